"""`fs.profile`: the time of each part of a run, from a trace of a few rounds."""

import gzip
import json
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from fedstrata.core.algorithm import Algorithm
from fedstrata.data.federation import Federation
from fedstrata.problems.base import Problem
from fedstrata.simulate.options import RunOptions, takes_run_options
from fedstrata.simulate.run import prepare

if TYPE_CHECKING:
    from rich.table import Table

ROUNDS = 20  # traced at most
# Names given by `engine.context.profiled`, and their titles in a profile.
PARTS = {
    "cohort": "drawing cohorts",
    "samples": "drawing and looking up examples",
    "local": "local steps",
    "merge": "merging",
    "server": "server steps",
    "evaluation": "evaluation",
    "": "all else",
}


class Profile(NamedTuple):
    """Seconds of a whole run by part: single costs, and the sums over all rounds and evaluations."""

    rounds: int
    evaluations: int
    data: float  # checking data and copying them to the device
    compile: float  # and the start
    seconds: dict[str, float]  # by part, extrapolated from the rounds that were traced
    traced: int  # rounds
    folder: str  # of the trace: for `xprof`, Perfetto (ui.perfetto.dev) or TensorBoard

    @property
    def total(self) -> float:
        return self.data + self.compile + sum(self.seconds.values())

    def rich(self, name: str = "") -> "Table":
        from rich.table import Table

        from fedstrata.report.format import human_seconds

        about = f"{self.rounds} rounds, {self.evaluations} evaluations"
        title = f"{name}: {about}" if name else about
        table = Table("part", title=title, caption=f"from a trace of {self.traced} rounds")
        for column in ("seconds", "share"):
            table.add_column(column, justify="right")
        rows = {"data to the device": self.data, "compiling and starting": self.compile, **self.seconds}
        for name, value in rows.items():
            table.add_row(name, human_seconds(value), f"{value / max(self.total, 1e-12):.1%}")
        table.add_row("in all", human_seconds(self.total), "100.0%", style="bold")
        return table


@takes_run_options
def profile(
    problem: Problem, algorithm: Algorithm, federation: Federation, *, folder: Any = None, **options: Any
) -> Profile:
    """Run a few rounds under XLA's profiler, and report which part of a run takes how long.

    A part's share is its share of the device threads' busy time, applied to the time of as many rounds without the
    profiler.

    Args:
        problem: what to minimise.
        algorithm: how.
        federation: on whose data.
        folder: where the trace goes; a new temporary folder, if left out.
        **options: those of `fs.run`.
    """
    began, wanted = time.perf_counter(), RunOptions.of("fs.profile", options)
    rounds = wanted.rounds
    executable = prepare(problem, algorithm, federation, wanted)
    jax.block_until_ready(executable.inputs.full)
    placed = time.perf_counter()
    carry, _, starts = executable.begin()
    if starts:
        carry = executable.advance(carry, 0, 1, starts)[0]
    first = int(bool(starts))  # a first round that starts client by client is a separate program
    traced = min(rounds, max(ROUNDS // executable.every * executable.every, min(ROUNDS, executable.every)))
    some = executable._replace(rounds=first + traced, threads=1)  # the last round evaluates
    jax.block_until_ready(some.advance(carry, first, first)[0].status)
    compiled = time.perf_counter()
    run = lambda: jax.block_until_ready(some.advance(carry, first, first + traced)[0].status)
    run()
    start = time.perf_counter()
    run()
    wall = time.perf_counter() - start
    path = Path(tempfile.mkdtemp(prefix="fedstrata-profile-") if folder is None else folder)
    with jax.profiler.trace(str(path)):
        run()
    busy = _busy(path, "\n".join(some.programs(carry)))
    total = sum(busy.values()) or 1.0
    evaluations = -(-rounds // executable.every)
    more = evaluations / len(some.due(first, first + traced))
    times = {name: more if name == "evaluation" else rounds / traced for name in PARTS}
    seconds = {PARTS[name]: wall * spent / total * times[name] for name, spent in busy.items()}
    return Profile(rounds, evaluations, placed - began, compiled - placed, seconds, traced, str(path))


def _busy(folder: Path, program: str) -> dict[str, float]:
    """Microseconds in which operations of each part ran."""
    parts = dict(_parts(program))
    busy = dict.fromkeys(PARTS, 0.0)
    newest = max(folder.rglob("*.trace.json.gz"), key=lambda f: f.stat().st_mtime)
    with gzip.open(newest) as file:
        events = json.load(file)["traceEvents"]
    for event in events:
        name = event.get("args", {}).get("hlo_op")
        if event.get("ph") == "X" and name in parts and not event["name"].startswith("end: "):
            busy[parts[name]] += event["dur"]
    return busy


def _parts(program: str) -> Iterator[tuple[str, str]]:
    """The part that each operation of a program belongs to; loops and branches belong to none.

    A fusion without a part has that of most operations inside it.
    """
    inside: dict[str, list[str]] = {}
    operations, within = [], []
    for line in program.splitlines():
        if line.endswith("{") and (opening := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(", line)):
            within = inside.setdefault(opening[1], [])
        found = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = \S.*? (\w[\w\-]*)\(", line)
        if not found or found[2] in ("while", "conditional", "call", "parameter", "tuple", "get-tuple-element"):
            continue
        scopes = re.findall(r"fs\.(\w+)", next(iter(re.findall(r'op_name="([^"]*)"', line)), ""))
        part = scopes[-1] if scopes and scopes[-1] in PARTS else ""
        within += [part] if part else []
        operations.append((found[1], part, re.findall(r"calls=%?([\w.\-]+)", line)))
    for name, part, called in operations:
        parts = [part for computation in called for part in inside.get(computation, ())]
        yield name, part or max(PARTS, key=parts.count) if parts else part
