"""The baselines for nested problems as plain loops over steps, workers and levels, with Jacobians by hand, in NumPy."""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from fedstrata.problems.nested import Nested

SIZES = (3, 4, 2, 3, 2)  # of x and of the outputs of levels 1, 2 …
START = np.array([0.4, -0.3, 0.7])
SPLIT = 1  # level 1 returns a tree: this many numbers, and the others


class Chain(NamedTuple):
    """K levels, all with noise and none alike on two workers: A y + sin(B y) + c, at the end Σ w √(1 + (y − t)²)."""

    data: Mapping[str, np.ndarray]  # (workers, examples, …): A1, B1, c1 … of the inner levels, w, t of the last

    @property
    def levels(self) -> int:
        return len(self.data) // 3 + 1

    @property
    def workers(self) -> int:
        return len(self.data["w"])

    @property
    def examples(self) -> int:
        return self.data["w"].shape[1]

    def value(self, k: int, n: int, rows: np.ndarray, y: np.ndarray) -> np.ndarray:
        """F_k of worker n, averaged over these examples."""
        A, B, c = (self.data[f"{name}{k}"][n, rows] for name in "ABc")
        return (A @ y + np.sin(B @ y) + c).mean(axis=0)

    def jacobian(self, k: int, n: int, rows: np.ndarray, y: np.ndarray) -> np.ndarray:
        """J_k likewise, one row for every output; of the last level, one row in all."""
        if k == self.levels:
            w, t = self.data["w"][n, rows], self.data["t"][n, rows]
            return (w * (y - t) / np.sqrt(1 + (y - t) ** 2)).mean(axis=0)[None]
        A, B = (self.data[f"{name}{k}"][n, rows] for name in "AB")
        return (A + np.cos(B @ y)[:, :, None] * B).mean(axis=0)

    @property
    def federation(self) -> fs.Federation:
        return fs.Federation.from_clients([{k: v[n] for k, v in self.data.items()} for n in range(self.workers)])

    def changed(self, **how: Callable[[np.ndarray], np.ndarray]) -> "Chain":
        """With every array whose name begins so replaced by a function of it."""
        return Chain({name: how.get(name[0], lambda a: a)(a) for name, a in self.data.items()})


@functools.cache
def problem(levels: int, weight: float = 0.0) -> Nested:
    """The same for the library, which finds the Jacobians itself; with weight |x|₁ added."""

    def inner(k: int) -> Callable:
        def level(y, e):
            y = jnp.concatenate(y) if k == 2 else y
            out = e[f"A{k}"] @ y + jnp.sin(e[f"B{k}"] @ y) + e[f"c{k}"]
            return (out[:SPLIT], out[SPLIT:]) if k == 1 else out

        return level

    def last(y, e):
        y = jnp.concatenate(y) if levels == 2 else y
        return jnp.sum(e["w"] * jnp.sqrt(1 + (y - e["t"]) ** 2))

    regularizer = fs.prox.L1(weight) if weight else fs.prox.Zero()
    return Nested([*(inner(k) for k in range(1, levels)), last], regularizer=regularizer)


def chain(levels: int, workers: int = 3, examples: int = 6, seed: int = 0) -> Chain:
    rng, data = np.random.default_rng(seed), {}
    draw = lambda *shape: rng.normal(size=(workers, 1, *shape)) + 0.5 * rng.normal(size=(workers, examples, *shape))
    for k in range(1, levels):
        into, out = SIZES[k - 1], SIZES[k]
        data |= {f"A{k}": 0.5 * draw(out, into), f"B{k}": 0.7 * draw(out, into), f"c{k}": draw(out)}
    last = SIZES[levels - 1]
    return Chain({**data, "w": 1 + 0.3 * draw(last), "t": draw(last)})


def indices(task: Chain, rounds: int, steps: int, batch: int, seed: int = 1) -> dict[str, np.ndarray]:
    """Random examples for every step, drawn with replacement."""
    rng, shape = np.random.default_rng(seed), (rounds, steps, task.workers, batch)
    return {f"level{k}": rng.integers(0, task.examples, shape) for k in range(1, task.levels + 1)}


class Walk(NamedTuple):
    """One run: the task, the samples to look at, and the step of x."""

    task: Chain
    table: Mapping[str, np.ndarray]
    step: float
    prox: Callable[[np.ndarray], np.ndarray] = lambda x: x

    def times(self):
        """Every iteration: its samples, rows(k, n), and whether it ends with an averaging."""
        rounds, steps = self.table["level1"].shape[:2]
        for r in range(rounds):
            for s in range(steps):
                yield (lambda k, n, r=r, s=s: self.table[f"level{k}"][r, s, n]), s == steps - 1

    def first(self, n: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """x, h_1 … h_{K−1} and J_1 … J_K of worker n before the first iteration."""
        task, points = self.task, [START.copy()]
        rows = lambda k: self.table[f"level{k}"][0, 0, n]
        for k in range(1, task.levels):
            points.append(task.value(k, n, rows(k), points[-1]))
        return points, [task.jacobian(k, n, rows(k), points[k - 1]) for k in range(1, task.levels + 1)]

    def starts(self) -> tuple[list, list]:
        both = [self.first(n) for n in range(self.task.workers)]
        return [points for points, _ in both], [jacobians for _, jacobians in both]


def product(jacobians: list[np.ndarray]) -> np.ndarray:
    """J_1ᵀ ⋯ J_Kᵀ"""
    out = np.ones(1)
    for J in jacobians[::-1]:
        out = J.T @ out
    return out


def average(workers: list[list[np.ndarray]]) -> None:
    """Every quantity of every worker becomes its mean over workers."""
    for quantity in range(len(workers[0])):
        mean = np.mean([mine[quantity] for mine in workers], axis=0)
        for mine in workers:
            mine[quantity] = mean


def local_scgdm(walk: Walk, beta: float, alpha: float) -> list[np.ndarray]:
    """Algorithm 2; x and h at the end."""
    task, (points, J) = walk.task, walk.starts()
    own = [[x, h, product(J[n])] for n, (x, h) in enumerate(points)]
    for rows, communicate in walk.times():
        for n, (x, h, v) in enumerate(own):
            x = walk.prox(x - walk.step * v)
            h = (1 - beta) * h + beta * task.value(1, n, rows(1, n), x)
            gradient = task.jacobian(1, n, rows(1, n), x).T @ task.jacobian(2, n, rows(2, n), h)[0]
            own[n] = [x, h, (1 - alpha) * v + alpha * gradient]
        if communicate:
            average(own)
    return own[0][:2]


def smvr(walk: Walk, b: float, radius: float = np.inf) -> list[np.ndarray]:
    task, (points, V) = walk.task, walk.starts()
    for rows, communicate in walk.times():
        for n in range(task.workers):
            old, new = points[n], [walk.prox(points[n][0] - walk.step * product(V[n]))]
            for k in range(1, task.levels):
                F = lambda y, k=k, n=n, rows=rows: task.value(k, n, rows(k, n), y)
                new.append((1 - b) * (old[k] - F(old[k - 1])) + F(new[k - 1]))
            for k in range(1, task.levels + 1):
                J = lambda y, k=k, n=n, rows=rows: task.jacobian(k, n, rows(k, n), y)
                matrix = (1 - b) * (V[n][k - 1] - J(old[k - 1])) + J(new[k - 1])
                V[n][k - 1] = matrix * min(1, radius / np.linalg.norm(matrix))
            points[n] = new
        if communicate:
            average(points)
            average(V)
    return points[0]


def scsc(walk: Walk, b: float) -> list[np.ndarray]:
    """With the original's form of the rule for h."""
    task, (points, J) = walk.task, walk.starts()
    for rows, communicate in walk.times():
        for n in range(task.workers):
            old, new = points[n], [walk.prox(points[n][0] - walk.step * product(J[n]))]
            for k in range(1, task.levels):
                F = lambda y, k=k, n=n, rows=rows: task.value(k, n, rows(k, n), y)
                new.append((1 - b) * (old[k] + F(new[k - 1]) - F(old[k - 1])) + b * F(new[k - 1]))
            J[n] = [task.jacobian(k, n, rows(k, n), new[k - 1]) for k in range(1, task.levels + 1)]
            points[n] = new
        if communicate:
            average(points)
            average(J)
    return points[0]


def nlasg(walk: Walk, tau: float, average_z: bool = False) -> list[np.ndarray]:
    """z at the end of the iteration, made of averaged Jacobians where they are averaged."""
    task, (points, J) = walk.task, walk.starts()
    z = [[np.zeros_like(START)] for _ in range(task.workers)]
    for rows, communicate in walk.times():
        for n in range(task.workers):
            old, new = points[n], [walk.prox(points[n][0] - walk.step * z[n][0])]
            J[n] = [task.jacobian(k, n, rows(k, n), old[k - 1]) for k in range(1, task.levels + 1)]
            for k in range(1, task.levels):
                G = task.value(k, n, rows(k, n), old[k - 1])
                new.append((1 - tau) * old[k] + tau * G + J[n][k - 1] @ (new[k - 1] - old[k - 1]))
            points[n] = new
        if communicate:
            average(points)
            average(J)
        for n in range(task.workers):
            z[n][0] = (1 - tau) * z[n][0] + tau * product(J[n])
        if communicate and average_z:
            average(z)
    return points[0]
