"""TrackedSCGD: each client tracks its own levels and adds the difference of the mean over all clients."""

from typing import NamedTuple

from fedstrata.algorithms.nested.base import (
    NestedMethod,
    Vectors,
    first_products,
    first_sample,
    first_values,
    level_by_level,
    zero_products,
    zero_values,
)
from fedstrata.core.algorithm import Phase
from fedstrata.core.hyperparameters import flag, real, whole
from fedstrata.core.levels import Levels
from fedstrata.core.placement import Averaged, Local
from fedstrata.core.vector import Vector, where
from fedstrata.problems.nested import Nested, NestedOracle


class TrackedSCGD(NestedMethod):
    r"""Recursive estimates of a client's own levels, corrected by the mean over clients; exact with constant steps.

    $$ x \gets x - \eta \, v_1, \qquad h_k = \hat h_k + c_k, \qquad v_k = \hat v_k + e_k $$
    $$ \hat h_k \gets (1-a) \big( \hat h_k - F_{i,k}(h_{k-1}^{old}; \xi_k) \big) + F_{i,k}(h_{k-1}; \xi_k) $$
    $$ \hat v_k \gets (1-a) \big( \hat v_k - J_{i,k}(h_{k-1}^{old}; \xi_k)^\top v_{k+1}^{old} \big)
       + J_{i,k}(h_{k-1}; \xi_k)^\top v_{k+1} $$

    In the last of p steps the levels are averaged one after another, as in `LevelwiseDRSCGD`, and
    $c_k = \sum_j p_j \hat h_{j,k} - \hat h_k$, $e_k = \sum_j p_j \hat v_{j,k} - \hat v_k$ are set again.

    This method is the library's: no paper has it. An average never overwrites a client's estimate; the mean enters as a
    control variate, so that at a fixed point $\hat h_k = F_{i,k}$ and $h_k = \bar F_k$. A round has 2K short exchanges.
    They upload as many numbers as `FedDRSCGD` and download d_0 more, for clients that were absent.

    Args:
        step_size: η.
        momentum: a, the weight of the new sample; 1 forgets the past.
        local_steps: p.
        init_batch_size: examples for the first estimates (None: those of a step).
        separate_samples: draw samples for Jacobians that values do not use.

    Converges to:
        - a stationary point of the globally coupled objective with constant steps, for any a and p, however different
          the clients are (with all data exactly, in all experiments so far; there is no published proof);
        - the optimum of a regularised problem too: every step in x is then a proximal one, and all clients move along
          the same direction.

    Does not:
        - converge to it on samples without separate_samples: v then follows the gradient of single samples, as in
          `FedDRSCGD`.
        - stay finite where a noisy estimate leaves the domain of the next level: the root of an estimated variance
          needs `risk_averse(floor=...)`, see the guide to nested problems.

    >>> TrackedSCGD(step_size=0.01, momentum=0.05, local_steps=4).separate_samples
    False

    Reference: gao2024, whose recursions it corrects; the method is this library's.
    """

    step_size: float = real(above=0)
    momentum: float = real(above=0, at_most=1)
    local_steps: int = whole(1, at_least=1)
    init_batch_size: int | None = whole(None, at_least=1)
    separate_samples: bool = flag(False)

    class State(NamedTuple):
        x: Averaged[Vector]
        h: Averaged[Vectors]  # clients send ĥ and receive its mean
        v: Averaged[Vectors]  # clients send v̂ and receive its mean
        own_h: Local[Vectors]  # ĥ_1 … ĥ_{K−1}
        own_v: Local[Vectors]  # v̂_1 … v̂_K
        c: Local[Vectors]
        e: Local[Vectors]
        points: Local[Vectors]  # x, h_1 … h_{K−1} at which ĥ and v̂ were last evaluated
        products: Local[Vectors]  # v_1 … v_K with which v̂ was last evaluated

    def init_server(self, problem: Nested, x0: Vector) -> State:
        h, v = zero_values(problem), zero_products(problem)
        return self.State(x=x0, h=h, v=v, own_h=h, own_v=v, c=h, e=v, points=(x0, *h), products=v)

    def init_client(self, oracle: NestedOracle, view: State) -> State:
        sample = first_sample(oracle, self.init_batch_size)
        h = first_values(sample, view.x)
        v = first_products(sample, view.x, h, self.separate_samples)
        # v is the client's own until it receives a mean, so that its first correction is zero.
        return view._replace(v=v, own_h=h, own_v=v, points=(view.x, *h), products=v)

    def phases(self, problem: Nested) -> list[Phase]:
        ways = self.local_step, self.value_step, self.product_step
        received = {"begin": self.local_begin, "receives": ("x", "v.0")}
        return level_by_level(problem, self.local_steps, *ways, **received, separate=self.separate_samples)

    def local_begin(self, oracle: NestedOracle, start: State, state: State) -> State:
        v, own_v, e = Levels(state.v), Levels(state.own_v), Levels(state.e)
        e[1] = v[1] - own_v[1]
        return state._replace(e=tuple(e))

    def local_step(self, oracle: NestedOracle, start: State, state: State) -> State:
        own_v, e = Levels(state.own_v), Levels(state.e)
        x = oracle.prox(state.x - self.step_size * (own_v[1] + e[1]), self.step_size)
        moved = state._replace(x=x)
        if self.local_steps == 1:
            return moved
        return where(oracle.clock.local_step == self.local_steps - 1, moved, self.estimate(oracle, moved))

    def estimate(self, oracle: NestedOracle, state: State) -> State:
        """All levels of a step that exchanges nothing."""
        own_h, own_v, c, e = Levels(state.own_h), Levels(state.own_v), Levels(state.c), Levels(state.e)
        h, v = Levels(below=state.x), Levels(state.products, above=None)
        for k in range(1, oracle.levels):
            own_h[k] = self.own_value(oracle, k, state, h)
            h[k] = own_h[k] + c[k]
        for k in range(oracle.levels, 0, -1):
            own_v[k] = self.own_product(oracle, k, state, h, v)
            v[k] = own_v[k] + e[k]
        return state._replace(own_h=tuple(own_h), own_v=tuple(own_v), points=(state.x, *h), products=tuple(v))

    def own_value(self, oracle: NestedOracle, k: int, state: State, h: Levels[Vector]) -> Vector:
        """ĥ_k of this step, given h_{k−1} of this step."""
        a, F = self.momentum, oracle.value
        own_h, h_old = Levels(state.own_h), Levels.from_zero(state.points)
        return (1 - a) * (own_h[k] - F(k, h_old[k - 1])) + F(k, h[k - 1])

    def own_product(self, oracle: NestedOracle, k: int, state: State, h: Levels[Vector], v: Levels[Vector]) -> Vector:
        """v̂_k of this step, given h_{k−1} and v_{k+1} of this step."""
        a, JT = self.momentum, lambda k, y, v: oracle.pull(k, y, v, self.separate_samples)  # at level K, ∇F_K(y)
        own_v, h_old, v_old = Levels(state.own_v), Levels.from_zero(state.points), Levels(state.products, above=None)
        return (1 - a) * (own_v[k] - JT(k, h_old[k - 1], v_old[k + 1])) + JT(k, h[k - 1], v[k + 1])

    def value_step(self, k: int, oracle: NestedOracle, start: State, state: State) -> State:
        """ĥ_k of the last step, from the mean of the level below."""
        own_h = Levels(state.own_h)
        h = Levels(state.own_h if k == 1 else state.h, below=state.x)  # no mean of h has arrived when k is 1
        own_h[k] = h[k] = self.own_value(oracle, k, state, h)
        return state._replace(own_h=tuple(own_h), h=tuple(h))

    def product_step(self, k: int, oracle: NestedOracle, start: State, state: State) -> State:
        """v̂_k of the last step, from the mean of the level above; after level 1, the corrections."""
        h, v = Levels(state.h if oracle.levels > 1 else (), below=state.x), Levels(state.v, above=None)
        own_h, own_v = Levels(state.own_h), Levels(state.own_v)
        own_v[k] = v[k] = self.own_product(oracle, k, state, h, v)
        state = state._replace(own_v=tuple(own_v), v=tuple(v))
        if k > 1:
            return state
        c = tuple(h[j] - own_h[j] for j in range(1, oracle.levels))
        e = tuple(v[j] - own_v[j] for j in range(1, oracle.levels + 1))  # e_1 follows with the next message
        return state._replace(c=c, e=e, points=(state.x, *h), products=tuple(v))

    def solution(self, problem: Nested, state: State) -> Vector:
        return state.x
