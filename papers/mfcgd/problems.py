"""Nested problems that also have a plain loss, so that FedAvg can be run and measured on them."""

from collections.abc import Sequence
from typing import Any, ClassVar, overload

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fedstrata.base.directions import Direction, column
from fedstrata.core.vector import Vector
from fedstrata.problems.average import Loss
from fedstrata.problems.base import Full, Rows, SmoothOracle
from fedstrata.problems.compositions import Adapt, Exponential
from fedstrata.problems.nested import Nested, NestedOracle


class PlainOracle(NestedOracle, SmoothOracle):
    """The oracle of a nested problem, whose gradient is that of the plain loss."""

    @overload
    def value(self, x: Vector) -> Array: ...

    @overload
    def value(self, k: int, y: Vector, separate: bool = False) -> Vector: ...

    def value(self, *at: Any, **named: Any) -> Array | Vector:
        """F_k(y) of `NestedOracle`, given a level; given parameters alone, the plain loss."""
        return super().value(*at, **named) if len(at) + len(named) > 1 else self.plain_loss(*at, **named)

    def plain_loss(self, x: Vector) -> Array:
        sample = self.samples["level1"]
        return sample.mean(jax.vmap(lambda example: self.problem.loss(x.tree, example))(sample.examples))


class PlainNested(Nested):
    """`fs.Nested` with a loss that methods for averages minimise; the nested objective measures all methods."""

    loss: Loss | None = None  # of the parameters and one example

    Oracle: ClassVar[type] = PlainOracle


class Guarded(Exponential):
    """exp(y / λ) up to a cap, and its tangent beyond: increasing, smooth, and with a bounded slope."""

    cap: float

    def __call__(self, y: Array) -> Array:
        cap = jnp.asarray(self.cap, y.dtype)
        beyond = jnp.maximum(y - cap, 0) / jnp.asarray(self.temperature, y.dtype)
        return super().__call__(jnp.minimum(y, cap)) * (1 + beyond)


class Robust(PlainNested):
    """Σ p_i exp(f_i(x) / λ), with the accuracy of the mean and of the worst client."""

    @classmethod
    def of(cls, loss: Any, temperature: float, cap: float) -> "Robust":
        levels = [loss, Guarded(temperature, cap)]
        return cls(levels, inner="client", metrics=loss.metrics, model=loss.model, loss=loss)

    def measured(self, x: Vector, full: Full) -> dict[str, Array]:
        rows, out = full["train"], {}
        for name, metric in self.metrics.items():
            by_client = rows.mean_by_client(lambda example, metric=metric: metric(x.tree, example))
            out[name] = jnp.sum(rows.client_weights().astype(by_client.dtype) * by_client)
            out[f"worst_{name}"] = jnp.min(by_client)
        return out

    def modes(self) -> dict[str, Direction]:
        own = super().modes()
        worst: dict[str, Direction] = {f"worst_{n}": c.direction for n in self.metrics if (c := column(n, own))}
        return {**own, **worst}


class MetaLearning(PlainNested):
    """Σ p_i f_i(adapted x): adaptation on "train", the loss on "query".

    New tasks are splits too: "new" has one new task in place of each client, "new_query" their queries.
    """

    @classmethod
    def of(cls, loss: Any, adapt: Sequence[Any]) -> "MetaLearning":
        options = {"metrics": loss.metrics, "metrics_level": len(adapt), "model": loss.model, "loss": loss}
        return cls([*adapt, loss], inner="client", splits=(*["train"] * len(adapt), "query"), **options)

    def measured(self, x: Vector, full: Full) -> dict[str, Array]:
        """The metrics of the adapted models, on the queries."""
        adapted, rows = self.values(x, full)[self.metrics_level].tree, full["query"]
        measure = lambda y, example: {name: metric(y, example) for name, metric in self.metrics.items()}
        return {name: jnp.mean(values) for name, values in rows.client_means(measure, adapted).items()}

    def evaluate_split(self, x: Vector, full: Full, split: str) -> dict[str, Array]:
        if split != "new":  # the others are parts of "train" and of "new"
            return {}
        return super().evaluate_split(x, {**full, "query": full["new_query"]}, split)

    def evaluate_clients(self, x: Vector, rows: Rows) -> dict[str, Array]:
        return {}


class AdaptHead(Adapt):
    """One gradient step on the last layer; the other parameters pass unchanged.

    fresh: it starts from zero and ignores the parameters there. If tasks number their labels arbitrarily, no other
    start is better.
    """

    fresh: bool = False

    def __call__(self, x: PyTree, example: PyTree) -> PyTree:
        *body, head = x
        head = jax.tree.map(jnp.zeros_like, head) if self.fresh else head
        moved = Adapt(lambda head, example: self.loss([*body, head], example), self.step_size)(head, example)
        return [*body, moved]


class Episode(eqx.Module):
    """The mean of a loss over the pictures of one example: a character set, drawn once by the same person."""

    each: Any

    @property
    def model(self) -> Any:
        return self.each.model

    def _mean(self, function: Loss, params: PyTree, example: PyTree) -> Array:
        return jnp.mean(jax.vmap(lambda x, y: function(params, {"x": x, "y": y}))(example["x"], example["y"]))

    def __call__(self, params: PyTree, example: PyTree) -> Array:
        return self._mean(self.each, params, example)

    @property
    def metrics(self) -> dict[str, Loss]:
        return {"accuracy": lambda params, example: self._mean(self.each.accuracy, params, example)}
