"""What the tests compare with: small federations with closed forms, and naive NumPy versions of algorithms."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import fedstrata as fs


def squared_error(w, example):
    return 0.5 * (jnp.dot(w, example["x"]) - example["y"]) ** 2


class LeastSquares(NamedTuple):
    """Heterogeneous clients with different linear targets; the optimum solves a linear system."""

    federation: fs.Federation
    problem: fs.Average
    hessians: np.ndarray  # (N, d, d) of every client's mean loss
    centres: np.ndarray  # (N, d): ∇f_i(w) = H_i w − b_i

    def gradient(self, client: int, w: np.ndarray) -> np.ndarray:
        return self.hessians[client] @ w - self.centres[client]

    def optimum(self, weights: np.ndarray | None = None) -> np.ndarray:
        p = np.full(len(self.hessians), 1 / len(self.hessians)) if weights is None else weights
        return np.linalg.solve(np.tensordot(p, self.hessians, 1), p @ self.centres)


def least_squares(clients=4, dimension=3, sizes=(5, 9), seed=0, shift=1.0) -> LeastSquares:
    rng = np.random.default_rng(seed)
    counts = rng.integers(sizes[0], sizes[1] + 1, clients)
    shards = []
    for i, n in enumerate(counts):
        x = rng.normal(size=(n, dimension))
        w = rng.normal(size=dimension) * shift
        shards.append({"x": x, "y": x @ w + 0.1 * rng.normal(size=n) + i * shift})
    hessians = np.stack([s["x"].T @ s["x"] / len(s["y"]) for s in shards])
    centres = np.stack([s["x"].T @ s["y"] / len(s["y"]) for s in shards])
    return LeastSquares(fs.Federation.from_clients(shards), fs.Average(squared_error), hessians, centres)


class Composite(NamedTuple):
    """The same with weight·|w|₁ added; the optimum by the proximal gradient method, run long enough to stand still."""

    smooth: LeastSquares
    problem: fs.Regularized
    weight: float

    @property
    def federation(self) -> fs.Federation:
        return self.smooth.federation

    def gradient(self, client: int, w: np.ndarray) -> np.ndarray:
        return self.smooth.gradient(client, w)

    def mean_gradient(self, w: np.ndarray) -> np.ndarray:
        return np.mean([self.gradient(i, w) for i in range(len(self.smooth.hessians))], axis=0)

    def optimum(self, weight: float | None = None) -> np.ndarray:
        weight = self.weight if weight is None else weight
        step = 1 / np.linalg.eigvalsh(self.smooth.hessians.mean(axis=0))[-1]
        w = np.zeros(self.smooth.centres.shape[1])
        for _ in range(20_000):
            w = soft(w - step * self.mean_gradient(w), step * weight)
        return w


def error_and_loss(w, example):
    error = jnp.dot(w, example["x"]) - example["y"]
    return error, 0.5 * error**2


def loss_and_bias(z, example):
    error, loss = z
    return loss + 0.25 * (error - example["y"]) ** 2


class NestedTask(NamedTuple):
    """Squared loss plus ¼ (mean error − y)², of all clients together or of each alone: quadratic, so solvable."""

    smooth: LeastSquares
    problem: fs.Nested

    @property
    def federation(self) -> fs.Federation:
        return self.smooth.federation

    def means(self) -> tuple[np.ndarray, np.ndarray]:
        """The mean features and targets of every client."""
        train = self.federation["train"]
        parts = [slice(a, b) for a, b in zip(train.offsets, train.offsets[1:], strict=False)]
        return tuple(np.stack([np.asarray(train.examples[k])[p].mean(axis=0) for p in parts]) for k in ("x", "y"))

    def gradient(self, client: int, w: np.ndarray) -> np.ndarray:
        """Of one client alone, where both couplings are the same."""
        x, y = (m[client] for m in self.means())
        return self.smooth.gradient(client, w) + 0.5 * (x @ w - 2 * y) * x

    def optimum(self) -> np.ndarray:
        x, y = self.means()
        if self.problem.inner == "global":
            x, y = x.mean(axis=0, keepdims=True), y.mean(axis=0, keepdims=True)
        hessian = self.smooth.hessians.mean(axis=0) + 0.5 * x.T @ x / len(x)
        return np.linalg.solve(hessian, self.smooth.centres.mean(axis=0) + x.T @ y / len(x))


def nested(inner: str, **options) -> NestedTask:
    smooth = least_squares(**options)
    problem = fs.Nested([error_and_loss, loss_and_bias], inner=inner)
    start = fs.Vector(jnp.zeros(smooth.centres.shape[1]))
    return NestedTask(smooth, problem.bind(start, smooth.federation))


def near_fit(x, y, example):
    """Below: fit one's own data, not far from x."""
    return squared_error(y, example) + 0.5 * jnp.sum((y - x) ** 2)


class BilevelTask(NamedTuple):
    """Models y near a common x that fit a client's data (or all data) best: quadratic, so solvable."""

    smooth: LeastSquares
    problem: fs.Bilevel
    weight: float = 0.5  # of |x|² above

    @property
    def federation(self) -> fs.Federation:
        return self.smooth.federation

    def hypergradient(self, client: int, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """∂²_xy g = −I and ∂²_yy g = H + I."""
        hessian = self.smooth.hessians[client] + np.eye(len(x))
        return self.weight * x + np.linalg.solve(hessian, self.smooth.gradient(client, y))

    def gradient(self, client: int, x: np.ndarray) -> np.ndarray:
        hessian = self.smooth.hessians[client] + np.eye(len(x))
        return self.hypergradient(client, x, np.linalg.solve(hessian, self.smooth.centres[client] + x))

    def optimum(self) -> np.ndarray:
        H, b = self.smooth.hessians, self.smooth.centres
        if self.problem.lower_level == "global":
            H, b = H.mean(axis=0, keepdims=True), b.mean(axis=0, keepdims=True)
        # ∇h = weight x + mean S (H S (b + x) − b) with S = (H + I)⁻¹
        S = np.linalg.inv(H + np.eye(H.shape[1]))
        slope = self.weight * np.eye(H.shape[1]) + np.mean(S @ H @ S, axis=0)
        return np.linalg.solve(slope, np.mean([s @ (c - h @ s @ c) for s, h, c in zip(S, H, b, strict=True)], axis=0))


def bilevel(lower_level: str, weight: float = 0.5, **options) -> BilevelTask:
    smooth = least_squares(**options)
    above = lambda x, y, example: squared_error(y, example) + 0.5 * weight * jnp.sum(x**2)
    zero = jnp.zeros(smooth.centres.shape[1])
    problem = fs.Bilevel(above, near_fit, zero, lower_level=lower_level, upper_split="train")
    return BilevelTask(smooth, problem, weight)


def paired_score(w, example):
    """What ranks an example, and what it should be ranked by."""
    return jnp.stack([jnp.dot(w, example["x"]), example["y"]])


def paired_error(a, b):
    return 0.5 * (a[0] - b[0] - a[1] + b[1]) ** 2


def bent(u):
    return u + 0.05 * u**2


class PairwiseTask(NamedTuple):
    """Differences of scores fitted to differences of targets, over all pairs of examples; f is bent or not."""

    smooth: LeastSquares
    problem: fs.Pairwise
    ridge: float = 0.2

    @property
    def federation(self) -> fs.Federation:
        return self.smooth.federation

    def of(self, x: np.ndarray, y: np.ndarray, w: np.ndarray) -> np.ndarray:
        """∇F over all pairs of these rows."""
        dx, dy = x[:, None] - x[None], y[:, None] - y[None]
        error = dx @ w - dy
        u = 0.5 * np.mean(error**2, axis=1)
        slope = 1 + 0.1 * u if self.problem.f is bent else np.ones_like(u)
        return np.mean(slope[:, None] * np.mean(error[..., None] * dx, axis=1), axis=0) + self.ridge * w

    def gradient(self, client: int, w: np.ndarray) -> np.ndarray:
        shard = self.federation["train"].shard(client)
        return self.of(np.asarray(shard["x"]), np.asarray(shard["y"]), w)

    def optimum(self) -> np.ndarray:
        rows = self.federation["train"].examples
        w = np.zeros(self.smooth.centres.shape[1])
        for _ in range(5000):
            w = w - 0.1 * self.of(np.asarray(rows["x"]), np.asarray(rows["y"]), w)
        return w


def pairwise(outer, **options) -> PairwiseTask:
    smooth = least_squares(**options)
    task = PairwiseTask(smooth, None)  # pyright: ignore[reportArgumentType]
    splits = {"first": "train", "second": "train"}
    problem = fs.Pairwise(paired_score, paired_error, outer, l2=task.ridge, metrics=(), **splits)
    start = fs.Vector(jnp.zeros(smooth.centres.shape[1]))
    return task._replace(problem=problem.bind(start, smooth.federation, fs.WithReplacement(3)))


class RankingTask(NamedTuple):
    """Positives (y > 0) to be scored one above the others, in the square loss: a linear system."""

    federation: fs.Federation
    problem: fs.Pairwise

    def parts(self, client: int | None = None) -> list[np.ndarray]:
        splits = [self.federation[name] for name in ("positives", "negatives")]
        return [np.asarray((s.examples if client is None else s.shard(client))["x"]) for s in splits]

    def gradient(self, client: int, w: np.ndarray) -> np.ndarray:
        """In w of the min-max form, where a = b = α = 0."""
        high, low = self.parts(client)
        p = len(high) / (len(high) + len(low))
        slope = 2 * high.T @ (high @ w - 1) / len(high) + 2 * low.T @ (low @ w + 1) / len(low)
        return p * (1 - p) * slope

    def optimum(self) -> np.ndarray:
        high, low = self.parts()
        gaps = (high[:, None] - low[None]).reshape(-1, high.shape[1])
        return np.linalg.solve(gaps.T @ gaps, gaps.sum(axis=0))


def ranking(**options) -> RankingTask:
    clients = [least_squares(**options).federation["train"].shard(i) for i in range(4)]
    labelled = [{**shard, "label": (np.asarray(shard["y"]) > 0).astype(int)} for shard in clients]
    federation = fs.Federation.from_clients(labelled).by_label(label="label")
    score = lambda w, example: jnp.dot(w, example["x"])
    problem = fs.Pairwise(score, fs.pair_losses.Square(), label="label", metrics=())
    return RankingTask(federation, problem.bind(fs.Vector(jnp.zeros(3)), federation, fs.WithReplacement(3)))


def soft(z: np.ndarray, threshold: float) -> np.ndarray:
    return np.sign(z) * np.maximum(np.abs(z) - threshold, 0)


def composite(weight: float = 0.2, **options) -> Composite:
    return Composite(least_squares(**options), fs.Regularized(squared_error, fs.prox.L1(weight)), weight)


def local_sgd(gradient, x, step_size, local_steps, control=0.0):
    """Q steps x ← x − η(∇f(x) + control) from x."""
    for _ in range(local_steps):
        x = x - step_size * (gradient(x) + control)
    return x
