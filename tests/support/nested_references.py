"""Nested problems with analytic Jacobians, and the methods for them as plain NumPy loops over workers and iterations.

Written from the methods' descriptions, not from the library. Levels are counted from 1, as in the papers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from fedstrata.problems.nested import Nested

Looks = Callable[[str, int, int, int, int], np.ndarray]  # (what, level, round, local step, worker) -> rows


def smooth_level(k, gain):
    """y ↦ E y + gain tanh(A y + b), with E ones on the diagonal."""

    def level(y, example):
        A, b = example[f"A{k}"], example[f"b{k}"]
        return jnp.eye(*A.shape) @ y + gain * jnp.tanh(A @ y + b)

    return level


def quadratic_level(k):
    def level(y, example):
        return 0.5 * jnp.sum((example[f"A{k}"] @ y - example[f"b{k}"]) ** 2) + 0.1 * jnp.sum(y**2)

    return level


class NestedTask(NamedTuple):
    """Workers with separate data for every level."""

    shards: list[dict[str, np.ndarray]]
    federation: fs.Federation
    problem: Nested
    levels: int
    gain: float

    @property
    def clients(self) -> int:
        return len(self.shards)

    def every(self, i: int) -> np.ndarray:
        return np.arange(len(self.shards[i]["b1"]))

    def value(self, k: int, i: int, y: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The mean of level k over these rows of worker i."""
        total: Any = 0.0
        for A, b in zip(self.shards[i][f"A{k}"][rows], self.shards[i][f"b{k}"][rows], strict=True):
            if k == self.levels:
                total += 0.5 * np.sum((A @ y - b) ** 2) + 0.1 * np.sum(y**2)
            else:
                total += np.eye(*A.shape) @ y + self.gain * np.tanh(A @ y + b)
        return total / len(rows)

    def jacobian(self, k: int, i: int, y: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Of level k, analytically; of the last level its gradient."""
        total: Any = 0.0
        for A, b in zip(self.shards[i][f"A{k}"][rows], self.shards[i][f"b{k}"][rows], strict=True):
            if k == self.levels:
                total += A.T @ (A @ y - b) + 0.2 * y
            else:
                total += np.eye(*A.shape) + self.gain * (1 - np.tanh(A @ y + b) ** 2)[:, None] * A
        return total / len(rows)

    def pull(self, k: int, i: int, y: np.ndarray, v: np.ndarray | None, rows: np.ndarray) -> np.ndarray:
        J = self.jacobian(k, i, y, rows)
        return J if v is None else J.T @ v

    def gradient(self, x: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        """∇ of the globally coupled objective: exact values upwards, the chain rule downwards."""
        p = np.full(self.clients, 1 / self.clients) if weights is None else weights
        y, jacobians = x, []
        for k in range(1, self.levels + 1):
            jacobians.append(sum(p[i] * self.jacobian(k, i, y, self.every(i)) for i in range(self.clients)))
            y = sum(p[i] * self.value(k, i, y, self.every(i)) for i in range(self.clients))
        direction = jacobians[-1]
        for J in reversed(jacobians[:-1]):
            direction = J.T @ direction
        return direction


LEVELS: dict[tuple[int, float], Nested] = {}  # the same functions for all tasks of a kind: programs are compiled once


def nested_problem(levels: int, gain: float = 0.5) -> Nested:
    if (levels, gain) not in LEVELS:
        inner = [smooth_level(k, gain) for k in range(1, levels)]
        LEVELS[levels, gain] = Nested([*inner, quadratic_level(levels)])
    return LEVELS[levels, gain]


def nested_task(levels, clients=4, sizes=(1,), dims=None, seed=0, spread=1.0, noise=0.0, gain=0.5) -> NestedTask:
    """spread: how much workers differ; noise: how much the examples of one worker do. dims: d_0 … d_{K−1}."""
    rng = np.random.default_rng(seed)
    dims = (3,) * levels if dims is None else dims
    outputs = (*dims[1:], 2)  # of A: what tanh acts on; at the last level, residuals
    A = [rng.normal(size=(m, d)) / np.sqrt(d) for d, m in zip(dims, outputs, strict=True)]
    b = [rng.normal(size=m) for m in outputs]
    shards = []
    for i in range(clients):
        n, shard = sizes[i % len(sizes)], {}
        for k in range(1, levels + 1):
            m, d = A[k - 1].shape
            own = A[k - 1] + 0.5 * spread * rng.normal(size=(m, d)) / np.sqrt(d), b[k - 1] + spread * rng.normal(size=m)
            shard[f"A{k}"] = own[0] + noise * rng.normal(size=(n, m, d)) / np.sqrt(d)
            shard[f"b{k}"] = own[1] + noise * rng.normal(size=(n, m))
        shards.append(shard)
    return NestedTask(shards, fs.Federation.from_clients(shards), nested_problem(levels, gain), levels, gain)


class Samples(NamedTuple):
    """Positions for every stream, (rounds, steps, workers, batch), as `fs.Replay` takes them."""

    indices: dict[str, np.ndarray]

    def look(self, what: str, k: int, round: int, step: int, worker: int) -> np.ndarray:
        return self.indices[f"{what}{k}"][round, step, worker]


def samples(task: NestedTask, rounds: int, steps: int, batch: int, separate: bool, seed: int = 0) -> Samples:
    rng = np.random.default_rng(seed)
    names = [f"{what}{k}" for what in ("level", *["jacobian"] * separate) for k in range(1, task.levels + 1)]
    draw = lambda: [rng.integers(0, len(task.every(i)), (rounds, steps, batch)) for i in range(task.clients)]
    return Samples({name: np.stack(draw(), axis=2) for name in names})


def whole(task: NestedTask) -> Looks:
    return lambda what, k, round, step, worker: task.every(worker)


class Worker:
    """x, h[1 … K−1] and v[1 … K] of one worker, started locally on its first samples; h[0] is x."""

    def __init__(self, task: NestedTask, i: int, x: np.ndarray, look: Looks, jacobian: str):
        self.h, self.v = {0: x}, {}
        for k in range(1, task.levels):
            self.h[k] = task.value(k, i, self.h[k - 1], look("level", k, 0, 0, i))
        above = None
        for k in range(task.levels, 0, -1):
            above = self.v[k] = task.pull(k, i, self.h[k - 1], above, look(jacobian, k, 0, 0, i))


def mean(weights, values):
    return sum(w * v for w, v in zip(weights, values, strict=True))


def ball(radius):
    """Π for level K − n + 1, onto the ball of radius Cⁿ; counts how often it clips and how often not."""

    def project(v, n):
        length = np.linalg.norm(v)
        inside = length <= radius**n
        project.counts[int(inside)] += 1
        return v if inside else v * (radius**n / length)

    project.counts = [0, 0]
    return project


def fed_dr_scgd(
    task, x0, step_size, a, p, rounds, look, *, separate=False, project=lambda v, n: v, anchored=False, weights=None
):
    """Algorithm 1 as published; anchored: the subtracted evaluations stay at a worker's points before averaging."""
    N, K = task.clients, task.levels
    weights = np.full(N, 1 / N) if weights is None else weights
    jacobian = "jacobian" if separate else "level"
    workers = [Worker(task, i, x0, look, jacobian) for i in range(N)]
    olds = [(dict(w.h), dict(w.v)) for w in workers]
    for t in range(rounds * p):
        r, s = divmod(t, p)
        for i, w in enumerate(workers):
            h_old, v_old = olds[i] if anchored else (dict(w.h), dict(w.v))
            h, v = {0: w.h[0] - step_size * w.v[1]}, {}
            for k in range(1, K):
                rows = look("level", k, r, s, i)
                h[k] = (1 - a) * (w.h[k] - task.value(k, i, h_old[k - 1], rows)) + task.value(k, i, h[k - 1], rows)
            for k in range(K, 0, -1):
                rows = look(jacobian, k, r, s, i)
                old = task.pull(k, i, h_old[k - 1], v_old.get(k + 1), rows)
                v[k] = project((1 - a) * (w.v[k] - old) + task.pull(k, i, h[k - 1], v.get(k + 1), rows), K - k + 1)
            w.h, w.v = h, v
            olds[i] = dict(h), dict(v)
        if (t + 1) % p == 0:
            h = {k: mean(weights, [w.h[k] for w in workers]) for k in range(K)}
            v = {k: mean(weights, [w.v[k] for w in workers]) for k in range(1, K + 1)}
            for w in workers:
                w.h, w.v = dict(h), dict(v)
    return workers


def level_by_level(task, x0, step_size, a, p, rounds, look, *, separate=False, project=lambda v, n: v, weights=None):
    """Algorithm 1 whose averaging step averages x, h_1 … h_{K−1}, v_K … v_1 one after another."""
    N, K = task.clients, task.levels
    weights = np.full(N, 1 / N) if weights is None else weights
    jacobian = "jacobian" if separate else "level"
    workers = [Worker(task, i, x0, look, jacobian) for i in range(N)]
    for t in range(rounds * p):
        r, s = divmod(t, p)
        talk = (lambda new: [mean(weights, new)] * N) if (t + 1) % p == 0 else (lambda new: new)
        olds = [(dict(w.h), dict(w.v)) for w in workers]
        x = talk([w.h[0] - step_size * w.v[1] for w in workers])
        for i, w in enumerate(workers):
            w.h[0] = x[i]
        for k in range(1, K):
            new = []
            for i, w in enumerate(workers):
                rows, (h_old, _) = look("level", k, r, s, i), olds[i]
                before, now = task.value(k, i, h_old[k - 1], rows), task.value(k, i, w.h[k - 1], rows)
                new.append((1 - a) * (h_old[k] - before) + now)
            for w, h in zip(workers, talk(new), strict=True):
                w.h[k] = h
        for k in range(K, 0, -1):
            new = []
            for i, w in enumerate(workers):
                rows, (h_old, v_old) = look(jacobian, k, r, s, i), olds[i]
                before = task.pull(k, i, h_old[k - 1], v_old.get(k + 1), rows)
                now = task.pull(k, i, w.h[k - 1], w.v.get(k + 1), rows)
                new.append(project((1 - a) * (v_old[k] - before) + now, K - k + 1))
            for w, v in zip(workers, talk(new), strict=True):
                w.v[k] = v
    return workers


def tracked_scgd(task, x0, step_size, a, p, rounds, look, *, separate=False, weights=None):
    """Raw estimates hr, vr of a worker's own levels, and corrections ch, cv: used are h = hr + ch, v = vr + cv.

    P, V: the points and products at which the raw estimates were last made.
    """
    N, K = task.clients, task.levels
    weights = np.full(N, 1 / N) if weights is None else weights
    jacobian = "jacobian" if separate else "level"
    workers = [Worker(task, i, x0, look, jacobian) for i in range(N)]
    hr, vr = [dict(w.h) for w in workers], [dict(w.v) for w in workers]
    ch = [{k: np.zeros_like(w.h[k]) for k in range(1, K)} for w in workers]
    cv = [{k: np.zeros_like(w.v[k]) for k in range(1, K + 1)} for w in workers]
    P, V = [dict(w.h) for w in workers], [dict(w.v) for w in workers]
    for t in range(rounds * p):
        r, s = divmod(t, p)
        communicating = (t + 1) % p == 0
        for w in workers:
            w.h[0] = w.h[0] - step_size * w.v[1]
        if communicating:
            x = mean(weights, [w.h[0] for w in workers])
            for w in workers:
                w.h[0] = x
        for k in range(1, K):
            for i, w in enumerate(workers):
                rows = look("level", k, r, s, i)
                hr[i][k] = (1 - a) * (hr[i][k] - task.value(k, i, P[i][k - 1], rows)) + task.value(
                    k, i, w.h[k - 1], rows
                )
            if communicating:
                middle = mean(weights, [hr[i][k] for i in range(N)])
                for i in range(N):
                    ch[i][k] = middle - hr[i][k]
            for i, w in enumerate(workers):
                w.h[k] = hr[i][k] + ch[i][k]
        for k in range(K, 0, -1):
            for i, w in enumerate(workers):
                rows = look(jacobian, k, r, s, i)
                before = task.pull(k, i, P[i][k - 1], V[i].get(k + 1), rows)
                vr[i][k] = (1 - a) * (vr[i][k] - before) + task.pull(k, i, w.h[k - 1], w.v.get(k + 1), rows)
            if communicating:
                middle = mean(weights, [vr[i][k] for i in range(N)])
                for i in range(N):
                    cv[i][k] = middle - vr[i][k]
            for i, w in enumerate(workers):
                w.v[k] = vr[i][k] + cv[i][k]
        for i, w in enumerate(workers):
            P[i], V[i] = dict(w.h), dict(w.v)
    return workers
