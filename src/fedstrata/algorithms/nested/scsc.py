"""SCSC: recursive estimates of every level's value, and the Jacobians of the current sample."""

from typing import ClassVar, NamedTuple

from fedstrata.algorithms.nested.base import (
    NestedMethod,
    Vectors,
    chained,
    first_sample,
    first_values,
    jacobians,
    zero_jacobians,
    zero_values,
)
from fedstrata.core.hyperparameters import real, whole
from fedstrata.core.levels import Levels
from fedstrata.core.placement import Averaged
from fedstrata.core.vector import Vector
from fedstrata.problems.nested import Nested, NestedOracle


class SCSC(NestedMethod):
    r"""Stochastically corrected stochastic compositional gradient, for K levels and with local steps.

    $$ x \gets x - \eta \, J_1^\top \cdots J_K^\top, \qquad
       h_k \gets (1-b) \big( h_k + F_{i,k}(h_{k-1}; \xi_k) - F_{i,k}(h_{k-1}^{old}; \xi_k) \big)
       + b \, F_{i,k}(h_{k-1}; \xi_k), \qquad J_k \gets J_{i,k}(h_{k-1}; \xi_k) $$

    with $h_0 = x$ and $J_K$ a gradient. After p such steps x, all h and the J of the last step are averaged. The first
    step of the next round therefore follows the product of mean Jacobians, and the others that of the client's
    Jacobians. Whole Jacobians are sent: d_0 + Σ_{k<K} d_k + Σ_k d_k d_{k−1} numbers each way.

    The rule is from memory of the original; gao2024 only states that x, h and J are averaged every p steps. With a
    regulariser the step in x is a proximal one, which is not in the papers.

    Args:
        step_size: η.
        momentum: b, the weight of the new sample in h; 1 forgets the past.
        local_steps: p.
        init_batch_size: examples for the first estimates (None: those of a step).

    Converges to:
        - a stationary point where clients are alike and steps look at all data; on samples the direction has no memory,
          so η must be small;
        - with K = 2 and p = 1 a point off by an error in proportion to b where clients differ (all data);
        - with one client and all data it is gradient descent for any b, and with K = 1 SGD. The rule of h equals that
          of SMVR: with b = 1, or with one client whose samples change nothing but offsets of affine inner levels, the
          two are the same method.

    Does not:
        - converge to it in general where clients differ: with p > 1 most steps multiply a client's Jacobians with each
          other, and with K > 2 the averages of h bring the error of `FedDRSCGD`; neither shrinks with b.

    >>> SCSC(step_size=0.01, momentum=0.05, local_steps=4).momentum
    0.05

    Reference: chen2020, from memory; made federated as in Section 5.1 of gao2024.
    """

    step_size: float = real(above=0)
    momentum: float = real(above=0, at_most=1)
    local_steps: int = whole(1, at_least=1)
    init_batch_size: int | None = whole(None, at_least=1)

    stores_jacobians: ClassVar[bool] = True

    class State(NamedTuple):
        x: Averaged[Vector]
        h: Averaged[Vectors]  # estimates of levels 1 … K−1
        J: Averaged[Vectors]  # of the last step, for levels 1 … K; the last is a gradient

    def init_server(self, problem: Nested, x0: Vector) -> State:
        return self.State(x=x0, h=zero_values(problem), J=zero_jacobians(problem))

    def init_client(self, oracle: NestedOracle, view: State) -> State:
        sample = first_sample(oracle, self.init_batch_size)
        h = first_values(sample, view.x)
        return view._replace(h=h, J=jacobians(sample, view.x, h))

    def local_step(self, oracle: NestedOracle, start: State, state: State) -> State:
        b, F = self.momentum, oracle.value
        x = oracle.prox(state.x - self.step_size * chained(state.J), self.step_size)
        h_old, h = Levels(state.h, below=state.x), Levels(state.h, below=x)
        for k in range(1, oracle.levels):  # the rule above, with the two terms in F(k, h[k - 1]) added up
            h[k] = (1 - b) * (h[k] - F(k, h_old[k - 1])) + F(k, h[k - 1])
        return state._replace(x=x, h=tuple(h), J=jacobians(oracle, x, tuple(h)))

    def solution(self, problem: Nested, state: State) -> Vector:
        return state.x
