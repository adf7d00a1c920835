"""The round: the only loop over clients. Every runtime runs it, and no algorithm does."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from fedstrata.algorithm import Algorithm, Cohort, Phase, at_time, steps_of
from fedstrata.clock import BEGIN, END, Clock
from fedstrata.data.sampling import Index, Sampler
from fedstrata.data.shard import Sample, Shard
from fedstrata.memory import Pool
from fedstrata.placement import field_of, part, placements, with_parts
from fedstrata.random import fold_in
from fedstrata.runtime.crew import Crew, Execution, over_clients
from fedstrata.runtime.layout import Flat, flat_union, push_union
from fedstrata.runtime.sight import ClientSight, server_sight, show_server
from fedstrata.transport.ledger import Exchange, exchanges
from fedstrata.vector import where, widest

part_of_time = lambda name: jax.named_scope(f"fs.{name}")  # what `fs.profile` finds again in a trace
AT_ONCE = 2**15  # bytes of examples (a core's nearest cache) up to which those of all steps are looked up at once


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
    """A client of the cohort."""

    id: Array
    starts: Mapping[str, Array]  # by split: where its rows begin, and how many they are
    counts: Mapping[str, Array]
    key: PRNGKeyArray  # folded from (seed, round, client)
    lasting_key: PRNGKeyArray  # folded from (seed, client)


def member_of(flat: Flat, id: Array, place: Array, key: PRNGKeyArray, round: Array | int) -> Member:
    """A client, which is the `place`-th of those whose data are here; `key` is the run's key for samples."""
    start, count = ({s: getattr(f, what)[place] for s, f in flat.items()} for what in ("start", "count"))
    return Member(id, start, count, fold_in(fold_in(key, round), id), fold_in(fold_in(key, 2**31 - 1), id))


class Round(NamedTuple):
    """One round as it stands before its first exchange."""

    setting: Setting
    cohort: Cohort
    crew: Crew
    key: PRNGKeyArray  # the run's key for samples
    starts: Mapping[str, Any]  # per-client values of fields that are else received: only in a first round that has them


def run_round(this: Round, shared: Any, rows: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """One round: `shared` is the server's state, `rows` the Local fields of the cohort, stacked."""
    phases = this.setting.algorithm.phases(this.setting.problem)
    plans = exchanges(this.setting.algorithm, phases)
    copies, known = {**rows, **this.starts}, frozenset(this.starts)
    for number, (phase, plan) in enumerate(zip(phases, plans, strict=True)):
        step = partial(_exchange, this, plan, number, known)
        if phase.repeat == 1 and phase.when is None:
            shared, copies = step(shared, copies, jnp.array(0, jnp.int32))
        else:
            shared, copies = _repeat(this, phase, step, shared, copies)
        known = known | {field_of(path) for path in (*plan.receives, *plan.sends)}
    return shared, {field: copies[field] for field in rows}


def _repeat(this: Round, phase: Phase, step: Callable, shared: Any, copies: dict[str, Any]) -> Any:
    """An exchange several times over, or under a condition, as one loop of the program."""
    # A loop needs the same copies before and after: what a client has not got yet starts as the server's.
    missing = [f for f, p in placements(type(shared)).items() if p.down and p.merge != "union" and f not in copies]
    wide = lambda a: jnp.broadcast_to(a, (this.crew.ids.shape[0], *a.shape))
    copies = {**{f: jax.tree.map(wide, getattr(shared, f)) for f in missing}, **copies}

    def once(state: tuple, repetition: Array) -> tuple:
        if phase.when is None:
            return step(*state, repetition), None
        go = phase.when(state[0], this.cohort, repetition)
        return jax.lax.cond(go, lambda: step(*state, repetition), lambda: state), None

    return jax.lax.scan(once, (shared, copies), jnp.arange(phase.repeat, dtype=jnp.int32))[0]


def _exchange(
    this: Round, plan: Exchange, number: int, known: frozenset[str], shared: Any, copies: Any, repetition: Array
) -> tuple[Any, dict[str, Any]]:
    """Clients receive, work and send; the server merges and steps. Returns its state and the clients' copies."""
    setting, cohort, crew, places = this.setting, this.cohort, this.crew, placements(type(shared))
    kept = [f for f, p in places.items() if p.client_reads and p.merge != "union" and (p.down or not p.up)]
    own = [f for f in plan.receives if field_of(f) in this.starts and number == 0]
    received = {
        f: flat_union(v) if isinstance(v, Pool) else v for f in plan.receives if f not in own for v in [part(shared, f)]
    }

    def client(flat: Flat, given: Any, own: tuple[Array, Array, dict[str, Any]]) -> dict[str, Any]:
        (setting, cohort, received, repetition, key), (id, place, copy) = given, own
        setting = setting._replace(flat=flat)
        member = member_of(flat, id, place, key, cohort.clock.round)
        start = with_parts(setting.template._replace(**copy), received)
        sight = ClientSight(setting.algorithm, known={*known, *map(field_of, plan.receives)})
        state = _local_work(setting, number, repetition, member, cohort, start, sight)
        return {f: part(state, f) for f in {*plan.sends, *kept}}

    given = (setting._replace(flat={}), cohort, received, repetition, this.key)
    with part_of_time("local"):
        done = over_clients(client, setting.flat, given, (crew.ids, crew.places, copies), crew, setting.execution)
    with part_of_time("merge"):
        merged = {f: merge(places[field_of(f)].merge, part(shared, f), done[f], cohort, crew) for f in plan.sends}
    after = with_parts(shared, merged)
    algorithm = at_time(setting.algorithm, cohort.clock, setting.dtype)
    server_step = algorithm.phases(setting.problem)[number].server_step
    if server_step is not None:
        before, where = show_server(shared), f"{type(algorithm).__name__}.{getattr(server_step, '__name__', 'server')}"
        with part_of_time("server"):
            after = server_sight(where, lambda merged: server_step(setting.problem, before, merged, cohort), after)
    return after, {f: done[f] for f in kept}


def _local_work(
    setting: Setting, number: int, repetition: Array, member: Member, cohort: Cohort, start: Any, sight: ClientSight
) -> Any:
    problem, rule, steps = setting.problem, setting.sampler, steps_of(setting.algorithm)
    phase = setting.algorithm.phases(problem)[number]
    shard = {s: f.view(member.starts[s], member.counts[s]) for s, f in setting.flat.items()}
    key = member.key
    if phase.fresh:
        key = fold_in(fold_in(key, number + 1), repetition)
    clock = lambda local_step: Clock.at(cohort.clock.round, steps, local_step)
    draw = lambda local_step: problem.draws(
        shard, key, rule, clock(local_step), member.id, member.lasting_key, phase.streams
    )
    count = phase.first + jnp.arange(phase.steps, dtype=jnp.int32)
    with part_of_time("samples"):
        drawn = _drawn(problem, shard, jax.vmap(draw)(count), cohort.ids.shape[0]) if rule.ahead else None

    def call(name: str, local_step: Array | int, state: Any, samples: Any = None) -> Any:
        ends = {BEGIN: phase.first, END: phase.first + phase.steps - 1}
        time = clock(ends[local_step] if isinstance(local_step, int) else local_step)
        with part_of_time("samples"):
            draws = draw(local_step) if samples is None else None
            oracle = problem.oracle(shard, key, rule, clock=time, client=member.id, draws=draws, samples=samples)
        function = getattr(at_time(setting.algorithm, time, setting.dtype).phases(problem)[number], name)
        return sight.call(function, oracle, start, state)

    def one_step(state: Any, local_step: Array) -> tuple[Any, None]:
        with part_of_time("samples"):
            samples = drawn(local_step - phase.first) if drawn else None
        new = call("step", local_step, state, samples)
        if rule.may_idle:
            seen = [rule.seen(local_step, shard[split].count) for split in problem.streams.values()]
            new = where(jnp.sum(jnp.stack([s for s in seen if s is not None])) > 0, new, state)
        return new, None

    state = start._replace(**own_start(setting, start, member.id))
    if phase.begin is not None and not _is_default(phase.begin, "local_begin"):
        state = call("begin", BEGIN, state)
    if phase.steps == 1:
        state = one_step(state, count[0])[0]
    else:
        state = jax.lax.scan(one_step, state, count, unroll=_unroll(state, phase.steps, cohort.ids.shape[0]))[0]
    if phase.end is not None and not _is_default(phase.end, "local_end"):
        state = call("end", END, state)
    return state


def _drawn(
    problem: Any, shard: Shard, draws: Mapping[str, Index], clients: int
) -> Callable[[Array], dict[str, Sample]]:
    """The samples of step i, given what was drawn for all steps.

    A few small examples are looked up for all steps and streams together: XLA takes every look-up in a large array for
    a large one and shares it between threads, at the price of several small kernels.
    """
    alike: dict[tuple, list[str]] = {}
    for stream, (index, _) in draws.items():
        alike.setdefault((problem.streams[stream], index.shape), []).append(stream)
    one = lambda split: sum(a.nbytes // max(len(a), 1) for a in jax.tree.leaves(shard[split].examples))
    size = clients * sum(index.size * one(problem.streams[stream]) for stream, (index, _) in draws.items())
    together = lambda names: jnp.stack([draws[s][0] for s in names])
    rows = {of: shard[of[0]].take(together(names)) for of, names in alike.items()} if size <= AT_ONCE else None

    def at(step: Array) -> dict[str, Sample]:
        out: dict[str, Sample] = {}
        for of, names in alike.items():
            for number, stream in enumerate(names):
                index, mask = jax.tree.map(lambda a: a[step], draws[stream])
                pick = lambda a, n=number: a[n, step]
                examples = shard[of[0]].take(index) if rows is None else jax.tree.map(pick, rows[of])
                out[stream] = Sample(examples, mask, index)
        return out

    return at


def _unroll(state: Any, steps: int, clients: int) -> int:
    """Few tiny steps are written out: a loop of tiny kernels costs more than what it does.

    Not so larger ones: XLA fuses what is written out into kernels that it deems worth two threads, and waking a thread
    costs more than such a kernel.
    """
    size = clients * sum(int(a.size) for a in jax.tree.leaves(state))
    return steps if steps <= 8 and size <= 1024 else 1


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


def merge(how: str | None, old: Any, stacked: Any, cohort: Cohort, crew: Crew) -> Any:
    if how == "union":
        return push_union(old, crew.in_order(stacked), cohort.ids, cohort.present)
    return crew.in_order(stacked) if how == "rows" else jax.tree.map(lambda a: weighted_mean(a, crew), stacked)


def weighted_mean(stacked: Array, crew: Crew) -> Array:
    """Σ_i w_i a_i over the clients that are present, in the dtype of a."""
    if not jnp.issubdtype(stacked.dtype, jnp.inexact):
        raise TypeError(f"a field of dtype {stacked.dtype} cannot be averaged; keep counts as floats, or use Gathered")
    # What an empty slot computed must not matter, even where it is not finite.
    present = crew.present.reshape((-1,) + (1,) * (stacked.ndim - 1))
    wide = widest(stacked.dtype, crew.weights.dtype)  # narrow floats are summed in float32
    # GPUs round the factors of a float32 product to ten bits unless told otherwise: the weights would no longer sum to
    # one, and methods that sum such means up (control variates) would drift.
    weights, values = crew.weights.astype(wide), jnp.where(present, stacked, 0).astype(wide)
    mean = jnp.tensordot(weights, values, axes=1, precision="highest")
    return mean.astype(stacked.dtype)


def _is_default(method: Any, name: str) -> bool:
    return getattr(method, "__func__", None) is getattr(Algorithm, name)
