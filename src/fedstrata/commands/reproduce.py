"""Reproduce a paper: its figures, and a table of claim, our result and verdict.

examples:
  fedstrata reproduce                   which papers can be reproduced
  fedstrata reproduce PAPER             all of its figures and claims
  fedstrata reproduce PAPER --figure 2  one figure
"""

import argparse

from fedstrata.commands.output import print_json, print_table
from fedstrata.commands.parsing import Mistake, json_option, whole
from fedstrata.errors import unknown


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paper", nargs="?", metavar="PAPER", help="a key of docs/papers.bib; without it, list them")
    parser.add_argument("--figure", type=whole(1), metavar="N", help="only this figure")
    parser.add_argument("--out", default="out/reproduce", metavar="DIR", help="folder for figures and table")
    json_option(
        parser, '{"papers": [{"key", "title"}]}, or with PAPER {"claims": [{"claim", "ours", "verdict"}], "files"}'
    )


def execute(options: argparse.Namespace) -> int:
    from fedstrata.experiments import reproductions

    known = reproductions()
    if options.paper is None:
        if options.json:
            print_json({"papers": [{"key": key, "title": r.title} for key, r in known.items()]})
        elif known:
            print_table("Papers", ["key", "title"], [[key, r.title] for key, r in known.items()])
        else:
            print("No reproduction has landed yet; `fedstrata list experiments` shows what can be run.")
        return 0
    if not known:
        raise Mistake(
            f"{options.paper}: no reproduction has landed yet; `fedstrata list experiments` shows what can be run"
        )
    if options.paper not in known:
        raise unknown("paper", options.paper, known)
    found = known[options.paper].reproduce(figure=options.figure, out=options.out)
    if options.json:
        print_json(found)
    else:
        rows = [[c["claim"], c["ours"], c["verdict"]] for c in found["claims"]]
        print_table(known[options.paper].title, ["claim", "ours", "verdict"], rows)
    return 0
