"""A client's half of a round: what it keeps, what it draws, and its local steps."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from fedstrata.algorithm import Algorithm, at_time, steps_of
from fedstrata.clock import BEGIN, END, Clock
from fedstrata.data.sampling import Index, Sampler
from fedstrata.data.shard import Sample, Shard
from fedstrata.memory import Pool
from fedstrata.placement import field_of, part, placements, select, with_parts
from fedstrata.random import fold_in
from fedstrata.runtime.crew import Execution
from fedstrata.runtime.layout import Flat
from fedstrata.runtime.sight import ClientSight
from fedstrata.transport.ledger import Exchange
from fedstrata.transport.privacy import Privacy
from fedstrata.vector import where

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
    privacy: Privacy | None = None


class Member(NamedTuple):
    """A client of the cohort."""

    id: Array
    round: Array | int
    starts: Mapping[str, Array]  # by split: where its rows begin, and how many they are
    counts: Mapping[str, Array]
    key: PRNGKeyArray  # folded from (seed, round, client)
    lasting_key: PRNGKeyArray  # folded from (seed, client)


def member_of(flat: Flat, id: Array, place: Array, key: PRNGKeyArray, round: Array | int) -> Member:
    """A client, which is the `place`-th of those whose data are here; `key` is the run's key for samples."""
    start, count = ({s: getattr(f, what)[place] for s, f in flat.items()} for what in ("start", "count"))
    return Member(id, round, start, count, fold_in(fold_in(key, round), id), fold_in(fold_in(key, 2**31 - 1), id))


def kept(state: type) -> tuple[str, ...]:
    """The fields of which a client has a copy until the round ends; those that are its own, for longer."""
    return select(state, lambda p: p.client_reads and p.merge != "union" and (p.down or not p.up))


def client_part(
    setting: Setting,
    plan: Exchange,
    number: int,
    known: frozenset[str],
    member: Member,
    copy: Mapping[str, Any],
    received: dict[str, Any],
    repetition: Array,
    size: int,
    reference: Any = None,
) -> dict[str, Any]:
    """What one client does in an exchange: the fields that it sends, and those it keeps.

    copy: the fields it has kept; known: those that it has received before in this round; size: of the cohort;
    reference: what its changes are clipped round, if they are. It goes on from what it sends.
    """
    start = with_parts(setting.template._replace(**copy), received)
    sight = ClientSight(setting.algorithm, known={*known, *map(field_of, plan.receives)})
    state = _local_work(setting, number, repetition, member, size, start, sight)
    if setting.privacy is not None:
        state = setting.privacy.clipped(state, reference, plan.sends)
    return {f: part(state, f) for f in {*plan.sends, *kept(type(state))}}


def _local_work(
    setting: Setting, number: int, repetition: Array, member: Member, size: int, start: Any, sight: ClientSight
) -> Any:
    problem, rule, steps = setting.problem, setting.sampler, steps_of(setting.algorithm)
    phase = setting.algorithm.phases(problem)[number]
    shard = {s: f.view(member.starts[s], member.counts[s]) for s, f in setting.flat.items()}
    key, lasting_key = member.key, member.lasting_key
    if phase.fresh:
        key, lasting_key = (fold_in(fold_in(k, number + 1), repetition) for k in (key, lasting_key))
    clock = lambda local_step: Clock.at(member.round, steps, local_step)
    draw = lambda local_step: problem.draws(shard, key, rule, clock(local_step), member.id, lasting_key, phase.streams)
    count = phase.first + jnp.arange(phase.steps, dtype=jnp.int32)
    with part_of_time("samples"):
        drawn = _drawn(problem, shard, jax.vmap(draw)(count), size) if rule.ahead else None

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
        state = jax.lax.scan(one_step, state, count, unroll=_unroll(state, phase.steps, size))[0]
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


def _is_default(method: Any, name: str) -> bool:
    return getattr(method, "__func__", None) is getattr(Algorithm, name)
