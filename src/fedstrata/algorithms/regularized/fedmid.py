"""FedMid (federated mirror descent): proximal steps at the clients and one at the server."""

from typing import NamedTuple

from fedstrata.algorithms.regularized.base import ProximalMethod
from fedstrata.core.algorithm import Cohort
from fedstrata.core.hyperparameters import real, whole
from fedstrata.core.placement import Broadcast, Reported
from fedstrata.core.vector import Vector
from fedstrata.problems.base import CompositeOracle
from fedstrata.problems.composite import CompositeProblem


class FedMid(ProximalMethod):
    r"""Proximal gradient steps at every client, then a proximal step of the whole round's length at the server.

    $$ x_i \gets \mathrm{prox}_{\eta_a\varphi}\big(x_i - \eta_a \nabla f_i(x_i; \xi_i)\big)
       \quad (Q \text{ times from } x), \qquad
       x \gets \mathrm{prox}_{\eta_s Q \eta_a\varphi}\Big(x + \eta_s \sum_i p_i (x_i - x)\Big) $$

    Args:
        step_size: η_a, the step of the clients.
        local_steps: Q, the steps of a client in a round.
        server_step_size: η_s, the step of the server.

    - *Converges to* a point that is shrunk as if by about twice the weight of φ: the regulariser acts at the clients
      and again at the server.
    - *Does not* reach the optimum when clients differ (drift, O(η_a Q)), nor when they are alike (the shrinkage).
    - The mean of sparse client models is dense ("the curse of primal averaging", yuan2021). The server's prox thins it
      out again.
    - With φ = 0 it is FedAvg with a server step. Any cohort is allowed.
    - The server's weight η_s Q η_a is that of the authors' public code. Where φ is the indicator of a set it does not
      matter.

    >>> FedMid(step_size=0.1, local_steps=10).server_step_size
    1.0

    Reference: yuan2021, Algorithm 2.
    """

    step_size: float = real(above=0)
    local_steps: int = whole(1, at_least=1)
    server_step_size: float = real(1.0, above=0)

    class State(NamedTuple):
        x: Broadcast[Vector]
        dx: Reported[Vector]  # what the client's round changed

    def prox_steps(self) -> dict[str, float]:
        whole_round = self.step_size * self.local_steps * self.server_step_size
        return {"step_size": self.step_size, "step_size * local_steps * server_step_size": whole_round}

    def init_server(self, problem: CompositeProblem, x0: Vector) -> State:
        return self.State(x=problem.prox(x0, self.step_size), dx=x0.zeros())

    def local_step(self, oracle: CompositeOracle, start: State, state: State) -> State:
        x = oracle.prox(state.x - self.step_size * oracle.grad(state.x), self.step_size)
        return state._replace(x=x)

    def local_end(self, oracle: CompositeOracle, start: State, state: State) -> State:
        return state._replace(dx=state.x - start.x)

    def server_step(self, problem: CompositeProblem, start: State, merged: State, cohort: Cohort) -> State:
        step = self.server_step_size * self.local_steps * self.step_size
        return merged._replace(x=problem.prox(start.x + self.server_step_size * merged.dx, step))

    def solution(self, problem: CompositeProblem, state: State) -> Vector:
        return state.x
