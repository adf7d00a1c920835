"""FedNMap: corrected local steps on the normal map, which reach the optimum of a composite problem."""

import math
from typing import NamedTuple

from fedstrata.algorithms.regularized.base import Composite, ProximalMethod
from fedstrata.base.directions import Direction
from fedstrata.core.algorithm import Cohort
from fedstrata.core.hyperparameters import real, whole
from fedstrata.core.placement import Broadcast, Local, Reported
from fedstrata.core.vector import Scalar, Vector
from fedstrata.problems.base import CompositeOracle
from fedstrata.problems.composite import CompositeProblem


class FedNMap(ProximalMethod):
    r"""Local steps on the normal map of f + φ, corrected for what makes a client different from the others.

    $$ x = \mathrm{prox}_{\gamma\varphi}(z), \qquad
       z_i \gets z_i - \eta_a \big[ \nabla f_i(\mathrm{prox}_{\gamma\varphi}(z_i); \xi_i) + \tfrac{1}{\gamma}(z - x)
       + c_i \big] \quad (Q \text{ times from } z) $$
    $$ y_i = \frac{z - z_i}{\eta_a Q}, \qquad z \gets z - \eta_s \eta_a Q \, \bar y, \qquad
       c_i \gets c_i - y_i + \bar y $$

    Args:
        step_size: η_a, the step of the clients; constant within a round (schedule it `fs.per_round`).
        local_steps: Q, the steps of a client in a round; every client takes all of them.
        gamma: γ of the prox, free of the step sizes; a number below 1/ρ, not a schedule.
        server_step_size: η_s, the step of the server; η_s η_a Q must stay below about 2γ.

    - *Converges to* a stationary point with constant steps, however different the clients are, for smooth f and weakly
      convex φ: with full batches exactly, else down to a noise that shrinks with the number of clients and of local
      steps.
    - *Does not* settle where η_s η_a Q is above about 2γ.
    - With φ = 0 it is SCAFFOLD (option II) step for step, for any γ.
    - One vector goes up; SCAFFOLD's classical message has two. Two go down. With full participation one would do,
      since a client can compute ȳ from two successive z.
    - The paper has full participation only. Here a client keeps its last mean gradient h_i and the server the mean h
      over all clients. Then c_i = h − h_i, which is the paper's c_i with full participation, and $\sum_i p_i c_i = 0$
      holds with any cohort and any weights.
    - `fedstrata.algorithms.regularized.theory` has the steps of the paper's theorems.

    >>> FedNMap(step_size=0.1, local_steps=10, gamma=4.0).server_step_size
    1.0

    Reference: huang2026, Algorithm 1.
    """

    step_size: float = real(above=0)
    local_steps: int = whole(1, at_least=1)
    gamma: float = real(1.0, above=0)
    server_step_size: float = real(1.0, above=0)

    class State(NamedTuple):
        z: Broadcast[Vector]  # at a client that works, z_i
        h: Broadcast[Vector]  # the mean of h_i over all clients; at a client that works, (z − x)/γ is added to it
        h_i: Local[Vector]  # the mean gradient of the client's last round; c_i = h − h_i
        y: Reported[Vector]  # y_i, the direction of the client's round; merged, ȳ

    def check(self, problem: CompositeProblem) -> None:
        if callable(self.gamma):
            raise ValueError("FedNMap: gamma must be a number; it defines the solution prox(z), so it cannot change")
        self.check_step(problem, "gamma", self.gamma)
        if math.isinf(problem.regularizer.rho):
            raise ValueError(
                f"FedNMap: {problem.regularizer!r} is not weakly convex, so no gamma < 1/rho exists and the normal map "
                "means nothing; use a weakly convex relative (fs.prox.MCP, fs.prox.SCAD)"
            )

    def init_server(self, problem: CompositeProblem, x0: Vector) -> State:
        zero = x0.zeros()
        return self.State(z=x0, h=zero, h_i=zero, y=zero)

    def pull(self, problem: Composite, z: Vector) -> Vector:
        """(z − x)/γ, the regulariser's part of the normal map."""
        x = problem.prox(z, self.gamma)
        return (z - x) / self.gamma

    # Lines of the paper's listing.

    def local_begin(self, oracle: CompositeOracle, start: State, state: State) -> State:  # 7–10: z, c_i, x
        return state._replace(h=start.h + self.pull(oracle, start.z))

    def local_step(self, oracle: CompositeOracle, start: State, state: State) -> State:  # 12–14
        x_i = oracle.prox(state.z, self.gamma)
        return state._replace(z=state.z - self.step_size * (oracle.grad(x_i) + state.h - start.h_i))

    def local_end(self, oracle: CompositeOracle, start: State, state: State) -> State:  # 16
        y = (start.z - state.z) / (self.step_size * self.local_steps)
        return state._replace(y=y, h_i=y - (state.h - start.h_i))

    def server_step(self, problem: CompositeProblem, start: State, merged: State, cohort: Cohort) -> State:  # 19
        step = self.server_step_size * self.step_size * self.local_steps
        h = merged.y - self.pull(problem, start.z)
        return merged._replace(z=start.z - step * merged.y, h=start.h + cohort.share * (h - start.h))

    def solution(self, problem: CompositeProblem, state: State) -> Vector:
        return problem.prox(state.z, self.gamma)

    def diagnose(self, problem: CompositeProblem, state: State, x: Vector, gradient: Vector) -> dict[str, Scalar]:
        return {"normal_map": (gradient + (state.z - x) / self.gamma).norm()}

    def modes(self) -> dict[str, Direction]:
        return {"normal_map": "min"}
