"""A history as rows and files: one flat record per run and round, axes first, then "round", then the metrics."""

import importlib
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from fedstrata.base.directions import Direction
from fedstrata.base.files import replacing

if TYPE_CHECKING:
    import pandas

CLIENTS = "per_client/"  # prefix of the fields that hold one number per client
ABOUT, MODE = "about:", "mode:"  # prefixes of the fields that describe the history, the same in every record


@dataclass(eq=False, repr=False)
class Portable:
    """The fields of a `History`, read and written; every format is exact, NaN and infinities included."""

    axes: dict[str, list]
    columns: dict[str, np.ndarray]
    per_client: dict[str, np.ndarray] = field(default_factory=dict)
    modes: dict[str, Direction] = field(default_factory=dict)
    problem: str = ""
    monitor: str = ""

    def about(self) -> dict[str, str]:
        """The declared directions and the fingerprints, without the unknown ones."""
        known = {"problem": self.problem, "monitor": self.monitor}
        return {n: w for n, w in known.items() if w} | {f"{MODE}{n}": w for n, w in self.modes.items()}

    def to_json(self) -> dict[str, Any]:
        """A dictionary that `json.dumps` accepts in strict mode; NaN becomes None."""
        columns, per_client = ({k: _plain(v.tolist()) for k, v in g.items()} for g in (self.columns, self.per_client))
        axes = {k: _plain(v) for k, v in self.axes.items()}
        return {"axes": axes, "columns": columns, "per_client": per_client, "about": self.about()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """The inverse of `to_json`.

        Args:
            content: the dictionary.
        """
        columns, per_client = ({k: _numbers(v) for k, v in content[g].items()} for g in ("columns", "per_client"))
        axes = {name: [_label(v) for v in values] for name, values in content["axes"].items()}
        return cls(axes, columns, per_client, **_about(content.get("about", {})))

    def to_jsonl(self, path: str | Path) -> Path:
        """Write one JSON object per run and round; NaN becomes null, an infinity the string "Infinity".

        Args:
            path: the file.
        """
        with replacing(path) as temporary:
            lines = (json.dumps(_plain(record), allow_nan=False) + "\n" for record in self.records())
            temporary.write_text("".join(lines), encoding="utf-8")
        return Path(path)

    @classmethod
    def from_jsonl(cls, path: str | Path) -> Self:
        """The inverse of `to_jsonl`.

        Args:
            path: the file.
        """
        records = []
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not a JSON object ({error}); is the file cut off?") from None
        return cls.from_records(records, str(path))

    def to_parquet(self, path: str | Path) -> Path:
        """Write the records of `to_jsonl` as a Parquet table, with per-client metrics as lists.

        Args:
            path: the file.
        """
        pyarrow, parquet = _needed("pyarrow", "parquet")
        rows = list(self.records())
        large = lambda values: isinstance(values[0], int) and max(values) >= 2**63  # a seed may have 64 bits
        kind = lambda values: pyarrow.uint64() if large(values) else None
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        table = pyarrow.table({name: pyarrow.array(values, kind(values)) for name, values in columns.items()})
        with replacing(path) as temporary:
            parquet.write_table(table, temporary)
        return Path(path)

    @classmethod
    def from_parquet(cls, path: str | Path) -> Self:
        """The inverse of `to_parquet`.

        Args:
            path: the file.
        """
        _, parquet = _needed("pyarrow", "parquet")
        return cls.from_records(parquet.ParquetFile(path).read().to_pylist(), str(path))

    def to_pandas(self, *, clients: bool = False) -> "pandas.DataFrame":
        """A tidy data frame with a row per run and round.

        Args:
            clients: whether to make a row per run, round and client instead, with the per-client metrics.
        """
        (pandas,) = _needed("pandas")
        if clients and not self.per_client:
            raise ValueError("History.to_pandas: clients=True, but no per-client metric was recorded")
        runs = pandas.DataFrame(list(itertools.product(*self.axes.values())), columns=list(self.axes))
        frame = runs.loc[runs.index.repeat(self.columns["round"].shape[-1])].reset_index(drop=True)
        if not clients:
            return frame.assign(**{name: self.columns[name].ravel() for name in self._names()})
        count = next(iter(self.per_client.values())).shape[-1]
        frame = frame.assign(round=self.columns["round"].ravel())
        frame = frame.loc[frame.index.repeat(count)].reset_index(drop=True)
        frame["client"] = np.arange(len(frame)) % count
        return frame.assign(**{name: values.ravel() for name, values in self.per_client.items()})

    def _names(self) -> list[str]:
        # "round" first: readers of a record take the fields before it for axes.
        return sorted(self.columns, key=lambda name: name != "round")

    def records(self) -> Iterator[dict[str, Any]]:
        """One dictionary per run and round, in the order of the axes."""
        names = [*self._names(), *(CLIENTS + name for name in self.per_client)]
        values = [*(self.columns[name] for name in self._names()), *self.per_client.values()]
        about = {ABOUT + name: word for name, word in self.about().items()}
        runs = itertools.product(*(enumerate(labels) for labels in self.axes.values()))
        for run in runs:
            index = tuple(i for i, _ in run)
            labels = dict(zip(self.axes, (label for _, label in run), strict=True))
            for row in zip(*(v[index].tolist() for v in values), strict=True):
                yield {**labels, **dict(zip(names, row, strict=True)), **about}

    @classmethod
    def from_records(cls, records: list[dict[str, Any]], where: str = "records") -> Self:
        """The inverse of `records`: the fields before "round" are the axes.

        Args:
            records: one dictionary per run and round.
            where: their origin, for errors.
        """
        if not records or "round" not in records[0]:
            raise ValueError(f"{where}: no records with a 'round' field, so this is not a history")
        fields = list(records[0])
        axes_names, names = fields[: fields.index("round")], fields[fields.index("round") :]
        if odd := next((r for r in records if r.keys() != records[0].keys()), None):
            raise ValueError(f"{where}: a record has fields {list(odd)}, the first one {fields}")
        runs: dict[tuple, list[dict]] = {}
        for record in records:
            runs.setdefault(tuple(_label(record[name]) for name in axes_names), []).append(record)
        axes = {name: list(dict.fromkeys(run[i] for run in runs)) for i, name in enumerate(axes_names)}
        shape = tuple(len(values) for values in axes.values())
        lengths = {len(rows) for rows in runs.values()}
        if len(runs) != math.prod(shape) or len(lengths) != 1:
            raise ValueError(f"{where}: {len(runs)} runs of {sorted(lengths)} rounds do not fill the grid {axes}")
        ordered = [runs[run] for run in itertools.product(*axes.values())]

        def stack(name: str) -> np.ndarray:
            values = _numbers([[row[name] for row in rows] for rows in ordered])
            return values.reshape(*shape, *values.shape[1:])

        columns = {name: stack(name) for name in names if not name.startswith((CLIENTS, ABOUT))}
        per_client = {name.removeprefix(CLIENTS): stack(name) for name in names if name.startswith(CLIENTS)}
        about = {name.removeprefix(ABOUT): records[0][name] for name in names if name.startswith(ABOUT)}
        return cls(axes, columns, per_client, **_about(about))


def _about(words: dict[str, str]) -> dict[str, Any]:
    """The inverse of `about`; files from before it existed have none."""
    modes = {name.removeprefix(MODE): word for name, word in words.items() if name.startswith(MODE)}
    return {"modes": modes, "problem": words.get("problem", ""), "monitor": words.get("monitor", "")}


def _plain(value: Any) -> Any:
    """Numbers that strict JSON has no word for: NaN as None, an infinity as a string that `float` reads."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _label(value: Any) -> Any:
    return float(value) if value in ("Infinity", "-Infinity") else value


def _numbers(values: Any) -> np.ndarray:
    array = np.array(values)
    if array.dtype.kind in "biuf":
        return array
    return np.array(values, dtype=np.float64)  # reads None as NaN and "Infinity" as the number


def _needed(package: str, *modules: str) -> list[Any]:
    try:
        return [importlib.import_module(name) for name in (package, *(f"{package}.{m}" for m in modules))]
    except ImportError:
        raise ImportError(f"this format needs {package}: install fedstrata[tables]") from None
