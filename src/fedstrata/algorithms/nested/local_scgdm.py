"""LocalSCGDM: local steps with a running mean of the inner level and of the gradient."""

from typing import Any, NamedTuple

from fedstrata.algorithm import real
from fedstrata.algorithms.nested.base import NestedMethod, first_products, first_values
from fedstrata.placement import Averaged
from fedstrata.problems.nested import NestedOracle
from fedstrata.vector import Vector


class LocalSCGDM(NestedMethod):
    r"""Local stochastic compositional gradient descent with momentum, for two levels, as printed.

    $$ x \gets x - \gamma\eta \, v, \qquad h \gets (1 - \beta\eta) h + \beta\eta \, F_i^{(1)}(x; \xi_1) $$
    $$ v \gets (1 - \alpha\eta) v + \alpha\eta \, J_i^{(1)}(x; \xi_1)^\top \nabla F_i^{(2)}(h; \xi_2) $$

    After p such steps h, v and x are averaged.

    step_size: γη. value_momentum: βη, the weight of a new value in h. momentum: αη, the weight of a new gradient in v;
    1 forgets the past, for both. local_steps: p. init_batch_size: examples for the first estimates (None: those of a
    step).

    Converges to a stationary point where all clients are alike and steps look at all data. Where they differ it does
    not, however small η is: it multiplies a client's Jacobian with that client's outer gradient, so with one local step
    and η → 0 it stops where $\sum_i p_i J_i^\top \nabla F_i^{(2)}(\bar F^{(1)}(x)) = 0$, which is neither the global
    nor the client coupling. That point is the right one when the outer gradient is the same function for all clients;
    the error is then in proportion to η. Nor is it exact for the client-coupled problems (robust learning,
    meta-learning) on which papers use it as a baseline, since h is averaged over clients. One sample ξ_1 serves value
    and Jacobian, a bias in proportion to βη. With one client and all data it is not gradient descent, as h and v lag
    behind, unless both weights are 1. Sends 2 d_0 + d_1 numbers each way. With a regulariser the step in x is a
    proximal one; that is ours.

    >>> LocalSCGDM(step_size=0.01, value_momentum=0.3, momentum=0.2, local_steps=5).momentum
    0.2

    Reference: gao2022, in the form of Algorithm 2 of gao2024.
    """

    step_size: float = real(above=0)
    value_momentum: float = real(above=0, at_most=1)
    momentum: float = real(above=0, at_most=1)
    local_steps: int = 1
    init_batch_size: int | None = None

    class State(NamedTuple):
        x: Averaged[Vector]
        h: Averaged[Vector]  # the running mean of the inner level
        v: Averaged[Vector]  # and of the gradient

    def check(self, problem: Any) -> None:
        if len(problem.levels) != 2:
            raise ValueError(
                f"LocalSCGDM is for two levels, an inner and an outer one, and this problem has {len(problem.levels)}; "
                "use a method for any number of them (TrackedSCGD, FedDRSCGD, SMVR, SCSC, NLASG)"
            )
        super().check(problem)

    def init_server(self, problem: Any, x0: Vector) -> State:
        return self.State(x=x0, h=problem.zeros(1), v=x0.zeros())

    def init_client(self, oracle: NestedOracle, view: State) -> State:
        sample = oracle if self.init_batch_size is None else oracle.fresh(0, self.init_batch_size)
        (h,) = first_values(sample, view.x)
        return view._replace(h=h, v=first_products(sample, (view.x, h))[0])

    def local_step(self, oracle: NestedOracle, start: State, state: State) -> State:
        x = oracle.prox(state.x - self.step_size * state.v, self.step_size)
        h = (1 - self.value_momentum) * state.h + self.value_momentum * oracle.value(1, x)
        gradient = oracle.pull(1, x, oracle.pull(2, h))
        return state._replace(x=x, h=h, v=(1 - self.momentum) * state.v + self.momentum * gradient)

    def solution(self, problem: Any, state: State) -> Vector:
        return state.x
