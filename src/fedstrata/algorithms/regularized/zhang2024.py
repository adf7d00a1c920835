"""The method of Zhang, Hu and Johansson (2024): gradient tracking with a prox at every local step."""

from typing import NamedTuple

from fedstrata.algorithms.regularized.base import ProximalMethod
from fedstrata.core.algorithm import Cohort
from fedstrata.core.hyperparameters import real, whole
from fedstrata.core.placement import Broadcast, Local, Reported
from fedstrata.core.vector import Vector
from fedstrata.problems.base import CompositeOracle
from fedstrata.problems.composite import CompositeProblem


class Zhang2024(ProximalMethod):
    r"""Corrected local steps whose prox grows with the step, so that a client at the optimum stays there.

    $$ z_i \gets z_i - \eta_a \big( \nabla f_i(x_i; \xi_i) + c_i \big), \qquad
       x_i = \mathrm{prox}_{(\ell+1)\eta_a\varphi}(z_i), \quad \ell = 0 \dots Q-1 \text{ from } z_i = x_i = x $$
    $$ z = x + \eta_s \Big( \sum_i p_i z_i - x \Big), \qquad
       c_i = \frac{x - z}{\hat\eta} - \frac{1}{Q} \sum_\ell \nabla f_i(x_i^\ell), \qquad
       x \gets \mathrm{prox}_{\hat\eta\varphi}(z), \qquad \hat\eta = \eta_a \eta_s Q $$

    Args:
        step_size: η_a, the step of the clients; constant within a round (schedule it `fs.per_round`).
        local_steps: Q, the steps of a client in a round; every client takes all of them.
        server_step_size: η_s, the step of the server.

    - *Converges to* the optimum of f + φ with constant steps (full batches), however different the clients are.
    - *Does not* leave the prox parameter free: it is tied to the step, η̂. FedNMap's is free.
    - The FedNMap paper, which restates the method in its (30)–(34), drops φ in (30) and (34) and has γ for η̂ in (11).
      Here the prox is that of η̂φ, and x in the correction is the old one.
    - With φ = 0 it is SCAFFOLD (option II).
    - The papers have full participation only. Here a client keeps its mean gradient h_i, the server sends the mean h
      over all clients, and c_i = h − h_i. That is the same with full participation, and $\sum_i p_i c_i = 0$ holds with
      any cohort and any weights.
    - Two vectors go down. With full participation one would do, since h = (x − z)/η̂; the ledger counts the two that
      always work.

    >>> Zhang2024(step_size=0.1, local_steps=10).server_step_size
    1.0

    Reference: zhang2024, in the form of equations (30)–(34) of huang2026.
    """

    step_size: float = real(above=0)
    local_steps: int = whole(1, at_least=1)
    server_step_size: float = real(1.0, above=0)

    class State(NamedTuple):
        x: Broadcast[Vector]  # while a client works on it: its z_i
        h: Broadcast[Vector]  # the mean of h_i over all clients; with it c_i = h − h_i
        h_i: Local[Vector]  # the client's mean gradient in its last round
        y: Reported[Vector]  # the direction that the client took

    def prox_steps(self) -> dict[str, float]:
        whole_round = self.step_size * self.local_steps
        return {
            "the last local prox step, step_size * local_steps": whole_round,
            "step_size * local_steps * server_step_size": whole_round * self.server_step_size,
        }

    def init_server(self, problem: CompositeProblem, x0: Vector) -> State:
        zero = x0.zeros()
        step = self.step_size * self.local_steps * self.server_step_size
        return self.State(x=problem.prox(x0, step), h=zero, h_i=zero, y=zero)

    def local_step(self, oracle: CompositeOracle, start: State, state: State) -> State:
        done = oracle.clock.local_step.astype(state.x.scalar_dtype)
        x_i = oracle.prox(state.x, done * self.step_size)
        return state._replace(x=state.x - self.step_size * (oracle.grad(x_i) + start.h - start.h_i))

    def local_end(self, oracle: CompositeOracle, start: State, state: State) -> State:
        y = (start.x - state.x) / (self.step_size * self.local_steps)
        return state._replace(y=y, h_i=y - (start.h - start.h_i))

    def server_step(self, problem: CompositeProblem, start: State, merged: State, cohort: Cohort) -> State:
        step = self.step_size * self.local_steps * self.server_step_size
        x = problem.prox(start.x - step * merged.y, step)
        return merged._replace(x=x, h=start.h + cohort.share * (merged.y - start.h))

    def solution(self, problem: CompositeProblem, state: State) -> Vector:
        return state.x
