"""Ordinary federated learning: the average of local losses."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from fedstrata.core.vector import Vector
from fedstrata.problems.base import Full, GradientOracle, Problem, Rows, SmoothOracle, traced

Loss = Callable[[PyTree, PyTree], Array]


class LossOracle(GradientOracle):
    """The mean loss over the sample."""

    def value(self, x: Vector) -> Array:
        sample = self.samples["batch"]
        return sample.mean(jax.vmap(lambda example: self.problem.loss(x.tree, example))(sample.examples))


class AverageOracle(LossOracle, SmoothOracle):
    """The oracle of `Average`."""


class LossProblem(Problem):
    """Base class of problems with a loss of one example: its mean, metrics, start values and checks.

    Args:
        loss: `loss(params, example) -> scalar`, for one example.
    """

    loss: Loss

    @property
    def streams(self) -> Mapping[str, str]:
        return {"batch": "train"}

    def mean_loss(self, x: Vector, full: Full) -> Array:
        return full["train"].mean(lambda example: self.loss(x.tree, example))

    def init(self, key: PRNGKeyArray) -> PyTree:
        start = getattr(getattr(self.loss, "model", None), "init", None)
        return super().init(key) if start is None else start(key)

    def all_metrics(self) -> dict[str, Loss]:
        """The metrics of the loss, and those of the field `metrics` of a subclass."""
        return {**getattr(self.loss, "metrics", {}), **getattr(self, "metrics", {})}

    def measured(self, x: Vector, rows: Rows) -> dict[str, Array]:
        """The metrics, averaged over the rows."""
        metrics = self.all_metrics()
        return rows.mean(lambda e: {name: f(x.tree, e) for name, f in metrics.items()}) if metrics else {}

    def evaluate_split(self, x: Vector, full: Full, split: str) -> dict[str, Array]:
        rows = full[split]
        return {"loss": self.mean_loss(x, {"train": rows}), **self.measured(x, rows)}

    def evaluate_clients(self, x: Vector, rows: Rows) -> dict[str, Array]:
        functions = {"objective": self.loss, **self.all_metrics()}
        return {name: rows.mean_by_client(lambda e, f=f: f(x.tree, e)) for name, f in functions.items()}

    def from_clients(self, x: Vector, values: Array, weights: Array) -> Array | None:
        return jnp.sum(weights * values)

    def check(self, x: Vector, federation: Any) -> None:
        example = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape[1:], jax.dtypes.canonicalize_dtype(a.dtype)),
            federation["train"].examples,
        )
        for name, function in {"loss": self.loss, **self.all_metrics()}.items():
            out = traced(f"{type(self).__name__}: {name}", function, x.tree, example)
            if not (hasattr(out, "shape") and out.shape == () and jnp.issubdtype(out.dtype, jnp.floating)):
                what = (
                    f"shape {out.shape} and dtype {out.dtype}" if hasattr(out, "shape") else f"a {type(out).__name__}"
                )
                raise ValueError(
                    f"{type(self).__name__}: {name}(params, example) must return one real number for one example, not "
                    f"{what}; take the mean or sum inside it (the library does the batching itself)"
                )
        check = getattr(self.loss, "check", None)
        if check is not None:
            check(x.tree, federation)


class Average(LossProblem):
    r"""$\min_x \sum_i p_i \, \frac{1}{n_i} \sum_{\xi \in D_i} \ell(x; \xi)$, with $p_i = 1/N$ or $n_i / n$.

    A loss object may have metrics: `fs.losses.Classification` has accuracy.

    Args:
        loss: `loss(params, example) -> scalar`, for one example.
        metrics: more functions like the loss, averaged; `fs.Metric(function, "max")` declares that high values are
            better.

    >>> problem = Average(lambda w, example: 0.5 * (w - example["x"]) ** 2)
    """

    metrics: Mapping[str, Loss] = eqx.field(default_factory=dict)
    Oracle: ClassVar[type] = AverageOracle

    def objective(self, x: Vector, full: Full) -> Array:
        return self.mean_loss(x, full)

    def evaluate(self, x: Vector, full: Full, smooth: tuple[Array, Vector] | None = None) -> dict[str, Array]:
        return {**super().evaluate(x, full, smooth), **self.measured(x, full["train"])}
