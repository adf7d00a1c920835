"""FedX1: pairwise losses across clients; partners are scores of the previous round."""

from typing import NamedTuple

from fedstrata.algorithms.pairwise.base import PoolingMethod
from fedstrata.core.memory import Pool
from fedstrata.core.placement import Averaged, Pooled
from fedstrata.core.vector import Vector
from fedstrata.problems.pairwise.oracle import PairwiseOracle
from fedstrata.problems.pairwise.problem import Pairwise


class FedX1(PoolingMethod):
    r"""Local steps on pairs of a client's example with a score that another client sent in the previous round.

    $$ G_1 = \omega_{1i} \, \omega_{2j} \, \partial_1 \ell(h(x_i; z), h_\xi) \, \nabla h(x_i; z), \qquad
       G_2 = \omega_{1j'} \, \omega_{2i} \, \partial_2 \ell(h_\zeta, h(x_i; z')) \, \nabla h(x_i; z') $$
    $$ x_i \gets x_i - \eta (G_1 + G_2) \quad (K \text{ times}), \qquad x \gets \frac{1}{N} \sum_i x_i $$

    with $z \in S_1^i$ and $z' \in S_2^i$ drawn anew, $\xi$ from the pool of scores of the second set, $\zeta$ from that
    of the first, and $\omega_{1i} = N |S_1^i| / |S_1|$ ($\omega_2$ alike).

    Args:
        step_size: η.
        local_steps: K, the steps of a client in a round.
        history: τ, the number of rounds whose scores are partners.
        pool_size: scores of each set that a client sends per round, a random sample (None: all).
        draws: "shuffled" uses every score of the pool once before any twice; "replacement" draws independently.
        shared_partners: all active examples of a step have the same partners; otherwise each has separate ones.
        extra_samples: scores for the pool come from separate samples ẑ, at twice the cost; otherwise from the
            examples of the step.

    - *Converges to* a stationary point of the pairwise risk for f(u) = u, up to an error proportional to the step when
      clients differ: their models drift, and partners are one round old.
    - *Does not* reach that point exactly with a constant step; `TrackedX` does.
    - With all data the first direction is the exact gradient; the later gap shrinks with the step.

    >>> FedX1(step_size=0.1, local_steps=32).history
    1

    Reference: guo2022, Algorithm 1; line 12 names the two buffers in the wrong order, (4) and (5) are right.
    """

    class State(NamedTuple):
        x: Averaged[Vector]
        first: Pooled[Pool]  # scores of examples of the first set
        second: Pooled[Pool]

    def check(self, problem: Pairwise) -> None:
        super().check(problem)
        if not problem.linear:
            raise ValueError("FedX1 is for f(u) = u, and this problem has an outer function: use FedX2")

    def init_server(self, problem: Pairwise, x0: Vector) -> State:
        first = self.pool(problem, 0, {"score": problem.blank("first")})
        second = self.pool(problem, 1, {"score": problem.blank("second")})
        return self.State(x=x0, first=first, second=second)

    def init_client(self, oracle: PairwiseOracle, view: State) -> State:
        fill = lambda pool, scores: pool.write(0, {"score": scores[: pool.capacity]})
        first, second = oracle.first_scores(view.x, self.local_steps)
        return view._replace(first=fill(view.first, first), second=fill(view.second, second))

    def local_step(self, oracle: PairwiseOracle, start: State, state: State) -> State:
        x, h = state.x, oracle.scores(state.x)
        partners = self.partners(oracle, start.first, start.second)
        g_1 = oracle.first_gradient(h, partners)  # (4)
        g_2 = oracle.second_gradient(h, partners)  # (5)
        sent = oracle.fresh(0).scores(x) if self.extra_samples else h
        first = oracle.send(state.first, 0, self.local_steps, {"score": sent.first})
        second = oracle.send(state.second, 1, self.local_steps, {"score": sent.second})
        return self.State(x=x - self.step_size * oracle.pull(x, h, g_1, g_2), first=first, second=second)
