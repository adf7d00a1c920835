"""Explain an algorithm: its update, hyper-parameters, what it sends, what that reveals, its paper and caveats.

examples:
  fedstrata explain FedAvg
  fedstrata explain SCAFFOLD --parameters 1663370 --cohort 10
  fedstrata explain FedAdam --json
  fedstrata explain my_package.methods:MyMethod        your own method; also methods.py:MyMethod
"""

import argparse
from typing import Any

from fedstrata.cli.output import bullets, console, paragraph, print_json, print_table
from fedstrata.cli.parsing import json_option, whole

_SHAPE = (
    '{"name", "summary", "update": [lines], "hyperparameters": [{"name", "meaning", "type", "range", "default"}], '
    '"state": [{"field", "placement", "reveals"}], "traffic": {"parameters", "cohort", "up_bytes", "down_bytes" (per '
    'client and round), "fields": [{"field", "placement", "direction", "bytes"}]}, "privacy", "converges_to": [texts], '
    '"does_not": [texts], "notes": [texts], "paper": {"key", "where", "citation", "link"}}'
)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "algorithm", metavar="ALGORITHM", help="a name from `fedstrata list algorithms`, or package.module:Class"
    )
    size = "numbers in the model, for counting bytes (default: 25450, an MLP 784-32-10)"
    parser.add_argument("--parameters", "--size", type=whole(1), default=25450, metavar="D", help=size)
    parser.add_argument("--cohort", type=whole(1), default=10, metavar="M", help="clients per round (default: 10)")
    json_option(parser, _SHAPE)


def execute(options: argparse.Namespace) -> int:
    from fedstrata.cli.explanation import explain
    from fedstrata.cli.methods import find

    about = explain(find(options.algorithm), options.parameters, options.cohort)
    print_json(about) if options.json else show(about)
    return 0


def show(about: dict[str, Any]) -> None:
    """Print an explanation for people.

    Args:
        about: what `fedstrata.cli.explanation.explain` found.
    """
    out = console()
    out.print(f"\n{about['name']}: {about['summary']}", style="bold")
    if about["update"]:
        out.print("\nUpdate", style="bold")
    for line in about["update"]:
        out.print(f"  {line}")
    out.print()
    rows = [[h["name"], h["range"] or "–", _default(h), h["meaning"] or "–"] for h in about["hyperparameters"]]
    print_table("Hyper-parameters (--set NAME=VALUE)", ["name", "range", "default", "meaning"], rows)
    _show_traffic(about)
    for title, key in (("Converges to", "converges_to"), ("Does not", "does_not"), ("Notes", "notes")):
        if about[key]:
            out.print(title, style="bold")
            bullets(about[key])
            out.print()
    paper = about["paper"]
    out.print("Paper", style="bold")
    where = f" {paper['where'][:1].upper()}{paper['where'][1:]}." if paper["where"] else ""
    paragraph(" ".join(filter(None, [f"{paper['citation'] or paper['key'] or 'not stated'}{where}", paper["link"]])))
    out.print()


def _show_traffic(about: dict[str, Any]) -> None:
    from fedstrata.core.placement import field_of
    from fedstrata.report.format import human_bytes

    out, traffic = console(), about["traffic"]
    if not about["state"]:
        out.print("What travels", style="bold")
        out.print("  nothing: it runs on the pooled data of all clients, so everything was revealed beforehand\n")
        return
    sent: dict[tuple[str, str], int] = {}
    for row in traffic["fields"] if traffic else []:
        key = field_of(row["field"]), row["direction"]
        sent[key] = sent.get(key, 0) + row["bytes"]
    size = lambda *key: human_bytes(sent[key]) if key in sent else "–"
    rows = [
        [s["field"], s["placement"], size(s["field"], "up"), size(s["field"], "down"), s["reveals"]]
        for s in about["state"]
    ]
    print_table("What travels, and what that reveals", ["field", "placement", ">up", ">down", "reveals"], rows)
    if traffic is None:
        out.print("  bytes depend on the problem: see `fedstrata run EXPERIMENT --dry-run`\n")
        return
    up, down, cohort = traffic["up_bytes"], traffic["down_bytes"], traffic["cohort"]
    note = f" ({traffic['note']})" if traffic["note"] else ""
    paragraph(
        f"per client and round, {traffic['parameters']:,} float32 parameters{note}: {human_bytes(up)} up, "
        f"{human_bytes(down)} down; a cohort of {cohort}: {human_bytes(cohort * (up + down))} a round"
    )
    if about["privacy"]:
        paragraph(f"beware: {about['privacy']}")
    paragraph("models, changes and gradients can give away training examples (zhu2019); only fs.Privacy adds noise")
    out.print()


def _default(entry: dict[str, Any]) -> str:
    return "needed" if entry["needed"] else str(entry["default"])
