"""How many examples the clients of a round draw, counted in 32 bits whatever their number."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedstrata.algorithm import Algorithm, Cohort, Phase
from fedstrata.runtime.world import World


def examples_seen(world: World, algorithm: Algorithm, cohort: Cohort) -> Array:
    """Examples that the cohort's local steps drew in this round, over all streams, as a multiple of `counting_unit`."""
    present, looks = cohort.present, _looks(world, algorithm)
    counts = {n: split.count if world.streamed else split.count[cohort.ids] for n, split in world.flat.items()}
    total = jnp.zeros(present.shape, jnp.int32)
    for split, steps, times, alike in looks:
        seen = world.sampler.seen(jnp.asarray(steps, jnp.int32)[:, None], counts[split][None, :])
        rows = 1 if alike or seen is None else jnp.sum(seen, axis=0, dtype=jnp.int32)
        total += jnp.where(counts[split] > 0, times // _unit(looks) * rows, 0)
    return jnp.sum(jnp.where(present, total, 0), dtype=jnp.int32)


def counting_unit(world: World, algorithm: Algorithm) -> int:
    """Programs count examples as multiples of this, because the examples of a long round pass 32 bits."""
    return _unit(_looks(world, algorithm))


def check_counted(world: World, algorithm: Algorithm, sizes: Mapping[str, int]) -> None:
    """Refuse a round of more examples than can be counted; sizes: the rows of every split."""
    looks, cohort = _looks(world, algorithm), world.selection.size(world.clients)
    epochs, most = getattr(world.sampler, "per_round", None) or 1, 0
    for split, steps, times, alike in looks:
        drawn = world.sampler.rows(world.flat[split].capacity) * len(steps) * cohort
        most += drawn if alike else min(drawn, times * epochs * sizes[split])
    if most // _unit(looks) >= 2**31:
        raise ValueError(
            f"a round may draw {most:,} examples, more than are counted (2**31 times {_unit(looks)}); take fewer local "
            "steps or epochs a round, or a smaller cohort"
        )


def _unit(looks: Sequence[tuple[str, list[int], int, bool]]) -> int:
    return math.gcd(*(times for _, _, times, _ in looks)) or 1


def _looks(world: World, algorithm: Algorithm) -> list[tuple[str, list[int], int, bool]]:
    """What a client draws in a round, by stream: split, local steps, a factor, and whether that factor is all of it.

    A client draws the factor, or the factor × what `Sampler.seen` says of its rows.
    """
    looks: list[tuple[str, list[int], int, bool]] = []
    shape = lambda rows: jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    for stream, steps in _draws(world.problem, algorithm.phases(world.problem)):
        split, seen = world.problem.streams[stream], jax.eval_shape(world.sampler.seen, shape(len(steps)), shape(1))
        if seen is None:
            looks.append((split, steps, world.sampler.rows(world.flat[split].capacity) * len(steps), True))
        else:  # the same in every step, unless it has an entry for each
            looks.append((split, steps, len(steps) if seen.shape[0] == 1 else 1, False))
    return looks


def _draws(problem: Any, phases: list[Phase]) -> list[tuple[str, list[int]]]:
    """The local steps at which each stream is drawn from. Phases share the samples of a step, unless they are fresh."""
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
