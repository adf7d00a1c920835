"""Writes the table of docs/guides/security.md: what each algorithm reveals, read from its placements."""

from pathlib import Path

import fedstrata as fs
from fedstrata.core.algorithm import Algorithm
from fedstrata.core.placement import placements

PAGE = Path(__file__).parent / "guides" / "security.md"
BEGIN, END = "<!-- from docs/security_table.py -->\n", "<!-- end -->\n"


def table() -> str:
    """One line for each algorithm whose clients send anything."""
    head = ("algorithm", "merged by a mean", "seen one by one", "seen by other sites", "a secure sum, noise")
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in sorted(dir(fs), key=str.lower):
        found = getattr(fs, name)
        if (
            isinstance(found, type)
            and issubclass(found, Algorithm)
            and found is not Algorithm
            and not found.centralised
        ):
            rows.append(_row(name, found))
    return "\n".join(rows) + "\n"


def _row(name: str, algorithm: type[Algorithm]) -> str:
    state = placements(algorithm.State)
    fields = lambda wanted: ", ".join(f"`{f}`" for f, place in state.items() if wanted(place)) or "–"
    mean = fields(lambda p: p.up and p.merge == "mean")
    alone = fields(lambda p: p.merge in ("rows", "union"))
    others = fields(lambda p: p.down)
    rows = any(place.merge == "union" for place in state.values())
    protects = "all" if alone == "–" else "not the rows" if mean != "–" else "nothing"
    return f"| {name} | {mean} | {alone} | {others}{', row by row' if rows else ''} | {protects} |"


def with_table(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
