"""Fed-DR-SCGD: recursive estimates of every level's value and Jacobian-vector product, averaged now and then."""

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
from fedstrata.errors import unknown
from fedstrata.placement import Averaged, Local
from fedstrata.problems.nested import NestedOracle
from fedstrata.vector import Vector, where

PROJECTIONS = ("none", "ball", "third")


class FedDRSCGD(NestedMethod):
    r"""Doubly recursive stochastic compositional gradient descent, for K levels, as printed.

    $$ x \gets x - \gamma\eta \, v^{(1)}, \qquad
       h^{(k)} \gets (1-a) \big( h^{(k)} - F_i^{(k)}(h^{(k-1)}_{old}; \xi_k) \big) + F_i^{(k)}(h^{(k-1)}; \xi_k) $$
    $$ v^{(k)} \gets \Pi \big[ (1-a) \big( v^{(k)} - J_i^{(k)}(h^{(k-1)}_{old}; \xi_k)^\top v^{(k+1)}_{old} \big)
       + J_i^{(k)}(h^{(k-1)}; \xi_k)^\top v^{(k+1)} \big] $$

    with $h^{(0)} = x$; after p such steps x, all h and all v are averaged.

    step_size: γη. momentum: a = αη², the weight of the new sample; 1 forgets the past. local_steps: p.
    projection: Π. "none" is the default; "ball" clips v of level k to radius C^(K−k+1); "third" divides by three, which
    Lemma C.21 allows but which is no projection: v then settles at $(a/(2+a))^{K-k+1}$ of what it should be.
    radius: C. init_batch_size: S, examples for the first estimates (None: those of a step).
    separate_samples: draw other samples for Jacobians than for values.

    Converges to a stationary point where all clients are alike and steps look at all data. Otherwise it does not,
    whatever a: where clients differ, an average replaces h between the two evaluations that should cancel, an error of
    order a each time, which a recursion that forgets at rate a carries at full size (with one local step it stops at
    the stationary point of the client-coupled objective instead). And since one sample ξ_k serves value and Jacobian of
    a level, v follows the gradient of the plug-in objective, a function of single samples. The paper's theorem misses
    both; `AnchoredDRSCGD`, `LevelwiseDRSCGD` and `SeparateDRSCGD` repair one each in part, `TrackedSCGD` goes to the
    root. With a = 1 it is plain SGD on the composed sample functions, with one client and all data gradient descent for
    any a, and with K = 1 and one client STORM. Sends d_0 + Σ_{k<K} d_k + Σ_k d_{k−1} numbers each way.

    >>> FedDRSCGD(step_size=0.01, momentum=0.05, local_steps=4).projection
    'none'

    Reference: gao2024, Algorithm 1.
    """

    step_size: float = real(above=0)
    momentum: float = real(above=0, at_most=1)
    local_steps: int = 1
    projection: str = "none"
    radius: float = real(1.0, above=0)
    init_batch_size: int | None = None
    separate_samples: bool = False

    class State(NamedTuple):
        x: Averaged[Vector]
        h: Averaged[Vectors]  # estimates of levels 1 … K−1
        v: Averaged[Vectors]  # products of levels 1 … K, the first of which is the direction

    def check(self, problem: Any) -> None:
        if self.projection not in PROJECTIONS:
            raise unknown(f"projection of {type(self).__name__}", str(self.projection), PROJECTIONS)
        super().check(problem)

    def init_server(self, problem: Any, x0: Vector) -> Any:
        return self.State(x=x0, h=zero_values(problem), v=zero_products(problem))

    def init_client(self, oracle: NestedOracle, view: Any) -> Any:
        sample = oracle if self.init_batch_size is None else oracle.fresh(0, self.init_batch_size)
        h = first_values(sample, view.x)
        return view._replace(h=h, v=first_products(sample, (view.x, *h), self.separate_samples))

    def local_step(self, oracle: NestedOracle, start: Any, state: Any) -> Any:
        return self.advance(oracle, state, before=((state.x, *state.h), state.v))

    def advance(self, oracle: NestedOracle, state: Any, before: tuple[Vectors, Vectors]) -> Any:
        """One step, whose subtracted evaluations are made at these points and products."""
        points, products = before
        x = self.move(oracle, state)
        now = [x]
        for k in range(1, oracle.levels):
            now.append(next_value(oracle, k, self.momentum, state.h[k - 1], points[k - 1], now[-1]))
        v = state.v
        for k in range(oracle.levels, 0, -1):
            v = replaced(v, k, self.product(oracle, k, state.v[k - 1], (points, products), (now, v)))
        return state._replace(x=x, h=tuple(now[1:]), v=v)

    def move(self, oracle: NestedOracle, state: Any) -> Vector:
        return oracle.prox(state.x - self.step_size * state.v[0], self.step_size)

    def product(self, oracle: NestedOracle, k: int, estimate: Vector, before: Any, now: Any) -> Vector:
        """The next v of level k; before, now: points (x, h_1 …) and products (v_1 …) of the last step and this one."""
        at = lambda points, products: (points[k - 1], products[k] if k < oracle.levels else None)
        v = next_product(oracle, k, self.momentum, estimate, at(*before), at(*now), self.separate_samples)
        if self.projection == "third":
            return v / 3
        return v.clip_to_ball(self.radius ** (oracle.levels - k + 1)) if self.projection == "ball" else v

    def solution(self, problem: Any, state: Any) -> Vector:
        return state.x

    @classmethod
    def theory(cls, *, clients: int, rounds: int, alpha: float = 1.0, eta: float = 1.0, gamma: float = 1.0) -> Any:
        """The schedule of Remark 4.3 for T = `rounds` · p steps, where the paper gives orders of magnitude only.

        alpha, eta, gamma: the constants in α = alpha/N, η = eta N^{2/3}/T^{1/3} and γ, which depend on smoothness and
        bounds of the levels and are the user's to supply; p and the first batch are ⌈T^{1/3}/N^{2/3}⌉.

        >>> FedDRSCGD.theory(clients=8, rounds=1000).local_steps
        4
        """
        steps = 1
        while steps < (rounds * steps) ** (1 / 3) / clients ** (2 / 3):  # T itself holds p
            steps += 1
        size = eta * clients ** (2 / 3) / (rounds * steps) ** (1 / 3)
        momentum = alpha / clients * size**2
        if momentum > 1:
            raise ValueError(
                f"{cls.__name__}.theory: a = αη² = {momentum:g} must be at most 1; take a smaller alpha or eta, or "
                "more rounds"
            )
        return cls(gamma * size, momentum, steps, init_batch_size=steps)


class SeparateDRSCGD(FedDRSCGD):
    r"""Fed-DR-SCGD with independent samples for values and Jacobians of a level: unbiased where clients are alike.

    The recursions are those of `FedDRSCGD`, with $\xi'_k$ instead of $\xi_k$ in

    $$ v^{(k)} \gets (1-a) \big( v^{(k)} - J^{(k)}(h^{(k-1)}_{old}; \xi'_k)^\top v^{(k+1)}_{old} \big)
       + J^{(k)}(h^{(k-1)}; \xi'_k)^\top v^{(k+1)} $$

    Converges near a stationary point where clients are alike: h then does not depend on the sample that its Jacobian
    is multiplied with. Where they differ it stops where `FedDRSCGD` does. Twice its samples. Ours, not the paper's.

    >>> SeparateDRSCGD(step_size=0.01, momentum=0.05).separate_samples
    True

    Reference: gao2024, Algorithm 1 with other samples.
    """

    separate_samples: bool = True


class AnchoredDRSCGD(FedDRSCGD):
    r"""Fed-DR-SCGD whose subtracted evaluations stay at the client's own points, where its estimates were made.

    As `FedDRSCGD`, with $h_{old}, v_{old}$ the client's own values before the last averaging:

    $$ h^{(k)} \gets (1-a) \big( \bar h^{(k)} - F_i^{(k)}(h_{i,old}^{(k-1)}; \xi_k) \big)
       + F_i^{(k)}(h^{(k-1)}; \xi_k) $$

    Converges to within an error in proportion to a where clients differ (all data). Sends what `FedDRSCGD` sends and
    keeps one more copy of it at each client. Less stable: steps that `FedDRSCGD` takes may make it diverge. Ours, not
    the paper's.

    >>> AnchoredDRSCGD(step_size=0.01, momentum=0.05, local_steps=4).momentum
    0.05

    Reference: gao2024, Algorithm 1 with anchored corrections.
    """

    class State(NamedTuple):  # pyright: ignore[reportIncompatibleVariableOverride]
        x: Averaged[Vector]
        h: Averaged[Vectors]
        v: Averaged[Vectors]
        points: Local[Vectors]  # x, h_1 … h_{K−1} of the client's last step, before averaging
        products: Local[Vectors]

    def init_server(self, problem: Any, x0: Vector) -> Any:
        h, v = zero_values(problem), zero_products(problem)
        return self.State(x=x0, h=h, v=v, points=(x0, *h), products=v)

    def init_client(self, oracle: NestedOracle, view: Any) -> Any:
        view = super().init_client(oracle, view)
        return view._replace(points=(view.x, *view.h), products=view.v)

    def local_step(self, oracle: NestedOracle, start: Any, state: Any) -> Any:
        state = self.advance(oracle, state, before=(state.points, state.products))
        return state._replace(points=(state.x, *state.h), products=state.v)


class LevelwiseDRSCGD(AnchoredDRSCGD):
    r"""Fed-DR-SCGD that averages level by level: in the last step each level builds on the mean of the one before.

    $$ x \to \bar x, \quad h^{(1)}(\bar x) \to \bar h^{(1)}, \quad \dots, \quad h^{(K-1)} \to \bar h^{(K-1)}, \quad
       v^{(K)} \to \bar v^{(K)}, \quad \dots, \quad v^{(1)} \to \bar v^{(1)} $$

    2K short exchanges a round, which upload as many numbers as `FedDRSCGD` in one.

    Converges to within an error in proportion to a where clients differ (all data), several times smaller than that of
    `AnchoredDRSCGD`. Ours, not the paper's. Down, a client is sent again what others averaged while it worked.

    >>> LevelwiseDRSCGD(step_size=0.01, momentum=0.05, local_steps=4).local_steps
    4

    Reference: gao2024, Algorithm 1 averaged level by level.
    """

    def phases(self, problem: Any) -> list[Phase]:
        ways = self.local_step, self.value_step, self.product_step
        return level_by_level(problem, self.local_steps, *ways, separate=self.separate_samples)

    def local_step(self, oracle: NestedOracle, start: Any, state: Any) -> Any:
        before = state._replace(points=(state.x, *state.h), products=state.v)
        moved = before._replace(x=self.move(oracle, state))
        if self.local_steps == 1:
            return moved
        whole = self.advance(oracle, before, (before.points, before.products))
        return where(oracle.clock.local_step == self.local_steps - 1, moved, whole)

    def value_step(self, k: int, oracle: NestedOracle, start: Any, state: Any) -> Any:
        below = state.x if k == 1 else state.h[k - 2]
        h = next_value(oracle, k, self.momentum, state.h[k - 1], state.points[k - 1], below)
        return state._replace(h=replaced(state.h, k, h))

    def product_step(self, k: int, oracle: NestedOracle, start: Any, state: Any) -> Any:
        before, now = (state.points, state.products), ((state.x, *state.h), state.v)
        return state._replace(v=replaced(state.v, k, self.product(oracle, k, state.v[k - 1], before, now)))
