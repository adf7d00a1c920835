"""A skeleton to copy: momentum at the server (Hsu et al. 2019, FedAvgM). See docs/add_an_algorithm.md."""

from typing import ClassVar, NamedTuple

from fedstrata.core.algorithm import Algorithm, Cohort
from fedstrata.core.hyperparameters import real, whole
from fedstrata.core.placement import Broadcast, Reported, Server
from fedstrata.core.vector import Vector
from fedstrata.problems.base import Problem, SmoothOracle


class Skeleton(Algorithm):
    r"""One line that states what it does.

    $$ x_i \gets x_i - \eta \nabla f_i(x_i; \xi_i) \quad (Q \text{ times from } x), \qquad
       v \gets \beta v + \sum_i p_i (x_i - x), \qquad x \gets x + v $$

    Args:
        step_size: η, the step of the clients.
        local_steps: Q, the steps of a client in a round.
        momentum: β, the share of the last change that is kept.

    - *Converges to* …
    - *Does not* …

    >>> Skeleton(step_size=0.1).momentum
    0.9

    Reference: hsu2019, Section 4.3.
    """

    oracle: ClassVar[type] = SmoothOracle

    step_size: float = real(above=0)
    local_steps: int = whole(1, at_least=1)
    momentum: float = real(0.9, at_least=0, below=1)

    class State(NamedTuple):
        x: Broadcast[Vector]  # the model
        dx: Reported[Vector]  # what a client's round changed
        v: Server[Vector]  # momentum

    def init_server(self, problem: Problem, x0: Vector) -> State:
        return self.State(x=x0, dx=x0.zeros(), v=x0.zeros())

    def local_step(self, oracle: SmoothOracle, start: State, state: State) -> State:
        return state._replace(x=state.x - self.step_size * oracle.grad(state.x))

    def local_end(self, oracle: SmoothOracle, start: State, state: State) -> State:
        return state._replace(dx=state.x - start.x)

    def server_step(self, problem: Problem, start: State, merged: State, cohort: Cohort) -> State:
        v = self.momentum * start.v + merged.dx
        return merged._replace(x=start.x + v, v=v)

    def solution(self, problem: Problem, state: State) -> Vector:
        return state.x
