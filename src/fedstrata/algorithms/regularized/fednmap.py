"""FedNMap: corrected local steps on the normal map, which reach the optimum of a composite problem."""

import math
from typing import Any, NamedTuple

from fedstrata.algorithm import Cohort, real
from fedstrata.algorithms.regularized.base import ProximalMethod
from fedstrata.directions import Direction
from fedstrata.placement import Broadcast, Local, Reported
from fedstrata.problems.base import CompositeOracle
from fedstrata.vector import Vector


class FedNMap(ProximalMethod):
    r"""Local steps on the normal map of f + φ, corrected for what makes a client different from the others.

    $$ x = \mathrm{prox}_{\gamma\varphi}(z), \qquad
       z_i \gets z_i - \eta_a \big[ \nabla f_i(\mathrm{prox}_{\gamma\varphi}(z_i); \xi_i) + \tfrac{1}{\gamma}(z - x)
       + c_i \big] \quad (Q \text{ times from } z) $$
    $$ y_i = \frac{z - z_i}{\eta_a Q}, \qquad z \gets z - \eta_s \eta_a Q \, \bar y, \qquad
       c_i \gets c_i - y_i + \bar y $$

    step_size: η_a. local_steps: Q. gamma: γ, free of the step sizes; γ < 1/ρ, and η_s η_a Q below about 2γ or it
    does not settle. server_step_size: η_s.

    Converges to a stationary point with constant steps, however different the clients are, for smooth f and weakly
    convex φ (with full batches exactly; else down to a noise that shrinks with the number of clients and of local
    steps). With φ = 0 it is SCAFFOLD (option II) step for step, for any γ. Sends one vector up, where SCAFFOLD's
    classical message has two; down go two, though with full participation one would do, since a client could work
    out ȳ from two successive z. The paper has full participation only. Here clients keep their last mean gradient h_i
    and the server the mean h over all clients, which gives the same c_i = h − h_i with full participation, and keeps
    $\sum_i p_i c_i = 0$ with any cohort and any weights. γ must be a number, not a schedule; within
    a round the step size must be constant (schedule it `fs.per_round`) and every client must take all Q steps.

    >>> FedNMap(step_size=0.1, local_steps=10, gamma=4.0).server_step_size
    1.0

    Reference: huang2026, Algorithm 1.
    """

    step_size: float = real(above=0)
    local_steps: int = 1
    gamma: float = real(1.0, above=0)
    server_step_size: float = real(1.0, above=0)

    class State(NamedTuple):
        z: Broadcast[Vector]
        h: Broadcast[Vector]  # the mean of h_i over all clients; with it c_i = h − h_i
        h_i: Local[Vector]  # the client's mean gradient in its last round
        y: Reported[Vector]  # the direction that the client took; while it works, what stays the same in every step

    def check(self, problem: Any) -> None:
        if callable(self.gamma):
            raise ValueError("FedNMap: gamma must be a number; it defines the solution prox(z), so it cannot change")
        self.check_step(problem, "gamma", self.gamma)
        if math.isinf(problem.regularizer.rho):
            raise ValueError(
                f"FedNMap: {problem.regularizer!r} is not weakly convex, so no gamma < 1/rho exists and the normal map "
                "means nothing; use a weakly convex relative (fs.prox.MCP, fs.prox.SCAD)"
            )

    def init_server(self, problem: Any, x0: Vector) -> State:
        zero = x0.zeros()
        return self.State(z=x0, h=zero, h_i=zero, y=zero)

    def pull(self, problem: Any, z: Vector) -> Vector:
        """(z − x)/γ, the regulariser's part of the normal map."""
        return (z - problem.prox(z, self.gamma)) / self.gamma

    def local_begin(self, oracle: CompositeOracle, start: State, state: State) -> State:
        c_i = start.h - start.h_i
        return state._replace(y=self.pull(oracle, start.z) + c_i)

    def local_step(self, oracle: CompositeOracle, start: State, state: State) -> State:
        g = oracle.grad(oracle.prox(state.z, self.gamma))
        return state._replace(z=state.z - self.step_size * (g + state.y))

    def local_end(self, oracle: CompositeOracle, start: State, state: State) -> State:
        y = (start.z - state.z) / (self.step_size * self.local_steps)
        return state._replace(y=y, h_i=y - state.y)

    def server_step(self, problem: Any, start: State, merged: State, cohort: Cohort) -> State:
        step = self.server_step_size * self.step_size * self.local_steps
        h = merged.y - self.pull(problem, start.z)
        return merged._replace(z=start.z - step * merged.y, h=start.h + cohort.share * (h - start.h))

    def solution(self, problem: Any, state: State) -> Vector:
        return problem.prox(state.z, self.gamma)

    def diagnose(self, problem: Any, state: State, x: Vector, gradient: Vector) -> dict[str, Any]:
        return {"normal_map": (gradient + (state.z - x) / self.gamma).norm()}

    def modes(self) -> dict[str, Direction]:
        return {"normal_map": "min"}

    @classmethod
    def theory(
        cls,
        *,
        smoothness: float,
        gap: float,
        noise: float,
        clients: int,
        rounds: int,
        local_steps: int,
        weak_convexity: float = 0.0,
    ) -> "FedNMap":
        """Steps of (15), for nonconvex f, capped by the bounds of Theorem 5.

        smoothness: L of every f_i. gap: Δ = ψ(x_0) − inf ψ. noise: σ, the deviation of one stochastic gradient.
        weak_convexity: ρ of φ. Safe and small: expect thousands of rounds.

        >>> method = FedNMap.theory(smoothness=1.0, gap=1.0, noise=1.0, clients=20, rounds=1000, local_steps=10)
        >>> method.gamma
        0.2
        """
        curvature, variance = weak_convexity + smoothness, noise**2
        gamma = 1 / (5 * curvature)
        m = max(1, math.ceil(math.sqrt(variance * rounds / (9 * curvature * gap * clients * local_steps))))
        cap = (1 - gamma * weak_convexity) / (100 * math.sqrt(smoothness**2 + 1 / gamma**2))
        both, local = cap / m, cap / (local_steps * math.sqrt(m))
        if variance > 0:  # without noise (15) has no bound, and the caps decide
            both = min(both, math.sqrt(clients * local_steps * gap / (variance * rounds * curvature)) / 320)
            first = 380 * (variance * rounds * local_steps**3 * curvature**3 / (clients * gap)) ** 0.25
            local = min(local, 1 / (first + 240 * math.sqrt(curvature * rounds * local_steps * variance / gap)))
        return cls(local, local_steps, gamma, both / (local * local_steps))

    @classmethod
    def theory_pl(
        cls,
        *,
        smoothness: float,
        pl: float,
        clients: int,
        rounds: int,
        local_steps: int,
        weak_convexity: float = 0.0,
        server_step_size: float = 1.0,
    ) -> "FedNMap":
        """Steps of (19), under the Polyak–Łojasiewicz condition with modulus μ (`pl`), capped by Theorem 8's bounds.

        >>> FedNMap.theory_pl(smoothness=1.0, pl=1.0, clients=20, rounds=1000, local_steps=10).gamma
        0.1
        """
        curvature = smoothness + weak_convexity + pl
        m = math.ceil(pl * rounds / (smoothness + weak_convexity))
        local = min(math.log(clients * local_steps * rounds) / (120 * rounds), 1 / 96) / (local_steps * curvature)
        both = min(server_step_size * local * local_steps, 1 / (120 * m * curvature))
        return cls(local, local_steps, 1 / (5 * curvature), both / (local * local_steps))
