"""Pairs inside one place: LocalPair on every client, and its centralised forms SOX and PairSGD."""

from typing import ClassVar, NamedTuple

from fedstrata.algorithms.pairwise.base import PairwiseMethod, UStart
from fedstrata.core.hyperparameters import choice, flag, real, whole
from fedstrata.core.memory import PerExample
from fedstrata.core.placement import Averaged, Local
from fedstrata.core.vector import Vector
from fedstrata.problems.pairwise.oracle import PairwiseOracle
from fedstrata.problems.pairwise.problem import Pairwise


class LocalPair(PairwiseMethod):
    r"""Each client minimises the pairwise risk of its pairs, and models are averaged.

    $$ u(z) \gets (1-\gamma) \, u(z) + \gamma \, \hat g(x_i; z), \qquad
       G \gets (1-\beta) \, G + \beta \, \tfrac{1}{B_1} \sum_z f'(u(z)) \, \nabla \hat g(x_i; z), \qquad
       x_i \gets x_i - \eta G \quad (K \text{ times}) $$

    with $\hat g$ the mean loss of z against the step's examples of the second set, and x and G averaged.

    Args:
        step_size: η.
        local_steps: K, the steps of a client in a round.
        memory_weight: γ, the weight of the new loss in u.
        momentum: β, the weight of the new gradient in G (1: no memory).
        u_start: the first u: "pool", the mean loss against examples of the same client; 1; or 0.
        updated_u: f' is evaluated at the new u; otherwise at the previous one.

    - *Converges to* a stationary point of the mean of the clients' local risks, up to the drift of their models.
    - *Does not* minimise the pairwise risk: no example is compared with one of another client, so the scores of a
      client may be off by a constant. On such data its global AUC is low however well it converges.

    >>> LocalPair(step_size=0.1, local_steps=4).momentum
    1.0

    Reference: guo2022, Section 4, the baseline "Local Pair".
    """

    step_size: float = real(above=0)
    local_steps: int = whole(1, at_least=1)
    memory_weight: float = real(0.2, above=0, at_most=1)
    momentum: float = real(1.0, above=0, at_most=1)
    u_start: UStart = choice("pool", 1, 0)
    updated_u: bool = flag(True)

    class State(NamedTuple):
        x: Averaged[Vector]
        g: Averaged[Vector]
        u: Local[PerExample]

    def init_server(self, problem: Pairwise, x0: Vector) -> State:
        return self.State(x=x0, g=x0.zeros(), u=self.memory(problem, self.u_start))

    def init_client(self, oracle: PairwiseOracle, view: State) -> State:
        if self.u_start != "pool" or oracle.problem.linear:
            return view
        return view._replace(u=oracle.remember(view.x, view.u, oracle.own_side(view.x, self.local_steps)))

    def local_step(self, oracle: PairwiseOracle, start: State, state: State) -> State:
        x, h, at = state.x, oracle.scores(state.x), oracle.sample("first").position
        partners = oracle.own_partners(h, state.u[at])
        u = oracle.blend(state.u[at], oracle.inner(h.first, partners), self.memory_weight, partners)
        slope_at = u if self.updated_u else state.u[at]
        new = oracle.grad(x, oracle.own_partners(h, slope_at), slope_at, h)
        g = (1 - self.momentum) * state.g + self.momentum * new
        return self.State(x=x - self.step_size * g, g=g, u=state.u.set(at, u))


class SOX(LocalPair):
    r"""Compositional pairwise risk on the pooled data of all clients: the reference for FedX2.

    $$ u(z) \gets (1-\gamma) \, u(z) + \gamma \, \hat g(x; z), \qquad
       G \gets (1-\beta) \, G + \beta \, \tfrac{1}{B_1} \sum_z f'(u(z)) \, \nabla \hat g(x; z), \qquad
       x \gets x - \eta G $$

    Args:
        step_size: η.
        local_steps: steps that are counted as one "round".
        memory_weight: γ, the weight of the new loss in u.
        momentum: β, the weight of the new gradient in G.
        u_start: the first u: "pool", the mean loss against a sample of the data; 1; or 0.
        updated_u: True evaluates f' at the new u, as the authors' code; False at the previous one, as their theory.

    - *Converges to* a stationary point of the pairwise risk of all data.
    - *Does not* describe a deployable method: all data are in one place, and its batch size is the total.

    >>> SOX(step_size=0.1).centralised
    True

    Reference: wang2022, Algorithm 1 (from memory), and the authors' public code for the updated u.
    """

    centralised: ClassVar[bool] = True
    momentum: float = real(0.1, above=0, at_most=1)


class PairSGD(PairwiseMethod):
    r"""SGD on pairs of two mini-batches of the pooled data of all clients: the reference for FedX1.

    $$ G \gets (1-\beta) \, G + \beta \, \tfrac{1}{B_1 B_2} \sum_{z, z'} \nabla \ell(h(x; z), h(x; z')), \qquad
       x \gets x - \eta G $$

    Args:
        step_size: η.
        local_steps: steps that are counted as one "round".
        momentum: β, the weight of the new gradient in G (1: plain SGD).

    - *Converges to* a stationary point of the pairwise risk of all data, for f(u) = u.
    - *Does not* describe a deployable method: all data are in one place.

    >>> PairSGD(step_size=0.1).centralised
    True

    Reference: guo2022, Section 4, the "Centralized" reference for linear f.
    """

    centralised: ClassVar[bool] = True
    step_size: float = real(above=0)
    local_steps: int = whole(1, at_least=1)
    momentum: float = real(1.0, above=0, at_most=1)

    class State(NamedTuple):
        x: Averaged[Vector]
        g: Averaged[Vector]
        u: Local[PerExample]  # constant: f(u) = u needs none, but checkpoints have it

    def check(self, problem: Pairwise) -> None:
        super().check(problem)
        if not problem.linear:
            raise ValueError("PairSGD is for f(u) = u, and this problem has an outer function: use SOX")

    def init_server(self, problem: Pairwise, x0: Vector) -> State:
        return self.State(x=x0, g=x0.zeros(), u=self.memory(problem, 1))

    def local_step(self, oracle: PairwiseOracle, start: State, state: State) -> State:
        x, h = state.x, oracle.scores(state.x)
        new = oracle.grad(x, oracle.own_partners(h, None), scores=h)
        g = (1 - self.momentum) * state.g + self.momentum * new
        return state._replace(x=x - self.step_size * g, g=g)
