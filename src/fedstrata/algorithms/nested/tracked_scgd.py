"""TrackedSCGD: each client tracks its own levels, and adds what the others differ by."""

from typing import Any, NamedTuple

from fedstrata.algorithm import Phase, real
from fedstrata.algorithms.nested.base import (
    NestedMethod,
    Vectors,
    first_products,
    first_values,
    level_by_level,
    next_product,
    next_value,
    replaced,
    zero_products,
    zero_values,
)
from fedstrata.placement import Averaged, Local
from fedstrata.problems.nested import NestedOracle
from fedstrata.vector import Vector, where


class TrackedSCGD(NestedMethod):
    r"""Recursive estimates of a client's own levels, corrected by the mean over clients; exact with constant steps.

    $$ x \gets x - \eta \, v_1, \qquad h_k = \hat h_k + c_k, \qquad v_k = \hat v_k + e_k $$
    $$ \hat h_k \gets (1-a) \big( \hat h_k - F_{i,k}(h_{k-1}^{old}; \xi_k) \big) + F_{i,k}(h_{k-1}; \xi_k) $$
    $$ \hat v_k \gets (1-a) \big( \hat v_k - J_{i,k}(h_{k-1}^{old}; \xi_k)^\top v_{k+1}^{old} \big)
       + J_{i,k}(h_{k-1}; \xi_k)^\top v_{k+1} $$

    In the last of p steps the levels are averaged one after another, as in `LevelwiseDRSCGD`, and
    $c_k = \sum_j p_j \hat h_{j,k} - \hat h_k$, $e_k = \sum_j p_j \hat v_{j,k} - \hat v_k$ are set anew.

    step_size: η. momentum: a, the weight of the new sample; 1 forgets the past. local_steps: p. init_batch_size:
    examples for the first estimates (None: those of a step). separate_samples: draw other samples for Jacobians than
    for values; without it v follows the gradient of single samples, as in `FedDRSCGD`.

    Converges to a stationary point of the globally coupled objective with constant steps, for any a and p, however
    different the clients are (with all data exactly, as far as it was tried; no proof is printed). A client's estimate
    is never overwritten by an average: the mean enters as a control variate, so that at a fixed point
    $\hat h_k = F_{i,k}$ and $h_k = \bar F_k$. This method is ours: no paper has it. Does not stay finite
    where a noisy estimate leaves the domain of the next level: the root of an estimated variance needs
    `risk_averse(floor=...)`, see docs/nested.md. With a regulariser every step in x is a proximal one, and since all
    clients walk along the same direction the optimum stays where it is. 2K short exchanges a round; up go as many
    numbers as with `FedDRSCGD`, down d_0 more, for clients that were away.

    >>> TrackedSCGD(step_size=0.01, momentum=0.05, local_steps=4).separate_samples
    False

    Reference: gao2024, whose recursions it corrects; the method is this library's.
    """

    step_size: float = real(above=0)
    momentum: float = real(above=0, at_most=1)
    local_steps: int = 1
    init_batch_size: int | None = None
    separate_samples: bool = False

    class State(NamedTuple):
        x: Averaged[Vector]
        h: Averaged[Vectors]  # up go a client's own estimates, down come means
        v: Averaged[Vectors]
        own_h: Local[Vectors]  # ĥ_1 … ĥ_{K−1}
        own_v: Local[Vectors]  # v̂_1 … v̂_K
        c: Local[Vectors]
        e: Local[Vectors]
        points: Local[Vectors]  # x, h_1 … h_{K−1}, where the client's own estimates were last made
        products: Local[Vectors]  # and v_1 … v_K

    def init_server(self, problem: Any, x0: Vector) -> State:
        h, v = zero_values(problem), zero_products(problem)
        return self.State(x=x0, h=h, v=v, own_h=h, own_v=v, c=h, e=v, points=(x0, *h), products=v)

    def init_client(self, oracle: NestedOracle, view: State) -> State:
        sample = oracle if self.init_batch_size is None else oracle.fresh(0, self.init_batch_size)
        h = first_values(sample, view.x)
        v = first_products(sample, (view.x, *h), self.separate_samples)
        # The first mean of v_1 that a client hears of is its own, so that its first correction is zero.
        return view._replace(v=v, own_h=h, own_v=v, points=(view.x, *h), products=v)

    def phases(self, problem: Any) -> list[Phase]:
        ways = self.local_step, self.value_step, self.product_step
        heard = {"begin": self.local_begin, "receives": ("x", "v.0")}
        return level_by_level(problem, self.local_steps, *ways, **heard, separate=self.separate_samples)

    def local_begin(self, oracle: NestedOracle, start: State, state: State) -> State:
        return state._replace(e=replaced(state.e, 1, state.v[0] - state.own_v[0]))

    def local_step(self, oracle: NestedOracle, start: State, state: State) -> State:
        direction = state.own_v[0] + state.e[0]
        moved = state._replace(x=oracle.prox(state.x - self.step_size * direction, self.step_size))
        if self.local_steps == 1:
            return moved
        return where(oracle.clock.local_step == self.local_steps - 1, moved, self.track(oracle, moved))

    def track(self, oracle: NestedOracle, state: State) -> State:
        """All levels of one step at the client alone."""
        own_h, own_v, points, products = state.own_h, state.own_v, [state.x], state.products
        for k in range(1, oracle.levels):
            own_h = replaced(own_h, k, self.value(oracle, k, state, points[-1]))
            points.append(own_h[k - 1] + state.c[k - 1])
        for k in range(oracle.levels, 0, -1):
            own_v = replaced(own_v, k, self.product(oracle, k, state, (points, products)))
            products = replaced(products, k, own_v[k - 1] + state.e[k - 1])
        return state._replace(own_h=own_h, own_v=own_v, points=tuple(points), products=products)

    def value(self, oracle: NestedOracle, k: int, state: State, below: Vector) -> Vector:
        return next_value(oracle, k, self.momentum, state.own_h[k - 1], state.points[k - 1], below)

    def product(self, oracle: NestedOracle, k: int, state: State, now: Any) -> Vector:
        at = lambda points, products: (points[k - 1], products[k] if k < oracle.levels else None)
        before = at(state.points, state.products)
        return next_product(oracle, k, self.momentum, state.own_v[k - 1], before, at(*now), self.separate_samples)

    def value_step(self, k: int, oracle: NestedOracle, start: State, state: State) -> State:
        """ĥ_k of the last step, from the mean of the level below."""
        own_h = replaced(state.own_h, k, self.value(oracle, k, state, state.x if k == 1 else state.h[k - 2]))
        return state._replace(own_h=own_h, h=own_h if k == 1 else replaced(state.h, k, own_h[k - 1]))

    def product_step(self, k: int, oracle: NestedOracle, start: State, state: State) -> State:
        """v̂_k of the last step, from the mean of the level above; after the last of them, the corrections."""
        h = state.h if oracle.levels > 1 else ()
        own_v = replaced(state.own_v, k, self.product(oracle, k, state, ((state.x, *h), state.v)))
        state = state._replace(own_v=own_v, v=replaced(state.v, k, own_v[k - 1]))
        if k > 1:
            return state
        differences = lambda means, own: tuple(mean - mine for mean, mine in zip(means, own, strict=True))
        c, e = differences(h, state.own_h), differences(state.v, own_v)  # e of level 1 follows with the next message
        return state._replace(c=c, e=e, points=(state.x, *h), products=state.v)

    def solution(self, problem: Any, state: State) -> Vector:
        return state.x
