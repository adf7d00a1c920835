"""The outer loss of given weights, exactly: every client's weighted logistic regression solved by Newton's method."""

from typing import Any

import numpy as np


def outer_loss(federation: Any, weights: np.ndarray, l2: float) -> float:
    """The mean over clients of the loss on "valid" of the model that minimises the weighted loss on "train".

    A plain loop over clients, for recorded weights: it compiles nothing and does not depend on the library.
    """
    losses = []
    for client in range(federation.clients):
        train, valid = (federation[split].shard(client) for split in ("train", "valid"))
        z = with_bias(valid["x"]) @ solved(train, weights, l2)
        losses.append(np.mean(np.logaddexp(0, z) - valid["y"] * z))
    return float(np.mean(losses))


def solved(train: Any, weights: np.ndarray, l2: float, tolerance: float = 1e-7, most: int = 50) -> np.ndarray:
    """The minimiser θ of mean w[a] ℓ(θ) + l2/2 |θ|², by Newton steps that are halved until they descend.

    The last step is at most `tolerance` × |θ|, so that problems with small weights are solved as accurately.
    """
    x, y = with_bias(train["x"]), np.asarray(train["y"], np.float64)
    w = np.asarray(weights, np.float64)[np.asarray(train["group"])] / len(y)

    def value(theta: np.ndarray) -> float:
        z = x @ theta
        return float(w @ (np.logaddexp(0, z) - y * z) + l2 / 2 * theta @ theta)

    theta = np.zeros(x.shape[1])
    for _ in range(most):
        p = 1 / (1 + np.exp(-(x @ theta)))
        slope = x.T @ (w * (p - y)) + l2 * theta
        hessian = (x * (w * p * (1 - p))[:, None]).T @ x + l2 * np.eye(len(theta))
        step, now, length = np.linalg.solve(hessian, slope), value(theta), 1.0
        while value(theta - length * step) > now and length > 1e-6:
            length /= 2
        theta = theta - length * step
        if np.linalg.norm(step) <= tolerance * np.linalg.norm(theta):
            break
    return theta


def with_bias(x: Any) -> np.ndarray:
    x = np.asarray(x, np.float64)
    return np.concatenate([x, np.ones((len(x), 1))], axis=1)
