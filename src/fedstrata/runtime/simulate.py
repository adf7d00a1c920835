"""The simulator's program: many rounds, evaluation included, as one compiled loop.

The loop's bounds are traced, so a segment of any length is the same executable: how a run is cut into segments
never changes a bit of its result. A run that diverges or stops early is frozen in place, at the cost of the cohort.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from fedstrata.algorithm import Algorithm, Cohort, steps_of
from fedstrata.clock import Clock, domain
from fedstrata.memory import Pool
from fedstrata.random import fold_in
from fedstrata.runtime import start as starting
from fedstrata.runtime.counting import examples_seen
from fedstrata.runtime.crew import Crew, crew_of, read_local, write_local
from fedstrata.runtime.evaluate import judge, measure, record_of
from fedstrata.runtime.local import Setting, part_of_time
from fedstrata.runtime.round import Round, run_round
from fedstrata.runtime.world import DIVERGED, RUNNING, Carry, Plan, Span, World
from fedstrata.transport.cohort import Everyone
from fedstrata.transport.privacy import noise_key
from fedstrata.vector import Vector, where


def setting_of(world: World, algorithm: Algorithm, plan: Plan, x0: Vector) -> Setting:
    template = starting.start_values(algorithm, world.problem, x0)
    dtype = x0.scalar_dtype
    return Setting(algorithm, world.problem, world.sampler, plan.execution, world.flat, template, dtype, world.privacy)


def noise_at(world: World, key: PRNGKeyArray) -> PRNGKeyArray | None:
    """The run's key for noise, where clients are private."""
    return None if world.privacy is None else domain(key, "privacy")


def cohort_at(world: World, algorithm: Algorithm, key: PRNGKeyArray, round: Array, dtype: Any) -> Cohort:
    """The clients of a round, weighted evenly or by their counts."""
    with part_of_time("cohort"):
        return _cohort_at(world, algorithm, key, round, dtype)


def _cohort_at(world: World, algorithm: Algorithm, key: PRNGKeyArray, round: Array, dtype: Any) -> Cohort:
    now = fold_in(domain(key, "cohort"), round)
    ids = world.selection.draw(now, round, world.clients)
    clock = Clock.at(round, steps_of(algorithm), steps_of(algorithm) - 1)
    present = jnp.ones(ids.shape, bool) if world.selection.full else ids >= 0
    if world.counts is None or world.total is None:
        weights, share = present.astype(dtype), present.sum() / world.clients
    else:
        weights = jnp.where(present, world.counts[jnp.maximum(ids, 0)].astype(dtype), 0)
        everyone = isinstance(world.selection, Everyone)  # all of it, and not all but a rounding error
        share = jnp.ones((), dtype) if everyone else jnp.sum(weights) / world.total
    weights = weights / jnp.sum(weights)
    return Cohort(clock, jnp.maximum(ids, 0), present, weights, fold_in(now, 1), world.clients, share)


def everyone_at(world: World, algorithm: Algorithm, key: PRNGKeyArray, dtype: Any) -> Cohort:
    """All clients, who send their starts before round 0."""
    whole = dataclasses.replace(world, selection=Everyone())
    return cohort_at(whole, algorithm, key, jnp.array(0, jnp.int32), dtype)


def crew_at(world: World, cohort: Cohort) -> Crew:
    """Who is worked on for a cohort, and where."""
    if world.streamed:
        seats = jnp.arange(cohort.ids.shape[0], dtype=jnp.int32)
        return Crew(cohort.ids, cohort.present, cohort.weights, False, world.selection.full, seats=seats)
    return crew_of(cohort, isinstance(world.selection, Everyone), world.selection.full, world.spread)


def begin(
    world: World, algorithm: Algorithm, plan: Plan, x0: Vector, key: PRNGKeyArray
) -> tuple[Carry, Any, starting.Start]:
    """The state before round 0, its evaluation, and how the first rounds start."""
    setting, key_of_starts = setting_of(world, algorithm, plan, x0), domain(key, "start")
    if algorithm.merge_at_init:
        everyone, size = everyone_at(world, algorithm, key, x0.scalar_dtype), world.selection.size(world.clients)
        crew = crew_of(everyone, True, True, world.spread)
        start = starting.begin_merged(setting, key_of_starts, everyone, crew, size, start_noise(world, key))
    else:
        cohort = cohort_at(world, algorithm, key, jnp.array(0, jnp.int32), x0.scalar_dtype)
        start = starting.begin_apart(setting, key_of_starts, cohort, crew_at(world, cohort))
    local = starting.begin_local(setting, key_of_starts, world.clients, world.spread, start.merged)
    x, found = measure(world, algorithm, plan, start.shared, local)
    carry = first_carry(plan, start.shared, local, x, found["objective"])
    return (*_everywhere(world, judge(plan, carry, x, found, jnp.array(0, jnp.int32)), found), start)


def start_noise(world: World, key: PRNGKeyArray) -> PRNGKeyArray | None:
    """The key of the noise on what is merged before round 0, where clients are private."""
    noise = noise_at(world, key)
    return None if noise is None else noise_key(noise, -1, 0, 0)


def first_carry(plan: Plan, shared: Any, local: dict[str, Any], x: Vector, objective: Array) -> Carry:
    """What a run remembers before anything has happened; x: its solution, of which this is the objective."""
    none, fields = jnp.array(-1, jnp.int32), jnp.zeros((len(shared._fields),), bool)
    running, worst = jnp.array(RUNNING, jnp.int32), jnp.array(-jnp.inf, objective.dtype)
    return Carry(shared, local, running, none, fields, objective, worst, x if plan.select else None, none, none)


def one_round(
    world: World, algorithm: Algorithm, plan: Plan, x0: Vector, key: PRNGKeyArray, carry: Carry, round: Array, own: Any
) -> tuple[Carry, Array, Array]:
    """One round of a running simulation; returns also the examples looked at and the clients that took part."""
    cohort = cohort_at(world, algorithm, key, round, x0.scalar_dtype)
    crew = crew_at(world, cohort)
    rows = read_local(carry.local, world.flat, crew)
    carry, rows, seen, took = one_cohort(world, algorithm, plan, x0, key, carry, cohort, rows, own)
    return carry._replace(local=write_local(carry.local, rows, world.flat, crew)), seen, took


def one_cohort(
    world: World,
    algorithm: Algorithm,
    plan: Plan,
    x0: Vector,
    key: PRNGKeyArray,
    carry: Carry,
    cohort: Cohort,
    rows: dict[str, Any],
    own: Any,
) -> tuple[Carry, dict[str, Any], Array, Array]:
    """A round of a cohort, given and returning the rows of its Local fields."""
    setting, crew, round = setting_of(world, algorithm, plan, x0), crew_at(world, cohort), cohort.clock.round
    pools = {field: value for field, value in (own or {}).items() if isinstance(value, Pool)}
    starts = {field: value for field, value in (own or {}).items() if field not in pools}
    this = Round(setting, cohort, crew, domain(key, "sample"), starts, noise_at(world, key), pools)
    shared, new_rows = run_round(this, carry.shared, rows)
    new_rows = crew.settled(new_rows, rows)
    finite = jnp.array([_finite(getattr(shared, f)) & _finite(new_rows.get(f)) for f in shared._fields])
    running = carry.status == RUNNING
    keep = running & jnp.all(finite)
    failed = running & ~keep
    carry = carry._replace(
        shared=where(keep, shared, carry.shared),
        status=jnp.where(failed, DIVERGED, carry.status),
        bad_round=jnp.where(failed, round + 1, carry.bad_round),
        bad_fields=jnp.where(failed, ~finite, carry.bad_fields),
    )
    took = jnp.where(running, jnp.sum(cohort.present), 0).astype(jnp.int32)
    seen = jnp.where(running, examples_seen(world, algorithm, cohort), 0)
    return carry, where(keep, new_rows, rows), seen, took


def advance(
    world: World,
    algorithm: Algorithm,
    plan: Plan,
    x0: Vector,
    key: PRNGKeyArray,
    carry: Carry,
    span: Span,
    own: Any = None,
) -> tuple[Carry, dict[str, Array], Array, Array]:
    """The rounds of a span. Returns what was recorded on the way, and how many examples and clients took part."""
    look = jax.jit(partial(measure, world, algorithm, plan))  # traced once, although it is asked for its shapes first
    shapes = jax.eval_shape(look, carry.shared, carry.local)[1]
    blank = lambda s: jnp.full((plan.records, *s.shape), jnp.nan, s.dtype)
    counts = {name: jnp.zeros((plan.records,), jnp.int32) for name in ("samples", "took", "status")}
    records = {**jax.tree.map(blank, shapes), **counts}

    def body(round: Array, loop: tuple) -> tuple:
        carry, records, at, samples, took = loop
        carry, more, came = one_round(world, algorithm, plan, x0, key, carry, round, own)
        samples, took = samples + more, took + came

        def record() -> tuple:
            judged, found = record_of(plan, carry, look, round + 1)
            found |= {"samples": samples, "took": took, "status": judged.status}
            return judged, {n: records[n].at[at].set(v) for n, v in found.items()}

        due = span.due(round + 1)
        carry, records = jax.lax.cond(due, record, lambda: (carry, records))
        return carry, records, at + due.astype(jnp.int32), samples, took

    zero = jnp.array(0, jnp.int32)
    carry, records, _, samples, took = jax.lax.fori_loop(
        span.first, span.last, body, (carry, records, zero, zero, zero)
    )
    return (*_everywhere(world, carry, records), samples, took)


def _everywhere(world: World, carry: Carry, found: dict[str, Array]) -> tuple[Carry, dict[str, Array]]:
    """On a mesh: all but the clients' own fields on every device, where any process can read them."""
    if world.spread is None:
        return carry, found
    local, rest = carry.local, carry._replace(local={})
    rest, found = world.spread.whole((rest, found))
    return rest._replace(local=local), found


def _finite(value: Any) -> Array:
    leaves = jax.tree.leaves(value.rows if isinstance(value, Pool) else value)
    floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in floats])) if floats else jnp.array(True)
