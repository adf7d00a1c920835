"""The state before round 0: the server's, the starts of the first cohort, and every client's `Local` fields."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from fedstrata.base.clock import Clock, domain
from fedstrata.core.algorithm import Algorithm, Cohort, steps_of
from fedstrata.core.grid import Noise
from fedstrata.core.hyperparameters import at_time
from fedstrata.core.memory import Pool
from fedstrata.core.placement import PlacedState, select
from fedstrata.engine.client import Client, first_oracle, own_start
from fedstrata.engine.context import Execution, RoundContext
from fedstrata.engine.layout import Flat, FlatSplit, empty_union, local_fields, newest, stack_local, window
from fedstrata.engine.over_clients import over_clients, read_local, write_local
from fedstrata.engine.privacy import first_reference, own_noise
from fedstrata.engine.server import merge, merged_fields
from fedstrata.engine.slots import Slots, all_slots, every_client, slots_of
from fedstrata.engine.visibility import ClientView, hide_local, server_view, show_server

CHUNK = 256  # clients per batch when `init_client` runs over a large federation


class Start(NamedTuple):
    """The state of a run before round 0."""

    shared: PlacedState  # the server's state
    first_round_starts: dict[str, Any]  # values of the first rounds in addition to it, usually none
    merged: dict[str, Any] | None = None  # the merged starts that clients receive, if any


def initialise(context: RoundContext, key: PRNGKeyArray) -> Start:
    """The server's state before round 0; `key` is the run's."""
    if context.algorithm.merge_at_init:
        return _start_merged(context, key)
    cohort = context.cohort(key, jnp.array(0, jnp.int32))
    return start_apart(context, key, cohort, slots_of(context, cohort))


def start_apart(context: RoundContext, key: PRNGKeyArray, cohort: Cohort, slots: Slots) -> Start:
    """The start if nothing is merged before round 0. The context has the data of the first cohort."""
    fields = own_fields(context, key)
    own = starts_of(context, key, slots, context.execution, fields, init_one) if fields else {}
    return Start(blank(context, cohort.ids.shape[0]), own)


def _start_merged(context: RoundContext, key: PRNGKeyArray) -> Start:
    """The start if all clients' starts are merged before round 0."""
    everyone = context.everyone(key)
    slots = all_slots(everyone, context.spread)
    whole = context.cohort_size == everyone.ids.shape[0]
    execution = context.execution if whole else min(CHUNK, slots.ids.shape[0])
    each = partial(starts_of, context, key, slots, execution)
    empty, sent = blank(context, everyone.ids.shape[0]), each(sent_at_start(context), sent_one, context.noise(key))
    merged = merge_starts(context, empty, sent, everyone, slots, noise=context.noise(key))
    if not starts_twice(context.algorithm):
        return narrowed(context, merged, everyone)
    received = received_at_start(merged)
    pooled = each(pools(context), start_one, received)
    return narrowed(context, pool_again(context, empty, merged, pooled, everyone, slots), everyone, received)


def narrowed(
    context: RoundContext, merged: PlacedState, everyone: Cohort, received: dict[str, Any] | None = None
) -> Start:
    """The server's state after the starts of all clients were merged, with room for the rows of one cohort.

    Under partial participation the first pools are kept apart from the state until their history has passed.
    """
    if context.cohort_size == everyone.ids.shape[0]:
        return Start(merged, {}, received)
    rows = select(type(merged), lambda p: p.held == "by cohort")
    empty, first = blank(context, context.cohort_size), {f: newest(getattr(merged, f)) for f in pools(context)}
    histories = {f: pool.history for f, pool in first.items()}
    if len({*histories.values()}) > 1:  # the first pools end in the same round
        raise ValueError(
            f"{type(context.algorithm).__name__}: with a cohort all pools need one history, not {histories}"
        )
    return Start(merged._replace(**{f: getattr(empty, f) for f in rows}), first, received)


def first_rounds(starts: Mapping[str, Any]) -> int:
    """The number of rounds that use `first_round_starts`: the history of a first pool, else one."""
    histories = (value.history for value in starts.values() if isinstance(value, Pool))
    return max(histories, default=1) if starts else 0


def blank(context: RoundContext, size: int) -> PlacedState:
    """The server's state before any client has sent anything, for cohorts of this size."""
    template = context.template
    shared = hide_local(template, context.algorithm)
    wide = {f: empty_union(getattr(template, f), size) for f in pools(context)}
    gathered = select(type(template), lambda p: p.merge == "rows")
    widen = lambda value: jax.tree.map(lambda a: jnp.broadcast_to(a, (size, *jnp.shape(a))), value)
    return shared._replace(**wide, **{f: widen(getattr(template, f)) for f in gathered})


def merge_starts(
    context: RoundContext,
    shared: PlacedState,
    sent: dict[str, Any],
    cohort: Cohort,
    slots: Slots,
    *,
    noise: Noise | None = None,
    merged_already: dict[str, Any] | None = None,
) -> Any:
    """The server's state after all clients have sent their starts; keywords as in `run_server`."""
    algorithm, paths = context.algorithm, sent_at_start(context)
    reference = None if context.privacy is None else first_reference(context.template)
    given = {"reference": reference, "noise": noise, "merged_already": merged_already}
    merged = merged_fields(context, paths, shared, sent, cohort, slots, **given)
    now = at_time(algorithm, Clock.at(0, steps_of(algorithm)), context.dtype)
    start = lambda merged: now.server_start(context.problem, merged, cohort)
    return server_view(f"{type(algorithm).__name__}.server_start", start, shared._replace(**merged))


def pool_again(
    context: RoundContext, empty: PlacedState, merged: PlacedState, pooled: dict[str, Any], cohort: Cohort, slots: Slots
) -> Any:
    """The server's state after `client_start`, with the pools that it wrote."""
    anew = {f: merge("union", getattr(empty, f), pooled[f], cohort, slots) for f in pools(context)}
    return merged._replace(**anew)


def pools(context: RoundContext) -> tuple[str, ...]:
    """The fields that are pools."""
    return tuple(f for f in context.template._fields if isinstance(getattr(context.template, f), Pool))


def sent_at_start(context: RoundContext) -> tuple[str, ...]:
    """The fields that clients send before round 0; none unless `merge_at_init`."""
    return select(context.state, lambda p: p.up) if context.algorithm.merge_at_init else ()


def received_at_start(merged: PlacedState) -> dict[str, Any]:
    """The fields that `client_start` receives."""
    return {f: getattr(show_server(merged), f) for f in select(type(merged), lambda p: p.down)}


def starts_twice(algorithm: Algorithm) -> bool:
    """Whether clients continue from what was merged at the start."""
    return algorithm.merge_at_init and type(algorithm).client_start is not Algorithm.client_start


def own_fields(context: RoundContext, key: PRNGKeyArray) -> tuple[str, ...]:
    """The fields whose start at a client of the first cohort differs from the server's."""
    if type(context.algorithm).init_client is Algorithm.init_client or context.algorithm.merge_at_init:
        return ()
    moved = _moved(context, key)
    return tuple(f for f in select(context.state, lambda p: p.down and p.merge == "mean") if f in moved)


def own_fields_unseen(context: RoundContext, key: PRNGKeyArray, examples: Mapping[str, Any]) -> tuple[str, ...]:
    """`own_fields` where no data are: `examples` has the shapes of one example by split."""
    if type(context.algorithm).init_client is Algorithm.init_client or context.algorithm.merge_at_init:
        return ()
    one = jax.ShapeDtypeStruct((1,), jnp.int32)

    def unseen(name: str, split: FlatSplit) -> FlatSplit:
        many = lambda a: jax.ShapeDtypeStruct((split.capacity, *a.shape), a.dtype)
        return FlatSplit(jax.tree.map(many, examples[name]), one, one, split.capacity)

    found: list[str] = []

    def trace(data: Flat) -> int:
        found.extend(own_fields(context.with_data(data), key))
        return 0

    jax.eval_shape(trace, {name: unseen(name, split) for name, split in context.data.items()})
    return tuple(found)


def initialise_local(context: RoundContext, key: PRNGKeyArray, merged: dict[str, Any] | None) -> dict[str, Any]:
    """The Local fields of all clients before round 0; the context has the data of all."""
    slots, fields, data = every_client(context.clients, context.spread), local_fields(context.state), context.data
    local = {f: stack_local(getattr(context.template, f), slots.ids.shape[0], data) for f in fields}
    local = local if context.spread is None else context.spread.cut(local)
    if not fields or not starts_differ(context.algorithm):
        return local
    rows = local_rows(context, key, slots, min(CHUNK, slots.ids.shape[0]), merged)
    rows = slots.keep_present(rows, read_local(local, data, slots))
    return write_local(local, rows, data, slots)


def starts_differ(algorithm: Algorithm) -> bool:
    """Whether clients set the starts of their `Local` fields."""
    return type(algorithm).init_client is not Algorithm.init_client or algorithm.merge_at_init


def local_rows(
    context: RoundContext, key: PRNGKeyArray, slots: Slots, execution: Execution, merged: dict[str, Any] | None
) -> dict[str, Any]:
    """The starts of the `Local` fields of these clients, stacked."""
    each = partial(starts_of, context, key, slots, execution, local_fields(context.state))
    return each(init_one) if merged is None else each(start_one, merged)


def starts_of(
    context: RoundContext,
    key: PRNGKeyArray,
    slots: Slots,
    execution: Execution,
    wanted: tuple[str, ...],
    function: Callable[..., Any],
    *given: Any,
) -> dict[str, Any]:
    """Some fields of function(context, client, *given) for every slot, stacked."""

    def one(data: Flat, given: tuple, who: tuple[Array, Array]) -> dict[str, Any]:
        context, key, *more = given
        state = function(context.with_data(data), Client.of(data, *who, key, 0), *more)
        return {f: getattr(state, f) for f in wanted}

    common = dataclasses.replace(context, data={}, counts=None, total=None)
    shared = (common, domain(key, "start"), *given)
    return over_clients(one, context.data, shared, (slots.ids, slots.places), slots, execution)


def init_one(context: RoundContext, client: Client) -> Any:
    """`init_client` of one client, on its own data."""
    algorithm, (oracle, clock) = context.algorithm, first_oracle(context, client)
    state = window(context.template, context.data)
    state = state._replace(**own_start(context, state, client.id))
    view = ClientView(algorithm, select(type(state), lambda p: p.down))
    now = at_time(algorithm, clock, context.dtype)
    return view.call(lambda oracle, start, state: now.init_client(oracle, state), oracle, state, state)


def sent_one(context: RoundContext, client: Client, noise: Noise | None = None) -> Any:
    """`init_one` as sent before round 0: in a private run its change from the template is clipped.

    noise: if clients add it, that of this client, or the key of the exchange.
    """
    state = init_one(context, client)
    if context.privacy is None:
        return state
    sends, reference = sent_at_start(context), first_reference(context.template)
    return context.privacy.sent(
        state, reference, context.grid(sends, context.clients), sends, own_noise(noise, client.id)
    )


def start_one(context: RoundContext, client: Client, received: dict[str, Any]) -> Any:
    """`client_start` of one client, which has received what was merged."""
    algorithm, (oracle, clock) = context.algorithm, first_oracle(context, client)
    own = init_one(context, client)
    view = ClientView(algorithm, received)
    state = own._replace(**{f: v for f, v in received.items() if not isinstance(v, Pool)})
    return view.call(at_time(algorithm, clock, context.dtype).client_start, oracle, own._replace(**received), state)


def _moved(context: RoundContext, key: PRNGKeyArray) -> set[str]:
    """The fields that `init_client` changes, found by tracing it: an unchanged field is the same object."""
    changed: set[str] = set()

    def trace(view: PlacedState) -> Any:
        zero = jnp.array(0, jnp.int32)
        client = Client.of(context.data, zero, zero, domain(key, "start"), 0)
        out = init_one(dataclasses.replace(context, template=view), client)
        for field in view._fields:
            old, new = (jax.tree.leaves(getattr(s, field)) for s in (view, out))
            if len(old) != len(new) or any(a is not b for a, b in zip(old, new, strict=True)):
                changed.add(field)
        return 0

    jax.eval_shape(trace, context.template)
    return changed
