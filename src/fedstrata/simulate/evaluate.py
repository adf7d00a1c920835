"""An evaluation: the record of a state, and its effect on the run (divergence, best solution, early stopping)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedstrata.base.directions import Direction
from fedstrata.core.algorithm import Algorithm
from fedstrata.core.vector import Vector, where, widest
from fedstrata.engine.context import RoundContext, profiled
from fedstrata.engine.over_clients import unspread
from fedstrata.engine.visibility import show_server
from fedstrata.problems.base import Problem
from fedstrata.simulate.inputs import Inputs
from fedstrata.simulate.state import DIVERGED, EXPLODED, RUNNING, STOPPED, Carry, ProgramOptions


@jax.default_matmul_precision("highest")  # reported values are exact to the dtype, on a GPU too
def measure(
    inputs: Inputs, options: ProgramOptions, context: RoundContext, shared: Any, local: dict[str, Any]
) -> tuple[Vector, dict[str, Array]]:
    """The solution and its record."""
    problem, algorithm, full = context.problem, context.algorithm, inputs.full
    x = algorithm.solution(problem, show_server(shared))
    solvable = getattr(problem, "exact", True)  # a problem may be too costly to solve
    smooth = problem.smooth(x, full) if options.stationarity and solvable else None
    out = problem.evaluate(x, full, smooth)
    if smooth is not None:
        out |= algorithm.diagnose(problem, show_server(shared), x, smooth[1])
    if not inputs.out_of_core:  # else the `Local` fields are not on the device
        out |= algorithm.observe(problem, unspread(local, context.data, context.spread), x, full)
    for split in full:
        if split != "train":
            out |= {f"{split}/{name}": v for name, v in problem.evaluate_split(x, full, split).items()}
    if inputs.monitor is not None:
        smooth = inputs.monitor.smooth(x, full) if options.stationarity else None
        found = inputs.monitor.evaluate(x, full, smooth)
        out |= {f"monitor/{name}": v for name, v in found.items()}
    if options.per_client:
        out |= {f"client/{n}": v for n, v in problem.evaluate_clients(x, full["train"]).items()}
    return x, {name: v.astype(widest(v.dtype, jnp.float32)) for name, v in out.items()}


def modes_of(problem: Problem, algorithm: Algorithm, monitor: Problem | None = None) -> dict[str, Direction]:
    """The directions of columns, as declared by a problem, an algorithm and a monitor."""
    found: dict[str, Direction] = {**algorithm.modes(), **problem.modes()}
    if monitor is not None:
        found.update((f"monitor/{name}", mode) for name, mode in monitor.modes().items())
    return found


def judge(options: ProgramOptions, carry: Carry, x: Vector, found: dict[str, Array], round: Array) -> Carry:
    """Divergence, the best solution so far, and early stopping, at one evaluation."""
    value, running = found["objective"], carry.status == RUNNING
    grown = value - carry.first > options.explosion * jnp.maximum(jnp.abs(carry.first), 1)
    status = jnp.where(running & (~jnp.isfinite(value) | grown), EXPLODED, carry.status)
    carry = carry._replace(status=status, bad_round=jnp.where(status != carry.status, round, carry.bad_round))
    if options.select is None:
        return carry
    score = options.sign * found[options.select].astype(carry.best.dtype)
    better = (carry.status == RUNNING) & (score > carry.best)
    waited = jnp.where(better, 0, carry.waited + 1)
    if options.patience is not None:
        late = (carry.status == RUNNING) & (waited >= options.patience)
        carry = carry._replace(status=jnp.where(late, STOPPED, carry.status))
    return carry._replace(
        best=jnp.where(better, score, carry.best),
        best_x=where(better, x, carry.best_x),
        best_round=jnp.where(better, round, carry.best_round),
        waited=waited,
    )


def record_of(options: ProgramOptions, carry: Carry, look: Callable, round: Array) -> tuple[Carry, dict[str, Array]]:
    """An evaluation and its effect on the run. A diverged run records nothing.

    look: `measure` of the state.
    """
    with profiled("evaluation"):
        x, found = look(carry.shared, carry.local)
    judged = judge(options, carry, x, found, round)
    bad = (judged.status == DIVERGED) | (judged.status == EXPLODED)
    return judged, {n: jnp.where(bad, jnp.nan, v) for n, v in found.items()}
