"""ComFedL: local gradient steps on the composed sample functions."""

from typing import NamedTuple

from fedstrata.algorithms.nested.base import NestedMethod
from fedstrata.core.algorithm import Cohort
from fedstrata.core.hyperparameters import real, whole
from fedstrata.core.levels import Levels
from fedstrata.core.placement import Averaged
from fedstrata.core.vector import Vector, where
from fedstrata.problems.nested import Nested, NestedOracle


class ComFedL(NestedMethod):
    r"""Local steps along the plug-in gradient, without memory: FedAvg on a composition, for any K.

    $$ x_i \gets x_i - \eta \, \nabla g_i(x_i; B_1)^\top \nabla f_i\big( g_i(x_i; B_1); B_2 \big) \quad
       (q \text{ times from } x), \qquad x \gets \sum_i p_i x_i $$

    and with K levels the product of all Jacobians, each level at the value of the one below on its own sample.

    The rule is from memory of the paper, whose listing was not available. Others describe it as averaging after every
    iteration, hence the default of one local step. With a regulariser every step is a proximal one; the last prox of a
    round is that of the mean, at the server, so that q = 1 stays exact.

    Args:
        step_size: η.
        local_steps: q.

    Converges to:
        - a stationary point of the client-coupled objective with all data and q = 1, where it is gradient descent.

    Does not:
        - converge to it on samples: a sample of $B_1$ inside $f_i$ makes the direction biased, and without memory the
          bias stays. It falls with the batch and not with the step, which is why the paper takes batches of order ε⁻⁴.
        - converge to it for q > 1: FedAvg's drift remains, in proportion to the step.

    >>> ComFedL(step_size=0.1).local_steps
    1

    Reference: huang2021, reconstructed.
    """

    step_size: float = real(above=0)
    local_steps: int = whole(1, at_least=1)

    solves = "client"

    class State(NamedTuple):
        x: Averaged[Vector]

    def init_server(self, problem: Nested, x0: Vector) -> State:
        return self.State(x=x0)

    def local_step(self, oracle: NestedOracle, start: State, state: State) -> State:
        K, h = oracle.levels, Levels(below=state.x)
        for k in range(1, K):
            h[k] = oracle.value(k, h[k - 1])
        v = oracle.pull(K, h[K - 1])
        for k in range(K - 1, 0, -1):
            v = oracle.pull(k, h[k - 1], v)
        x = state.x - self.step_size * v
        last = oracle.clock.local_step == self.local_steps - 1
        return state._replace(x=where(last, x, oracle.prox(x, self.step_size)))

    def server_step(self, problem: Nested, start: State, merged: State, cohort: Cohort) -> State:
        return merged._replace(x=problem.prox(merged.x, self.step_size))

    def solution(self, problem: Nested, state: State) -> Vector:
        return state.x
