"""Fed-DR-SCGD: recursive estimates of every level's value and Jacobian-vector product, averaged every p steps."""

from collections.abc import Callable
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
from fedstrata.core.algorithm import Phase, StateWithX
from fedstrata.core.hyperparameters import choice, flag, real, whole
from fedstrata.core.levels import Levels
from fedstrata.core.placement import Averaged, Local
from fedstrata.core.vector import Vector, where
from fedstrata.problems.nested import Nested, NestedOracle


class DoublyRecursive(NestedMethod):
    """What Fed-DR-SCGD and its variants share: the recursions of Algorithm 1, for whatever points they start from."""

    step_size: float = real(above=0)
    momentum: float = real(above=0, at_most=1)
    local_steps: int = whole(1, at_least=1)
    projection: str = choice("none", "ball", "third")
    radius: float = real(1.0, above=0)
    init_batch_size: int | None = whole(None, at_least=1)
    separate_samples: bool = flag(False)

    def first_estimates(self, oracle: NestedOracle, x: Vector) -> tuple[Vectors, Vectors]:
        """Line 1."""
        sample = first_sample(oracle, self.init_batch_size)
        h = first_values(sample, x)
        return h, first_products(sample, x, h, self.separate_samples)

    def move(self, oracle: NestedOracle, x: Vector, v: Vectors) -> Vector:
        """Line 3; with a regulariser the step is a proximal one."""
        return oracle.prox(x - self.step_size * Levels(v)[1], self.step_size)

    def estimate(
        self,
        oracle: NestedOracle,
        h: Levels[Vector],
        v: Levels[Vector],
        h_old: Levels[Vector],
        v_old: Levels[Vector],
    ) -> tuple[Vectors, Vectors]:
        """Lines 5 to 13: h and v of this step.

        Args:
            oracle: the client's sample of this step.
            h: the new x at level 0, and above it the estimates so far.
            v: the products so far.
            h_old: x and the estimates at which the subtracted terms are evaluated.
            v_old: the products with which they are evaluated.
        """
        K, a, F = oracle.levels, self.momentum, oracle.value
        JT = self.transposed(oracle)
        for k in range(1, K):
            h[k] = (1 - a) * (h[k] - F(k, h_old[k - 1])) + F(k, h[k - 1])
        for k in range(K, 0, -1):
            v[k] = self.project(k, K, (1 - a) * (v[k] - JT(k, h_old[k - 1], v_old[k + 1])) + JT(k, h[k - 1], v[k + 1]))
        return tuple(h), tuple(v)

    def transposed(self, oracle: NestedOracle) -> Callable[[int, Vector, Vector], Vector]:
        """J_k(y)ᵀ v as a function of k, y and v; at level K, where v is None, ∇F_K(y)."""
        return lambda k, y, v: oracle.pull(k, y, v, self.separate_samples)

    def project(self, k: int, K: int, v: Vector) -> Vector:
        """Π for level k of K: Lemma C.1 bounds the product by C^(K−k+1)."""
        if self.projection == "third":
            return v / 3
        return v.clip_to_ball(self.radius ** (K - k + 1)) if self.projection == "ball" else v

    def solution(self, problem: Nested, state: StateWithX) -> Vector:
        return state.x


class FedDRSCGD(DoublyRecursive):
    r"""Doubly recursive stochastic compositional gradient descent for K levels, as published.

    $$ x \gets x - \gamma\eta \, v^{(1)}, \qquad
       h^{(k)} \gets (1-a) \big( h^{(k)} - F_i^{(k)}(h^{(k-1)}_{old}; \xi_k) \big) + F_i^{(k)}(h^{(k-1)}; \xi_k) $$
    $$ v^{(k)} \gets \Pi \big[ (1-a) \big( v^{(k)} - J_i^{(k)}(h^{(k-1)}_{old}; \xi_k)^\top v^{(k+1)}_{old} \big)
       + J_i^{(k)}(h^{(k-1)}; \xi_k)^\top v^{(k+1)} \big] $$

    with $h^{(0)} = x$, and with $\nabla F_i^{(K)}$ instead of $J^\top v$ at level K. After p such steps x, all h and
    all v are averaged. A message has d_0 + Σ_{k<K} d_k + Σ_k d_{k−1} numbers each way.

    Args:
        step_size: γη.
        momentum: a = αη², the weight of the new sample; 1 forgets the past.
        local_steps: p.
        projection: Π. "none" projects nothing; "ball" clips v of level k to radius C^(K−k+1); "third" divides by
            three, which Lemma C.21 allows but which is no projection.
        radius: C, for projection="ball".
        init_batch_size: S, examples for the first estimates (None: those of a step).
        separate_samples: draw samples for Jacobians that values do not use.

    Converges to:
        - a stationary point where all clients are alike and steps look at all data;
        - with a = 1 it is plain SGD on the composed sample functions, with one client and all data gradient descent
          for any a, and with K = 1 and one client STORM.

    Does not:
        - converge to it where clients differ, whatever a: an average replaces h between the two evaluations that should
          cancel. The error is of order a each time, and a recursion that forgets at rate a accumulates it to full size.
          With one local step the limit is the stationary point of the client-coupled objective.
        - converge to it on samples: one sample ξ_k serves value and Jacobian of a level, so v follows the gradient of
          the plug-in objective, a function of single samples.
        - keep the size of v with projection="third": v settles at $(a/(2+a))^{K-k+1}$ of the true product.
        - follow the paper's theorem, which misses the first two. `AnchoredDRSCGD`, `LevelwiseDRSCGD` and
          `SeparateDRSCGD` repair one each in part; `TrackedSCGD` removes the first and can remove the second.

    >>> FedDRSCGD(step_size=0.01, momentum=0.05, local_steps=4).projection
    'none'

    Reference: gao2024, Algorithm 1.
    """

    class State(NamedTuple):
        x: Averaged[Vector]
        h: Averaged[Vectors]  # estimates of levels 1 … K−1
        v: Averaged[Vectors]  # products of levels 1 … K, the first of which is the direction

    def init_server(self, problem: Nested, x0: Vector) -> State:
        return self.State(x=x0, h=zero_values(problem), v=zero_products(problem))

    def init_client(self, oracle: NestedOracle, view: State) -> State:
        h, v = self.first_estimates(oracle, view.x)
        return view._replace(h=h, v=v)

    def local_step(self, oracle: NestedOracle, start: State, state: State) -> State:
        h_old, v_old = Levels(state.h, below=state.x), Levels(state.v, above=None)
        x = self.move(oracle, state.x, state.v)
        h, v = self.estimate(oracle, Levels(state.h, below=x), Levels(state.v, above=None), h_old, v_old)
        return state._replace(x=x, h=h, v=v)


class SeparateDRSCGD(FedDRSCGD):
    r"""Fed-DR-SCGD with independent samples for values and Jacobians of a level: unbiased where clients are alike.

    The recursions are those of `FedDRSCGD`, with $\xi'_k$ instead of $\xi_k$ in

    $$ v^{(k)} \gets (1-a) \big( v^{(k)} - J^{(k)}(h^{(k-1)}_{old}; \xi'_k)^\top v^{(k+1)}_{old} \big)
       + J^{(k)}(h^{(k-1)}; \xi'_k)^\top v^{(k+1)} $$

    This variant is not in the paper. It draws twice the samples of `FedDRSCGD`.

    Args:
        step_size: γη.
        momentum: a = αη², the weight of the new sample; 1 forgets the past.
        local_steps: p.
        projection: Π: "none", "ball" or "third", as in `FedDRSCGD`.
        radius: C, for projection="ball".
        init_batch_size: S, examples for the first estimates (None: those of a step).
        separate_samples: draw samples for Jacobians that values do not use; True here.

    Converges to:
        - a point near a stationary point where clients are alike: h then does not depend on the sample that its
          Jacobian is multiplied with.

    Does not:
        - converge to it where clients differ: its limit is then that of `FedDRSCGD`.

    >>> SeparateDRSCGD(step_size=0.01, momentum=0.05).separate_samples
    True

    Reference: gao2024, Algorithm 1 with other samples.
    """

    separate_samples: bool = flag(True)


class AnchoredDRSCGD(DoublyRecursive):
    r"""Fed-DR-SCGD whose subtracted evaluations stay at the points where the client made its estimates.

    As `FedDRSCGD`, with $h_{old}, v_{old}$ the client's values before the last averaging:

    $$ h^{(k)} \gets (1-a) \big( \bar h^{(k)} - F_i^{(k)}(h_{i,old}^{(k-1)}; \xi_k) \big)
       + F_i^{(k)}(h^{(k-1)}; \xi_k) $$

    This variant is not in the paper. It sends what `FedDRSCGD` sends, and each client keeps one more copy of it.

    Args:
        step_size: γη.
        momentum: a = αη², the weight of the new sample; 1 forgets the past.
        local_steps: p.
        projection: Π: "none", "ball" or "third", as in `FedDRSCGD`.
        radius: C, for projection="ball".
        init_batch_size: S, examples for the first estimates (None: those of a step).
        separate_samples: draw samples for Jacobians that values do not use.

    Converges to:
        - a stationary point, within an error in proportion to a where clients differ (all data).

    Does not:
        - remain stable at all steps that `FedDRSCGD` can take: it may diverge there.

    >>> AnchoredDRSCGD(step_size=0.01, momentum=0.05, local_steps=4).momentum
    0.05

    Reference: gao2024, Algorithm 1 with anchored corrections.
    """

    variant_of = FedDRSCGD

    class State(NamedTuple):
        x: Averaged[Vector]
        h: Averaged[Vectors]
        v: Averaged[Vectors]
        points: Local[Vectors]  # x, h_1 … h_{K−1} of the client's last step, before averaging
        products: Local[Vectors]  # v_1 … v_K of that step

    def init_server(self, problem: Nested, x0: Vector) -> State:
        h, v = zero_values(problem), zero_products(problem)
        return self.State(x=x0, h=h, v=v, points=(x0, *h), products=v)

    def init_client(self, oracle: NestedOracle, view: State) -> State:
        h, v = self.first_estimates(oracle, view.x)
        return view._replace(h=h, v=v, points=(view.x, *h), products=v)

    def local_step(self, oracle: NestedOracle, start: State, state: State) -> State:
        h_old, v_old = Levels.from_zero(state.points), Levels(state.products, above=None)
        x = self.move(oracle, state.x, state.v)
        h, v = self.estimate(oracle, Levels(state.h, below=x), Levels(state.v, above=None), h_old, v_old)
        return state._replace(x=x, h=h, v=v, points=(x, *h), products=v)


_Anchored = AnchoredDRSCGD.State


class LevelwiseDRSCGD(AnchoredDRSCGD):
    r"""Fed-DR-SCGD that averages level by level: in the last step each level builds on the mean of the one before.

    $$ x \to \bar x, \quad h^{(1)}(\bar x) \to \bar h^{(1)}, \quad \dots, \quad h^{(K-1)} \to \bar h^{(K-1)}, \quad
       v^{(K)} \to \bar v^{(K)}, \quad \dots, \quad v^{(1)} \to \bar v^{(1)} $$

    This variant is not in the paper. A round has 2K short exchanges. They upload as many numbers as `FedDRSCGD` does in
    one; a client also receives again what others averaged while it worked.

    Args:
        step_size: γη.
        momentum: a = αη², the weight of the new sample; 1 forgets the past.
        local_steps: p.
        projection: Π: "none", "ball" or "third", as in `FedDRSCGD`.
        radius: C, for projection="ball".
        init_batch_size: S, examples for the first estimates (None: those of a step).
        separate_samples: draw samples for Jacobians that values do not use.

    Converges to:
        - a stationary point, within an error in proportion to a where clients differ (all data). The error is several
          times smaller than that of `AnchoredDRSCGD`.

    Does not:
        - reach it exactly where clients differ; `TrackedSCGD` does.

    >>> LevelwiseDRSCGD(step_size=0.01, momentum=0.05, local_steps=4).local_steps
    4

    Reference: gao2024, Algorithm 1 averaged level by level.
    """

    def phases(self, problem: Nested) -> list[Phase]:
        ways = self.local_step, self.value_step, self.product_step
        return level_by_level(problem, self.local_steps, *ways, separate=self.separate_samples)

    def local_step(self, oracle: NestedOracle, start: _Anchored, state: _Anchored) -> _Anchored:
        moved = state._replace(x=self.move(oracle, state.x, state.v), points=(state.x, *state.h), products=state.v)
        if self.local_steps == 1:
            return moved
        h_old, v_old = Levels.from_zero(moved.points), Levels(moved.products, above=None)
        h, v = self.estimate(oracle, Levels(moved.h, below=moved.x), Levels(moved.v, above=None), h_old, v_old)
        return where(oracle.clock.local_step == self.local_steps - 1, moved, moved._replace(h=h, v=v))

    def value_step(self, k: int, oracle: NestedOracle, start: _Anchored, state: _Anchored) -> _Anchored:
        """h^(k) of the last step, from the mean of the level below."""
        a, F = self.momentum, oracle.value
        h, h_old = Levels(state.h, below=state.x), Levels.from_zero(state.points)
        h[k] = (1 - a) * (h[k] - F(k, h_old[k - 1])) + F(k, h[k - 1])
        return state._replace(h=tuple(h))

    def product_step(self, k: int, oracle: NestedOracle, start: _Anchored, state: _Anchored) -> _Anchored:
        """v^(k) of the last step, from the mean of the level above."""
        K, a, JT = oracle.levels, self.momentum, self.transposed(oracle)
        h, h_old = Levels(state.h, below=state.x), Levels.from_zero(state.points)
        v, v_old = Levels(state.v, above=None), Levels(state.products, above=None)
        v[k] = self.project(k, K, (1 - a) * (v[k] - JT(k, h_old[k - 1], v_old[k + 1])) + JT(k, h[k - 1], v[k + 1]))
        return state._replace(v=tuple(v))
