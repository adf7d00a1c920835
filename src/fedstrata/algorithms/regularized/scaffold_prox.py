"""SCAFFOLD with a proximal step at the server."""

from typing import Any

from fedstrata.algorithm import Cohort
from fedstrata.algorithms.average.scaffold import Scaffold
from fedstrata.algorithms.regularized.base import ProximalMethod
from fedstrata.problems.base import CompositeOracle
from fedstrata.vector import Vector


class ScaffoldServerProx(Scaffold, ProximalMethod):
    r"""SCAFFOLD (option II) on the smooth part, then one proximal step of the whole round's length at the server.

    $$ x_i \gets x_i - \eta_a \big( \nabla f_i(x_i; \xi_i) - c_i + c \big) \quad (Q \text{ times from } x), \qquad
       x \gets \mathrm{prox}_{\eta_s \eta_a Q \varphi} \Big( x + \eta_s \sum_i p_i (x_i - x) \Big) $$

    step_size: η_a. local_steps: Q. server_step_size: η_s.

    Converges near the optimum of f + φ, but off by O(η_a Q): the corrections take out what differs between clients, not
    that all of them walk away from a point where ∇f is not zero. FedNMap and Zhang2024 repair exactly that. Control
    variates and partial participation as in SCAFFOLD, messages too.

    >>> ScaffoldServerProx(step_size=0.1, local_steps=10).server_step_size
    1.0

    Reference: karimireddy2020, Algorithm 1, option II, with a prox added.
    """

    def prox_steps(self) -> dict[str, Any]:
        name = "step_size * local_steps * server_step_size"
        return {name: self.step_size * self.local_steps * self.server_step_size}

    def init_server(self, problem: Any, x0: Vector) -> Scaffold.State:
        step = self.step_size * self.local_steps * self.server_step_size
        return super().init_server(problem, x0)._replace(x=problem.prox(x0, step))

    def local_step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, oracle: CompositeOracle, start: Scaffold.State, state: Scaffold.State
    ) -> Scaffold.State:
        return state._replace(x=state.x - self.step_size * (oracle.grad(state.x) - start.c_i + start.c))

    def server_step(
        self, problem: Any, start: Scaffold.State, merged: Scaffold.State, cohort: Cohort
    ) -> Scaffold.State:
        after = super().server_step(problem, start, merged, cohort)
        step = self.step_size * self.local_steps * self.server_step_size
        return after._replace(x=problem.prox(after.x, step))
