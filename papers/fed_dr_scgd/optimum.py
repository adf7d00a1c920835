"""The best portfolio and its objective, in NumPy and float64: the reference of the gaps."""

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedstrata.experiments.solvers import fista

if TYPE_CHECKING:
    from fedstrata.data.federation import Federation

TOLERANCE = 1e-9  # how far the reference may violate its optimality condition, relative to the unit of returns


class Moments(NamedTuple):
    """Mean μ and covariance Σ of the returns; all clients have the same weight."""

    mean: np.ndarray
    covariance: np.ndarray

    @classmethod
    def of(cls, federation: "Federation") -> "Moments":
        train = federation["train"]
        counts = np.asarray(train.counts)
        r = np.asarray(train.examples["r"], np.float64)
        weight = np.repeat(1 / (len(counts) * counts), counts)
        mean = weight @ r
        return cls(mean, (r - mean).T @ (weight[:, None] * (r - mean)))

    @property
    def kappa(self) -> float:
        """κ = μᵀΣ⁻¹μ, the square of the best Sharpe ratio; infinite where some portfolio has no variance."""
        spectrum = np.linalg.eigvalsh(self.covariance)
        if spectrum[0] <= 1e-12 * spectrum[-1]:
            return math.inf
        return float(self.mean @ np.linalg.solve(self.covariance, self.mean))

    def value(self, x: np.ndarray, risk_aversion: float, eps: float, floor: float) -> float:
        spread = max(float(x @ self.covariance @ x) + eps, floor)
        return risk_aversion * math.sqrt(spread) - float(self.mean @ x)


class Best(NamedTuple):
    x: np.ndarray
    value: float


def unconstrained(moments: Moments, risk_aversion: float, eps: float, floor: float) -> Best:
    r"""The minimum of $\lambda \sqrt{\max(x^\top \Sigma x + \epsilon, f)} - \mu^\top x$ over all x.

    Of all x with $x^\top \Sigma x = v$ the best is $\sqrt{v / \kappa} \, \Sigma^{-1} \mu$, of mean $\sqrt{\kappa v}$,
    so only v remains: $\lambda \sqrt{\max(v + \epsilon, f)} - \sqrt{\kappa v}$ falls up to
    $v = \max(\epsilon \kappa / (\lambda^2 - \kappa), f - \epsilon)$ and grows from there on. Without guards v = 0: the
    best is to buy nothing. Where $\kappa \ge \lambda^2$ there is no minimum.

    >>> moments = Moments(np.array([0.6]), np.eye(1))
    >>> best = unconstrained(moments, 1.0, eps=0.25, floor=0.0)  # sqrt(ε (λ² − κ)) = 0.5 · 0.8
    >>> round(best.value, 12), best.x.round(12).tolist()
    (0.4, [0.375])
    """
    kappa = moments.kappa
    if kappa >= risk_aversion**2:
        raise ValueError(
            f"portfolio: κ = μᵀΣ⁻¹μ = {kappa:.3g} is not below λ² = {risk_aversion**2:.3g}, so the objective has no "
            "minimum; take a larger risk_aversion, or constraint='simplex'"
        )
    v = max(eps * kappa / (risk_aversion**2 - kappa), floor - eps, 0.0)
    x = math.sqrt(v / kappa) * np.linalg.solve(moments.covariance, moments.mean) if kappa else 0 * moments.mean
    return Best(x, risk_aversion * math.sqrt(max(v + eps, floor)) - math.sqrt(kappa * v))


def on_simplex(moments: Moments, risk_aversion: float, eps: float, floor: float) -> Best:
    """The same over x ≥ 0 with sum one, which is convex: accelerated projected steps until the condition holds.

    Such a portfolio always has a variance, so a floor below it changes nothing; one above it is refused.
    """
    mean, covariance = moments
    unit = math.sqrt(float(np.trace(covariance)) / len(mean))  # steps must not depend on percent or decimal
    mean, covariance, eps, floor = mean / unit, covariance / unit**2, eps / unit**2, floor / unit**2
    top = np.linalg.eigvalsh(covariance)[-1]
    start = np.full(len(mean), 1 / len(mean))
    project = lambda z, step: onto_simplex(z)
    least = fista(lambda x: 2 * covariance @ x, project, start, 0.5 / top, tolerance=1e-12, limit=100_000).x
    lowest = float(least @ covariance @ least)
    if floor > lowest + eps:
        raise ValueError(
            f"portfolio: floor={floor * unit**2:g} is above the least variance of a portfolio, {lowest * unit**2:.3g}; "
            "take a smaller one"
        )
    spread = lambda x: math.sqrt(float(x @ covariance @ x) + eps)
    gradient = lambda x: risk_aversion * covariance @ x / spread(x) - mean
    step = math.sqrt(0.99 * lowest + eps) / (risk_aversion * top)
    found = fista(gradient, project, least, step, tolerance=1e-13, limit=100_000)
    if not found.residual <= TOLERANCE:
        raise ValueError(f"portfolio: the reference violates its optimality condition by {found.residual:.1e}")
    return Best(found.x, unit * (risk_aversion * spread(found.x) - float(mean @ found.x)))


def onto_simplex(z: np.ndarray) -> np.ndarray:
    """The nearest point of the simplex: (z − t)₊ with the level t at which it sums to one.

    >>> onto_simplex(np.array([0.75, 1.25, -3.0])).tolist()
    [0.25, 0.75, 0.0]
    """
    ordered = np.sort(z)[::-1]
    levels = (np.cumsum(ordered) - 1) / np.arange(1, len(z) + 1)
    return np.maximum(z - levels[np.flatnonzero(ordered > levels)[-1]], 0)
