"""The server's half of an exchange: merge the clients' fields by placement, then the server step."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from fedstrata.core.algorithm import Cohort
from fedstrata.core.hyperparameters import at_time
from fedstrata.core.memory import Pool
from fedstrata.core.placement import PlacedState, field_of, part, placements, with_parts
from fedstrata.core.vector import widest
from fedstrata.engine.context import RoundContext, profiled
from fedstrata.engine.exchange import Exchange
from fedstrata.engine.layout import flat_union, push_union
from fedstrata.engine.slots import Slots
from fedstrata.engine.visibility import server_view, show_server


def broadcast(
    exchange: Exchange, shared: PlacedState, pools: Mapping[str, Pool], without: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """The fields that every client receives at the start of an exchange.

    Args:
        exchange: which fields go down.
        shared: the server's state.
        pools: the pools of all clients from before round 0, while their history lasts.
        without: fields for which each client has its own start value.
    """
    values = {f: part(shared, f) for f in exchange.receives if field_of(f) not in without}
    return {f: flat_union(v, pools.get(f)) if isinstance(v, Pool) else v for f, v in values.items()}


def run_server(
    context: RoundContext,
    exchange: Exchange,
    shared: PlacedState,
    sent: Mapping[str, Any],
    cohort: Cohort,
    slots: Slots,
    *,
    noise: PRNGKeyArray | None = None,
    merged_already: Mapping[str, Any] | None = None,
) -> Any:
    """The server's state after an exchange: the merge, then the server step.

    Args:
        context: the context of the round.
        exchange: which fields were sent.
        shared: the server's state before.
        sent: the clients' fields, stacked by slot.
        cohort: the clients of the round.
        slots: the position of each client of the cohort among the stacked rows.
        noise: the key of this exchange's noise, in a private run.
        merged_already: fields that arrive merged, from a secure sum.
    """
    with profiled("merge"):
        merged = merged_fields(
            context, exchange.sends, shared, sent, cohort, slots, noise=noise, merged_already=merged_already
        )
    after = with_parts(shared, merged)
    algorithm = at_time(context.algorithm, cohort.clock, context.dtype)
    server_step = algorithm.phases(context.problem)[exchange.number].server_step
    if server_step is None:
        return after
    before, where = show_server(shared), f"{type(algorithm).__name__}.{getattr(server_step, '__name__', 'server')}"
    with profiled("server"):
        return server_view(where, lambda merged: server_step(context.problem, before, merged, cohort), after)


def merged_fields(
    context: RoundContext,
    paths: tuple[str, ...],
    shared: PlacedState,
    sent: Mapping[str, Any],
    cohort: Cohort,
    slots: Slots,
    *,
    noise: PRNGKeyArray | None = None,
    merged_already: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The fields that were sent, merged by placement, with noise in a private run."""
    places, ready = placements(type(shared)), merged_already or {}
    one = lambda f: merge(places[field_of(f)].merge, part(shared, f), sent[f], cohort, slots)
    merged = {f: ready[f] if f in ready else one(f) for f in paths}
    if context.privacy is None:
        return merged
    if noise is None:
        raise ValueError("a private run needs a key for the noise of every merge")
    weights = jnp.where(cohort.present, cohort.weights, 0)
    return context.privacy.noised(merged, type(shared), weights, noise)


def merge(how: str | None, old: PyTree, stacked: PyTree, cohort: Cohort, slots: Slots) -> Any:
    """One field of all clients, merged as its placement states."""
    if how == "union":
        return push_union(old, slots.in_order(stacked), cohort.ids, cohort.present)
    return slots.in_order(stacked) if how == "rows" else jax.tree.map(lambda a: weighted_mean(a, slots), stacked)


def weighted_mean(stacked: Array, slots: Slots) -> Array:
    """Σ_i w_i a_i over the clients present, in the dtype of a."""
    if not jnp.issubdtype(stacked.dtype, jnp.inexact):
        raise TypeError(f"a field of dtype {stacked.dtype} cannot be averaged; keep counts as floats, or use Gathered")
    # Values of an empty slot must not matter, even if they are not finite.
    present = slots.present.reshape((-1,) + (1,) * (stacked.ndim - 1))
    wide = widest(stacked.dtype, slots.weights.dtype)  # narrow floats are summed in float32
    # By default GPUs round the factors of a float32 product to ten bits. The weights would no longer sum to one, and
    # methods that accumulate such means (control variates) would drift.
    weights, values = slots.weights.astype(wide), jnp.where(present, stacked, 0).astype(wide)
    mean = jnp.tensordot(weights, values, axes=1, precision="highest")
    return mean.astype(stacked.dtype)
