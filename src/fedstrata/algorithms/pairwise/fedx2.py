"""FedX2: functions of mean pairwise losses across clients (partial AUC, average precision)."""

from typing import Any, Literal, NamedTuple

from fedstrata.algorithm import real
from fedstrata.algorithms.pairwise.base import PoolingMethod, UStart
from fedstrata.memory import PerExample, Pool
from fedstrata.placement import Averaged, Local, Pooled
from fedstrata.problems.pairwise_oracle import PairwiseOracle
from fedstrata.vector import Vector, where


class FedX2(PoolingMethod):
    r"""As FedX1 around a nonlinear f: every example keeps an estimate u of its mean loss, and steps have momentum.

    $$ u(z) \gets (1-\gamma) \, u(z) + \gamma \, \omega_{2j} \, \ell(h(x_i; z), h_\xi) $$
    $$ G_1 = \omega_{1i} f'(u(z)) \, \omega_{2j} \, \partial_1 \ell(h(x_i; z), h_\xi) \, \nabla h(x_i; z), \qquad
       G_2 = \omega_{1j'} f'(u_\zeta) \, \omega_{2i} \, \partial_2 \ell(h_\zeta, h(x_i; z')) \, \nabla h(x_i; z') $$
    $$ G \gets (1-\beta) \, G + \beta (G_1 + G_2), \qquad x_i \gets x_i - \eta G \quad (K \text{ times}) $$

    and x and G are averaged. A pooled row holds a score and its u, so that both are of the same example.

    step_size: η. local_steps: K. memory_weight: γ, the weight of the new loss in u. momentum: β, the weight of the new
    gradient in G. u_start: where u begins: "pool", the mean loss against the first pool; 1, as the authors' later code
    has it; 0, as printed, where f = λ log makes f'(0) infinite. momentum_start: "zero" as printed, or "first", where
    the first gradient counts fully. history, pool_size, draws, shared_partners, extra_samples: as in `FedX1`.

    Converges to a stationary point up to an error in proportion to the step where clients differ, as FedX1. u is
    updated before f' is taken at it. With f(u) = u and β = 1 it is FedX1. Losses that are exponentials are kept as
    logarithms.

    >>> FedX2(step_size=0.1, local_steps=32).momentum
    0.1

    Reference: guo2022, Algorithm 2 (Algorithm 3 where a cohort takes part).
    """

    memory_weight: float = real(0.2, above=0, at_most=1)
    momentum: float = real(0.1, above=0, at_most=1)
    u_start: UStart = "pool"
    momentum_start: Literal["zero", "first"] = "zero"

    class State(NamedTuple):
        x: Averaged[Vector]
        g: Averaged[Vector]  # the momentum G
        first: Pooled[Pool]  # scores of examples of the first set, and their u
        second: Pooled[Pool]
        u: Local[PerExample]

    @classmethod
    def theory(cls, *, examples: int, rounds: int, scale: float = 1.0) -> Any:
        """γ = M^(1/3) / R^(2/3), β = 1 / (M^(1/6) R^(2/3)), η = scale / (M R)^(2/3) and K = (M R)^(1/3).

        Of Theorem 2, up to constants; examples: M, the most that a client has in the first set.
        """
        m, r = float(examples), float(rounds)
        return cls(
            step_size=scale / (m * r) ** (2 / 3),
            local_steps=max(1, round((m * r) ** (1 / 3))),
            memory_weight=min(1.0, m ** (1 / 3) / r ** (2 / 3)),
            momentum=min(1.0, 1 / (m ** (1 / 6) * r ** (2 / 3))),
        )

    def __check_init__(self) -> None:
        if self.momentum_start not in ("zero", "first"):
            raise ValueError(f'{type(self).__name__}: momentum_start={self.momentum_start!r} must be "zero" or "first"')

    def fields(self, problem: Any, x0: Vector) -> dict[str, Any]:
        """The start of x, of the pools and of u."""
        memory = self.memory(problem, self.u_start)
        first = self.pool(problem, 0, {"score": problem.blank("first"), "u": memory.rows})
        second = self.pool(problem, 1, {"score": problem.blank("second")})
        return {"x": x0, "first": first, "second": second, "u": memory}

    def init_server(self, problem: Any, x0: Vector) -> State:
        return self.State(g=x0.zeros(), **self.fields(problem, x0))

    def init_client(self, oracle: PairwiseOracle, view: Any) -> Any:
        scores = oracle.first_scores(view.x, self.local_steps)
        first = {**view.first.rows, "score": scores.first[: view.first.capacity]}
        second = {"score": scores.second[: view.second.capacity]}
        return view._replace(first=view.first.write(0, first), second=view.second.write(0, second))

    def client_start(self, oracle: PairwiseOracle, start: Any, state: Any) -> Any:
        if self.u_start != "pool" or oracle.problem.linear:
            return state
        negatives = oracle.pooled(start.second)
        scores = state.first.rows["score"]
        first = state.first.write(0, {"score": scores, "u": oracle.mean_losses(scores, negatives)})
        return state._replace(first=first, u=oracle.remember(state.x, state.u, negatives))

    def estimate(self, oracle: PairwiseOracle, start: Any, state: Any) -> tuple[Vector, Any]:
        """G_1 + G_2 at x, and the state with u and the pools brought up to date."""
        x, lazy = state.x, self.lazy(oracle, start)
        scores, at = oracle.scores(x), oracle.sample("first").position
        u = oracle.blend(state.u[at], oracle.inner(scores.first, lazy), self.memory_weight, lazy)
        memory = state.u.set(at, u)
        direction = oracle.grad(x, lazy, memory[at], scores)
        if self.extra_samples:
            more = oracle.fresh(0)
            scores, u = more.scores(x), memory[more.sample("first").position]
        first = oracle.send(state.first, 0, self.local_steps, {"score": scores.first, "u": u})
        second = oracle.send(state.second, 1, self.local_steps, {"score": scores.second})
        return direction, state._replace(first=first, second=second, u=memory)

    def blended(self, oracle: PairwiseOracle, old: Vector, new: Vector) -> Vector:
        """(1 − β) G + β (G_1 + G_2)."""
        mixed = (1 - self.momentum) * old + self.momentum * new
        return mixed if self.momentum_start == "zero" else where(oracle.clock.step == 0, new, mixed)

    def local_step(self, oracle: PairwiseOracle, start: State, state: State) -> State:
        new, state = self.estimate(oracle, start, state)
        g = self.blended(oracle, state.g, new)
        return state._replace(x=state.x - self.step_size * g, g=g)
