"""Pairwise risks and the listings of FedX in plain NumPy: loops over rounds, clients, steps, examples and pairs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from fedstrata import pair_losses

# Losses: value, ∂₁ and ∂₂ at (score of the first, score of the second, label of the second), all of shape (k,); f and
# f' at u of shape (k,).


class Loss(NamedTuple):
    ours: Any
    value: Callable
    d1: Callable
    d2: Callable
    f: Callable = lambda u: u[0]
    slope: Callable = lambda u: np.ones(1)
    second: str = "negatives"
    outer: Callable | None = None  # where our loss has not its own

    def problem(self, **options) -> fs.Pairwise:
        given = {"second": self.second, "outer": self.outer, "metrics": (), **options}
        return fs.Pairwise(linear_score, self.ours, **given)


def linear_score(w, example):
    return jnp.dot(w, example["x"])


def hinge(a, b):
    return max(1 - a + b, 0.0)


def of_difference(ours, value, derivative, **more) -> Loss:
    """A scalar loss of t = a − b."""
    at = lambda function, sign: lambda a, b, y: np.array([sign * function(a - b)])
    return Loss(ours, at(value, 1), at(derivative, 1), at(derivative, -1), **more)


def sigmoid(t):
    return 1 / (1 + np.exp(-t))


square = lambda t: max(1 - t, 0.0) ** 2
square_slope = lambda t: -2 * max(1 - t, 0.0)


def exponential(ours, lam, f, slope) -> Loss:
    value = lambda t: np.exp(square(t) / lam)
    return of_difference(ours, value, lambda t: value(t) * square_slope(t) / lam, f=f, slope=slope)


def kl_opauc(lam) -> Loss:
    return exponential(pair_losses.KLOPAUC(lam), lam, lambda u: lam * np.log(u[0]), lambda u: np.array([lam / u[0]]))


def two_way(lam, first) -> Loss:
    power = lam / first
    return exponential(
        pair_losses.TwoWay(lam, first), lam, lambda u: first * u[0] ** power, lambda u: lam * u ** (power - 1)
    )


LOSSES = {
    "square": of_difference(pair_losses.Square(), lambda t: (1 - t) ** 2, lambda t: -2 * (1 - t)),
    "squared hinge": of_difference(pair_losses.SquaredHinge(), square, square_slope),
    "logistic": of_difference(pair_losses.Logistic(), lambda t: np.log1p(np.exp(-t)), lambda t: -sigmoid(-t)),
    "psm": of_difference(pair_losses.PSM(), lambda t: sigmoid(-t), lambda t: -sigmoid(t) * sigmoid(-t)),
    "kl": kl_opauc(2.0),
    "two-way": two_way(2.0, 3.0),
    "precision": Loss(
        pair_losses.AveragePrecision(),
        lambda a, b, y: np.array([y, 1]) * hinge(a, b) ** 2,
        lambda a, b, y: np.array([y, 1]) * -2 * hinge(a, b),
        lambda a, b, y: np.array([y, 1]) * 2 * hinge(a, b),
        lambda u: -u[0] / u[1],
        lambda u: np.array([-1 / u[1], u[0] / u[1] ** 2]),
        "train",
    ),
    "own f": of_difference(
        lambda a, b: jnp.square(1 - a + b),
        lambda t: (1 - t) ** 2,
        lambda t: -2 * (1 - t),
        f=lambda u: np.sqrt(1 + u[0]),
        slope=lambda u: 0.5 / np.sqrt(1 + u),
        outer=lambda u: jnp.sqrt(1 + u),
    ),
}
LINEAR = ("square", "squared hinge", "logistic", "psm")


# Data.


class PairTask(NamedTuple):
    federation: fs.Federation  # with splits by label
    counts: tuple[tuple[int, int], ...]  # of each client: positives, negatives

    @property
    def clients(self) -> int:
        return len(self.counts)

    def first(self, client) -> np.ndarray:
        return self.federation["positives"].shard(client)["x"]

    def second(self, client, loss) -> list[tuple[np.ndarray, int]]:
        shard = self.federation[loss.second].shard(client)
        return list(zip(shard["x"], shard["y"], strict=True))

    def omegas(self, loss, weighting="examples") -> np.ndarray:
        """(2, N): N |S^i| / |S| for both sets."""
        sizes = np.array([[len(self.first(i)), len(self.second(i, loss))] for i in range(self.clients)], float).T
        parts = sizes if weighting == "examples" else (sizes > 0).astype(float)
        return self.clients * parts / parts.sum(axis=1, keepdims=True)


def pair_task(counts=((3, 5), (6, 2), (2, 4)), seed=0, shift=0.4, dimension=3) -> PairTask:
    rng = np.random.default_rng(seed)
    shards = []
    for i, (positives, negatives) in enumerate(counts):
        y = np.r_[np.ones(positives, int), np.zeros(negatives, int)]
        order = rng.permutation(y.size)
        x = rng.normal(size=(y.size, dimension)) + 0.7 * y[:, None] + shift * i * rng.normal(size=dimension)
        shards.append({"x": x[order], "y": y[order]})
    return PairTask(fs.Federation.from_clients(shards, classes=2).by_label(), tuple(counts))


# The objective.


def objective(task, loss, w, weighting="examples", l2=0.0) -> float:
    """Every pair in turn."""
    omega, n = task.omegas(loss, weighting), task.clients
    total = 0.5 * l2 * w @ w
    for i in range(n):
        for x in task.first(i):
            u = sum(
                omega[1, j] / n / len(rows) * loss.value(w @ x, w @ other, y)
                for j in range(n)
                for rows in [task.second(j, loss)]
                for other, y in rows
            )
            total += omega[0, i] / n / len(task.first(i)) * loss.f(u)
    return total


def gradient(task, loss, w, weighting="examples", l2=0.0) -> np.ndarray:
    omega, n = task.omegas(loss, weighting), task.clients
    total = l2 * w
    for i in range(n):
        for x in task.first(i):
            u, inner = 0.0, 0.0
            for j in range(n):
                rows = task.second(j, loss)
                for other, y in rows:
                    a, b, share = w @ x, w @ other, omega[1, j] / n / len(rows)
                    u += share * loss.value(a, b, y)
                    inner += share * (np.outer(loss.d1(a, b, y), x) + np.outer(loss.d2(a, b, y), other))
            total = total + omega[0, i] / n / len(task.first(i)) * loss.slope(u) @ inner
    return total


# The listings.


class Block(NamedTuple):
    """What one client sent in one round: H_1 with the u of the same examples, and H_2 with labels."""

    client: int
    first: list  # (score, u)
    second: list  # (score, label)


def scored(task, loss, w, client):
    return [w @ x for x in task.first(client)], [(w @ x, y) for x, y in task.second(client, loss)]


def fedx1(task, loss, w, step, steps, rounds, history=1, cohorts=None, l2=0.0) -> np.ndarray:
    """Algorithm 1 with every active example in each step, and whole buffers averaged block by block."""
    omega = task.omegas(loss)
    cohorts = cohorts or [range(task.clients)] * rounds
    pools = [[Block(i, *scored(task, loss, w, i)) for i in range(task.clients)]]  # Algorithm 3, line 26: from all N
    for r in range(rounds):
        buffers = [block for pool in pools[-history:] for block in pool]
        ends, sent = [], []
        for i in cohorts[r]:
            w_i, one, two = w, [], []
            for _ in range(steps):
                h1, h2 = scored(task, loss, w_i, i)
                one, two = one + h1, two + h2
                g = l2 * w_i
                for x, a in zip(task.first(i), h1, strict=True):
                    for block in buffers:
                        for b, y in block.second:
                            share = omega[0, i] * omega[1, block.client] / len(h1) / len(block.second) / len(buffers)
                            g = g + share * loss.d1(a, b, y)[0] * x
                for (x, _), (b, y) in zip(task.second(i, loss), h2, strict=True):
                    for block in buffers:
                        for a in block.first:
                            share = omega[0, block.client] * omega[1, i] / len(h2) / len(block.first) / len(buffers)
                            g = g + share * loss.d2(a, b, y)[0] * x
                w_i = w_i - step * g
            ends.append(w_i)
            sent.append(Block(i, one, two))
        w, pools = np.mean(ends, axis=0), [*pools, sent]
    return w


def mean_loss(loss, omega, buffers, a):
    """1/|blocks| Σ ω_2j mean over the block of ℓ(a, ·); None where nothing of the second set is there."""
    found = [
        omega[1, block.client] / len(block.second) / len(buffers) * loss.value(a, b, y)
        for block in buffers
        for b, y in block.second
    ]
    return np.sum(found, axis=0) if found else None


class FedX2End(NamedTuple):
    w: np.ndarray
    g: np.ndarray
    u: list  # by client: one row (k,) per example
    pool: list


def fedx2(
    task, loss, w, step, steps, rounds, gamma=0.2, beta=0.1, history=1, cohorts=None, l2=0.0, start="pool"
) -> FedX2End:
    """Algorithm 2 (3 with cohorts), likewise. start: "pool", or the number that every u begins with."""
    omega, parts = task.omegas(loss), loss.value(0.0, 0.0, 1).size
    cohorts = cohorts or [range(task.clients)] * rounds
    blank = [Block(i, [], scored(task, loss, w, i)[1]) for i in range(task.clients)]

    def begin(a):
        found = mean_loss(loss, omega, blank, a) if start == "pool" else np.full(parts, float(start))
        return np.ones(parts) if found is None else found

    u = [[begin(a) for a in scored(task, loss, w, i)[0]] for i in range(task.clients)]
    pools = [
        [
            Block(i, list(zip(scored(task, loss, w, i)[0], u[i], strict=True)), scored(task, loss, w, i)[1])
            for i in range(task.clients)
        ]
    ]
    mean_g = np.zeros_like(w)
    for r in range(rounds):
        buffers = [block for pool in pools[-history:] for block in pool]
        ends, directions, sent = [], [], []
        for i in cohorts[r]:
            w_i, g, one, two = w, mean_g, [], []
            for _ in range(steps):
                h1, h2 = scored(task, loss, w_i, i)
                for p, a in enumerate(h1):
                    fresh = mean_loss(loss, omega, buffers, a)
                    u[i][p] = u[i][p] if fresh is None else (1 - gamma) * u[i][p] + gamma * fresh
                new = l2 * w_i
                for p, (x, a) in enumerate(zip(task.first(i), h1, strict=True)):
                    for block in buffers:
                        for b, y in block.second:
                            share = omega[0, i] * omega[1, block.client] / len(h1) / len(block.second) / len(buffers)
                            new = new + share * (loss.slope(u[i][p]) @ loss.d1(a, b, y)) * x
                for (x, _), (b, y) in zip(task.second(i, loss), h2, strict=True):
                    for block in buffers:
                        for a, u_zeta in block.first:
                            share = omega[0, block.client] * omega[1, i] / len(h2) / len(block.first) / len(buffers)
                            new = new + share * (loss.slope(u_zeta) @ loss.d2(a, b, y)) * x
                g = (1 - beta) * g + beta * new
                w_i = w_i - step * g
                one, two = one + list(zip(h1, u[i], strict=True)), two + h2
            ends.append(w_i)
            directions.append(g)
            sent.append(Block(i, one, two))
        w, mean_g, pools = np.mean(ends, axis=0), np.mean(directions, axis=0), [*pools, sent]
    return FedX2End(w, mean_g, u, pools[-1])


def sox(task, loss, w, step, steps, gamma, beta, updated=True) -> np.ndarray:
    """All examples of all clients in one place and in every step; u begins as the exact mean loss."""
    first = np.concatenate([task.first(i) for i in range(task.clients)])
    second = [row for i in range(task.clients) for row in task.second(i, loss)]
    mean = lambda w, x: np.mean([loss.value(w @ x, w @ other, y) for other, y in second], axis=0)
    u, g = [mean(w, x) for x in first], np.zeros_like(w)
    for _ in range(steps):
        new = np.zeros_like(w)
        for p, x in enumerate(first):
            old, u[p] = u[p], (1 - gamma) * u[p] + gamma * mean(w, x)
            slope = loss.slope(u[p] if updated else old)
            for other, y in second:
                a, b = w @ x, w @ other
                pull = slope @ (np.outer(loss.d1(a, b, y), x) + np.outer(loss.d2(a, b, y), other))
                new = new + pull / len(first) / len(second)
        g = (1 - beta) * g + beta * new
        w = w - step * g
    return w
