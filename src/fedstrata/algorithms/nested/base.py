"""What methods for nested problems have in common: starts, recursive estimates, exchanges level by level, checks."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from fedstrata.algorithm import Algorithm, Phase, steps_of
from fedstrata.problems.nested import NestedOracle
from fedstrata.vector import Vector

JACOBIAN_LIMIT = 2**32  # bytes of explicit Jacobians over all clients above which a method refuses to start

Vectors = tuple[Vector, ...]


class CouplingWarning(UserWarning):
    """A method made for one coupling of inner expectations runs on a problem with the other."""


class NestedMethod(Algorithm):
    """A method for `fs.Nested`. Estimates of levels 1 … K−1 are `h[0] …`, products of levels 1 … K are `v[0] …`."""

    solves: ClassVar[Literal["global", "client"]] = "global"  # whose expectation an inner level is (see `fs.Nested`)
    stores_jacobians: ClassVar[bool] = False  # as numbers, d_k × d_{k−1} for every level

    def check(self, problem: Any) -> None:
        name = type(self).__name__
        if problem.inner != self.solves:
            warnings.warn(
                f"{name} is made for inner={self.solves!r} and this problem has inner={problem.inner!r}: where clients "
                "differ it settles at another point than the optimum",
                CouplingWarning,
                stacklevel=2,
            )
        step = getattr(self, "step_size", None)
        if isinstance(step, float | int):  # a schedule's steps are known only in the run
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

    def phases(self, problem: Any) -> list[Phase]:
        streams = None if getattr(self, "separate_samples", False) else problem.level_streams
        begin, end, server = self.local_begin, self.local_end, self.server_step
        return [Phase(self.local_step, steps_of(self), begin=begin, end=end, server_step=server, streams=streams)]


def jacobian_bytes(problem: Any) -> int:
    """Bytes of the Jacobians of levels 1 … K−1 and of the last gradient, for all clients."""
    sizes = problem.sizes()
    widths = [max(leaf.dtype.itemsize for leaf in leaves) for _, leaves in problem.shapes]
    numbers = [below * above * width for below, above, width in zip(sizes, sizes[1:], widths, strict=False)]
    return sum(numbers) * (problem.clients or 1)


def zero_values(problem: Any) -> Vectors:
    """Zeros for the estimates of levels 1 … K−1."""
    return tuple(problem.zeros(k) for k in range(1, len(problem.levels)))


def zero_products(problem: Any) -> Vectors:
    """Zeros for the products of levels 1 … K, each of the size of its level's input."""
    return tuple(problem.zeros(k) for k in range(len(problem.levels)))


def first_values(oracle: NestedOracle, x: Vector) -> Vectors:
    """F_1(x), F_2(F_1(x)) … up to level K−1, on this sample."""
    points = [x]
    for k in range(1, oracle.levels):
        points.append(oracle.value(k, points[-1]))
    return tuple(points[1:])


def first_products(oracle: NestedOracle, points: Sequence[Vector], separate: bool = False) -> Vectors:
    """∇F_K, J_{K−1}ᵀ∇F_K … down to level 1, at these points (x, h_1 … h_{K−1}), on this sample."""
    above, out = None, []
    for k in range(oracle.levels, 0, -1):
        above = oracle.pull(k, points[k - 1], above, separate)
        out.insert(0, above)
    return tuple(out)


def next_value(oracle: NestedOracle, k: int, a: Any, estimate: Vector, before: Vector, now: Vector) -> Vector:
    """(1 − a)(h_k − F_k(before; ξ_k)) + F_k(now; ξ_k)"""
    return (1 - a) * (estimate - oracle.value(k, before)) + oracle.value(k, now)


def next_product(
    oracle: NestedOracle,
    k: int,
    a: Any,
    estimate: Vector,
    before: tuple[Vector, Vector | None],
    now: tuple[Vector, Vector | None],
    separate: bool = False,
) -> Vector:
    """(1 − a)(v_k − J_k(y; ξ_k)ᵀ v) + J_k(y'; ξ_k)ᵀ v' with (y, v) = before and (y', v') = now; no v at level K."""
    old = oracle.pull(k, *before, separate)
    return (1 - a) * (estimate - old) + oracle.pull(k, *now, separate)


def level_by_level(
    problem: Any,
    steps: int,
    walk: Callable[..., Any],
    value: Callable[..., Any],
    product: Callable[..., Any],
    *,
    begin: Callable[..., Any] | None = None,
    receives: tuple[str, ...] | None = None,
    separate: bool = False,
) -> list[Phase]:
    """Local steps and a last step whose levels are averaged one after another: 2K exchanges, each of one vector.

    walk: a local step; in the last one of a round it only moves x. value(k, …), product(k, …): level k of that last
    step. Every exchange looks at the sample of the last step.
    """
    levels, last = len(problem.levels), steps - 1
    source = "jacobian" if separate else "level"
    looks = lambda what, k: (f"{what}{k}",) if problem.samples_at(k - 1) else ()
    streams = tuple(problem.streams) if separate else problem.level_streams
    sends = ("x",) if levels > 1 else ("x", "h")  # with one level h is empty, and goes along
    phases = [Phase(walk, steps, sends=sends, receives=receives, begin=begin, streams=streams)]
    for k in range(1, levels):
        phases.append(Phase(partial(value, k), sends=(f"h.{k - 1}",), first=last, streams=looks("level", k)))
    for k in range(levels, 0, -1):
        phases.append(Phase(partial(product, k), sends=(f"v.{k - 1}",), first=last, streams=looks(source, k)))
    return phases


def replaced(values: Vectors, k: int, new: Vector) -> Vectors:
    """The tuple with the entry of level k (counted from 1) replaced."""
    return (*values[: k - 1], new, *values[k:])


def zero_jacobians(problem: Any) -> Vectors:
    """Zeros for the Jacobians of levels 1 … K, the last a gradient."""
    levels = len(problem.levels)
    return (*(problem.zero_jacobian(k) for k in range(1, levels)), problem.zeros(levels - 1))


def jacobians(oracle: NestedOracle, points: Sequence[Vector]) -> tuple[Any, ...]:
    """J_1 … J_{K−1} and ∇F_K at these points (x, h_1 … h_{K−1}), on this sample."""
    below = (oracle.jacobian(k, points[k - 1]) for k in range(1, oracle.levels))
    return (*below, oracle.pull(oracle.levels, points[-1]))


def chained(jacobians: Sequence[Any]) -> Vector:
    """J_1ᵀ ⋯ J_{K−1}ᵀ ∇F_K"""
    *below, direction = jacobians
    for J in reversed(below):
        direction = J.pull(direction)
    return direction
