"""The gap between groups by chance alone: that of a perfectly fair model, on few examples."""

from typing import Any

import numpy as np

RATE = 0.6  # about the true positive rate of logistic models on Adult
DRAWS = 20_000


def by_chance(part: Any, label: int, rate: float, groups: int) -> float:
    """The expected gap in the recall of a label, if every group's true recall is `rate`.

    >>> part = {"y": np.ones(200), "group": np.repeat([0, 1], [100, 100])}
    >>> round(by_chance(part, 1, 0.5, 2), 2)  # 2 sqrt(1/(4 · 100) / π)
    0.06
    """
    counts = np.bincount(np.asarray(part["group"])[np.asarray(part["y"]) == label], minlength=groups)
    counts = counts[counts > 0]
    shares = np.random.default_rng(0).binomial(counts, rate, (DRAWS, len(counts))) / counts
    return float(np.ptp(shares, axis=1).mean())
