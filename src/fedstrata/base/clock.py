"""The clock that schedules read, and random keys folded from (seed, round, client, step, stream)."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from fedstrata.base.random import fold_in

STREAMS = 64  # the most named samples one step may draw; the stream number is packed beside the step
BEGIN = -1  # the local step under which `local_begin` draws a sample, independent of those of the steps
END = -2  # and `local_end`


class Clock(NamedTuple):
    """The current round and step of a run, as traced values: a new round never recompiles.

    Args:
        round: the number of the round, from 0.
        step: local steps over all rounds, from 0: round × steps per round + local step.
        local_step: the number of the local step within the round, from 0.
    """

    round: Int[Array, ""]
    step: Int[Array, ""]
    local_step: Int[Array, ""]

    @classmethod
    def at(cls, round: Array | int, steps: int, local_step: Array | int = 0) -> "Clock":
        """The clock at a local step of a round of `steps` local steps."""
        round, local_step = jnp.asarray(round, jnp.int32), jnp.asarray(local_step, jnp.int32)
        return cls(round, round * steps + local_step, local_step)


def domain(key: PRNGKeyArray, name: str) -> PRNGKeyArray:
    """An independent key for each use of a run's seed, so that a new use never shifts an old one."""
    return fold_in(key, ("parameters", "cohort", "sample", "start", "privacy").index(name))


def stream_key(key: PRNGKeyArray, local_step: Array | int, stream: int) -> PRNGKeyArray:
    """The key of one named sample of a local step."""
    return fold_in(key, jnp.asarray(local_step, jnp.int32) * STREAMS + stream)
