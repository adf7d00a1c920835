"""Tables of methods: final values with their spread over seeds, the best of every column marked."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedstrata.base.directions import Column, Direction, checked, column
from fedstrata.base.errors import unknown
from fedstrata.report.format import byte_unit, human_seconds, plus_minus
from fedstrata.report.series import Series, series

if TYPE_CHECKING:
    import rich.table

_FIRST, _LAST = ("objective", "stationarity"), ("bytes_up", "bytes_down", "seconds")
_HOW_FAR = ("round", "samples")  # the length of a run, not its quality


class ComparisonCell(NamedTuple):
    """One value of a table.

    Args:
        mean: over seeds.
        std: the standard deviation over seeds.
        best: whether it is the best of its column.
    """

    mean: float
    std: float
    best: bool


@dataclass(frozen=True)
class Comparison:
    """A table with one row per setting; it prints as Markdown, with rich, or as JSON.

    Args:
        columns: the names of the columns.
        rows: the settings.
        cells: the values by row and column; None where a row lacks the column.
        notes: lines below the table.
    """

    columns: tuple[str, ...]
    rows: tuple[Series, ...]
    cells: tuple[tuple[ComparisonCell | None, ...], ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """A Markdown table; the best value of a column is bold."""
        header, body = self._text()
        mark = lambda text, cell: f"**{text}**" if cell is not None and cell.best else text
        body = [[_escape(row[0]), *map(mark, row[1:], cells)] for row, cells in zip(body, self.cells, strict=True)]
        widths = [max(len(line[i]) for line in [header, *body]) for i in range(len(header))]
        rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
        lines = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in [header, rule, *body]]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
        return table + "".join(f"\n{_escape(note)}\n" for note in self.notes)

    def _repr_markdown_(self) -> str:
        """The text that Jupyter displays as the result of a cell."""
        return self.markdown()

    def rich(self) -> "rich.table.Table":
        """A table for the terminal; the best value of a column is bold and starred, so colour is not needed."""
        from rich.table import Table
        from rich.text import Text

        header, body = self._text()
        marked = any(cell is not None and cell.best for row in self.cells for cell in row)
        words = [*(["* best of its column"] if marked else []), *self.notes]
        table = Table(caption=Text("\n".join(words)) if words else None)
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
        """The table as plain numbers in base units, None for missing or diverged values."""
        plain = lambda value: value if math.isfinite(value) else None
        rows = []
        for row, cells in zip(self.rows, self.cells, strict=True):
            values = {
                name: None if cell is None else {"mean": plain(cell.mean), "std": plain(cell.std), "best": cell.best}
                for name, cell in zip(self.columns, cells, strict=True)
            }
            rows.append({"label": row.label, "setting": row.setting, "seeds": row.history.seeds, "values": values})
        return {"columns": list(self.columns), "rows": rows, "notes": list(self.notes)}

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


def compare(
    results: Any, columns: Sequence[str] | None = None, modes: Mapping[str, Direction] | None = None
) -> Comparison:
    """A table of the final mean and standard deviation over seeds of every method and swept value.

    The best value of a column is marked, in the declared direction of the column. Equal values share the mark, and a
    diverged run never has it. Columns without a direction and columns of a single row have no mark. Objectives, and
    other values of the problem, have none where the rows minimised different problems.

    Args:
        results: a dictionary from labels to results of `fs.run` or histories, a list of them, or one.
        columns: the columns to show; None: all metrics, bytes and seconds.
        modes: the directions of columns, e.g. {"my_column": "max"}; they take precedence over the declared ones.

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
        middle = [name for name in known if name not in (*_FIRST, *_LAST, *_HOW_FAR)]
        columns = [name for name in (*_FIRST, *middle, *_LAST) if name in known]
    for name in columns:
        if name not in known:
            raise unknown("history column", name, known)
    if not columns:
        raise ValueError("compare: no column to show; record a metric or name the columns")
    for name, mode in (modes or {}).items():
        if name not in known:
            raise unknown("history column in modes", name, known)
        checked(mode, f"compare: modes, column {name!r}")
    declared = {name: _declared(name, rows, modes or {}) for name in columns}
    apart = [name for name in columns if _of_different_problems(name, declared[name], rows)]
    rank: dict[str, Direction] = {n: c.direction for n, c in declared.items() if c is not None and n not in apart}
    by_column = [_column(name, rows, rank.get(name, "none")) for name in columns]
    notes = [f"Not ranked across different problems: {', '.join(apart)}."] if apart else []
    return Comparison(tuple(columns), tuple(rows), tuple(zip(*by_column, strict=True)), tuple(notes))


def _declared(name: str, rows: list[Series], modes: Mapping[str, Direction]) -> Column | None:
    """The declaration of a column that all rows share; None where there is none or they differ."""
    if name in modes:
        return column(name, modes)
    found = {column(name, row.history.modes) for row in rows if name in row.history.columns}
    return found.pop() if len(found) == 1 else None


def _of_different_problems(name: str, declared: Column | None, rows: list[Series]) -> bool:
    """Whether values are of different problems; histories without a fingerprint count as one problem."""
    having = [row.history for row in rows if name in row.history.columns]
    problems = {h.monitor if name.startswith("monitor/") else h.problem for h in having}
    return declared is not None and declared.of_problem and len(problems) > 1


def _column(name: str, rows: list[Series], direction: Direction) -> list[ComparisonCell | None]:
    ends = [
        (float(row.history.mean(name)[-1]), float(row.history.std(name)[-1])) if name in row.history.columns else None
        for row in rows
    ]
    lost = -math.inf  # diverged or without this column
    to_max = 1 if direction == "max" else -1
    goodness = [
        lost if end is None or math.isnan(end[0]) or _diverged(row) else to_max * end[0]
        for end, row in zip(ends, rows, strict=True)
    ]
    ranked = [good for good in goodness if good != lost]
    # Equal values have no best, nor has a column of a single row; but the only run that did not diverge is the best.
    clear = sum(end is not None for end in ends) > len(ranked) == 1 or len(set(ranked)) > 1
    top = max(ranked) if clear and direction != "none" else math.nan
    return [
        None if end is None else ComparisonCell(*end, best=good == top)
        for end, good in zip(ends, goodness, strict=True)
    ]


def _diverged(row: Series) -> bool:
    """Whether a run diverged: its bytes and seconds, however few, are then never the best."""
    return "objective" in row.history.columns and not np.isfinite(row.history.last("objective")).all()


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
