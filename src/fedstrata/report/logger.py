"""Loggers: callbacks of `fs.run` that write the records of a run while it runs."""

import json
import math
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np


class JsonLines:
    r"""A callback that appends one JSON object per recorded round: the mean over runs of every column.

    Args:
        path: the file; it is created at once, so that it can be tailed.

    >>> import tempfile; path = Path(tempfile.mkdtemp()) / "log.jsonl"
    >>> JsonLines(path)(10, {"objective": np.array([1.0, 3.0])})
    >>> path.read_text()
    '{"round": 10, "objective": 2.0}\n'
    """

    def __init__(self, path: str | PathLike[str]):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()

    def __call__(self, round: int, row: dict[str, np.ndarray]) -> None:
        means: dict[str, Any] = {n: float(np.mean(v)) for n, v in row.items() if np.ndim(v) == 1 and n != "status"}
        finite = {n: v if math.isfinite(v) else None for n, v in means.items()}
        with self.path.open("a") as file:
            file.write(json.dumps({"round": round, **finite}) + "\n")
