"""TrackedX: FedX whose clients add what the mean direction differs by from their own."""

from typing import Any, NamedTuple

from fedstrata.algorithm import Cohort
from fedstrata.algorithms.pairwise.fedx2 import FedX2
from fedstrata.memory import PerExample, Pool
from fedstrata.placement import Averaged, Broadcast, Local, Pooled, Reported
from fedstrata.problems.pairwise_oracle import PairwiseOracle
from fedstrata.vector import Vector


class TrackedX(FedX2):
    r"""The directions of FedX2 (with f(u) = u and β = 1 those of FedX1), corrected by their mean over clients.

    $$ G_i \gets (1-\beta) \, G_i + \beta (G_1 + G_2), \qquad x_i \gets x_i - \eta (G_i + c_i) \quad (K \text{ times}),
       \qquad x \gets \frac{1}{N} \sum_i x_i, \qquad c_i = \bar G - G_i $$

    with $\bar G$ the mean over all clients of their last $G_i$, and $G_1, G_2, u$ and the pools as in FedX2.

    step_size: η. local_steps: K. All others as in `FedX2`; a client's own G is never overwritten by the mean.

    Converges to a stationary point with constant steps, however different the clients are (with all data exactly, as
    far as it was tried; no proof is printed): at a fixed point nothing moves, so that old scores are fresh and clients
    agree. This method is ours: no paper has it. It needs smaller steps than FedX where $\eta K$ is large for the loss.
    Sends what FedX2 sends.

    >>> TrackedX(step_size=0.1, local_steps=5, momentum=1.0).u_start
    'pool'

    Reference: guo2022, whose directions it corrects; the method is this library's.
    """

    class State(NamedTuple):  # pyright: ignore[reportIncompatibleVariableOverride]
        x: Averaged[Vector]
        mean: Broadcast[Vector]  # of G over all clients
        change: Reported[Vector]  # of the client's own G, since it last said
        said: Local[Vector]  # its G then
        g: Local[Vector]
        first: Pooled[Pool]
        second: Pooled[Pool]
        u: Local[PerExample]

    def init_server(self, problem: Any, x0: Vector) -> State:  # pyright: ignore[reportIncompatibleMethodOverride]
        zero = x0.zeros()
        return self.State(mean=zero, change=zero, said=zero, g=zero, **self.fields(problem, x0))

    def local_step(self, oracle: PairwiseOracle, start: State, state: State) -> State:  # pyright: ignore[reportIncompatibleMethodOverride]
        new, state = self.estimate(oracle, start, state)
        g = self.blended(oracle, state.g, new)
        return state._replace(x=state.x - self.step_size * (g + start.mean - start.said), g=g)

    def local_end(self, oracle: PairwiseOracle, start: State, state: State) -> State:
        return state._replace(change=state.g - start.said, said=state.g)

    def server_step(self, problem: Any, start: State, merged: State, cohort: Cohort) -> State:
        return merged._replace(mean=start.mean + cohort.share * merged.change)
