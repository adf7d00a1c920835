"""Reproduce a paper: its figures, and a table of claim, our result and verdict.

Papers are folders outside the installed package. They are looked for in $FEDSTRATA_PAPERS, in papers/ of this folder
and of those above it, in papers/ of the checkout that fedstrata is imported from, and among installed packages (entry
points `fedstrata.papers`). A path works too: any folder whose __init__.py defines REPRODUCTION.

examples:
  fedstrata reproduce                     which papers can be reproduced
  fedstrata reproduce fednmap --figure 2  one figure
  fedstrata reproduce fednmap             all of its figures and claims
  fedstrata reproduce ../mine/my_paper    a paper by the path of its folder
  fedstrata reproduce fednmap --scale full --out out/gpu    with the paper's sizes (needs a GPU)

In --out/PAPER/SCALE: figure_N.png, claims.md, claims.json, and runs/ with every finished run. A reproduction that was
stopped resumes with the first missing run; finished runs are not run again unless their settings change.
"""

import argparse

from fedstrata.cli.output import paragraph, print_json
from fedstrata.cli.parsing import json_option, whole


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paper", nargs="?", metavar="PAPER", help="a name or the path of a folder; without it, list them"
    )
    parser.add_argument("--figure", type=whole(1), metavar="N", help="only this figure")
    parser.add_argument("--scale", metavar="S", help="how large; the list of papers shows what each scale costs")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--out", default="out/reproduce", metavar="DIR", help="folder for figures and table")
    json_option(
        parser,
        '{"papers": [{"name", "title", "reference", "figures", "scales"}]}, or with PAPER '
        '{"claims": [{"figure", "claim", "ours", "verdict"}], "cost": {"runs", "seconds", "samples"}, "files"}',
    )


def execute(options: argparse.Namespace) -> int:
    from fedstrata.experiments.reproduction import papers

    if options.paper is None:
        return _list(options.json)
    paper = papers.find(options.paper)
    from fedstrata.base.compilation import configure  # from here on everything needs JAX
    from fedstrata.report.format import human_number, human_seconds

    configure(cache=True)
    found = paper.reproduce(options.figure, options.out, options.scale, options.quiet)
    if options.json:
        print_json(found)
        return 0
    print(f"\n{paper.title}")
    for c in found["claims"]:
        print(f"\nFigure {c['figure']}: {c['verdict']}")
        paragraph(f"claim: {c['claim']}")
        paragraph(f"ours: {c['ours']}")
    cost = found["cost"]
    speed = f"{human_number(cost['samples'] / cost['seconds'])} examples/s" if cost["seconds"] else ""
    print(f"\n{cost['runs']} runs took {human_seconds(cost['seconds'])} after compilation; {speed}")
    print("\n".join(found["files"]))
    return 0


def _list(as_json: bool) -> int:
    from fedstrata.experiments.reproduction import papers

    about = lambda r: {"title": r.title, "reference": r.reference, "figures": [*r.figures], "scales": {**r.scales}}
    found = [{"name": name, **about(r)} for name, r in papers.reproductions().items()]
    if as_json:
        print_json({"papers": found})
        return 0
    if not found:
        print("no papers were found\n")
        paragraph(papers.WHERE)
    for p in found:
        print(f"\n{p['name']}: {p['title']}")
        paragraph(f"figures {', '.join(map(str, p['figures']))}; scales: ")
        for scale, cost in p["scales"].items():
            paragraph(f"  {scale}: {cost}")
    return 0
