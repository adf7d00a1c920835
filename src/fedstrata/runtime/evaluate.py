"""An evaluation: what is recorded about a state, and what follows from it for the run."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedstrata.algorithm import Algorithm
from fedstrata.directions import Direction
from fedstrata.runtime.crew import unspread
from fedstrata.runtime.local import part_of_time
from fedstrata.runtime.sight import show_server
from fedstrata.runtime.world import DIVERGED, EXPLODED, RUNNING, STOPPED, Carry, Plan, World
from fedstrata.vector import Vector, where, widest


@jax.default_matmul_precision("highest")  # what is reported is exact to the dtype, on a GPU too
def measure(
    world: World, algorithm: Algorithm, plan: Plan, shared: Any, local: dict[str, Any]
) -> tuple[Vector, dict[str, Array]]:
    """The solution and everything that is recorded about it."""
    x = algorithm.solution(world.problem, show_server(shared))
    known = getattr(world.problem, "exact", True)  # a problem may be too costly to solve
    smooth = world.problem.smooth(x, world.full) if plan.stationarity and known else None
    out = world.problem.evaluate(x, world.full, smooth)
    if smooth is not None:
        out |= algorithm.diagnose(world.problem, show_server(shared), x, smooth[1])
    if not world.streamed:  # the clients' own fields are not here
        out |= algorithm.observe(world.problem, unspread(local, world.flat, world.spread), x, world.full)
    for split in world.full:
        if split != "train":
            out |= {f"{split}/{name}": v for name, v in world.problem.evaluate_split(x, world.full, split).items()}
    if world.monitor is not None:
        smooth = world.monitor.smooth(x, world.full) if plan.stationarity else None
        found = world.monitor.evaluate(x, world.full, smooth)
        out |= {f"monitor/{name}": v for name, v in found.items()}
    if plan.per_client:
        out |= {f"client/{n}": v for n, v in world.problem.evaluate_clients(x, world.full["train"]).items()}
    return x, {name: v.astype(widest(v.dtype, jnp.float32)) for name, v in out.items()}


def modes_of(problem: Any, algorithm: Algorithm, monitor: Any = None) -> dict[str, Direction]:
    """The directions that a problem, an algorithm and a monitor declare of the columns they record."""
    theirs = {} if monitor is None else {f"monitor/{name}": mode for name, mode in monitor.modes().items()}
    return {**algorithm.modes(), **problem.modes(), **theirs}


def judge(plan: Plan, carry: Carry, x: Vector, found: dict[str, Array], round: Array) -> Carry:
    """Divergence, the best solution so far, and early stopping, at one evaluation."""
    value, running = found["objective"], carry.status == RUNNING
    grown = value - carry.first > plan.explosion * jnp.maximum(jnp.abs(carry.first), 1)
    status = jnp.where(running & (~jnp.isfinite(value) | grown), EXPLODED, carry.status)
    carry = carry._replace(status=status, bad_round=jnp.where(status != carry.status, round, carry.bad_round))
    if plan.select is None:
        return carry
    score = plan.sign * found[plan.select].astype(carry.best.dtype)
    better = (carry.status == RUNNING) & (score > carry.best)
    waited = jnp.where(better, 0, carry.waited + 1)
    if plan.patience is not None:
        late = (carry.status == RUNNING) & (waited >= plan.patience)
        carry = carry._replace(status=jnp.where(late, STOPPED, carry.status))
    return carry._replace(
        best=jnp.where(better, score, carry.best),
        best_x=where(better, x, carry.best_x),
        best_round=jnp.where(better, round, carry.best_round),
        waited=waited,
    )


def record_of(plan: Plan, carry: Carry, look: Callable, round: Array) -> tuple[Carry, dict[str, Array]]:
    """An evaluation and what follows from it; a run that has gone wrong records nothing.

    look: `measure` of the state.
    """
    with part_of_time("evaluation"):
        x, found = look(carry.shared, carry.local)
    judged = judge(plan, carry, x, found, round)
    bad = (judged.status == DIVERGED) | (judged.status == EXPLODED)
    return judged, {n: jnp.where(bad, jnp.nan, v) for n, v in found.items()}
