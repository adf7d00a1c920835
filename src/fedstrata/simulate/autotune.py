"""The choice of `execution="auto"`: clients all at once, one by one, or in chunks. Measured once, then cached."""

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from typing import Any

import jax
import numpy as np

from fedstrata.base.files import cache_folder, replacing
from fedstrata.core.fingerprint import describe
from fedstrata.engine.context import Execution
from fedstrata.simulate.executable import Executable
from fedstrata.simulate.state import ProgramOptions

WORTH_MEASURING = 2e11  # floating-point operations of a run; below, measuring costs more than it can save


def choose_execution(executable: Executable, execution: Execution) -> Executable:
    """The executable with its execution chosen."""
    if execution != "auto":
        chunk = isinstance(execution, int | np.integer) and not isinstance(execution, bool) and execution >= 1
        if execution not in ("vmap", "map") and not chunk:
            raise ValueError(f'execution={execution!r} must be "vmap", "map", "auto", or a chunk size >= 1')
        return _with(executable, int(execution) if chunk else str(execution))
    return _with(executable, choose(executable)[0])


def choose(executable: Executable) -> tuple[str | int, str]:
    """The fastest execution, and the reason."""
    cohort = executable.context.cohort_size
    if cohort == 1:
        return "vmap", "one client per round"
    if executable.context.spread is not None:
        return "vmap", "clients are spread over devices, whose processes must all choose alike"
    if executable.inputs.out_of_core:
        return "vmap", "cohorts come from the host, and nothing is tried out"
    if jax.default_backend() != "cpu":
        return "vmap", "all clients at once was fastest for every network that was tried on an accelerator"
    work = _work(executable)
    if work * executable.rounds < WORTH_MEASURING:
        return "vmap", f"a run of {work * executable.rounds:.1e} operations is too short to measure"
    memory, name = _memory(), _name(executable)
    if name in memory:
        return memory[name], "measured before"
    times: dict[Any, float] = {}
    for candidate in _candidates(cohort):
        times[candidate] = _time(_with(executable, candidate))
    best = min(times, key=lambda c: times[c])
    _remember({**memory, name: best})
    measured = ", ".join(f"{c}: {t * 1e3:.1f} ms" for c, t in times.items())
    return best, f"measured per round: {measured}"


def _candidates(cohort: int) -> list[str | int]:
    return ["vmap", "map", *([8] if cohort > 8 else [])]


def _with(executable: Executable, execution: Execution) -> Executable:
    return executable.with_context(execution=execution)


def _time(executable: Executable) -> float:
    """Seconds per round, without evaluation: the best of a few."""
    runs = dataclasses.replace(executable.runs, options=ProgramOptions(records=1, stationarity=False))
    quiet = executable._replace(runs=runs, every=2**30, rounds=2**30)
    carry = quiet.begin()[0]
    jax.block_until_ready(quiet.advance(carry, 0, 1))
    took = []
    for _ in range(3):
        began = time.perf_counter()
        jax.block_until_ready(quiet.advance(carry, 1, 2))
        took.append(time.perf_counter() - began)
    return min(took)


def _work(executable: Executable) -> float:
    """Floating-point operations of one round, roughly: six per parameter, example and local step."""
    return 6.0 * executable.runs.x0.size * executable.rows_a_round()


def _name(executable: Executable) -> str:
    context = executable.context
    shapes = [str((a.shape, str(a.dtype))) for a in jax.tree.leaves((executable.runs.x0, context.data))]
    words = [describe(part) for part in (context.problem, context.algorithm, context.sampler)]
    machine = [jax.devices()[0].device_kind, os.cpu_count(), jax.__version__]
    size = context.cohort_size
    about = json.dumps([words, shapes, _candidates(size), size, machine], default=str)
    return hashlib.sha256(about.encode()).hexdigest()[:24]


def _memory() -> dict[str, Any]:
    try:
        return json.loads((cache_folder() / "execution.json").read_text())
    except (OSError, ValueError):
        return {}


def _remember(memory: dict[str, Any]) -> None:
    """Cache a choice. A cache that cannot be written is not an error: the choice is measured again."""
    with contextlib.suppress(OSError), replacing(cache_folder() / "execution.json") as part:
        part.write_text(json.dumps(memory))
