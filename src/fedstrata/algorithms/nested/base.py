"""Common parts of methods for nested problems: start values, Jacobians, exchanges level by level, checks."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from fedstrata.core.algorithm import Algorithm, Phase, steps_of
from fedstrata.core.hyperparameters import is_number
from fedstrata.core.levels import Levels
from fedstrata.core.vector import Vector
from fedstrata.problems.nested import Nested, NestedOracle

JACOBIAN_LIMIT = 2**32  # bytes of explicit Jacobians over all clients above which a method refuses to start

Vectors = tuple[Vector, ...]


class CouplingWarning(UserWarning):
    """A method made for one coupling of inner expectations runs on a problem with the other."""


class NestedMethod(Algorithm):
    """A method for `fs.Nested` problems.

    Its state holds plain tuples: estimates of levels 1 … K−1 and products of levels 1 … K. Updates read them through
    `Levels`, so that `h[k]` is level k, `h[0]` is x and `v[K + 1]` is None.
    """

    oracle: ClassVar[type | None] = NestedOracle

    solves: ClassVar[Literal["global", "client"]] = "global"  # of whom an inner level is the mean (see `fs.Nested`)
    stores_jacobians: ClassVar[bool] = False  # as numbers, d_k × d_{k−1} for every level

    def check(self, problem: Nested) -> None:
        name = type(self).__name__
        if problem.inner != self.solves:
            warnings.warn(
                f"{name} is made for inner={self.solves!r} and this problem has inner={problem.inner!r}: where clients "
                "differ, its limit is not the optimum",
                CouplingWarning,
                stacklevel=2,
            )
        step = getattr(self, "step_size", None)
        if is_number(step):
            problem.regularizer.check_step(step)
        if self.stores_jacobians and problem.shapes is not None:
            needed = jacobian_bytes(problem)
            if needed > JACOBIAN_LIMIT:
                raise ValueError(
                    f"{name} keeps the Jacobian of every level as numbers, {needed / 2**30:.1f} GiB for "
                    f"{problem.clients} clients and levels of sizes {problem.sizes()}, which is more than the limit of "
                    f"{JACOBIAN_LIMIT / 2**30:.0f} GiB; use a method that needs products only (TrackedSCGD, "
                    "LocalSCGDM, ComFedL), adapt fewer parameters, or raise "
                    "fedstrata.algorithms.nested.base.JACOBIAN_LIMIT"
                )

    def phases(self, problem: Nested) -> list[Phase]:
        streams = None if getattr(self, "separate_samples", False) else problem.level_streams
        begin, end, server = self.local_begin, self.local_end, self.server_step
        return [Phase(self.local_step, steps_of(self), begin=begin, end=end, server_step=server, streams=streams)]


def check_two_levels(method: NestedMethod, problem: Nested, instead: str) -> None:
    """Refuse a problem that does not have two levels.

    Args:
        method: the method that needs two.
        problem: the problem to check.
        instead: methods that take any number of levels.
    """
    if len(problem.levels) != 2:
        raise ValueError(
            f"{type(method).__name__} is made for two levels, and this problem has {len(problem.levels)}; use "
            f"{instead}, for any number of levels"
        )


def jacobian_bytes(problem: Nested) -> int:
    """Bytes of the Jacobians of levels 1 … K−1 and of the last gradient, for all clients."""
    sizes = problem.sizes()
    widths = [max(leaf.dtype.itemsize for leaf in leaves) for _, leaves in problem.shapes]
    numbers = [below * above * width for below, above, width in zip(sizes, sizes[1:], widths, strict=False)]
    return sum(numbers) * (problem.clients or 1)


def first_sample(oracle: NestedOracle, size: int | None) -> NestedOracle:
    """The oracle of the first estimates: a fresh sample of this size, or for None the sample of a step."""
    return oracle if size is None else oracle.fresh(0, size)


def zero_values(problem: Nested) -> Vectors:
    """Zeros for the estimates of levels 1 … K−1."""
    return tuple(problem.zeros(k) for k in range(1, len(problem.levels)))


def zero_products(problem: Nested) -> Vectors:
    """Zeros for the products of levels 1 … K, each of the shape of its level's input."""
    return tuple(problem.zeros(k - 1) for k in range(1, len(problem.levels) + 1))


def zero_jacobians(problem: Nested) -> Vectors:
    """Zeros for the Jacobians of levels 1 … K, the last a gradient."""
    K = len(problem.levels)
    return (*(problem.zero_jacobian(k) for k in range(1, K)), problem.zeros(K - 1))


def first_values(oracle: NestedOracle, x: Vector) -> Vectors:
    """h_k = F_k(h_{k−1}; ξ_k) for k = 1 … K−1, with h_0 = x."""
    h = Levels(below=x)
    for k in range(1, oracle.levels):
        h[k] = oracle.value(k, h[k - 1])
    return tuple(h)


def first_products(oracle: NestedOracle, x: Vector, values: Vectors, separate: bool = False) -> Vectors:
    """v_K = ∇F_K(h_{K−1}; ξ_K) and v_k = J_k(h_{k−1}; ξ_k)ᵀ v_{k+1} for k = K−1 … 1, with h_0 = x."""
    K, h = oracle.levels, Levels(values, below=x)
    products = [oracle.pull(K, h[K - 1], None, separate)]
    for k in range(K - 1, 0, -1):
        products.append(oracle.pull(k, h[k - 1], products[-1], separate))
    return tuple(reversed(products))


def jacobian(oracle: NestedOracle, k: int, y: Vector) -> Vector:
    """J_k(y; ξ_k) as numbers; of level K the gradient."""
    return oracle.jacobian(k, y) if k < oracle.levels else oracle.pull(k, y)


def jacobians(oracle: NestedOracle, x: Vector, values: Vectors) -> tuple[Any, ...]:
    """J_k(h_{k−1}; ξ_k) for k = 1 … K, with h_0 = x; the last is a gradient."""
    h = Levels(values, below=x)
    return tuple(jacobian(oracle, k, h[k - 1]) for k in range(1, oracle.levels + 1))


def chained(jacobians: Sequence[Any]) -> Vector:
    """J_1ᵀ ⋯ J_{K−1}ᵀ ∇F_K"""
    *below, direction = jacobians
    for J in reversed(below):
        direction = J.pull(direction)
    return direction


def level_by_level(
    problem: Nested,
    steps: int,
    walk: Callable[..., Any],
    value: Callable[..., Any],
    product: Callable[..., Any],
    *,
    begin: Callable[..., Any] | None = None,
    receives: tuple[str, ...] | None = None,
    separate: bool = False,
) -> list[Phase]:
    """The exchanges of a round whose last step averages its levels one after another: 2K exchanges of one vector each.

    All exchanges use the sample of the last step.

    Args:
        problem: the nested problem.
        steps: local steps in a round.
        walk: a local step; in the last step of a round it only moves x.
        value: `value(k, …)`, the estimate of level k in the last step.
        product: `product(k, …)`, the product of level k in the last step.
        begin: called once before the first step.
        receives: the fields that come down before the first step.
        separate: products use samples that values do not use.
    """
    levels, last = len(problem.levels), steps - 1
    source = "jacobian" if separate else "level"
    looks = lambda what, k: (f"{what}{k}",) if problem.samples_at(k - 1) else ()
    streams = tuple(problem.streams) if separate else problem.level_streams
    sends = ("x",) if levels > 1 else ("x", "h")  # with one level h is empty, and is sent along
    phases = [Phase(walk, steps, sends=sends, receives=receives, begin=begin, streams=streams)]
    for k in range(1, levels):
        phases.append(Phase(partial(value, k), sends=(f"h.{k - 1}",), first=last, streams=looks("level", k)))
    for k in range(levels, 0, -1):
        phases.append(Phase(partial(product, k), sends=(f"v.{k - 1}",), first=last, streams=looks(source, k)))
    return phases
