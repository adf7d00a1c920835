"""How a cohort's clients are executed: all at once, one by one, or in chunks. `auto` measures once and remembers."""

import contextlib
import hashlib
import json
import os
import time
from typing import Any

import jax
import numpy as np

from fedstrata.files import cache_folder, replacing
from fedstrata.runtime.describe import describe
from fedstrata.runtime.job import Job
from fedstrata.runtime.world import Plan

WORTH_MEASURING = 2e11  # floating-point operations of a run below which trying out costs more than it can save


def settle(job: Job, execution: Any) -> Job:
    """The job with its execution chosen."""
    if execution != "auto":
        chunk = isinstance(execution, int | np.integer) and not isinstance(execution, bool) and execution >= 1
        if execution not in ("vmap", "map") and not chunk:
            raise ValueError(f'execution={execution!r} must be "vmap", "map", "auto", or a chunk size >= 1')
        return _with(job, int(execution) if chunk else execution)
    return _with(job, choose(job)[0])


def choose(job: Job) -> tuple[str | int, str]:
    """The fastest execution for this job, and why."""
    cohort = job.world.selection.size(job.world.clients)
    if cohort == 1:
        return "vmap", "one client a round"
    if job.world.spread is not None:
        return "vmap", "clients are spread over devices, whose processes must all choose alike"
    if job.world.streamed:
        return "vmap", "cohorts come from the host, and nothing is tried out"
    if jax.default_backend() != "cpu":
        return "vmap", "all clients at once was fastest for every network that was tried on an accelerator"
    work = _work(job)
    if work * job.rounds < WORTH_MEASURING:
        return "vmap", f"a run of {work * job.rounds:.1e} operations is too short to measure"
    memory, name = _memory(), _name(job)
    if name in memory:
        return memory[name], "measured before"
    times: dict[Any, float] = {}
    for candidate in _candidates(cohort):
        times[candidate] = _time(_with(job, candidate))
    best = min(times, key=lambda c: times[c])
    _remember({**memory, name: best})
    measured = ", ".join(f"{c}: {t * 1e3:.1f} ms" for c, t in times.items())
    return best, f"measured per round: {measured}"


def _candidates(cohort: int) -> list[str | int]:
    return ["vmap", "map", *([8] if cohort > 8 else [])]


def _with(job: Job, execution: Any) -> Job:
    return job._replace(plan=job.plan._replace(execution=execution))


def _time(job: Job) -> float:
    """Seconds per round, without evaluation: the best of a few."""
    plan = Plan(records=1, execution=job.plan.execution, stationarity=False)
    quiet = job._replace(plan=plan, every=2**30, rounds=2**30)
    carry = quiet.begin()[0]
    jax.block_until_ready(quiet.advance(carry, 0, 1))
    took = []
    for _ in range(3):
        began = time.perf_counter()
        jax.block_until_ready(quiet.advance(carry, 1, 2))
        took.append(time.perf_counter() - began)
    return min(took)


def _work(job: Job) -> float:
    """Floating-point operations of one round, roughly: six per parameter, example and local step."""
    return 6.0 * job.x0.size * job.rows_a_round()


def _name(job: Job) -> str:
    shapes = [str((a.shape, str(a.dtype))) for a in jax.tree.leaves((job.x0, job.world.flat))]
    device = jax.devices()[0].device_kind
    words = [
        describe(job.world.problem),
        describe(job.rest),
        describe(job.world.sampler),
        shapes,
        device,
        os.cpu_count(),
    ]
    size = job.world.selection.size(job.world.clients)
    return hashlib.sha256(
        json.dumps([words, _candidates(size), size, jax.__version__], default=str).encode()
    ).hexdigest()[:24]


def _memory() -> dict[str, Any]:
    try:
        return json.loads((cache_folder() / "execution.json").read_text())
    except (OSError, ValueError):
        return {}


def _remember(memory: dict[str, Any]) -> None:
    """Losing this costs a measurement, so a cache that cannot be written is no error."""
    with contextlib.suppress(OSError), replacing(cache_folder() / "execution.json") as part:
        part.write_text(json.dumps(memory))
