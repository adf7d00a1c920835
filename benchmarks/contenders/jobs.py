"""The jobs of the contenders: the same data and start values for all of them, in NumPy.

Weights have the layout (outputs, inputs, ...), images (height, width, channels).
"""

from typing import Any, NamedTuple

import numpy as np


class Data(NamedTuple):
    """Rows of every client, one set of rows for evaluation, and start values."""

    x: np.ndarray  # (clients, examples, ...)
    y: np.ndarray  # (clients, examples)
    test_x: np.ndarray
    test_y: np.ndarray
    start: list[np.ndarray]


def load(job: dict[str, Any]) -> Data:
    return {"mlp": mlp, "cnn": cnn}[job["model"]](job)


def mlp(job: dict[str, Any]) -> Data:
    """Labels of a random linear teacher on uniform inputs around 0; an MLP 784-32-10."""
    rng = np.random.default_rng(0)
    shape = (job["clients"], job["examples"])
    x = 2 * rng.random((*shape, 784), np.float32) - 1
    y = np.argmax(x @ rng.standard_normal((784, 10)).astype(np.float32), axis=-1)
    start = [_weight(rng, 32, 784), np.zeros(32), _weight(rng, 10, 32), np.zeros(10)]
    return Data(x, y.astype(np.int32), x[0], y[0], [a.astype(np.float32) for a in start])


def cnn(job: dict[str, Any]) -> Data:
    """Noise around ten patterns, 32 × 32 × 3; two valid 3 × 3 convolutions, 2 × 2 max pooling, a hidden layer."""
    rng = np.random.default_rng(0)
    patterns = rng.random((10, 32, 32, 3), np.float32)

    def images(count: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.integers(0, 10, count)
        x = rng.random((count, 32, 32, 3), np.float32)
        x += np.float32(0.2) * patterns[y]
        return x - np.float32(0.6), y.astype(np.int32)

    clients, examples = job["clients"], job["examples"]
    x, y = images(clients * examples)
    test_x, test_y = images(job["test"])
    layers = [(32, 3, 3, 3), (64, 32, 3, 3), (128, 64 * 14 * 14), (10, 128)]
    start = [part for shape in layers for part in (_weight(rng, *shape), np.zeros(shape[0]))]
    split = lambda a: a.reshape(clients, examples, *a.shape[1:])
    return Data(split(x), split(y), test_x, test_y, [a.astype(np.float32) for a in start])


def mlp_loss(params: list[np.ndarray], data: Data) -> float:
    """The mean cross-entropy over the data of all clients: the objective, in float64."""
    w1, b1, w2, b2 = (np.asarray(p) for p in params)
    hidden = np.maximum(data.x.reshape(-1, 784) @ w1.T + b1, 0)
    z = (hidden @ w2.T + b2).astype(np.float64)
    top = z.max(axis=1)
    log_sum = top + np.log(np.exp(z - top[:, None]).sum(axis=1))
    return float(np.mean(log_sum - z[np.arange(len(z)), data.y.reshape(-1)]))


def _weight(rng: Any, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))
