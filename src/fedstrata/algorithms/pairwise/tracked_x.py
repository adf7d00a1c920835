"""TrackedX: FedX2 whose clients add the difference between the mean direction and theirs."""

from typing import NamedTuple

from fedstrata.algorithms.pairwise.fedx2 import FedX2, RememberingMethod
from fedstrata.core.algorithm import Cohort
from fedstrata.core.memory import PerExample, Pool
from fedstrata.core.placement import Averaged, Broadcast, Local, Pooled, Reported
from fedstrata.core.vector import Vector
from fedstrata.problems.pairwise.oracle import PairwiseOracle
from fedstrata.problems.pairwise.problem import Pairwise


class TrackedX(RememberingMethod):
    r"""The directions of FedX2 (with f(u) = u and β = 1 those of FedX1), corrected by their mean over clients.

    $$ G_i \gets (1-\beta) \, G_i + \beta (G_1 + G_2), \qquad x_i \gets x_i - \eta (G_i + c_i) \quad (K \text{ times}),
       \qquad x \gets \frac{1}{N} \sum_i x_i, \qquad c_i = \bar G - G_i $$

    with $\bar G$ the mean over all clients of their last $G_i$, and $G_1, G_2, u$ and the pools as in FedX2. The mean
    never overwrites a client's $G_i$. It sends as many numbers as FedX2. This method is ours; no paper publishes it.

    Args:
        step_size: η.
        local_steps: K, the steps of a client in a round.
        history: τ, the number of rounds whose scores are partners.
        pool_size: scores of each set that a client sends per round, a random sample (None: all).
        draws: "shuffled" uses every score of the pool once before any twice; "replacement" draws independently.
        shared_partners: all active examples of a step have the same partners; otherwise each has separate ones.
        extra_samples: scores for the pool come from separate samples ẑ, at twice the cost; otherwise from the
            examples of the step.
        memory_weight: γ, the weight of the new loss in u.
        momentum: β, the weight of the new gradient in G_i.
        u_start: the first u: "pool", the mean loss against the first pool; 1; or 0.
        momentum_start: "zero", or "first", which gives the first gradient the full weight.

    - *Converges to* a stationary point with constant steps, however different the clients are (with all data exactly,
      as far as tried; there is no proof). At a fixed point nothing moves, so old scores are fresh and clients agree.
    - *Does not* tolerate steps as large as FedX does when $\eta K$ is large for the loss.
    - *Does not* reach the point exactly under partial participation: the pool is that of another cohort every round.

    >>> TrackedX(step_size=0.1, local_steps=5, momentum=1.0).u_start
    'pool'

    Reference: guo2022, whose directions it corrects; the method is this library's.
    """

    variant_of = FedX2

    class State(NamedTuple):
        x: Averaged[Vector]
        mean: Broadcast[Vector]  # of G over all clients
        change: Reported[Vector]  # of the client's G since it last took part
        said: Local[Vector]  # its G then
        g: Local[Vector]
        first: Pooled[Pool]
        second: Pooled[Pool]
        u: Local[PerExample]

    def init_server(self, problem: Pairwise, x0: Vector) -> State:
        zero = x0.zeros()
        return self.State(mean=zero, change=zero, said=zero, g=zero, **self.fields(problem, x0))

    def local_step(self, oracle: PairwiseOracle, start: State, state: State) -> State:
        new, state = self.estimate(oracle, start, state)
        g = self.blended(oracle, state.g, new)
        return state._replace(x=state.x - self.step_size * (g + start.mean - start.said), g=g)

    def local_end(self, oracle: PairwiseOracle, start: State, state: State) -> State:
        return state._replace(change=state.g - start.said, said=state.g)

    def server_step(self, problem: Pairwise, start: State, merged: State, cohort: Cohort) -> State:
        return merged._replace(mean=start.mean + cohort.share * merged.change)
