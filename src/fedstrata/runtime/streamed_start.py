"""How a job begins whose federation stays on the host: all clients, some at a time, without their data at once."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedstrata.clock import domain
from fedstrata.runtime import simulate
from fedstrata.runtime import start as starting
from fedstrata.runtime.crew import Crew, crew_of
from fedstrata.runtime.evaluate import measure
from fedstrata.runtime.layout import Flat, local_fields
from fedstrata.runtime.local import Setting
from fedstrata.runtime.round import weighted_mean
from fedstrata.runtime.runs import over_runs
from fedstrata.runtime.sight import show_server
from fedstrata.runtime.world import Carry, World
from fedstrata.transport.privacy import means
from fedstrata.vector import Vector

Parts = tuple  # world, plan, values, rest, x0, keys and seeds of a job


def with_data(world: World, flat: Flat) -> World:
    return dataclasses.replace(world, flat=flat)


def _setting(parts: Parts, v: Any, x: Vector, flat: Flat | None = None) -> Setting:
    world, plan, _, rest, *_ = parts
    return simulate.setting_of(world if flat is None else with_data(world, flat), eqx.combine(v, rest), plan, x)


def _some(ids: Array, weights: Array | None = None) -> Crew:
    """These clients, −1 where there is none, whose data are at hand in this order."""
    here, seats = ids >= 0, jnp.arange(ids.shape[0], dtype=jnp.int32)
    weights = here.astype(float) if weights is None else jnp.where(here, weights[ids], 0)
    return Crew(jnp.maximum(ids, 0), here, weights, False, True, seats=seats)


@eqx.filter_jit
def begin_apart(parts: Parts, flat: Flat) -> starting.Start:
    """The start where nothing is merged; `flat`: the data of the first cohort of each seed."""
    world, _, values, rest, x0, keys, seeds = parts

    def one(v: Any, flat: Flat, x: Vector, key: Array) -> starting.Start:
        here = with_data(world, flat)
        cohort = simulate.cohort_at(here, eqx.combine(v, rest), key, jnp.array(0, jnp.int32), x.scalar_dtype)
        setting, crew = _setting(parts, v, x, flat), simulate.crew_at(here, cohort)
        return starting.begin_apart(setting, domain(key, "start"), cohort, crew)

    return over_runs(one, seeds, values, (flat, x0, keys))


@eqx.filter_jit
def sent(parts: Parts, flat: Flat, ids: Array) -> tuple[dict[str, Any], dict[str, Any]]:
    """What these clients send before round 0: their part of every mean, and rows."""
    world, _, values, rest, x0, keys, seeds = parts

    def one(v: Any, x: Vector, key: Array) -> tuple[dict[str, Any], dict[str, Any]]:
        setting = _setting(parts, v, x, flat)
        crew = _some(ids, simulate.everyone_at(world, eqx.combine(v, rest), key, x.scalar_dtype).weights)
        fields = starting.sent_at_start(setting)
        given = (domain(key, "start"), crew, min(starting.CHUNK, ids.shape[0]), fields, starting.sent_one)
        rows, averaged = starting.starts_of(setting, *given), means(type(setting.template), fields)
        mean = lambda field: jax.tree.map(lambda a: weighted_mean(a, crew), rows[field])
        return {f: mean(f) for f in averaged}, {f: value for f, value in rows.items() if f not in averaged}

    return over_runs(one, seeds, values, (x0, keys))


@eqx.filter_jit
def merge_starts(parts: Parts, rows: dict[str, Any], known: dict[str, Any]) -> Any:
    """The server's state after the starts of all clients were merged, with room for the rows of all."""
    world, _, values, rest, x0, keys, seeds = parts

    def one(v: Any, x: Vector, key: Array, rows: Any, known: Any) -> Any:
        setting = _setting(parts, v, x)
        everyone = simulate.everyone_at(world, eqx.combine(v, rest), key, x.scalar_dtype)
        crew, empty = crew_of(everyone, True, True, None), starting.blank(setting, world.clients)
        return starting.merge_starts(setting, empty, rows, everyone, crew, simulate.start_noise(world, key), known)

    return over_runs(one, seeds, values, (x0, keys), (rows, known))


@eqx.filter_jit
def received(parts: Parts, merged: Any) -> dict[str, Any]:
    return over_runs(lambda v, merged: starting.received_at_start(merged), parts[-1], parts[2], (), (merged,))


@eqx.filter_jit
def pooled(parts: Parts, flat: Flat, ids: Array, known: dict[str, Any]) -> dict[str, Any]:
    """What these clients pool once they know what was merged."""
    _, _, values, _, x0, keys, seeds = parts

    def one(v: Any, x: Vector, key: Array, known: Any) -> dict[str, Any]:
        setting, size = _setting(parts, v, x, flat), min(starting.CHUNK, ids.shape[0])
        given = (domain(key, "start"), _some(ids), size, starting.pools(setting), starting.start_one, known)
        return starting.starts_of(setting, *given)

    return over_runs(one, seeds, values, (x0, keys), (known,))


@eqx.filter_jit
def narrowed(parts: Parts, merged: Any, pooled: Any, known: Any) -> starting.Start:
    world, _, values, rest, x0, keys, seeds = parts

    def one(v: Any, x: Vector, key: Array, merged: Any, pooled: Any, known: Any) -> starting.Start:
        setting, size = _setting(parts, v, x), world.selection.size(world.clients)
        everyone = simulate.everyone_at(world, eqx.combine(v, rest), key, x.scalar_dtype)
        if pooled is not None:
            crew, empty = crew_of(everyone, True, True, None), starting.blank(setting, world.clients)
            merged = starting.pool_again(setting, empty, merged, pooled, everyone, crew)
        return starting.narrowed(setting, merged, everyone, size, known)

    return over_runs(one, seeds, values, (x0, keys), (merged, pooled, known))


@eqx.filter_jit
def blank(parts: Parts) -> Any:
    world, _, values, _, x0, _, seeds = parts
    size = world.selection.size(world.clients)
    return over_runs(lambda v, x: starting.blank(_setting(parts, v, x), size), seeds, values, (x0,))


@eqx.filter_jit
def first_carry(parts: Parts, shared: Any) -> Carry:
    """The carry before the first evaluation, which says where the objective begins."""
    world, plan, values, rest, _, _, seeds = parts

    def one(v: Any, shared: Any) -> Carry:
        algorithm = eqx.combine(v, rest)
        objective = jax.eval_shape(lambda: measure(world, algorithm, plan, shared, {}))[1]["objective"]
        x = algorithm.solution(world.problem, show_server(shared))
        return simulate.first_carry(plan, shared, {}, x, jnp.full(objective.shape, jnp.inf, objective.dtype))

    return over_runs(one, seeds, values, (), (shared,))


@eqx.filter_jit
def template(parts: Parts) -> dict[str, Any]:
    """How one client's Local fields begin, for every run."""
    world, _, values, rest, x0, _, seeds = parts

    def one(v: Any, x: Vector) -> dict[str, Any]:
        template = starting.start_values(eqx.combine(v, rest), world.problem, x)
        return {f: getattr(template, f) for f in local_fields(type(template))}

    return over_runs(one, seeds, values, (x0,))


@eqx.filter_jit
def local_rows(parts: Parts, flat: Flat, ids: Array, merged: Any) -> dict[str, Any]:
    """How the Local fields of these clients begin, whose data are given."""
    _, _, values, _, x0, keys, seeds = parts

    def one(v: Any, x: Vector, key: Array, merged: Any) -> dict[str, Any]:
        setting, size = _setting(parts, v, x, flat), min(starting.CHUNK, ids.shape[0])
        return starting.local_rows(setting, domain(key, "start"), _some(ids), size, merged)

    return over_runs(one, seeds, values, (x0, keys), (merged,))
