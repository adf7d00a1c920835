"""Pairs inside one place: LocalPair on every client, and its centralised forms SOX and PairSGD."""

from typing import Any, ClassVar, NamedTuple

from fedstrata.algorithm import real
from fedstrata.algorithms.pairwise.base import PairwiseMethod, UStart
from fedstrata.memory import PerExample
from fedstrata.placement import Averaged, Local
from fedstrata.problems.pairwise_oracle import PairwiseOracle
from fedstrata.vector import Vector


class LocalPair(PairwiseMethod):
    r"""Each client minimises the pairwise risk of its own pairs, and models are averaged.

    $$ u(z) \gets (1-\gamma) \, u(z) + \gamma \, \hat g(x_i; z), \qquad
       G \gets (1-\beta) \, G + \beta \, \tfrac{1}{B_1} \sum_z f'(u(z)) \, \nabla \hat g(x_i; z), \qquad
       x_i \gets x_i - \eta G \quad (K \text{ times}) $$

    with $\hat g$ the mean loss of z against the step's own examples of the second set, and x and G averaged.

    step_size: η. local_steps: K. memory_weight: γ. momentum: β (1: no memory). u_start: "pool", the mean loss against
    examples of the client's own; 1; or 0. updated_u: f' is taken at the new u; otherwise at the one before.

    Converges to a stationary point of the mean of the clients' own risks, up to the drift of their models. That is
    another objective: no example is ever compared with one of another client, so that a score may be off by a constant
    of each client's own and nothing notices. On such data its global AUC is low however well it converges.

    >>> LocalPair(step_size=0.1, local_steps=4).momentum
    1.0

    Reference: guo2022, Section 4, the baseline "Local Pair".
    """

    step_size: float = real(above=0)
    local_steps: int = 1
    memory_weight: float = real(0.2, above=0, at_most=1)
    momentum: float = real(1.0, above=0, at_most=1)
    u_start: UStart = "pool"
    updated_u: bool = True

    class State(NamedTuple):
        x: Averaged[Vector]
        g: Averaged[Vector]
        u: Local[PerExample]

    def init_server(self, problem: Any, x0: Vector) -> State:
        return self.State(x=x0, g=x0.zeros(), u=self.memory(problem, self.u_start))

    def init_client(self, oracle: PairwiseOracle, view: State) -> State:
        if self.u_start != "pool" or oracle.problem.linear:
            return view
        return view._replace(u=oracle.remember(view.x, view.u, oracle.own_side(view.x, self.local_steps)))

    def local_step(self, oracle: PairwiseOracle, start: State, state: State) -> State:
        x, at = state.x, oracle.sample("first").position
        scores = oracle.scores(x)
        own = oracle.own_partners(scores, state.u[at])
        u = oracle.blend(state.u[at], oracle.inner(scores.first, own), self.memory_weight, own)
        slope_at = u if self.updated_u else state.u[at]
        new = oracle.grad(x, oracle.own_partners(scores, slope_at), slope_at, scores)
        g = (1 - self.momentum) * state.g + self.momentum * new
        return self.State(x=x - self.step_size * g, g=g, u=state.u.set(at, u))


class SOX(LocalPair):
    r"""Compositional pairwise risk on the pooled data of all clients: the reference for FedX2.

    $$ u(z) \gets (1-\gamma) \, u(z) + \gamma \, \hat g(x; z), \qquad
       G \gets (1-\beta) \, G + \beta \, \tfrac{1}{B_1} \sum_z f'(u(z)) \, \nabla \hat g(x; z), \qquad
       x \gets x - \eta G $$

    step_size: η. local_steps: steps that are counted as one "round". memory_weight: γ. momentum: β. u_start: as in
    `LocalPair`. updated_u: True, as in the authors' code; False, f' at the previous u, as their theory has it.

    Converges to a stationary point of the pairwise risk of all data. Does not describe anything deployable: all data
    are in one place, and its batch size is the total.

    >>> SOX(step_size=0.1).centralised
    True

    Reference: wang2022, Algorithm 1 (from memory), and the authors' public code for the updated u.
    """

    centralised: ClassVar[bool] = True
    momentum: float = real(0.1, above=0, at_most=1)


class PairSGD(LocalPair):
    r"""SGD on pairs of two mini-batches of the pooled data of all clients: the reference for FedX1.

    $$ x \gets x - \eta \, \tfrac{1}{B_1 B_2} \sum_{z, z'} \nabla \ell(h(x; z), h(x; z')) $$

    step_size: η. local_steps: steps that are counted as one "round". momentum: 1, none. `memory_weight` is not used,
    `u_start` is not used, `updated_u` is not used: f(u) = u needs no memory.

    Converges to a stationary point of the pairwise risk of all data, for f(u) = u. Does not describe anything
    deployable.

    >>> PairSGD(step_size=0.1).centralised
    True

    Reference: guo2022, Section 4, the "Centralized" reference for linear f.
    """

    centralised: ClassVar[bool] = True

    def check(self, problem: Any) -> None:
        super().check(problem)
        if not problem.linear:
            raise ValueError("PairSGD is for f(u) = u, and this problem has an outer function: use SOX")
