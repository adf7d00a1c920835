"""The round: the only loop over clients. Every runtime runs it, and no algorithm does."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from fedstrata.algorithm import Algorithm, Cohort, Phase, at_time
from fedstrata.clock import BEGIN, END, Clock
from fedstrata.data.sampling import Sampler
from fedstrata.memory import Pool
from fedstrata.placement import placements
from fedstrata.runtime.layout import Flat, flat_union, push_union
from fedstrata.runtime.sight import ClientSight, server_sight
from fedstrata.transport.ledger import Exchange, exchanges
from fedstrata.vector import where

Execution = str | int  # "vmap", "map", or the number of clients in a chunk


class Setting(NamedTuple):
    """What a round needs beside its state."""

    algorithm: Algorithm
    problem: Any
    sampler: Sampler
    execution: Execution
    flat: Flat  # the data of all clients
    template: Any  # one client's start value of every field
    dtype: Any  # of the parameters


class Member(NamedTuple):
    """A client of the cohort: one row of each when stacked."""

    id: Array
    starts: Mapping[str, Array]  # by split: where its rows begin, and how many they are
    counts: Mapping[str, Array]
    key: PRNGKeyArray  # folded from (seed, round, client)
    lasting_key: PRNGKeyArray  # folded from (seed, client)


def members(flat: Flat, ids: Array, key: PRNGKeyArray, round: Array | int) -> Member:
    """The cohort with these ids, stacked; `key` is the run's key for samples."""
    start, count = ({s: getattr(f, what)[ids] for s, f in flat.items()} for what in ("start", "count"))
    now, always = jax.random.fold_in(key, round), jax.random.fold_in(key, 2**31 - 1)
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    return Member(ids, start, count, fold(now, ids), fold(always, ids))


def over_clients(function: Callable, stacked: Any, execution: Execution) -> Any:
    """The function on every client: at once, one after the other, or in chunks."""
    if execution == "vmap":
        return jax.vmap(function)(stacked)
    return jax.lax.map(function, stacked, batch_size=execution if isinstance(execution, int) else None)


def run_round(
    setting: Setting,
    shared: Any,
    rows: Mapping[str, Any],
    stacked: Member,
    cohort: Cohort,
    starts: Mapping[str, Any] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """One round: `shared` is the server's state, `rows` the Local fields of the cohort, stacked.

    `starts` holds per-client values of fields that are otherwise received (only in a first round that has them).
    """
    phases = setting.algorithm.phases(setting.problem)
    plan = exchanges(setting.algorithm, phases)
    copies, known = {**rows, **(starts or {})}, frozenset(starts or ())
    for number, phase in enumerate(phases):
        step = lambda shared, copies, repetition, known=known, number=number: _exchange(
            setting, plan[number], number, repetition, shared, copies, known, stacked, cohort, starts or {}
        )
        once = phase.repeat == 1 and phase.when is None
        if not once:
            # A loop needs the same copies before and after: what a client has not got yet starts as the server's.
            wide = {f: _broadcast(getattr(shared, f), cohort) for f in _copied(setting, copies)}
            copies = {**wide, **copies}
        if once:
            shared, copies = step(shared, copies, jnp.array(0, jnp.int32))
        else:
            (shared, copies), _ = jax.lax.scan(
                lambda c, r, phase=phase, step=step: (_guarded(phase, cohort, step, *c, r), None),
                (shared, copies),
                jnp.arange(phase.repeat, dtype=jnp.int32),
            )
        known = known | set(plan[number].receives) | set(plan[number].sends)
    return shared, {field: copies[field] for field in rows}


def _guarded(phase: Phase, cohort: Cohort, step: Callable, shared: Any, copies: Any, repetition: Array) -> Any:
    if phase.when is None:
        return step(shared, copies, repetition)
    go = phase.when(shared, cohort, repetition)
    return jax.lax.cond(go, lambda: step(shared, copies, repetition), lambda: (shared, copies))


def _exchange(
    setting: Setting,
    plan: Exchange,
    number: int,
    repetition: Array,
    shared: Any,
    copies: dict[str, Any],
    known: frozenset[str],
    stacked: Member,
    cohort: Cohort,
    starts: Mapping[str, Any],
) -> tuple[Any, dict[str, Any]]:
    places = placements(type(shared))
    kept = [f for f, p in places.items() if p.client_reads and p.merge != "union" and (p.down or not p.up)]
    own = [f for f in plan.receives if f in starts and number == 0]  # a first round starts from each client's own
    received = {f: flat_union(v) if isinstance(v, Pool) else v for f in plan.receives for v in [getattr(shared, f)]}
    sight = ClientSight(setting.algorithm, known=known | set(plan.receives))

    def client(args: tuple[Member, dict[str, Any]]) -> dict[str, Any]:
        member, copy = args
        begun = {**copy, **{f: v for f, v in received.items() if f not in own}}
        start = setting.template._replace(**begun)
        state = _local_work(setting, number, repetition, member, cohort.clock, start, sight)
        return {f: getattr(state, f) for f in {*plan.sends, *kept}}

    done = over_clients(client, (stacked, copies), setting.execution)
    merged = {f: merge(places[f].merge, getattr(shared, f), done[f], cohort) for f in plan.sends}
    before, after = shared, shared._replace(**merged)
    algorithm = at_time(setting.algorithm, cohort.clock, setting.dtype)
    phase = algorithm.phases(setting.problem)[number]
    if phase.server_step is not None:
        after = server_sight(algorithm, phase.server_step, setting.problem, before, after, cohort)
    return after, {f: done[f] for f in kept}


def _local_work(
    setting: Setting, number: int, repetition: Array, member: Member, now: Clock, start: Any, sight: ClientSight
) -> Any:
    problem, rule, steps = setting.problem, setting.sampler, setting.algorithm.local_steps
    phase = setting.algorithm.phases(problem)[number]
    shard = {s: f.view(member.starts[s], member.counts[s]) for s, f in setting.flat.items()}
    key = member.key
    if phase.fresh:
        key = jax.random.fold_in(jax.random.fold_in(key, number + 1), repetition)
    clock = lambda local_step: Clock.at(now.round, steps, local_step)
    draw = lambda local_step: problem.draws(shard, key, rule, clock(local_step), member.id, member.lasting_key)

    def call(name: str, local_step: Array | int, state: Any, draws: Any) -> Any:
        time = clock(jnp.maximum(local_step, 0))
        oracle = problem.oracle(
            shard, key, rule, clock=time, client=member.id, draws=draw(local_step) if draws is None else draws
        )
        function = getattr(at_time(setting.algorithm, time, setting.dtype).phases(problem)[number], name)
        return sight.call(function, oracle, start, state)

    def one_step(state: Any, at: tuple[Array, Any]) -> tuple[Any, None]:
        local_step, draws = at
        new = call("step", local_step, state, draws)
        if rule.may_idle:
            seen = [rule.seen(local_step, shard[split].count) for split in problem.streams.values()]
            new = where(jnp.sum(jnp.stack([s for s in seen if s is not None])) > 0, new, state)
        return new, None

    state = start._replace(**own_start(setting, start, member.id))
    if phase.begin is not None and not _is_default(phase.begin, "local_begin"):
        state = call("begin", BEGIN, state, None)
    count = jnp.arange(phase.steps, dtype=jnp.int32)
    ahead = jax.vmap(draw)(count) if rule.ahead else None
    if phase.steps == 1:
        state = one_step(state, jax.tree.map(lambda a: a[0], (count, ahead)))[0]
    else:
        state = jax.lax.scan(one_step, state, (count, ahead))[0]
    if phase.end is not None and not _is_default(phase.end, "local_end"):
        state = call("end", END, state, None)
    return state


def own_start(setting: Setting, start: Any, client: Array) -> dict[str, Any]:
    """What a client sends up only, and its own rows of a pool, begin as the template in every exchange."""
    out: dict[str, Any] = {}
    for field, place in placements(type(start)).items():
        value = getattr(setting.template, field)
        if isinstance(value, Pool):
            out[field] = Pool(
                value.rows, jnp.full_like(value.client, client), value.valid, value.capacity, value.history
            )
        elif place.up and not place.down:
            out[field] = value
    return out


def merge(how: str | None, old: Any, stacked: Any, cohort: Cohort) -> Any:
    if how == "union":
        return push_union(old, stacked, cohort.ids, cohort.present)
    return stacked if how == "rows" else jax.tree.map(lambda a: weighted_mean(a, cohort.weights), stacked)


def weighted_mean(stacked: Array, weights: Array) -> Array:
    """Σ_i w_i a_i over the first axis, in the dtype of a."""
    if not jnp.issubdtype(stacked.dtype, jnp.inexact):
        raise TypeError(f"a field of dtype {stacked.dtype} cannot be averaged; keep counts as floats, or use Gathered")
    return jnp.tensordot(weights.astype(stacked.dtype), stacked, axes=1)


def _copied(setting: Setting, copies: Mapping[str, Any]) -> list[str]:
    places = placements(type(setting.algorithm).State)
    return [f for f, p in places.items() if p.down and p.merge != "union" and f not in copies]


def _broadcast(value: Any, cohort: Cohort) -> Any:
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (cohort.ids.shape[0], *a.shape)), value)


def _is_default(method: Any, name: str) -> bool:
    return getattr(method, "__func__", None) is getattr(Algorithm, name)
