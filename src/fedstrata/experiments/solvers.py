"""Optima to full precision, in NumPy and float64: the references of the gaps in an experiment."""

import functools
import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from fedstrata.data.federation import Federation

TOLERANCE = 1e-9  # how far a reference may violate its optimality condition


class ReferenceSolution(NamedTuple):
    x: np.ndarray
    residual: float  # the largest entry of |x − prox(x − s∇f(x))|/s
    steps: int


def fista(
    gradient: Callable[[np.ndarray], np.ndarray],
    prox: Callable[[np.ndarray, float], np.ndarray],
    x: np.ndarray,
    step: float,
    *,
    tolerance: float = 1e-15,
    limit: int = 10_000,
    momentum: bool = True,
) -> ReferenceSolution:
    r"""Accelerated proximal gradient steps, restarted whenever the momentum points uphill.

    $$ x^+ = \mathrm{prox}_{s\varphi}(y - s \nabla f(y)), \qquad
       y^+ = x^+ + \frac{t - 1}{t^+} (x^+ - x), \qquad t^+ = \tfrac12 \big(1 + \sqrt{1 + 4 t^2}\big) $$

    step: s, at most 1/L. Stops at a residual of `tolerance`, or after `limit` steps. Without momentum it is the
    proximal gradient method, whose objective never increases, even if φ is only weakly convex.

    >>> fista(lambda w: w - 2, lambda z, s: soft(z, s), np.zeros(1), 0.5).x.round(12).tolist()  # ½(w − 2)² + |w|
    [1.0]

    Args:
        gradient: ∇f.
        prox: the proximal operator, `prox(z, step)`.
        x: the start.
        step: s, at most 1/L.
        tolerance: the residual at which it stops.
        limit: the largest number of steps.
        momentum: without it, the proximal gradient method.
    """
    y, t, residual = x, 1.0, math.inf
    for steps in range(1, limit + 1):
        new = prox(y - step * gradient(y), step)
        residual = float(np.abs(y - new).max()) / step
        if residual <= tolerance:
            return ReferenceSolution(new, residual, steps)
        if momentum and (y - new) @ (new - x) <= 0:
            grown = (1 + math.sqrt(1 + 4 * t * t)) / 2
            y, t = new + (t - 1) / grown * (new - x), grown
        else:
            y, t = new, 1.0
        x = new
    return ReferenceSolution(x, residual, limit)


def soft(z: np.ndarray, threshold: float | np.ndarray) -> np.ndarray:
    """sign(z) (|z| − threshold)₊

    Args:
        z: numbers.
        threshold: what they shrink by.
    """
    return z - np.clip(z, -threshold, threshold)


class SparseLogistic(NamedTuple):
    r"""All clients' rows in one place: the logistic loss plus MCP on the slopes, or the l1 norm, which is θ = ∞.

    $$ \sum_i \frac{1}{N n_i} \sum_{j \le n_i} \log\big(1 + e^{-s_{ij} (\langle x_{ij}, w \rangle + b)}\big)
       + \varphi(w), \qquad s_{ij} = \pm 1 $$

    Points are arrays with the intercept b last.
    """

    x: np.ndarray  # (rows, features)
    signs: np.ndarray
    shares: np.ndarray  # of each row in the objective: 1/(N n_i), since clients have equal weights
    weight: float
    theta: float = math.inf

    @classmethod
    def of(cls, federation: "Federation", weight: float, theta: float = math.inf) -> "SparseLogistic":
        train = federation["train"]
        counts = np.asarray(train.counts)
        x, y = (np.asarray(train.examples[name], np.float64) for name in ("x", "y"))
        return cls(x, 2 * y - 1, np.repeat(1 / (len(counts) * counts), counts), weight, theta)

    def scores(self, w: np.ndarray) -> np.ndarray:
        return self.x @ w[:-1] + w[-1]

    def value(self, w: np.ndarray) -> float:
        size = np.minimum(np.abs(w[:-1]), self.theta * self.weight)
        penalty = self.weight * size.sum() - (size**2).sum() / (2 * self.theta)
        return float(self.shares @ np.logaddexp(0, -self.signs * self.scores(w)) + penalty)

    def gradient(self, w: np.ndarray) -> np.ndarray:
        """Of the loss."""
        pull = -self.signs * self.shares * np.exp(-np.logaddexp(0, self.signs * self.scores(w)))
        return np.append(self.x.T @ pull, pull.sum())

    def prox(self, z: np.ndarray, step: float) -> np.ndarray:
        slopes = z[:-1]
        near = soft(slopes, step * self.weight) / (1 - step / self.theta)
        return np.append(np.where(np.abs(slopes) <= self.theta * self.weight, near, slopes), z[-1])

    def violation(self, w: np.ndarray) -> float:
        """The largest entry of the smallest element of ∇f + ∂φ: zero at stationary points."""
        gradient, slopes = self.gradient(w), w[:-1]
        slope = np.maximum(self.weight - np.abs(slopes) / self.theta, 0)
        there = np.abs(gradient[:-1] + np.sign(slopes) * slope)
        at_zero = np.maximum(np.abs(gradient[:-1]) - self.weight, 0)
        return float(max(np.where(slopes != 0, there, at_zero).max(), abs(gradient[-1])))

    def step(self) -> float:
        """1/L"""
        x = np.column_stack([self.x, np.ones(len(self.x))])
        return 4 / float(np.linalg.eigvalsh(x.T @ (x * self.shares[:, None]))[-1])


class Reference(NamedTuple):
    x: np.ndarray
    violation: float
    moved: float  # the distance between skglm's solution and ours


def reference(objective: SparseLogistic) -> Reference:
    """A stationary point by skglm, for MCP from the l1 optimum, refined to full precision by proximal steps.

    With the l1 norm it is the optimum. MCP is not convex: there it is the stationary point that skglm finds, which may
    be neither the only nor the lowest one.

    Args:
        objective: loss, data and penalty.
    """
    convex = objective._replace(theta=math.inf)
    found = _skglm(convex, np.zeros(objective.x.shape[1] + 1))
    if objective.theta < math.inf:
        found = _skglm(objective, found)
    step, momentum = min(objective.step(), objective.theta / 2), objective.theta == math.inf
    better = fista(objective.gradient, objective.prox, found, step, tolerance=1e-11, limit=300, momentum=momentum)
    answer = Reference(better.x, objective.violation(better.x), float(np.abs(better.x - found).max()))
    if answer.violation > TOLERANCE:
        raise RuntimeError(
            f"reference: skglm and {better.steps} proximal steps leave an optimality violation of "
            f"{answer.violation:.1e} (more than {TOLERANCE:g}); give the penalty more weight, and MCP a larger theta: "
            "with theta below 1 / (curvature of the loss along a slope) the slope may run away"
        )
    if answer.moved > 1e-6:
        warnings.warn(f"reference: proximal steps moved skglm's solution by {answer.moved:.1e}", stacklevel=2)
    return answer


def _skglm(objective: SparseLogistic, start: np.ndarray) -> np.ndarray:
    datafit = _weighted_logistic()
    from scipy.sparse import csc_matrix
    from skglm.penalties import L1, MCPenalty
    from skglm.solvers import ProxNewton
    from sklearn.exceptions import ConvergenceWarning

    convex = objective.theta == math.inf
    penalty = L1(objective.weight) if convex else MCPenalty(objective.weight, objective.theta)
    x, loss = csc_matrix(objective.x), datafit(objective.shares)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the optimality condition is checked afterwards
        solver: Any = ProxNewton(max_iter=30, max_pn_iter=20, tol=1e-11)
        return solver.solve(x, objective.signs, loss, penalty, start.copy(), objective.scores(start))[0]


@functools.cache  # otherwise every call would compile a new class
def _weighted_logistic() -> Any:
    try:
        from numba import float64
        from skglm.datafits import Logistic
    except ImportError as error:
        raise ImportError(
            'sparse_logistic measures gaps from an optimum found by skglm: pip install "fedstrata[experiments]"'
        ) from error

    class WeightedLogistic(Logistic):
        """skglm's logistic loss with a share for every row; all of it must be what numba can compile."""

        def __init__(self, shares: Any) -> None:
            self.shares = shares

        def get_spec(self) -> Any:
            return (("shares", float64[:]),)

        def params_to_dict(self) -> Any:
            return {"shares": self.shares}

        def value(self, y: Any, w: Any, Xw: Any) -> Any:
            return np.sum(self.shares * np.logaddexp(0.0, -y * Xw))

        def raw_grad(self, y: Any, Xw: Any) -> Any:
            return -y * self.shares / (1 + np.exp(y * Xw))

        def raw_hessian(self, y: Any, Xw: Any) -> Any:
            chance = 1 / (1 + np.exp(-y * Xw))
            return self.shares * chance * (1 - chance)

    return WeightedLogistic
