"""SCAFFOLD: control variates that take the client drift out of FedAvg."""

from typing import Any, NamedTuple

from fedstrata.algorithm import Algorithm, Cohort, real
from fedstrata.placement import Broadcast, Local, Reported
from fedstrata.problems.base import SmoothOracle
from fedstrata.vector import Vector


class Scaffold(Algorithm):
    r"""Local SGD steps corrected by the difference between the average and the client's own past gradient.

    $$ x_i \gets x_i - \eta_a \big( \nabla f_i(x_i; \xi_i) - c_i + c \big) \quad (Q \text{ times from } x) $$
    $$ c_i^+ = c_i - c + \frac{x - x_i}{\eta_a Q}, \qquad
       x \gets x + \eta_s \frac{\sum_{i \in S} p_i (x_i - x)}{\sum_{i \in S} p_i}, \qquad
       c \gets c + \sum_{i \in S} p_i (c_i^+ - c_i) $$

    step_size: η_a. local_steps: Q. server_step_size: η_s.

    Converges to the minimum with constant steps, however different the clients are (with full batches exactly), for
    any weights $p_i$ and any cohort S: $c = \sum_i p_i c_i$ holds throughout. This is option II of the paper, which has
    equal weights; within a round the step size must be constant (schedule it `fs.per_round`) and every client must
    take all Q steps. Sends twice what FedAvg sends.

    >>> Scaffold(step_size=0.1, local_steps=10).server_step_size
    1.0

    Reference: karimireddy2020, Algorithm 1, option II.
    """

    step_size: float = real(above=0)
    local_steps: int = 1
    server_step_size: float = real(1.0, above=0)

    class State(NamedTuple):
        x: Broadcast[Vector]
        c: Broadcast[Vector]  # the average control variate
        c_i: Local[Vector]  # the client's own
        dx: Reported[Vector]  # what the client's round changed
        dc: Reported[Vector]

    def init_server(self, problem: Any, x0: Vector) -> State:
        zero = x0.zeros()
        return self.State(x=x0, c=zero, c_i=zero, dx=zero, dc=zero)

    def local_step(self, oracle: SmoothOracle, start: State, state: State) -> State:
        return state._replace(x=state.x - self.step_size * (oracle.grad(state.x) - start.c_i + start.c))

    def local_end(self, oracle: SmoothOracle, start: State, state: State) -> State:
        c_i = start.c_i - start.c + (start.x - state.x) / (self.step_size * self.local_steps)
        return state._replace(c_i=c_i, dx=state.x - start.x, dc=c_i - start.c_i)

    def server_step(self, problem: Any, start: State, merged: State, cohort: Cohort) -> State:
        return merged._replace(x=start.x + self.server_step_size * merged.dx, c=start.c + cohort.share * merged.dc)

    def solution(self, problem: Any, state: State) -> Vector:
        return state.x
