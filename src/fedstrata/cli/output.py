"""Printing: tables for people, JSON for programs."""

import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 120  # columns of a table in a file or a pipe


def console(stderr: bool = False) -> "Console":
    """Standard output; if it is not a terminal, nothing is truncated.

    Args:
        stderr: take standard error instead.
    """
    from rich.console import Console

    out = Console(stderr=stderr, highlight=False, markup=False, soft_wrap=False)
    return out if out.is_terminal else Console(stderr=stderr, highlight=False, markup=False, width=_WIDE)


def close_output(stream: Any) -> None:
    """Let nothing more be written to a stream that nobody reads, so that Python does not fail on it at its end.

    Args:
        stream: that of a closed pipe, or a file on a full disk.
    """
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def paragraph(text: str) -> None:
    """Print prose, indented and in lines of at most 100 characters.

    Args:
        text: the prose.
    """
    from rich.padding import Padding

    out = console()
    out.print(Padding(text, (0, 0, 0, 2)), width=min(out.width, 100))


def bullets(texts: Iterable[str]) -> None:
    """A list of texts, each with a mark and indented.

    Args:
        texts: the texts.
    """
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    for text in texts:
        table.add_row("•", Text(text))
    out = console()
    out.print(Padding(table, (0, 0, 0, 2)), width=min(out.width, 100))


def print_json(content: Any) -> None:
    """Print JSON for programs.

    Args:
        content: what is printed; not-a-number is refused.
    """
    print(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a plain table, whose last column wraps.

    Args:
        title: the line above it.
        columns: their titles; one that starts with '>' is right-aligned.
        rows: the cells of each row.
    """
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
