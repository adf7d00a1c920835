"""Ordinary federated learning: the average of local losses."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from fedstrata.problems.base import Full, Problem, Rows, SmoothOracle
from fedstrata.vector import Vector

Loss = Callable[[PyTree, PyTree], Array]


class AverageOracle(SmoothOracle):
    def value(self, x: Vector) -> Array:
        sample = self.samples["batch"]
        return sample.mean(jax.vmap(lambda example: self.problem.loss(x.tree, example))(sample.examples))


class Average(Problem):
    r"""$\min_x \sum_i p_i \, \frac{1}{n_i} \sum_{\xi \in D_i} \ell(x; \xi)$, with $p_i = 1/N$ or $n_i / n$.

    loss: `loss(params, example) -> scalar`, for one example. metrics: more such functions, averaged the same way
    (a loss object may bring its own: `fs.losses.Classification` has accuracy).

    >>> problem = Average(lambda w, example: 0.5 * (w - example["x"]) ** 2)
    """

    loss: Loss
    metrics: Mapping[str, Loss] = eqx.field(default_factory=dict)
    Oracle: ClassVar[type] = AverageOracle
    streams: ClassVar[Mapping[str, str]] = {"batch": "train"}

    def objective(self, x: Vector, full: Full) -> Array:
        return full["train"].mean(lambda example: self.loss(x.tree, example))

    def init(self, key: PRNGKeyArray) -> PyTree:
        start = getattr(getattr(self.loss, "model", None), "init", None)
        return super().init(key) if start is None else start(key)

    def all_metrics(self) -> dict[str, Loss]:
        return {**getattr(self.loss, "metrics", {}), **self.metrics}

    def evaluate(self, x: Vector, full: Full, stationarity: bool = True) -> dict[str, Array]:
        metrics = {name: (lambda e, f=f: f(x.tree, e)) for name, f in self.all_metrics().items()}
        measured = full["train"].mean(lambda e: {name: f(e) for name, f in metrics.items()}) if metrics else {}
        if not stationarity:
            return {"objective": self.objective(x, full), **measured}
        value, gradient = jax.value_and_grad(self.objective)(x, full)
        return {"objective": value, "stationarity": gradient.norm(), **measured}

    def evaluate_clients(self, x: Vector, rows: Rows) -> dict[str, Array]:
        functions = {"objective": self.loss, **self.all_metrics()}
        return {name: rows.mean_by_client(lambda e, f=f: f(x.tree, e)) for name, f in functions.items()}

    def check(self, x: Vector, federation: Any) -> None:
        example = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape[1:], jax.dtypes.canonicalize_dtype(a.dtype)),
            federation["train"].examples,
        )
        for name, function in {"loss": self.loss, **self.all_metrics()}.items():
            out = jax.eval_shape(function, x.tree, example)
            if not (hasattr(out, "shape") and out.shape == () and jnp.issubdtype(out.dtype, jnp.floating)):
                what = (
                    f"shape {out.shape} and dtype {out.dtype}" if hasattr(out, "shape") else f"a {type(out).__name__}"
                )
                raise ValueError(
                    f"Average: {name}(params, example) must return one real number for one example, not {what}; "
                    "take the mean or sum inside it (the library does the batching itself)"
                )
        if hasattr(self.loss, "check"):
            self.loss.check(x.tree, federation)  # pyright: ignore[reportFunctionMemberAccess]
