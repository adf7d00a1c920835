"""What a run is made of: what it looks at, what is fixed, and what it remembers."""

from typing import Any, NamedTuple

import equinox as eqx
from jaxtyping import Array

from fedstrata.data.sampling import Sampler
from fedstrata.problems.base import Rows
from fedstrata.runtime.crew import Execution
from fedstrata.runtime.layout import Flat
from fedstrata.runtime.mesh import Spread
from fedstrata.transport.cohort import Selection
from fedstrata.transport.privacy import Privacy
from fedstrata.vector import Vector

RUNNING, DIVERGED, EXPLODED, STOPPED = range(4)


class World(eqx.Module):
    """Everything a run looks at and never changes."""

    problem: Any
    monitor: Any  # another problem to evaluate on, or None
    sampler: Sampler
    selection: Selection
    flat: Flat
    full: dict[str, Rows]  # the splits to evaluate on; "train" is the objective
    counts: Array | None  # (N,) rows by which clients weigh; None: all alike
    clients: int = eqx.field(static=True)
    spread: Spread | None = eqx.field(static=True, default=None)  # how the clients lie on a device mesh
    host: Any = eqx.field(static=True, default=None)  # what stays on the host; `flat` then has one cohort's data
    privacy: Privacy | None = eqx.field(static=True, default=None)
    total: float | None = None  # Σ counts

    @property
    def streamed(self) -> bool:
        return self.host is not None


class Plan(NamedTuple):
    """The static part of a run: what another value of would make another program."""

    records: int  # evaluations that one segment may hold
    execution: Execution = "vmap"
    stationarity: bool = True
    per_client: bool = False
    select: str | None = None  # the column by which the best solution is kept
    sign: int = -1  # +1: the larger the better
    patience: int | None = None  # evaluations without improvement before a run stops
    explosion: float = 1e6  # an objective that grew by this factor counts as diverged


class Span(NamedTuple):
    """Which rounds a segment runs, and when it evaluates: all traced, so none of it recompiles."""

    first: Array
    last: Array
    every: Array
    rounds: Array  # of the whole run: its last round is always evaluated

    def due(self, done: Array) -> Array:
        return (done % self.every == 0) | (done == self.rounds)


class Carry(NamedTuple):
    """All that a run remembers between rounds: a checkpoint of it is complete by construction."""

    shared: Any
    local: dict[str, Any]
    status: Array
    bad_round: Array  # the round in which it diverged, or −1
    bad_fields: Array  # which fields then were not finite, in the order of the state
    first: Array  # the objective at the start
    best: Array  # the best value of `select` so far
    best_x: Vector | None
    best_round: Array
    waited: Array  # evaluations since
