"""The contender's side: an object whose methods are called by lines of JSON, and timed rounds.

Used in environments without FedStrata: only the standard library and NumPy.
"""

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import jobs
import numpy as np

CORES = int(os.environ.get("CORES", os.cpu_count() or 1))

TRIALS = 8


def serve(make: Callable[[dict[str, Any]], Any]) -> None:
    """Create the object from the first line, reply with its note, then answer each line with one."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to the log
    say = lambda what: print(json.dumps(what), file=answers, flush=True)
    found = make(json.loads(sys.stdin.readline()))
    say({"note": found.note})
    for line in sys.stdin:
        question = json.loads(line)
        say(getattr(found, question["call"])(**question["arguments"]))


class Rounds:
    """A contender that trains: `advance` continues for some rounds and returns when they are done."""

    note: str

    def advance(self, rounds: int) -> None:
        raise NotImplementedError

    def params(self) -> list[np.ndarray]:
        """Its parameters, in the order and layout of `jobs`."""
        raise NotImplementedError

    def counted(self) -> tuple[int, int]:
        """Local steps and examples so far, counted as they are computed."""
        raise NotImplementedError

    def run(self, rounds: int) -> float:
        """Seconds of `rounds` rounds."""
        began = time.perf_counter()
        self.advance(rounds)
        return time.perf_counter() - began

    def report(self) -> dict[str, Any]:
        """Loss and work so far, for checks. Not timed."""
        return {"loss": jobs.mlp_loss(self.params(), self.data), "work": self.counted()}

    data: Any


def versions(*names: str) -> str:
    return ", ".join(f"{name} {_version(name)}" for name in names)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "from this checkout"


def fastest(settings: Iterable[Any], trial: Callable[[Any], None]) -> Any:
    """The setting with the smallest median time: two threads can be lucky for a while."""

    def seconds(setting: Any) -> float:
        began = time.perf_counter()
        trial(setting)
        return time.perf_counter() - began

    return min(settings, key=lambda setting: float(np.median([seconds(setting) for _ in range(TRIALS)])))
