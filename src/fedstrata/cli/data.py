"""Show, fetch or check data sets.

Files are looked for in $FEDSTRATA_DATA, then in the user's cache ($FEDSTRATA_CACHE moves it); `fetch` downloads what
is missing from its official address into the cache, and explains what to do where there is none. Files have a checksum,
except those that you have to put there by hand.

examples:
  fedstrata data list               every set: where its files are, sizes, licences
  fedstrata data fetch mnist        make sure that its files are here and intact
  fedstrata data check              compute every checksum
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedstrata.base.errors import unknown
from fedstrata.cli.output import print_json, print_table
from fedstrata.cli.parsing import Mistake, json_option

if TYPE_CHECKING:
    from fedstrata.data.sources.store import Status

_ACTIONS = ("list", "fetch", "check")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", metavar="ACTION", help="list, fetch or check")
    parser.add_argument("name", nargs="?", metavar="NAME", help="a data set; `fetch` needs one")
    sets = '{"sets": [{"name", "title", "origin", "licence", "built_in"}], "files": FILES} for list'
    files = 'FILES = [{"source", "file", "where" (a path or "missing"), "size", "checksum" (ok, bad, unchecked)}]'
    json_option(parser, f'{sets}, {{"files": FILES}} otherwise; {files}')


def execute(options: argparse.Namespace) -> int:
    from fedstrata.data.sources import available, by_hand, status, store

    if options.action not in _ACTIONS:
        raise unknown("action of `fedstrata data`:", options.action, _ACTIONS)
    if options.name is not None and options.name not in available():
        raise unknown("data set", options.name, available())
    if options.action == "fetch" and options.name is None:
        raise Mistake("fetch needs the name of a data set; `fedstrata data list` shows them")
    if options.action == "list":
        return _list(options)
    name = options.name
    if name is not None and not status(name):
        return _show(options, [], f"{name} comes with scikit-learn: there is nothing to {options.action}.")
    if options.action == "fetch":
        (by_hand.needed if name in by_hand.FILES else store.fetch)(str(name))
    return _show(options, status(name, verify=True), "")


def _list(options: argparse.Namespace) -> int:
    from fedstrata.data.sources import available, status, where
    from fedstrata.report.format import human_bytes

    rows = status(options.name)
    files = lambda name: [row for row in rows if row.source == name]
    chosen = [s for s in available().values() if options.name in (None, s.name)]
    if options.json:
        built_in = lambda s: not files(s.name)
        about = lambda s: {"name": s.name, "title": s.title, "origin": s.origin, "licence": s.licence}
        print_json({"sets": [{**about(s), "built_in": built_in(s)} for s in chosen], "files": _plain(rows)})
        return 0
    size = lambda name: human_bytes(total) if (total := sum(row.size for row in files(name))) else "–"
    table = [[s.name, size(s.name), where(s.name), s.licence, s.title] for s in chosen]
    print_table("Data sets", ["name", ">size", "files", "licence", "what"], table)
    return 0


def _show(options: argparse.Namespace, rows: "Sequence[Status]", note: str) -> int:
    from fedstrata.report.format import human_bytes

    if options.json:
        print_json({"files": _plain(rows)})
    elif note:
        print(note)
    else:
        table = [[f"{r.source}/{r.file}", human_bytes(r.size), r.checksum, r.where] for r in rows]
        print_table("Files", ["file", ">size", "checksum", "where"], table)
    bad = [row for row in rows if row.checksum == "bad"]
    if bad and not options.json:
        print(f"{len(bad)} damaged: delete them and `fedstrata data fetch` again, or replace them by intact copies.")
    return 1 if bad else 0


def _plain(rows: "Sequence[Status]") -> list[dict[str, Any]]:
    return [row._asdict() for row in rows]
