"""The number of examples that the clients of a round draw, counted in 32 bits."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedstrata.core.algorithm import Cohort, Phase
from fedstrata.engine.context import RoundContext
from fedstrata.problems.base import Problem


class Look(NamedTuple):
    """Examples that a client draws from one stream in a round: `times`, or `times` × `Sampler.seen` of its rows."""

    split: str
    steps: list[int]
    times: int
    alike: bool  # the same for all clients: `times`


def examples_seen(context: RoundContext, cohort: Cohort) -> Array:
    """Examples that the cohort's local steps drew in this round, over all streams, as a multiple of `counting_unit`."""
    present, looks = cohort.present, _looks(context)
    own = context.in_cohort_order
    counts = {n: split.count if own else split.count[cohort.ids] for n, split in context.data.items()}
    total = jnp.zeros(present.shape, jnp.int32)
    for split, steps, times, alike in looks:
        seen = context.sampler.seen(jnp.asarray(steps, jnp.int32)[:, None], counts[split][None, :])
        rows = 1 if alike or seen is None else jnp.sum(seen, axis=0, dtype=jnp.int32)
        total += jnp.where(counts[split] > 0, times // _unit(looks) * rows, 0)
    return jnp.sum(jnp.where(present, total, 0), dtype=jnp.int32)


def counting_unit(context: RoundContext) -> int:
    """Programs count examples in multiples of this unit, because a long round has more than 32 bits hold."""
    return _unit(_looks(context))


def check_counted(context: RoundContext, sizes: Mapping[str, int]) -> None:
    """Refuse a round with more examples than can be counted; sizes: the rows of every split."""
    looks, epochs, most = _looks(context), getattr(context.sampler, "per_round", None) or 1, 0
    for split, steps, times, alike in looks:
        drawn = context.sampler.rows(context.data[split].capacity) * len(steps) * context.cohort_size
        most += drawn if alike else min(drawn, times * epochs * sizes[split])
    if most // _unit(looks) >= 2**31:
        raise ValueError(
            f"a round may draw {most:,} examples, more than are counted (2**31 times {_unit(looks)}); take fewer local "
            "steps or epochs per round, or a smaller cohort"
        )


def rows_a_round(context: RoundContext) -> int:
    """The most examples that the cohort of one run draws in a round."""
    steps = sum(p.steps * p.repeat for p in context.algorithm.phases(context.problem))
    rows = sum(context.sampler.rows(context.data[s].capacity) for s in context.problem.streams.values())
    return rows * steps * context.cohort_size


def _unit(looks: Sequence[Look]) -> int:
    return math.gcd(*(look.times for look in looks)) or 1


def _looks(context: RoundContext) -> list[Look]:
    """Examples that a client draws in a round, by stream."""
    looks: list[Look] = []
    shape = lambda rows: jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    for stream, steps in _draws(context.problem, context.algorithm.phases(context.problem)):
        split = context.problem.streams[stream]
        seen = jax.eval_shape(context.sampler.seen, shape(len(steps)), shape(1))
        if seen is None:
            rows = context.sampler.rows(context.data[split].capacity)
            looks.append(Look(split, steps, rows * len(steps), True))
        else:  # the same in every step, unless it has an entry for each
            looks.append(Look(split, steps, len(steps) if seen.shape[0] == 1 else 1, False))
    return looks


def _draws(problem: Problem, phases: list[Phase]) -> list[tuple[str, list[int]]]:
    """The local steps that draw from each stream. Phases share the samples of a step, unless they are fresh."""
    shared: dict[tuple[str, int], set[int]] = {}
    fresh: list[tuple[str, list[int]]] = []
    for phase in phases:
        steps = range(phase.first, phase.first + phase.steps)
        named = tuple(problem.streams if phase.streams is None else phase.streams)
        for at, stream in enumerate(named):
            if phase.fresh:
                fresh += [(stream, list(steps))] * phase.repeat
            else:
                shared.setdefault((stream, named[:at].count(stream)), set()).update(steps)
    return [*((stream, sorted(steps)) for (stream, _), steps in shared.items()), *fresh]
