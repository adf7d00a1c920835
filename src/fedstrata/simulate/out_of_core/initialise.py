"""The state before round 0 of an out-of-core run: all clients, in batches, so that their data fit."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedstrata.engine import initialise as starting
from fedstrata.engine.context import RoundContext
from fedstrata.engine.layout import Flat, local_fields
from fedstrata.engine.privacy import first_reference, means
from fedstrata.engine.server import largest_weight, summed, weighted_mean
from fedstrata.engine.slots import all_slots, seated, slots_of
from fedstrata.engine.visibility import show_server
from fedstrata.simulate import program
from fedstrata.simulate.batching import Runs
from fedstrata.simulate.evaluate import measure
from fedstrata.simulate.state import Carry


@eqx.filter_jit
def start_apart(runs: Runs, data: Flat) -> starting.Start:
    """The start if nothing is merged; `data`: of the first cohort of each seed."""

    def one(context: RoundContext, key: Array, data: Flat) -> starting.Start:
        here = context.with_data(data)
        cohort = here.cohort(key, jnp.array(0, jnp.int32))
        return starting.start_apart(here, key, cohort, slots_of(here, cohort))

    return runs.each(one, (data,))


@eqx.filter_jit
def sent(runs: Runs, data: Flat, ids: Array) -> tuple[dict[str, Any], dict[str, Any]]:
    """The messages of these clients before round 0: their part of every mean (in a private run, integers), and rows."""
    size = min(starting.CHUNK, ids.shape[0])

    def one(context: RoundContext, key: Array) -> tuple[dict[str, Any], dict[str, Any]]:
        everyone, fields = context.everyone(key), starting.sent_at_start(context)
        slots, noise = seated(ids, everyone.weights), context.noise(key)
        rows = starting.starts_of(context.with_data(data), key, slots, size, fields, starting.sent_one, noise)
        averaged, grid = means(context.state, fields), context.grid(fields, context.clients)
        others = {f: value for f, value in rows.items() if f not in averaged}
        if context.privacy is not None and context.privacy.where == "server" and grid is not None:
            most = largest_weight(all_slots(everyone, None))
            return summed(context, grid, first_reference(context.template), rows, slots, most), others
        return {f: jax.tree.map(lambda a: weighted_mean(a, slots), rows[f]) for f in averaged}, others

    return runs.each(one)


@eqx.filter_jit
def merge_starts(runs: Runs, rows: dict[str, Any], merged_already: dict[str, Any]) -> Any:
    """The server's state after the starts of all clients were merged, with room for the rows of all."""

    def one(context: RoundContext, key: Array, rows: Any, merged_already: Any) -> Any:
        everyone, empty = context.everyone(key), starting.blank(context, context.clients)
        given = {"noise": context.noise(key), "merged_already": merged_already}
        return starting.merge_starts(context, empty, rows, everyone, all_slots(everyone, None), **given)

    return runs.each(one, by_run=(rows, merged_already))


@eqx.filter_jit
def received(runs: Runs, merged: Any) -> dict[str, Any]:
    """The fields of the merged starts that clients receive before round 0."""
    return runs.each(lambda context, key, merged: starting.received_at_start(merged), by_run=(merged,))


@eqx.filter_jit
def pooled(runs: Runs, data: Flat, ids: Array, received: dict[str, Any]) -> dict[str, Any]:
    """The rows that these clients pool after they have received the merged starts."""
    size = min(starting.CHUNK, ids.shape[0])

    def one(context: RoundContext, key: Array, received: Any) -> dict[str, Any]:
        here, fields = context.with_data(data), starting.pools(context)
        return starting.starts_of(here, key, seated(ids), size, fields, starting.start_one, received)

    return runs.each(one, by_run=(received,))


@eqx.filter_jit
def narrowed(runs: Runs, merged: Any, pooled: Any, received: Any) -> starting.Start:
    """The state before round 0 from the merged starts of all clients, with room for the pools of one cohort."""

    def one(context: RoundContext, key: Array, merged: Any, pooled: Any, received: Any) -> starting.Start:
        everyone = context.everyone(key)
        if pooled is not None:
            slots, empty = all_slots(everyone, None), starting.blank(context, context.clients)
            merged = starting.pool_again(context, empty, merged, pooled, everyone, slots)
        return starting.narrowed(context, merged, everyone, received)

    return runs.each(one, by_run=(merged, pooled, received))


@eqx.filter_jit
def blank(runs: Runs) -> Any:
    """The server's state before any client has sent anything."""
    return runs.each(lambda context, key: starting.blank(context, context.cohort_size))


@eqx.filter_jit
def first_carry(runs: Runs, shared: Any) -> Carry:
    """The carry before the first evaluation, which computes the objective at the start."""

    def one(context: RoundContext, key: Array, shared: Any) -> Carry:
        look = lambda: measure(runs.inputs, runs.options, context, shared, {})
        objective = jax.eval_shape(look)[1]["objective"]
        x = context.algorithm.solution(context.problem, show_server(shared))
        return program.first_carry(runs.options, shared, {}, x, jnp.full(objective.shape, jnp.inf, objective.dtype))

    return runs.each(one, by_run=(shared,))


@eqx.filter_jit
def template(runs: Runs) -> dict[str, Any]:
    """The starts of one client's `Local` fields, for every run."""
    fields = local_fields(runs.inputs.context.state)
    return runs.each(lambda context, key: {f: getattr(context.template, f) for f in fields})


@eqx.filter_jit
def local_rows(runs: Runs, data: Flat, ids: Array, merged: Any) -> dict[str, Any]:
    """The starts of the `Local` fields of these clients, from their data."""
    size = min(starting.CHUNK, ids.shape[0])

    def one(context: RoundContext, key: Array, merged: Any) -> dict[str, Any]:
        return starting.local_rows(context.with_data(data), key, seated(ids), size, merged)

    return runs.each(one, by_run=(merged,))
