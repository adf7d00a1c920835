"""The static settings of a run's program, its segments, and the state that it carries from round to round."""

from typing import Any, NamedTuple

from jaxtyping import Array

from fedstrata.core.vector import Vector

RUNNING, DIVERGED, EXPLODED, STOPPED = range(4)


class ProgramOptions(NamedTuple):
    """Static settings; changing one recompiles."""

    records: int  # evaluations that one segment may hold
    stationarity: bool = True
    per_client: bool = False
    select: str | None = None  # the column by which the best solution is kept
    sign: int = -1  # +1: the larger the better
    patience: int | None = None  # evaluations without improvement before a run stops
    explosion: float = 1e6  # an objective that grew by this factor counts as diverged


class Segment(NamedTuple):
    """The rounds of one call of the program, and its evaluations. All values are traced, so none recompiles."""

    first: Array
    last: Array
    every: Array
    rounds: Array  # of the whole run: its last round is always evaluated

    def due(self, done: Array) -> Array:
        """Whether there is an evaluation after this many rounds."""
        return (done % self.every == 0) | (done == self.rounds)


class Carry(NamedTuple):
    """Everything that a run keeps between rounds, and so everything that a checkpoint needs."""

    shared: Any  # the server's state
    local: dict[str, Any]  # the clients' Local fields
    status: Array
    bad_round: Array  # the round in which it diverged, or −1
    bad_fields: Array  # which fields then were not finite, in the order of the state
    first: Array  # the objective at the start
    best: Array  # the best value of `select` so far
    best_x: Vector | None
    best_round: Array
    waited: Array  # evaluations since
