"""A client's half of an exchange: its copies, its samples, its local steps, and the fields that it sends."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from fedstrata.base.clock import BEGIN, END, Clock
from fedstrata.base.random import fold_in
from fedstrata.core.algorithm import Algorithm, Phase, steps_of
from fedstrata.core.grid import Noise
from fedstrata.core.hyperparameters import at_time
from fedstrata.core.memory import Pool
from fedstrata.core.placement import PlacedState, part, placements, select, with_parts
from fedstrata.core.vector import where
from fedstrata.data.sampling import Index
from fedstrata.data.shard import Sample, Shard
from fedstrata.engine.context import RoundContext, profiled
from fedstrata.engine.exchange import Exchange
from fedstrata.engine.layout import Flat
from fedstrata.engine.visibility import ClientView
from fedstrata.problems.base import Oracle, Problem

Samples = Mapping[str, Sample]  # by stream
AT_ONCE = 2**15  # bytes (a core's L1 cache): up to this size the examples of all steps are looked up at once


class Client(NamedTuple):
    """One client of a cohort."""

    id: Array
    round: Array | int
    starts: Mapping[str, Array]  # by split: the first of its rows, and their number
    counts: Mapping[str, Array]
    key: PRNGKeyArray  # folded from (seed, round, client)
    lasting_key: PRNGKeyArray  # folded from (seed, client)

    @classmethod
    def of(cls, data: Flat, id: Array, place: Array, key: PRNGKeyArray, round: Array | int) -> "Client":
        """The client at position `place` of the context's data; `key` is the run's key for samples."""
        start, count = ({s: getattr(f, what)[place] for s, f in data.items()} for what in ("start", "count"))
        return cls(id, round, start, count, fold_in(fold_in(key, round), id), fold_in(fold_in(key, 2**31 - 1), id))

    def shard(self, data: Flat) -> Shard:
        """Its rows of every split."""
        return {s: f.view(self.starts[s], self.counts[s]) for s, f in data.items()}


def kept_fields(state: type) -> tuple[str, ...]:
    """The fields of which a client has a copy during the round. `Local` ones last longer."""
    return select(state, lambda p: p.client_reads and p.merge != "union" and (p.down or not p.up))


def run_client(
    context: RoundContext,
    exchange: Exchange,
    client: Client,
    *,
    copies: Mapping[str, Any],
    received: dict[str, Any],
    received_fields: frozenset[str],
    repetition: Array,
    reference: PlacedState | None = None,
    noise: Noise | None = None,
) -> dict[str, Any]:
    """One client's work in an exchange. Returns the fields that it sends and those that it keeps.

    Args:
        context: the context, with the data of this client among others.
        exchange: the fields that are received and sent.
        client: the client.
        copies: its copies of fields from earlier exchanges.
        received: the fields that it receives now.
        received_fields: names of the fields that it received earlier in this round.
        repetition: the number of this repetition of the exchange.
        reference: in a private run, the values around which its changes are clipped. It continues from what it sent.
        noise: of this client, if it adds noise itself.
    """
    start = with_parts(context.template._replace(**copies), received)
    view = ClientView(context.algorithm, {*received_fields, *Exchange(0, exchange.receives, ()).fields})
    state = _local_work(context, exchange.number, repetition, client, start, view)
    if context.privacy is not None and reference is not None:
        state = context.privacy.sent(state, reference, context.grid(exchange.sends), exchange.sends, noise)
    return {f: part(state, f) for f in {*exchange.sends, *kept_fields(type(state))}}


def _local_work(
    context: RoundContext, number: int, repetition: Array, client: Client, start: PlacedState, view: ClientView
) -> PlacedState:
    problem, rule, steps = context.problem, context.sampler, steps_of(context.algorithm)
    phase = context.algorithm.phases(problem)[number]
    shard, key, lasting_key = client.shard(context.data), client.key, client.lasting_key
    if phase.fresh:
        key, lasting_key = (fold_in(fold_in(k, number + 1), repetition) for k in (key, lasting_key))
    clock = lambda local_step: Clock.at(client.round, steps, local_step)
    draw = lambda local_step: problem.draws(shard, key, rule, clock(local_step), client.id, lasting_key, phase.streams)
    count = phase.first + jnp.arange(phase.steps, dtype=jnp.int32)
    with profiled("samples"):
        drawn = _drawn(problem, shard, jax.vmap(draw)(count), context.cohort_size) if rule.ahead else None

    def call(
        name: str, local_step: Array | int, state: PlacedState, samples: Mapping[str, Sample] | None = None
    ) -> PlacedState:
        ends = {BEGIN: phase.first, END: phase.first + phase.steps - 1}
        time = clock(ends[local_step] if isinstance(local_step, int) else local_step)
        with profiled("samples"):
            draws = draw(local_step) if samples is None else None
            oracle = problem.oracle(shard, key, rule, clock=time, client=client.id, draws=draws, samples=samples)
        return view.call(_function(context, phase, number, name, time), oracle, start, state)

    def one_step(state: PlacedState, local_step: Array) -> tuple[PlacedState, None]:
        with profiled("samples"):
            samples = drawn(local_step - phase.first) if drawn else None
        new = call("step", local_step, state, samples)
        if rule.may_idle:
            seen = [rule.seen(local_step, shard[split].count) for split in problem.streams.values()]
            new = where(jnp.sum(jnp.stack([s for s in seen if s is not None])) > 0, new, state)
        return new, None

    state = start._replace(**own_start(context, start, client.id))
    if phase.begin is not None and not _is_default(phase.begin, "local_begin"):
        state = call("begin", BEGIN, state)
    if phase.steps == 1:
        state = one_step(state, count[0])[0]
    else:
        unroll = _unroll(state, phase.steps, context.cohort_size)
        state = jax.lax.scan(one_step, state, count, unroll=unroll)[0]
    if phase.end is not None and not _is_default(phase.end, "local_end"):
        state = call("end", END, state)
    return state


def _function(context: RoundContext, phase: Phase, number: int, name: str, time: Clock) -> Callable[..., Any]:
    """A function of a phase, bound to the algorithm with its schedules evaluated at this clock."""
    now = at_time(context.algorithm, time, context.dtype)
    return getattr(phase if now is context.algorithm else now.phases(context.problem)[number], name)


def _drawn(
    problem: Problem, shard: Shard, draws: Mapping[str, Index], clients: int
) -> Callable[[Array], dict[str, Sample]]:
    """The samples of step i, from those drawn for all steps.

    A few small examples are looked up for all steps and streams together. XLA treats every look-up in a large array as
    a large one and splits it between threads, which costs as much as several small kernels.
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


def _unroll(state: PlacedState, steps: int, clients: int) -> int:
    """Unroll a few tiny steps: a loop over tiny kernels costs more than the kernels.

    Larger steps are not unrolled: XLA fuses unrolled steps into kernels for two threads, and waking a thread costs more
    than such a kernel.
    """
    size = clients * sum(int(a.size) for a in jax.tree.leaves(state))
    return steps if steps <= 8 and size <= 1024 else 1


def own_start(context: RoundContext, start: PlacedState, client: Array) -> dict[str, Any]:
    """Fields that only go up, and a client's own rows of a pool, start from the template in every exchange."""
    out: dict[str, Any] = {}
    for field, place in placements(type(start)).items():
        value = getattr(context.template, field)
        if isinstance(value, Pool):
            out[field] = Pool(
                value.rows, jnp.full_like(value.client, client), value.valid, value.capacity, value.history
            )
        elif place.up and not place.down:
            out[field] = value
    return out


def first_oracle(context: RoundContext, client: Client) -> tuple[Oracle, Clock]:
    """The oracle of `init_client`, before round 0."""
    algorithm, problem = context.algorithm, context.problem
    shard, clock = client.shard(context.data), Clock.at(0, steps_of(algorithm))
    looked_at = [p.streams for p in algorithm.phases(problem)]
    streams = None if None in looked_at else {s for names in looked_at for s in names or ()}
    draws = problem.draws(shard, client.key, context.sampler, clock, client.id, client.lasting_key, streams)
    return problem.oracle(shard, client.key, context.sampler, clock=clock, client=client.id, draws=draws), clock


def _is_default(method: Callable[..., Any], name: str) -> bool:
    return getattr(method, "__func__", None) is getattr(Algorithm, name)
