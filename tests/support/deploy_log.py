"""The log of the full deployment tests: `python tests/support/deploy_log.py docs/deploy_log.md out/deploy.xml`."""

import os
import platform
import re
import sys
from collections import defaultdict
from datetime import date
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

HEAD = """# Log of the full deployment tests
`make test-deploy`: a SuperLink and three SuperNodes of Flower {flower} in separate processes, with TLS and registered
keys, in a network namespace that has nothing but loopback (if the machine allows it). A run passes if its solution
equals the simulated one to 1e-12. {day}, {cores} cores, Python {python}, jax {jax}.

{passed} passed, {failed} failed, {skipped} skipped.
"""


def page(reports: list[str]) -> str:
    """The page of these reports; a test that is in several counts as in the last one."""
    cases = (case for report in reports for case in ElementTree.parse(report).iter("testcase"))
    found = {(case.get("classname"), case.get("name")): case for case in cases}
    rows: dict[str, list[tuple[str, str, float]]] = defaultdict(list)
    for case in found.values():
        test, _, given = str(case.get("name")).partition("[")
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        rows[test].append((given.rstrip("]"), outcome, float(case.get("time") or 0)))
    count = lambda wanted: sum(outcome == wanted for cases in rows.values() for _, outcome, _ in cases)
    about = {"flower": version("flwr"), "jax": version("jax"), "python": platform.python_version()}
    about |= {"cores": os.cpu_count(), "day": date.today().isoformat()}
    lines = [HEAD.format(passed=count("passed"), failed=count("failed"), skipped=count("skipped"), **about)]
    lines += ["| test | passed | failed | seconds: least, most | cases |", "|---|---|---|---|---|"]
    for test, cases in rows.items():
        times, bad = [t for _, _, t in cases], [g for g, outcome, _ in cases if outcome == "failed"]
        words = re.sub("_", " ", test.removeprefix("test_"))
        given = ", ".join(g for g, _, _ in cases if g)
        passed = sum(outcome == "passed" for _, outcome, _ in cases)
        lines.append(f"| {words} | {passed} | {', '.join(bad) or '–'} | {min(times):.0f}, {max(times):.0f} | {given} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(sys.argv[2:]))
