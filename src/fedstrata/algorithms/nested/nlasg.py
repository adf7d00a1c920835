"""NLASG: running means of every level's value, corrected along its linearisation, and of the gradient."""

from typing import ClassVar, NamedTuple, TypeVar

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
from fedstrata.core.algorithm import StateWithX
from fedstrata.core.hyperparameters import real, whole
from fedstrata.core.levels import Levels
from fedstrata.core.placement import Averaged, Local
from fedstrata.core.vector import Vector
from fedstrata.problems.nested import Nested, NestedOracle

S = TypeVar("S", "NLASG.State", "NLASGAveraged.State")  # the state of either method


class LinearisedMethod(NestedMethod):
    """What NLASG and NLASGAveraged share: everything but the placement of z."""

    step_size: float = real(above=0)
    momentum: float = real(above=0, at_most=1)
    local_steps: int = whole(1, at_least=1)
    init_batch_size: int | None = whole(None, at_least=1)

    stores_jacobians: ClassVar[bool] = True

    def init_client(self, oracle: NestedOracle, view: S) -> S:
        return view._replace(h=first_values(first_sample(oracle, self.init_batch_size), view.x))

    def local_step(self, oracle: NestedOracle, start: S, state: S) -> S:
        tau = self.momentum
        # Formed at the start of a step, so that J is the mean where it was averaged. J = 0 makes the first z zero.
        z = (1 - tau) * state.z + tau * chained(state.J)
        x = oracle.prox(state.x - self.step_size * z, self.step_size)
        h_old, h = Levels(state.h, below=state.x), Levels(state.h, below=x)
        J = Levels(jacobians(oracle, state.x, state.h))
        for k in range(1, oracle.levels):
            G = oracle.value(k, h_old[k - 1])
            h[k] = (1 - tau) * h[k] + tau * G + J[k].push(h[k - 1] - h_old[k - 1])
        return state._replace(x=x, h=tuple(h), J=tuple(J), z=z)

    def solution(self, problem: Nested, state: StateWithX) -> Vector:
        return state.x


class NLASG(LinearisedMethod):
    r"""Nested linearised averaging stochastic gradient, with local steps.

    $$ x \gets x - \eta \, z, \qquad G_k = F_{i,k}(h_{k-1}^{old}; \xi_k), \quad J_k = J_{i,k}(h_{k-1}^{old}; \xi_k) $$
    $$ h_k \gets (1-\tau) h_k + \tau \, G_k + J_k (h_{k-1} - h_{k-1}^{old}), \qquad
       z \gets (1-\tau) z + \tau \, J_1^\top \cdots J_K^\top $$

    with $h_0 = x$, $J_K$ a gradient and z = 0 at first. After p such steps x, all h and the J of the last step are
    averaged, and z of that step is formed with the mean J; z itself stays with its client (see `NLASGAveraged`). Whole
    Jacobians are sent: d_0 + Σ_{k<K} d_k + Σ_k d_k d_{k−1} numbers each way.

    The rule is from memory of the original; gao2024 only states that x, h and J are averaged every p steps. With a
    regulariser the step in x is the prox of ηφ at x − ηz; the original moves a part τ of the way to the projection of
    x − z/β instead.

    Args:
        step_size: η, in the paper τ/β.
        momentum: τ, the weight of the new sample; 1 forgets the past. A schedule of τ is read for z one step later than
            for h.
        local_steps: p.
        init_batch_size: examples for the first h (None: those of a step).

    Converges to:
        - a stationary point where clients are alike (near one where steps look at samples: the points of G and J do
          not depend on the new sample);
        - a stationary point where clients differ only with two levels and one local step (all data, any τ).

    Does not:
        - converge to it where clients differ with K > 2: the differences $h_{k-1} - h_{k-1}^{old}$ contain the distance
          of the client from the average, which shifts $h_2$ by $\sum_i p_i J_{i,2} (F_{i,1} - \bar F_1)$ for any τ.
        - converge to it where clients differ with p > 1: most z are made of one client's Jacobians.
        - equal gradient descent with one client and all data: z lags, and h is exact only for affine inner levels,
          where the method is gradient descent with momentum.

    >>> NLASG(step_size=0.01, momentum=0.05, local_steps=4).momentum
    0.05

    Reference: balasubramanian2022, from memory; made federated as in Section 5.1 of gao2024.
    """

    class State(NamedTuple):
        x: Averaged[Vector]
        h: Averaged[Vectors]  # estimates of levels 1 … K−1
        J: Averaged[Vectors]  # of the last step, for levels 1 … K; the last is a gradient
        z: Local[Vector]  # the direction of the last step; that of the next is made of it and of J

    def init_server(self, problem: Nested, x0: Vector) -> State:
        return self.State(x=x0, h=zero_values(problem), J=zero_jacobians(problem), z=x0.zeros())


class NLASGAveraged(LinearisedMethod):
    r"""NLASG that averages the direction z as well.

    As `NLASG`, with, after p steps, also

    $$ z \gets (1-\tau) \sum_i p_i z_i + \tau \, \bar J_1^\top \cdots \bar J_K^\top $$

    The papers leave open whether z is averaged. It costs d_0 more numbers each way.

    Args:
        step_size: η, in the paper τ/β.
        momentum: τ, the weight of the new sample; 1 forgets the past. A schedule of τ is read for z one step later than
            for h.
        local_steps: p.
        init_batch_size: examples for the first h (None: those of a step).

    Converges to:
        - a stationary point where `NLASG` does.

    Does not:
        - converge to it where `NLASG` does not.

    >>> NLASGAveraged(step_size=0.01, momentum=0.05, local_steps=4).local_steps
    4

    Reference: balasubramanian2022, from memory; made federated as in Section 5.1 of gao2024.
    """

    variant_of = NLASG

    class State(NamedTuple):
        x: Averaged[Vector]
        h: Averaged[Vectors]
        J: Averaged[Vectors]
        z: Averaged[Vector]

    def init_server(self, problem: Nested, x0: Vector) -> State:
        return self.State(x=x0, h=zero_values(problem), J=zero_jacobians(problem), z=x0.zeros())
