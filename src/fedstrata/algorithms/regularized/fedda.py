"""FedDA (federated dual averaging): clients walk in the dual space, and the prox grows with the way gone."""

import math
from typing import Any, NamedTuple

from fedstrata.algorithm import Cohort, real
from fedstrata.algorithms.regularized.base import ProximalMethod
from fedstrata.placement import Broadcast, Reported
from fedstrata.problems.base import CompositeOracle
from fedstrata.vector import Vector


class FedDA(ProximalMethod):
    r"""Dual averaging at every client; the sum of all step sizes so far is the weight of the prox.

    $$ x_i = \mathrm{prox}_{e_i\varphi}(z_i), \quad z_i \gets z_i - \eta_a \nabla f_i(x_i; \xi_i), \quad
       e_i \gets e_i + \eta_a \quad (Q \text{ times from } z, e) $$
    $$ z \gets z + \eta_s \sum_i p_i (z_i - z), \qquad e \gets e + \eta_s \sum_i p_i (e_i - e), \qquad
       x = \mathrm{prox}_{e\varphi}(z) $$

    step_size: η_a. local_steps: Q. server_step_size: η_s.

    Converges to the optimum when clients are alike, when Q = 1, or when η_a falls to zero. Does not when clients
    differ and steps are constant: nothing corrects the drift, and the limit is off by O(η_a Q), as FedAvg's. With
    φ = 0 it is FedAvg with a server step. Averaging the dual z rather than x keeps the average sparse, which is the
    point of the method. φ must be convex: the prox weight e grows without bound. One number, e, travels besides z.
    Any cohort will do. Here with the mirror map |x|²/2; the paper allows others.

    >>> FedDA(step_size=0.1, local_steps=10).server_step_size
    1.0

    Reference: yuan2021, Algorithm 3.
    """

    step_size: float = real(above=0)
    local_steps: int = 1
    server_step_size: float = real(1.0, above=0)

    class State(NamedTuple):
        z: Broadcast[Vector]
        e: Broadcast[Any]  # elapsed: the sum of the step sizes so far
        dz: Reported[Vector]  # what the client's round changed
        de: Reported[Any]

    def prox_steps(self) -> dict[str, Any]:
        return {"the prox weight, which grows by step_size with every step,": math.inf}

    def init_server(self, problem: Any, x0: Vector) -> State:
        return self.State(z=x0, e=0.0, dz=x0.zeros(), de=0.0)

    def local_step(self, oracle: CompositeOracle, start: State, state: State) -> State:
        x = oracle.prox(state.z, state.e)
        return state._replace(z=state.z - self.step_size * oracle.grad(x), e=state.e + self.step_size)

    def local_end(self, oracle: CompositeOracle, start: State, state: State) -> State:
        return state._replace(dz=state.z - start.z, de=state.e - start.e)

    def server_step(self, problem: Any, start: State, merged: State, cohort: Cohort) -> State:
        step = self.server_step_size
        return merged._replace(z=start.z + step * merged.dz, e=start.e + step * merged.de)

    def solution(self, problem: Any, state: State) -> Vector:
        return problem.prox(state.z, state.e)
