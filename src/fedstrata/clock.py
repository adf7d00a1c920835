"""Time and randomness: the clock that schedules read, and keys folded from (seed, round, client, step, stream)."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from fedstrata.random import fold_in

STREAMS = 64  # the most named samples one step may draw; the stream number is packed beside the step
BEGIN = -1  # the local step under which `local_begin` draws a sample, independent of those of the steps
END = -2  # and `local_end`


class Clock(NamedTuple):
    """Where a run stands, as traced values: a new round never recompiles.

    `step` counts local steps over all rounds (round × steps a round + local step), from 0.
    """

    round: Int[Array, ""]
    step: Int[Array, ""]
    local_step: Int[Array, ""]

    @classmethod
    def at(cls, round: Array | int, steps: int, local_step: Array | int = 0) -> "Clock":
        round, local_step = jnp.asarray(round, jnp.int32), jnp.asarray(local_step, jnp.int32)
        return cls(round, round * steps + local_step, local_step)


def domain(key: PRNGKeyArray, name: str) -> PRNGKeyArray:
    """An independent key for each use of a run's seed, so that a new use never shifts an old one."""
    return fold_in(key, ("parameters", "cohort", "sample", "start", "privacy").index(name))


def stream_key(key: PRNGKeyArray, local_step: Array | int, stream: int) -> PRNGKeyArray:
    return fold_in(key, jnp.asarray(local_step, jnp.int32) * STREAMS + stream)
