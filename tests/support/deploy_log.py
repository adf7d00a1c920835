"""The log of the full deployment tests: `python tests/support/deploy_log.py docs/deploy_log.md out/deploy.xml`."""

import os
import platform
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
HEAD = """# Log of the full deployment tests
`make test-deploy` on {day}: {cores} cores, Python {python}, jax {jax}, Flower {flower}.
{passed} passed, {failed} failed, {skipped} skipped.
"""
FLOWER = """## Over Flower
Tests in `tests/deploy/flower` that start Flower's programs: a SuperLink and three SuperNodes in separate processes,
with TLS and registered keys, in a network namespace that has nothing but loopback (if the machine allows it). A run
passes if its solution equals the simulated one to 1e-12.
{passed} passed, {failed} failed, {skipped} skipped.
"""
PARTS = """## Without a SuperLink
Tests in `tests/deploy/flower` of commands, keys, files and single parts. They start no SuperLink.
{passed} passed, {failed} failed, {skipped} skipped.
"""
ATTACKS = """## Attacks
Tests in `tests/attacks`. They start no SuperLink: the server and the sites are in one process, and a stand-in for
Flower's grid, or the test itself, carries the messages.
{passed} passed, {failed} failed, {skipped} skipped.
"""


class Case(NamedTuple):
    """One case of a test."""

    file: str
    test: str
    given: str  # its parameters
    outcome: str
    seconds: float

    @classmethod
    def of(cls, element: ElementTree.Element) -> "Case":
        """A case in a JUnit report."""
        test, _, given = str(element.get("name")).partition("[")
        kinds = {child.tag for child in element}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        file = str(element.get("classname")).replace(".", "/") + ".py"
        return cls(file, test, given.removesuffix("]"), outcome, float(element.get("time") or 0))

    @property
    def attacks(self) -> bool:
        return self.file.startswith("tests/attacks/")

    @property
    def over_flower(self) -> bool:
        """Whether the tests of this file start Flower's programs: then they skip where there are none."""
        path = ROOT / self.file
        return not self.attacks and path.exists() and "programs_or_skip()" in path.read_text()


def page(reports: list[str]) -> str:
    """The page of these reports; a case that is in several counts as in the last one."""
    elements = [element for report in reports for element in ElementTree.parse(report).iter("testcase")]
    cases = [*{(e.get("classname"), e.get("name")): Case.of(e) for e in elements}.values()]
    attacks = [case for case in cases if case.attacks]
    flower = [case for case in cases if case.over_flower]
    parts = [case for case in cases if not case.attacks and not case.over_flower]
    about = {"flower": version("flwr"), "jax": version("jax"), "python": platform.python_version()}
    about |= {"cores": os.cpu_count(), "day": date.today().isoformat()}
    texts = [HEAD.format(**about, **counts(cases))]
    texts += [text.format(**counts(some)) + "\n" + table(some) for text, some in ((FLOWER, flower), (PARTS, parts))]
    texts.append(ATTACKS.format(**counts(attacks)) + "\n" + short_table(attacks))
    return "\n".join(texts)


def counts(cases: Iterable[Case]) -> dict[str, int]:
    """How many cases passed, failed and were skipped."""
    found = Counter(case.outcome for case in cases)
    return {outcome: found[outcome] for outcome in ("passed", "failed", "skipped")}


def table(cases: list[Case]) -> str:
    """A row for each test, with its cases."""
    lines = ["| test | passed | failed | seconds: least, most | cases |", "|---|---|---|---|---|"]
    rows: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in cases:
        rows[case.file, case.test].append(case)
    for some in rows.values():
        times, bad = [case.seconds for case in some], [case.given or "1" for case in some if case.outcome == "failed"]
        given = ", ".join(case.given for case in some if case.given).replace("|", r"\|")
        passed, failed = counts(some)["passed"], ", ".join(bad).replace("|", r"\|") or "–"
        lines.append(f"| {words(some[0].test)} | {passed} | {failed} | {min(times):.0f}, {max(times):.0f} | {given} |")
    return "\n".join(lines) + "\n"


def short_table(cases: list[Case]) -> str:
    """A row for each file, without its cases; a test that failed is named."""
    lines = ["| file | passed | failed | seconds |", "|---|---|---|---|"]
    rows: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        rows[case.file].append(case)
    for file, some in sorted(rows.items()):
        bad = Counter(words(case.test) for case in some if case.outcome == "failed")
        failed = ", ".join(f"{times} ({test})" for test, times in bad.items()) or "–"
        seconds = sum(case.seconds for case in some)
        lines.append(f"| {words(Path(file).stem)} | {counts(some)['passed']} | {failed} | {seconds:.0f} |")
    return "\n".join(lines) + "\n"


def words(name: str) -> str:
    """The name of a test or of its file, without underscores."""
    return re.sub("_", " ", name.removeprefix("test_"))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(sys.argv[2:]))
