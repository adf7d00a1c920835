"""FedAvg with a prox, the simplest way to add a regulariser: at the clients, or at the server."""

from typing import NamedTuple

from fedstrata.algorithms.regularized.base import ProximalMethod
from fedstrata.core.algorithm import Cohort
from fedstrata.core.hyperparameters import real, whole
from fedstrata.core.placement import Averaged
from fedstrata.core.vector import Vector
from fedstrata.problems.base import CompositeOracle
from fedstrata.problems.composite import CompositeProblem


class FedAvgLocalProx(ProximalMethod):
    r"""FedAvg whose local steps are proximal gradient steps: a naive baseline.

    $$ x_i \gets \mathrm{prox}_{\eta\varphi}\big(x_i - \eta \nabla f_i(x_i; \xi_i)\big) \quad (Q \text{ times from } x),
       \qquad x \gets \sum_i p_i x_i $$

    Args:
        step_size: η, the step of the clients.
        local_steps: Q, the steps of a client in a round.

    - *Converges to* the optimum when clients are alike or when η falls to zero.
    - *Does not* when clients differ and η is constant. The limit is off by O(ηQ), with Q = 1 too, because the mean of
      proximal steps is not the proximal step of the mean.
    - *Does not* give a sparse average: a coordinate is zero only where it is zero at every client.

    >>> FedAvgLocalProx(step_size=0.1, local_steps=10)
    FedAvgLocalProx(step_size=0.1, local_steps=10)

    Reference: yuan2021, Section 1 (there a warning).
    """

    step_size: float = real(above=0)
    local_steps: int = whole(1, at_least=1)

    class State(NamedTuple):
        x: Averaged[Vector]

    def prox_steps(self) -> dict[str, float]:
        return {"step_size": self.step_size}

    def init_server(self, problem: CompositeProblem, x0: Vector) -> State:
        return self.State(x=problem.prox(x0, self.step_size))

    def local_step(self, oracle: CompositeOracle, start: State, state: State) -> State:
        return self.State(x=oracle.prox(state.x - self.step_size * oracle.grad(state.x), self.step_size))

    def solution(self, problem: CompositeProblem, state: State) -> Vector:
        return state.x


class FedAvgServerProx(FedAvgLocalProx):
    r"""FedAvg followed by one proximal step of the whole round's length at the server: a naive baseline.

    $$ x_i \gets x_i - \eta \nabla f_i(x_i; \xi_i) \quad (Q \text{ times from } x), \qquad
       x \gets \mathrm{prox}_{\eta Q \varphi}\Big( \sum_i p_i x_i \Big) $$

    Args:
        step_size: η, the step of the clients.
        local_steps: Q, the steps of a client in a round.

    - *Converges to* the optimum when Q = 1 (then it is the proximal gradient method) or when η falls to zero.
    - *Does not* when Q > 1 and η is constant. The limit is off by O(ηQ), even for clients that are alike: they walk
      away from an optimum where the regulariser, and not the gradient alone, holds the balance.
    - Its iterates are sparse.

    >>> FedAvgServerProx(step_size=0.1, local_steps=10)
    FedAvgServerProx(step_size=0.1, local_steps=10)

    Reference: yuan2021, Section 1 (a variant).
    """

    def prox_steps(self) -> dict[str, float]:
        return {"step_size * local_steps": self.step_size * self.local_steps}

    def init_server(self, problem: CompositeProblem, x0: Vector) -> FedAvgLocalProx.State:
        return self.State(x=problem.prox(x0, self.step_size * self.local_steps))

    def local_step(
        self, oracle: CompositeOracle, start: FedAvgLocalProx.State, state: FedAvgLocalProx.State
    ) -> FedAvgLocalProx.State:
        return self.State(x=state.x - self.step_size * oracle.grad(state.x))

    def server_step(
        self, problem: CompositeProblem, start: FedAvgLocalProx.State, merged: FedAvgLocalProx.State, cohort: Cohort
    ) -> FedAvgLocalProx.State:
        return self.State(x=problem.prox(merged.x, self.step_size * self.local_steps))
