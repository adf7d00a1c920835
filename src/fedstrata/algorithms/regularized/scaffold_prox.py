"""SCAFFOLD with a proximal step at the server."""

from typing import Any, ClassVar

from fedstrata.algorithms.average.scaffold import SCAFFOLD
from fedstrata.algorithms.regularized.base import ProximalMethod
from fedstrata.core.algorithm import Cohort
from fedstrata.core.vector import Vector
from fedstrata.problems.base import CompositeOracle


class SCAFFOLDServerProx(SCAFFOLD, ProximalMethod):
    r"""SCAFFOLD (option II) on the smooth part, then one proximal step of the whole round's length at the server.

    $$ x_i \gets x_i - \eta_a \big( \nabla f_i(x_i; \xi_i) - c_i + c \big) \quad (Q \text{ times from } x), \qquad
       x \gets \mathrm{prox}_{\eta_s \eta_a Q \varphi} \Big( x + \eta_s \sum_i p_i (x_i - x) \Big) $$

    Args:
        step_size: η_a, the step of the clients; constant within a round (schedule it `fs.per_round`).
        local_steps: Q, the steps of a client in a round; every client takes all of them.
        server_step_size: η_s, the step of the server.

    - *Converges to* a point near the optimum of f + φ.
    - *Does not* reach it: the limit is off by O(η_a Q). The corrections take out what differs between clients, not
      that all of them walk away from a point where ∇f is not zero. FedNMap and Zhang2024 repair exactly that.
    - Control variates, partial participation and messages as in SCAFFOLD.

    >>> SCAFFOLDServerProx(step_size=0.1, local_steps=10).server_step_size
    1.0

    Reference: karimireddy2020, Algorithm 1, option II, with a prox added.
    """

    oracle: ClassVar[type] = CompositeOracle

    def prox_steps(self) -> dict[str, float]:
        name = "step_size * local_steps * server_step_size"
        return {name: self.step_size * self.local_steps * self.server_step_size}

    # `problem` is a CompositeProblem here, which a method of SCAFFOLD, for any problem, cannot be overridden to need.
    def init_server(self, problem: Any, x0: Vector) -> SCAFFOLD.State:
        step = self.step_size * self.local_steps * self.server_step_size
        return super().init_server(problem, x0)._replace(x=problem.prox(x0, step))

    def server_step(
        self, problem: Any, start: SCAFFOLD.State, merged: SCAFFOLD.State, cohort: Cohort
    ) -> SCAFFOLD.State:
        after = super().server_step(problem, start, merged, cohort)
        step = self.step_size * self.local_steps * self.server_step_size
        return after._replace(x=problem.prox(after.x, step))
