"""LocalSCGDM: local steps with a running mean of the inner level and of the gradient."""

from typing import NamedTuple

from fedstrata.algorithms.nested.base import NestedMethod, check_two_levels, first_products, first_sample, first_values
from fedstrata.core.hyperparameters import real, whole
from fedstrata.core.placement import Averaged
from fedstrata.core.vector import Vector
from fedstrata.problems.nested import Nested, NestedOracle


class LocalSCGDM(NestedMethod):
    r"""Local stochastic compositional gradient descent with momentum, for two levels, as published.

    $$ x \gets x - \gamma\eta \, v, \qquad h \gets (1 - \beta\eta) h + \beta\eta \, F_i^{(1)}(x; \xi_1) $$
    $$ v \gets (1 - \alpha\eta) v + \alpha\eta \, J_i^{(1)}(x; \xi_1)^\top \nabla F_i^{(2)}(h; \xi_2) $$

    After p such steps h, v and x are averaged. A message has 2 d_0 + d_1 numbers each way. With a regulariser the step
    in x is a proximal one, which is not in the papers.

    Args:
        step_size: γη.
        value_momentum: βη, the weight of a new value in h; 1 forgets the past.
        momentum: αη, the weight of a new gradient in v; 1 forgets the past.
        local_steps: p.
        init_batch_size: examples for the first estimates (None: those of a step).

    Converges to:
        - a stationary point where all clients are alike and steps look at all data;
        - a point off by an error in proportion to η where clients differ but the outer gradient is the same function
          for all of them.

    Does not:
        - converge to it where clients differ, however small η is: it multiplies a client's Jacobian with that client's
          outer gradient. With one local step and η → 0 it stops where
          $\sum_i p_i J_i^\top \nabla F_i^{(2)}(\bar F^{(1)}(x)) = 0$, which is neither the global nor the client
          coupling.
        - solve the client-coupled problems (robust learning, meta-learning) on which papers use it as a baseline,
          since h is averaged over clients.
        - converge to it exactly on samples: one sample ξ_1 serves value and Jacobian, a bias in proportion to βη.
        - equal gradient descent with one client and all data, as h and v lag behind, unless both weights are 1.

    >>> LocalSCGDM(step_size=0.01, value_momentum=0.3, momentum=0.2, local_steps=5).momentum
    0.2

    Reference: gao2022, in the form of Algorithm 2 of gao2024.
    """

    step_size: float = real(above=0)
    value_momentum: float = real(above=0, at_most=1)
    momentum: float = real(above=0, at_most=1)
    local_steps: int = whole(1, at_least=1)
    init_batch_size: int | None = whole(None, at_least=1)

    class State(NamedTuple):
        x: Averaged[Vector]
        h: Averaged[Vector]  # the running mean of the inner level
        v: Averaged[Vector]  # and of the gradient

    def check(self, problem: Nested) -> None:
        check_two_levels(self, problem, "TrackedSCGD, FedDRSCGD, SMVR, SCSC or NLASG")
        super().check(problem)

    def init_server(self, problem: Nested, x0: Vector) -> State:
        return self.State(x=x0, h=problem.zeros(1), v=x0.zeros())

    def init_client(self, oracle: NestedOracle, view: State) -> State:
        sample = first_sample(oracle, self.init_batch_size)
        values = first_values(sample, view.x)
        v, _ = first_products(sample, view.x, values)
        return view._replace(h=values[0], v=v)

    def local_step(self, oracle: NestedOracle, start: State, state: State) -> State:
        beta_eta, alpha_eta = self.value_momentum, self.momentum
        x = oracle.prox(state.x - self.step_size * state.v, self.step_size)
        h = (1 - beta_eta) * state.h + beta_eta * oracle.value(1, x)
        v = (1 - alpha_eta) * state.v + alpha_eta * oracle.pull(1, x, oracle.pull(2, h))
        return state._replace(x=x, h=h, v=v)

    def solution(self, problem: Nested, state: State) -> Vector:
        return state.x
