"""Means over seeds with their uncertainty, and slopes of logarithms."""

import numpy as np


def interval(values: np.ndarray, level: float = 0.95) -> tuple[float, float, float]:
    """The mean over seeds and its Student interval.

    >>> interval(np.array([1.0, 1.0, 1.0]))
    (1.0, 1.0, 1.0)

    Args:
        values: one for each seed.
        level: the probability that the interval covers the mean.
    """
    from scipy.stats import t

    values = np.asarray(values, np.float64)
    mean = float(values.mean())
    if values.size < 2:
        return mean, float("nan"), float("nan")
    half = float(t.ppf((1 + level) / 2, values.size - 1) * values.std(ddof=1) / values.size**0.5)
    return mean, mean - half, mean + half


def slope(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The least-squares slope of every row of y against x.

    >>> slope(np.array([0.0, 1.0, 2.0]), np.array([[1.0, 0.5, 0.0]])).tolist()
    [-0.5]

    Args:
        x: points.
        y: rows of values at these points.
    """
    centred = x - x.mean()
    return (y - y.mean(axis=1, keepdims=True)) @ centred / (centred @ centred)
