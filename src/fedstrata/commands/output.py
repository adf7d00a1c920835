"""Printing: tables for people, JSON for programs."""

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 120  # of a table that goes into a file or a pipe, where nothing has to fit a window


def console(stderr: bool = False) -> "Console":
    """Standard output, with nothing cut off where it is not a terminal."""
    from rich.console import Console

    out = Console(stderr=stderr, highlight=False, markup=False, soft_wrap=False)
    return out if out.is_terminal else Console(stderr=stderr, highlight=False, markup=False, width=_WIDE)


def paragraph(text: str) -> None:
    """Prose, indented and at most as wide as one likes to read."""
    from rich.padding import Padding

    out = console()
    out.print(Padding(text, (0, 0, 0, 2)), width=min(out.width, 100))


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A plain table; columns whose title starts with '>' are right-aligned, and the last one wraps."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        last = number == len(columns) - 1
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left", no_wrap=not last)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console().print(table)
