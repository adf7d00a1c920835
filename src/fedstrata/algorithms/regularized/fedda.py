"""FedDA (federated dual averaging): steps in the dual space; the weight of the prox is the sum of all steps so far."""

import math
from typing import NamedTuple

from fedstrata.algorithms.regularized.base import ProximalMethod
from fedstrata.core.algorithm import Cohort
from fedstrata.core.hyperparameters import real, whole
from fedstrata.core.placement import Broadcast, Reported
from fedstrata.core.vector import Scalar, Vector
from fedstrata.problems.base import CompositeOracle
from fedstrata.problems.composite import CompositeProblem


class FedDA(ProximalMethod):
    r"""Dual averaging at every client; the sum of all step sizes so far is the weight of the prox.

    $$ x_i = \mathrm{prox}_{e_i\varphi}(z_i), \quad z_i \gets z_i - \eta_a \nabla f_i(x_i; \xi_i), \quad
       e_i \gets e_i + \eta_a \quad (Q \text{ times from } z, e) $$
    $$ z \gets z + \eta_s \sum_i p_i (z_i - z), \qquad e \gets e + \eta_s \sum_i p_i (e_i - e), \qquad
       x = \mathrm{prox}_{e\varphi}(z) $$

    Args:
        step_size: η_a, the step of the clients.
        local_steps: Q, the steps of a client in a round.
        server_step_size: η_s, the step of the server.

    - *Converges to* the optimum when clients are alike, when Q = 1, or when η_a falls to zero.
    - *Does not* when clients differ and steps are constant. Nothing corrects the drift, and the limit is off by
      O(η_a Q), as FedAvg's.
    - *Does not* take a nonconvex φ: the prox weight e grows without bound.
    - Averaging the dual z rather than x keeps the average sparse, which is the point of the method.
    - With φ = 0 it is FedAvg with a server step. Any cohort is allowed. One number, e, travels besides z.
    - The mirror map is |x|²/2; the paper allows others.

    >>> FedDA(step_size=0.1, local_steps=10).server_step_size
    1.0

    Reference: yuan2021, Algorithm 3.
    """

    step_size: float = real(above=0)
    local_steps: int = whole(1, at_least=1)
    server_step_size: float = real(1.0, above=0)

    class State(NamedTuple):
        z: Broadcast[Vector]
        e: Broadcast[Scalar]  # elapsed: the sum of the step sizes so far
        dz: Reported[Vector]  # what the client's round changed
        de: Reported[Scalar]

    def prox_steps(self) -> dict[str, float]:
        return {"the prox weight, which grows by step_size with every step,": math.inf}

    def init_server(self, problem: CompositeProblem, x0: Vector) -> State:
        return self.State(z=x0, e=0.0, dz=x0.zeros(), de=0.0)

    def local_step(self, oracle: CompositeOracle, start: State, state: State) -> State:
        x = oracle.prox(state.z, state.e)
        return state._replace(z=state.z - self.step_size * oracle.grad(x), e=state.e + self.step_size)

    def local_end(self, oracle: CompositeOracle, start: State, state: State) -> State:
        return state._replace(dz=state.z - start.z, de=state.e - start.e)

    def server_step(self, problem: CompositeProblem, start: State, merged: State, cohort: Cohort) -> State:
        step = self.server_step_size
        return merged._replace(z=start.z + step * merged.dz, e=start.e + step * merged.de)

    def solution(self, problem: CompositeProblem, state: State) -> Vector:
        return problem.prox(state.z, state.e)
