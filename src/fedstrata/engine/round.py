"""The round, with the only loop over clients. Algorithms have none."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from fedstrata.base.clock import domain
from fedstrata.core.algorithm import Cohort, Phase
from fedstrata.core.memory import Pool
from fedstrata.core.placement import PlacedState, placements
from fedstrata.engine.client import Client, kept_fields, run_client
from fedstrata.engine.context import RoundContext, profiled
from fedstrata.engine.exchange import Exchange
from fedstrata.engine.layout import Flat
from fedstrata.engine.over_clients import over_clients
from fedstrata.engine.privacy import first_reference, next_reference, own_noise
from fedstrata.engine.server import broadcast, run_server
from fedstrata.engine.slots import Slots


def run_round(
    context: RoundContext,
    cohort: Cohort,
    slots: Slots,
    key: PRNGKeyArray,
    shared: PlacedState,
    rows: Mapping[str, Any],
    first_round_starts: Mapping[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """One round; returns the server's state and the Local fields of the cohort after it.

    Args:
        context: the context of the run.
        cohort: the clients of this round.
        slots: their slots.
        key: the run's key.
        shared: the server's state.
        rows: the `Local` fields of the cohort, stacked.
        first_round_starts: values of the first rounds in addition to the server's state; usually none.
    """
    pools = {field: value for field, value in first_round_starts.items() if isinstance(value, Pool)}
    starts = {field: value for field, value in first_round_starts.items() if field not in pools}
    copies, received_fields = {**rows, **starts}, frozenset(starts)
    reference = None if context.privacy is None else first_reference(context.template)
    for exchange, phase in zip(context.exchanges, context.algorithm.phases(context.problem), strict=True):
        own = frozenset(starts) if exchange.number == 0 else frozenset()
        given = {"key": key, "pools": pools, "own_starts": own, "received_fields": received_fields}
        step = partial(_exchange, context, exchange, cohort, slots, **given)
        if phase.repeat == 1 and phase.when is None:
            shared, copies, reference = step((shared, copies, reference), jnp.array(0, jnp.int32))
        else:
            shared, copies, reference = _repeat(slots, cohort, phase, step, (shared, copies, reference))
        received_fields = received_fields | exchange.fields
    return shared, {field: copies[field] for field in rows}


def _repeat(slots: Slots, cohort: Cohort, phase: Phase, step: Callable, state: tuple) -> tuple:
    """Repetitions of an exchange, possibly masked by `when`, as one loop of the program."""
    shared, copies, reference = state
    # A loop has the same copies before and after, so copies not yet received start as the server's values.
    missing = [f for f, p in placements(type(shared)).items() if p.down and p.merge != "union" and f not in copies]
    wide = lambda a: jnp.broadcast_to(a, (slots.ids.shape[0], *a.shape))
    copies = {**{f: jax.tree.map(wide, getattr(shared, f)) for f in missing}, **copies}

    def once(state: tuple, repetition: Array) -> tuple:
        if phase.when is None:
            return step(state, repetition), None
        go = phase.when(state[0], cohort, repetition)
        return jax.lax.cond(go, lambda: step(state, repetition), lambda: state), None

    return jax.lax.scan(once, (shared, copies, reference), jnp.arange(phase.repeat, dtype=jnp.int32))[0]


def _exchange(
    context: RoundContext,
    exchange: Exchange,
    cohort: Cohort,
    slots: Slots,
    state: tuple,
    repetition: Array,
    *,
    key: PRNGKeyArray,
    pools: Mapping[str, Pool],
    own_starts: frozenset[str],
    received_fields: frozenset[str],
) -> tuple[Any, dict[str, Any], Any]:
    """Clients receive, work and send; the server merges and steps.

    `state` and the result: the server's state, the clients' copies, and the reference of a private run.
    """
    shared, copies, reference = state
    received, noise = broadcast(exchange, shared, pools, own_starts), None
    if context.privacy is not None:
        reference = next_reference(reference, received)
        noise = context.noise(key, cohort.clock.round, exchange.number, repetition)

    def work(data: Flat, given: tuple, mine: tuple[Array, Array, dict[str, Any]]) -> dict[str, Any]:
        (common, round, received, reference, repetition, key, noise), (id, place, copies) = given, mine
        client = Client.of(data, id, place, key, round)
        return run_client(
            common.with_data(data),
            exchange,
            client,
            copies=copies,
            received=received,
            received_fields=received_fields,
            repetition=repetition,
            reference=reference,
            noise=own_noise(noise, id),
        )

    # Values common to all clients are copied to every device; the data and their counts are not.
    common = dataclasses.replace(context, data={}, counts=None, total=None)
    given = (common, cohort.clock.round, received, reference, repetition, domain(key, "sample"), noise)
    with profiled("local"):
        done = over_clients(work, context.data, given, (slots.ids, slots.places, copies), slots, context.execution)
    after = run_server(context, exchange, shared, done, cohort, slots, reference=reference, noise=noise)
    return after, {f: done[f] for f in kept_fields(type(shared))}, reference
