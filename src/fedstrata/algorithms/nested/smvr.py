"""SMVR: recursive estimates of every level's value and of its whole Jacobian."""

from typing import ClassVar, NamedTuple

from fedstrata.algorithms.nested.base import (
    NestedMethod,
    Vectors,
    chained,
    first_sample,
    first_values,
    jacobian,
    jacobians,
    zero_jacobians,
    zero_values,
)
from fedstrata.core.hyperparameters import real, whole
from fedstrata.core.levels import Levels
from fedstrata.core.placement import Averaged
from fedstrata.core.vector import Vector
from fedstrata.problems.nested import Nested, NestedOracle


class SMVR(NestedMethod):
    r"""Stochastic multi-level variance reduction, with local steps.

    $$ x \gets x - \eta \, V_1^\top \cdots V_K^\top, \qquad
       h_k \gets (1-b) \big( h_k - F_{i,k}(h_{k-1}^{old}; \xi_k) \big) + F_{i,k}(h_{k-1}; \xi_k) $$
    $$ V_k \gets \Pi_L \big[ (1-b) \big( V_k - J_{i,k}(h_{k-1}^{old}; \xi_k) \big) + J_{i,k}(h_{k-1}; \xi_k) \big] $$

    with $h_0 = x$ and $V_K$ a gradient. After p such steps x, all h and all V are averaged. Whole Jacobians are kept
    and sent: d_0 + Σ_{k<K} d_k + Σ_k d_k d_{k−1} numbers each way.

    The rule is from memory of the original; gao2024 only states that x, h and V are averaged every p steps. With a
    regulariser the step in x is a proximal one, which is not in the papers.

    Args:
        step_size: η.
        momentum: b, the weight of the new sample; 1 forgets the past.
        local_steps: p.
        radius: L, of the ball (Frobenius norm) onto which every V_k is projected (None: no projection).
        init_batch_size: examples for the first estimates (None: those of a step).

    Converges to:
        - a stationary point where clients are alike (near one where steps look at samples: every factor of the
          direction is an average over time);
        - with one client and all data it is gradient descent for any b, with b = 1 it is SCSC, and with K = 1 STORM.

    Does not:
        - converge to it where clients differ, whatever b: an average replaces h between two evaluations that should
          cancel, as in `FedDRSCGD`, and each such error, of order b, is forgotten at rate b. With two levels, all data
          and one local step the tracked outer gradient settles at
          $\nabla \bar F_2 + \sum_i p_i \nabla^2 F_{i,2} (F_{i,1} - \bar F_1)$ (exactly for quadratics, else to first
          order), which is right only when all clients have the same curvature.

    >>> SMVR(step_size=0.01, momentum=0.05, local_steps=4).radius is None
    True

    Reference: jiang2022, from memory; made federated as in Section 5.1 of gao2024.
    """

    step_size: float = real(above=0)
    momentum: float = real(above=0, at_most=1)
    local_steps: int = whole(1, at_least=1)
    radius: float | None = real(None, above=0)
    init_batch_size: int | None = whole(None, at_least=1)

    stores_jacobians: ClassVar[bool] = True

    class State(NamedTuple):
        x: Averaged[Vector]
        h: Averaged[Vectors]  # estimates of levels 1 … K−1
        V: Averaged[Vectors]  # Jacobians of levels 1 … K, the last a gradient

    def init_server(self, problem: Nested, x0: Vector) -> State:
        return self.State(x=x0, h=zero_values(problem), V=zero_jacobians(problem))

    def init_client(self, oracle: NestedOracle, view: State) -> State:
        sample = first_sample(oracle, self.init_batch_size)
        h = first_values(sample, view.x)
        return view._replace(h=h, V=jacobians(sample, view.x, h))

    def local_step(self, oracle: NestedOracle, start: State, state: State) -> State:
        K, b, F = oracle.levels, self.momentum, oracle.value
        J = lambda k, y: jacobian(oracle, k, y)
        x = oracle.prox(state.x - self.step_size * chained(state.V), self.step_size)
        h_old, h, V = Levels(state.h, below=state.x), Levels(state.h, below=x), Levels(state.V)
        for k in range(1, K):
            h[k] = (1 - b) * (h[k] - F(k, h_old[k - 1])) + F(k, h[k - 1])
        for k in range(1, K + 1):
            V[k] = self.project((1 - b) * (V[k] - J(k, h_old[k - 1])) + J(k, h[k - 1]))
        return state._replace(x=x, h=tuple(h), V=tuple(V))

    def project(self, V_k: Vector) -> Vector:
        return V_k if self.radius is None else V_k.clip_to_ball(self.radius)

    def solution(self, problem: Nested, state: State) -> Vector:
        return state.x
