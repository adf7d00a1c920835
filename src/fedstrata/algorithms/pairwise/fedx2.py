"""FedX2: functions of mean pairwise losses across clients (partial AUC, average precision)."""

from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from fedstrata.algorithms.pairwise.base import PoolingMethod, UStart
from fedstrata.core.algorithm import StateWithX
from fedstrata.core.hyperparameters import choice, real
from fedstrata.core.memory import PerExample, Pool
from fedstrata.core.placement import Averaged, Local, Pooled
from fedstrata.core.vector import Vector, where
from fedstrata.problems.pairwise.oracle import PairwiseOracle
from fedstrata.problems.pairwise.problem import Pairwise


class PooledState(StateWithX, Protocol):
    """What the states of FedX2 and of TrackedX have in common."""

    @property
    def first(self) -> Pool: ...

    @property
    def second(self) -> Pool: ...

    @property
    def u(self) -> PerExample: ...


S = TypeVar("S", bound=PooledState)


class RememberingMethod(PoolingMethod):
    """What FedX2 and TrackedX share: u of every example, and the directions made of it and of the pools."""

    memory_weight: float = real(0.2, above=0, at_most=1)
    momentum: float = real(0.1, above=0, at_most=1)
    u_start: UStart = choice("pool", 1, 0)
    momentum_start: Literal["zero", "first"] = choice("zero", "first")

    def fields(self, problem: Pairwise, x0: Vector) -> dict[str, Any]:
        """The start of x, of the pools and of u.

        Args:
            problem: the problem.
            x0: the start of x.
        """
        memory = self.memory(problem, self.u_start)
        first = self.pool(problem, 0, {"score": problem.blank("first"), "u": memory.rows})
        second = self.pool(problem, 1, {"score": problem.blank("second")})
        return {"x": x0, "first": first, "second": second, "u": memory}

    def init_client(self, oracle: PairwiseOracle, view: S) -> S:
        scores = oracle.first_scores(view.x, self.local_steps)
        first = {**view.first.rows, "score": scores[0][: view.first.capacity]}
        second = {"score": scores[1][: view.second.capacity]}
        return view._replace(first=view.first.write(0, first), second=view.second.write(0, second))

    def client_start(self, oracle: PairwiseOracle, start: S, state: S) -> S:
        if self.u_start != "pool" or oracle.problem.linear:
            return state
        others = oracle.pooled(start.second)
        scores = state.first.rows["score"]
        first = state.first.write(0, {"score": scores, "u": oracle.mean_losses(scores, others)})
        return state._replace(first=first, u=oracle.remember(state.x, state.u, others))

    def estimate(self, oracle: PairwiseOracle, start: S, state: S) -> tuple[Vector, S]:
        """G_1 + G_2 at x, and the state with new u and pools.

        Args:
            oracle: of this step.
            start: the state as the round began.
            state: the state before this step.
        """
        x, h, at = state.x, oracle.scores(state.x), oracle.sample("first").position
        partners = self.partners(oracle, start.first, start.second)
        u = oracle.blend(state.u[at], oracle.inner(h.first, partners), self.memory_weight, partners)  # (8)
        memory = state.u.set(at, u)
        g_1 = oracle.first_gradient(h, partners, memory[at])  # (9)
        g_2 = oracle.second_gradient(h, partners)  # (9); the partners bring u_ζ
        sent = h
        if self.extra_samples:
            extra = oracle.fresh(0)
            sent, u = extra.scores(x), memory[extra.sample("first").position]
        first = oracle.send(state.first, 0, self.local_steps, {"score": sent.first, "u": u})
        second = oracle.send(state.second, 1, self.local_steps, {"score": sent.second})
        return oracle.pull(x, h, g_1, g_2), state._replace(first=first, second=second, u=memory)

    def blended(self, oracle: PairwiseOracle, old: Vector, new: Vector) -> Vector:
        """(1 − β) G + β (G_1 + G_2).

        Args:
            oracle: of this step.
            old: G.
            new: G_1 + G_2.
        """
        mixed = (1 - self.momentum) * old + self.momentum * new
        return mixed if self.momentum_start == "zero" else where(oracle.clock.step == 0, new, mixed)


class FedX2(RememberingMethod):
    r"""FedX1 for a nonlinear f: every example keeps an estimate u of its mean loss, and steps have momentum.

    $$ u(z) \gets (1-\gamma) \, u(z) + \gamma \, \omega_{2j} \, \ell(h(x_i; z), h_\xi) $$
    $$ G_1 = \omega_{1i} f'(u(z)) \, \omega_{2j} \, \partial_1 \ell(h(x_i; z), h_\xi) \, \nabla h(x_i; z), \qquad
       G_2 = \omega_{1j'} f'(u_\zeta) \, \omega_{2i} \, \partial_2 \ell(h_\zeta, h(x_i; z')) \, \nabla h(x_i; z') $$
    $$ G \gets (1-\beta) \, G + \beta (G_1 + G_2), \qquad x_i \gets x_i - \eta G \quad (K \text{ times}) $$

    and x and G are averaged. A pooled row holds a score and its u, so that both belong to the same example. Losses that
    are exponentials are kept as logarithms.

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
        momentum: β, the weight of the new gradient in G.
        u_start: the first u: "pool", the mean loss against the first pool; 1, as in the authors' later code; 0, as
            published, where f = λ log makes f'(0) infinite.
        momentum_start: "zero" as published; "first" gives the first gradient the full weight.

    - *Converges to* a stationary point, up to an error proportional to the step when clients differ, as FedX1.
    - *Does not* reach that point exactly with a constant step; `TrackedX` does.
    - u is updated before f' is evaluated at it.
    - With f(u) = u and β = 1 it is FedX1.

    >>> FedX2(step_size=0.1, local_steps=32).momentum
    0.1

    Reference: guo2022, Algorithm 2 (Algorithm 3 under partial participation).
    """

    class State(NamedTuple):
        x: Averaged[Vector]
        g: Averaged[Vector]  # the momentum G
        first: Pooled[Pool]  # scores of examples of the first set, and their u
        second: Pooled[Pool]
        u: Local[PerExample]

    def init_server(self, problem: Pairwise, x0: Vector) -> State:
        return self.State(g=x0.zeros(), **self.fields(problem, x0))

    def local_step(self, oracle: PairwiseOracle, start: State, state: State) -> State:
        new, state = self.estimate(oracle, start, state)
        g = self.blended(oracle, state.g, new)
        return state._replace(x=state.x - self.step_size * g, g=g)
