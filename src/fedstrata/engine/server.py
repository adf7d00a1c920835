"""The server's half of an exchange: merge the clients' fields by placement, then the server step."""

from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fedstrata.core.algorithm import Cohort
from fedstrata.core.grid import Grid, Noise
from fedstrata.core.hyperparameters import at_time
from fedstrata.core.memory import Pool
from fedstrata.core.placement import PlacedState, field_of, part, placements, with_parts
from fedstrata.core.vector import widest
from fedstrata.engine.context import RoundContext, profiled
from fedstrata.engine.exchange import Exchange
from fedstrata.engine.layout import flat_union, push_union
from fedstrata.engine.privacy import Privacy, means
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
    reference: PlacedState | None = None,
    noise: Noise | None = None,
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
        reference: in a private run, the values around which clients' changes were clipped.
        noise: of this exchange, if the server adds it.
        merged_already: fields that arrive merged; means that get noise, as sums of integers (`Privacy.summed`).
    """
    with profiled("merge"):
        merged = merged_fields(
            context,
            exchange.sends,
            shared,
            sent,
            cohort,
            slots,
            reference=reference,
            noise=noise,
            merged_already=merged_already,
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
    reference: PlacedState | None = None,
    noise: Noise | None = None,
    merged_already: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The fields that were sent, merged by placement, with noise in a private run."""
    places, ready, privacy = placements(type(shared)), merged_already or {}, context.privacy
    grid = None if privacy is None else context.grid(paths, cohort.ids.shape[0])
    noisy = means(type(shared), paths) if privacy and grid and privacy.where == "server" else ()
    one = lambda f: merge(places[field_of(f)].merge, part(shared, f), sent[f], cohort, slots)
    merged = {f: ready[f] if f in ready else one(f) for f in paths if f not in noisy}
    if privacy is None or grid is None or not noisy:
        return merged
    if noise is None or reference is None:
        raise ValueError("a private run needs noise and the reference of every merge")
    sums = {f: ready[f] for f in noisy if f in ready}
    sums = sums or summed(context, grid, reference, {f: sent[f] for f in noisy}, slots)
    return merged | privacy.noised(sums, reference, grid, largest_weight(slots), noise)


def summed(
    context: RoundContext, grid: Grid, reference: PlacedState, sent: Mapping[str, Any], slots: Slots, most: Any = None
) -> dict[str, Any]:
    """The sums of integers from which a private run's means are computed; `most` is the largest weight of all slots."""
    most = largest_weight(slots) if most is None else most
    for a in jax.tree.leaves({f: sent[f] for f in means(type(reference), tuple(sent))}):
        _check_inexact(a)
    ratios = jnp.where(slots.present, slots.weights, 0) / most
    return cast(Privacy, context.privacy).summed(sent, reference, grid, ratios)


def largest_weight(slots: Slots) -> Array:
    """Of the clients present; 1 if there is none."""
    most = jnp.max(jnp.where(slots.present, slots.weights, 0))
    return jnp.where(most > 0, most, 1)


def merge(how: str | None, old: PyTree, stacked: PyTree, cohort: Cohort, slots: Slots) -> Any:
    """One field of all clients, merged as its placement states."""
    if how == "union":
        return push_union(old, slots.in_order(stacked), cohort.ids, cohort.present)
    return slots.in_order(stacked) if how == "rows" else jax.tree.map(lambda a: weighted_mean(a, slots), stacked)


def weighted_mean(stacked: Array, slots: Slots) -> Array:
    """Σ_i w_i a_i over the clients present, in the dtype of a."""
    _check_inexact(stacked)
    # Values of an empty slot must not matter, even if they are not finite.
    present = slots.present.reshape((-1,) + (1,) * (stacked.ndim - 1))
    wide = widest(stacked.dtype, slots.weights.dtype)  # narrow floats are summed in float32
    # By default GPUs round the factors of a float32 product to ten bits. The weights would no longer sum to one, and
    # methods that accumulate such means (control variates) would drift.
    weights, values = slots.weights.astype(wide), jnp.where(present, stacked, 0).astype(wide)
    mean = jnp.tensordot(weights, values, axes=1, precision="highest")
    return mean.astype(stacked.dtype)


def _check_inexact(a: Array) -> None:
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        raise TypeError(f"a field of dtype {a.dtype} cannot be averaged; keep counts as floats, or use Gathered")
