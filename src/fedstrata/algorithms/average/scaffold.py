"""SCAFFOLD: FedAvg with control variates that remove client drift."""

from typing import ClassVar, NamedTuple

from fedstrata.core.algorithm import Algorithm, Cohort
from fedstrata.core.hyperparameters import real, whole
from fedstrata.core.placement import Broadcast, Local, Reported
from fedstrata.core.vector import Vector
from fedstrata.problems.base import GradientOracle, Problem, SmoothOracle


class SCAFFOLD(Algorithm):
    r"""Local SGD steps corrected by the difference between the average and the client's own past gradient.

    $$ x_i \gets x_i - \eta_a \big( \nabla f_i(x_i; \xi_i) - c_i + c \big) \quad (Q \text{ times from } x) $$
    $$ c_i^+ = c_i - c + \frac{x - x_i}{\eta_a Q}, \qquad
       x \gets x + \eta_s \frac{\sum_{i \in S} p_i (x_i - x)}{\sum_{i \in S} p_i}, \qquad
       c \gets c + \sum_{i \in S} p_i (c_i^+ - c_i) $$

    Args:
        step_size: η_a, the step of the clients; constant within a round (schedule it `fs.per_round`).
        local_steps: Q, the steps of a client in a round; every client takes all of them.
        server_step_size: η_s, the step of the server.

    - *Converges to* the minimum with constant steps, however different the clients are; with full batches exactly.
    - Any weights $p_i$ and any cohort S are allowed: $c = \sum_i p_i c_i$ holds throughout.
    - *Does not* save bytes: it sends twice what FedAvg sends.
    - This is option II of the paper, which has equal weights.

    >>> SCAFFOLD(step_size=0.1, local_steps=10).server_step_size
    1.0

    Reference: karimireddy2020, Algorithm 1, option II.
    """

    oracle: ClassVar[type] = SmoothOracle

    step_size: float = real(above=0)
    local_steps: int = whole(1, at_least=1)
    server_step_size: float = real(1.0, above=0)

    class State(NamedTuple):
        x: Broadcast[Vector]
        c: Broadcast[Vector]  # the average control variate
        c_i: Local[Vector]  # the client's own
        dx: Reported[Vector]  # what the client's round changed
        dc: Reported[Vector]

    def init_server(self, problem: Problem, x0: Vector) -> State:
        zero = x0.zeros()
        return self.State(x=x0, c=zero, c_i=zero, dx=zero, dc=zero)

    def local_step(self, oracle: GradientOracle, start: State, state: State) -> State:
        return state._replace(x=state.x - self.step_size * (oracle.grad(state.x) - start.c_i + start.c))

    def local_end(self, oracle: GradientOracle, start: State, state: State) -> State:
        c_i = start.c_i - start.c + (start.x - state.x) / (self.step_size * self.local_steps)
        return state._replace(c_i=c_i, dx=state.x - start.x, dc=c_i - start.c_i)

    def server_step(self, problem: Problem, start: State, merged: State, cohort: Cohort) -> State:
        return merged._replace(x=start.x + self.server_step_size * merged.dx, c=start.c + cohort.share * merged.dc)

    def solution(self, problem: Problem, state: State) -> Vector:
        return state.x
