"""ComFedL: local gradient steps on the composed sample functions."""

from typing import Any, NamedTuple

from fedstrata.algorithm import Cohort, real
from fedstrata.algorithms.nested.base import NestedMethod, first_products, first_values
from fedstrata.placement import Averaged
from fedstrata.problems.nested import NestedOracle
from fedstrata.vector import Vector, where


class ComFedL(NestedMethod):
    r"""Local steps along the plug-in gradient, without memory: FedAvg on a composition, for any K.

    $$ x_i \gets x_i - \eta \, \nabla g_i(x_i; B_1)^\top \nabla f_i\big( g_i(x_i; B_1); B_2 \big) \quad
       (q \text{ times from } x), \qquad x \gets \sum_i p_i x_i $$

    and with K levels the product of all Jacobians, each level at the value of the one below on its own sample.

    step_size: η. local_steps: q.

    Converges to a stationary point of the client-coupled objective with all data and q = 1, where it is gradient
    descent. A sample of $B_1$ inside $f_i$ makes the direction biased, and without memory the bias stays: it falls with
    the batch and not with the step, which is why the paper takes batches of order ε⁻⁴. For q > 1 there is FedAvg's
    drift in proportion to the step. The rule is from memory of the paper, whose listing was not at hand; that it
    averages after every iteration is what others say of it, hence the default of one local step. With a regulariser
    every step is a proximal one, and the last one's prox is that of the mean, at the server, so that q = 1 stays exact.

    >>> ComFedL(step_size=0.1).local_steps
    1

    Reference: huang2021, reconstructed.
    """

    step_size: float = real(above=0)
    local_steps: int = 1

    solves = "client"

    class State(NamedTuple):
        x: Averaged[Vector]

    def init_server(self, problem: Any, x0: Vector) -> State:
        return self.State(x=x0)

    def local_step(self, oracle: NestedOracle, start: State, state: State) -> State:
        points = (state.x, *first_values(oracle, state.x))
        direction = first_products(oracle, points)[0]
        x = state.x - self.step_size * direction
        last = oracle.clock.local_step == self.local_steps - 1
        return state._replace(x=where(last, x, oracle.prox(x, self.step_size)))

    def server_step(self, problem: Any, start: State, merged: State, cohort: Cohort) -> State:
        return merged._replace(x=problem.prox(merged.x, self.step_size))

    def solution(self, problem: Any, state: State) -> Vector:
        return state.x
