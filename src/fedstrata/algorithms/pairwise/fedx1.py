"""FedX1: pairwise losses across clients, with partners that are scores of the round before."""

from typing import Any, NamedTuple

from fedstrata.algorithms.pairwise.base import PoolingMethod
from fedstrata.memory import Pool
from fedstrata.placement import Averaged, Pooled
from fedstrata.problems.pairwise_oracle import PairwiseOracle
from fedstrata.vector import Vector


class FedX1(PoolingMethod):
    r"""Local steps on pairs of an example of the client's own with scores that other clients sent a round ago.

    $$ G_1 = \omega_{1i} \, \omega_{2j} \, \partial_1 \ell(h(x_i; z), h_\xi) \, \nabla h(x_i; z), \qquad
       G_2 = \omega_{1j'} \, \omega_{2i} \, \partial_2 \ell(h_\zeta, h(x_i; z')) \, \nabla h(x_i; z') $$
    $$ x_i \gets x_i - \eta (G_1 + G_2) \quad (K \text{ times}), \qquad x \gets \frac{1}{N} \sum_i x_i $$

    with $z \in S_1^i$, $z' \in S_2^i$ drawn anew, $\xi$ from the pool of scores of the second set, $\zeta$ from that of
    the first, and $\omega_{1i} = N |S_1^i| / |S_1|$ (ω_2 alike).

    step_size: η. local_steps: K. history: τ, the rounds whose scores are partners. pool_size: scores that a client
    sends of each set and round, a random sample of those it had (None: all). draws: "shuffled" goes through the pool
    before any score comes twice, "replacement" draws each anew. shared_partners: all active examples of a step have
    the same partners; otherwise each has its own. extra_samples: scores for the pool come from samples of their own,
    ẑ, at twice the price; otherwise from those that were stepped on.

    Converges, for f(u) = u, to a stationary point of the pairwise risk up to an error in proportion to the step where
    clients differ (their models drift, and partners are a round old); `TrackedX` is without that error. With all data
    the first direction is the exact gradient, and the later gap shrinks with the step.

    >>> FedX1(step_size=0.1, local_steps=32).history
    1

    Reference: guo2022, Algorithm 1; line 12 names the two buffers in the wrong order, (4) and (5) are right.
    """

    class State(NamedTuple):
        x: Averaged[Vector]
        first: Pooled[Pool]  # scores of examples of the first set
        second: Pooled[Pool]

    @classmethod
    def theory(cls, *, clients: int, rounds: int, scale: float = 1.0) -> Any:
        """η = scale · N / R^(2/3) and K = R^(1/3) / N, of Theorem 1 (up to constants)."""
        return cls(
            step_size=scale * clients / rounds ** (2 / 3), local_steps=max(1, round(rounds ** (1 / 3) / clients))
        )

    def check(self, problem: Any) -> None:
        super().check(problem)
        if not problem.linear:
            raise ValueError("FedX1 is for f(u) = u, and this problem has an outer function: use FedX2")

    def init_server(self, problem: Any, x0: Vector) -> State:
        rows = [{"score": problem.blank(side)} for side in ("first", "second")]
        first, second = (self.pool(problem, side, row) for side, row in enumerate(rows))
        return self.State(x=x0, first=first, second=second)

    def init_client(self, oracle: PairwiseOracle, view: State) -> State:
        scores = oracle.first_scores(view.x, self.local_steps)
        start = lambda pool, rows: pool.write(0, {"score": rows[: pool.capacity]})
        return view._replace(first=start(view.first, scores.first), second=start(view.second, scores.second))

    def local_step(self, oracle: PairwiseOracle, start: State, state: State) -> State:
        x, scores = state.x, oracle.scores(state.x)
        direction = oracle.grad(x, self.lazy(oracle, start), scores=scores)
        scores = oracle.fresh(0).scores(x) if self.extra_samples else scores
        first = oracle.send(state.first, 0, self.local_steps, {"score": scores.first})
        second = oracle.send(state.second, 1, self.local_steps, {"score": scores.second})
        return self.State(x=x - self.step_size * direction, first=first, second=second)
