"""Methods side by side: final values with their spread over seeds, the best of every column marked."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedstrata.errors import unknown
from fedstrata.report.axes import sign
from fedstrata.report.format import byte_unit, human_seconds, plus_minus
from fedstrata.report.series import Series, series

if TYPE_CHECKING:
    import rich.table

_FIRST, _LAST = ("objective", "stationarity"), ("bytes_up", "bytes_down", "seconds")
_UNRANKED = ("round", "samples")  # how far a run went, not how well


class Cell(NamedTuple):
    mean: float
    std: float
    best: bool


@dataclass(frozen=True)
class Comparison:
    """A table of `Cell`s, a row per setting; print it as Markdown, with rich, or as JSON."""

    columns: tuple[str, ...]
    rows: tuple[Series, ...]
    cells: tuple[tuple[Cell | None, ...], ...]

    def markdown(self) -> str:
        """A Markdown table; the best value of a column is bold."""
        header, body = self._text()
        mark = lambda text, cell: f"**{text}**" if cell is not None and cell.best else text
        body = [[_escape(row[0]), *map(mark, row[1:], cells)] for row, cells in zip(body, self.cells, strict=True)]
        widths = [max(len(line[i]) for line in [header, *body]) for i in range(len(header))]
        rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
        lines = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in [header, rule, *body]]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"

    def rich(self) -> "rich.table.Table":
        """A table for the terminal; the best value of a column is bold and starred, so that colour is not needed."""
        from rich.table import Table
        from rich.text import Text

        header, body = self._text()
        marked = any(cell is not None and cell.best for row in self.cells for cell in row)
        table = Table(caption="* best of its column" if marked else None)
        table.add_column(header[0])
        for name in header[1:]:
            table.add_column(Text(name), justify="right")
        for row, cells in zip(body, self.cells, strict=True):
            texts = [
                Text(f"{text} *", style="bold green") if cell is not None and cell.best else Text(f"{text}  ")
                for text, cell in zip(row[1:], cells, strict=True)
            ]
            table.add_row(Text(row[0]), *texts)
        return table

    def json(self) -> dict[str, Any]:
        """The same table for programs: plain numbers in base units, None for what is missing or diverged."""
        plain = lambda value: value if math.isfinite(value) else None
        rows = []
        for row, cells in zip(self.rows, self.cells, strict=True):
            values = {
                name: None if cell is None else {"mean": plain(cell.mean), "std": plain(cell.std), "best": cell.best}
                for name, cell in zip(self.columns, cells, strict=True)
            }
            rows.append({"label": row.label, "setting": row.setting, "seeds": row.history.seeds, "values": values})
        return {"columns": list(self.columns), "rows": rows}

    def _text(self) -> tuple[list[str], list[list[str]]]:
        header, texts = ["method"], []
        for name, cells in zip(self.columns, zip(*self.cells, strict=True), strict=True):
            title, show = name.replace("/", " "), plus_minus
            if name in ("bytes_up", "bytes_down"):  # one unit for the whole column, or rows could not be compared
                size, unit = byte_unit(max((c.mean for c in cells if c and math.isfinite(c.mean)), default=0.0))
                title = f"{unit} {name.removeprefix('bytes_')}"
                show = lambda mean, std, size=size: plus_minus(mean / size, std / size)
            elif name == "seconds":
                title, show = "time", lambda mean, std: human_seconds(mean)
            header.append(title)
            texts.append(["–" if c is None else show(c.mean, c.std) for c in cells])
        return header, [[row.label, *line] for row, line in zip(self.rows, zip(*texts, strict=True), strict=True)]


def compare(results: Any, columns: list[str] | None = None) -> Comparison:
    """Final mean and standard deviation over seeds of every method and swept value.

    `results` is a dictionary from labels to histories (or results of `run`). Losses, objectives, bytes and seconds
    are better when low, accuracies and AUCs when high; equal values share the mark, and a diverged run never has it.

    >>> import numpy as np
    >>> from fedstrata.report import History
    >>> run = lambda f: History({"seed": [0, 1]}, {"round": [[5], [5]], "objective": np.array(f)[:, None]})
    >>> print(compare({"FedAvg": run([0.30, 0.34]), "FedProx": run([0.5, 0.5])}).markdown())
    | method  |         objective |
    | ------- | ----------------: |
    | FedAvg  | **0.320 ± 0.028** |
    | FedProx |               0.5 |
    """
    rows = series(results, "compare")
    known = list(dict.fromkeys(name for row in rows for name in row.history.columns))
    if columns is None:
        middle = [name for name in known if name not in (*_FIRST, *_LAST, *_UNRANKED)]
        columns = [name for name in (*_FIRST, *middle, *_LAST) if name in known]
    for name in columns:
        if name not in known:
            raise unknown("history column", name, known)
    if not columns:
        raise ValueError("compare: no column to show; record a metric or name the columns")
    by_column = [_column(name, rows) for name in columns]
    return Comparison(tuple(columns), tuple(rows), tuple(zip(*by_column, strict=True)))


def _column(name: str, rows: list[Series]) -> list[Cell | None]:
    ends = [
        (float(row.history.mean(name)[-1]), float(row.history.std(name)[-1])) if name in row.history.columns else None
        for row in rows
    ]
    lost = -math.inf  # diverged or without this column
    goodness = [
        lost if end is None or math.isnan(end[0]) or _diverged(row) else sign(name) * end[0]
        for end, row in zip(ends, rows, strict=True)
    ]
    ranked = [good for good in goodness if good != lost]
    # A column of equals has no best, but the only survivor has.
    clear = len(rows) > len(ranked) == 1 or len(set(ranked)) > 1
    top = max(ranked) if clear and name not in _UNRANKED else math.nan
    return [None if end is None else Cell(*end, best=good == top) for end, good in zip(ends, goodness, strict=True)]


def _diverged(row: Series) -> bool:
    """What a failed run spent is no achievement, however little it was."""
    return "objective" in row.history.columns and not np.isfinite(row.history.last("objective")).all()


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
