"""A weight for every training example, given or learned from clean examples."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fedstrata.core.vector import Vector
from fedstrata.problems.average import Average
from fedstrata.problems.base import Metric
from fedstrata.problems.bilevel import Bilevel
from fedstrata.problems.group_weights import Same, Unweighted, at_model
from fedstrata.problems.losses import Loss


class WeightedExample(eqx.Module):
    """The loss of an example times its weight, plus the l2 term; an `id` below 0 weighs one.

    Args:
        loss: the loss without weights.
        weights: one per example.
    """

    loss: Loss
    weights: Array

    def __call__(self, params: PyTree, example: PyTree) -> Array:
        return weighted(self.loss, self.weights, params, example)

    @property
    def model(self) -> Any:
        return self.loss.model

    @property
    def metrics(self) -> Any:
        return self.loss.metrics

    def check(self, params: PyTree, federation: Any) -> None:
        self.loss.check(params, federation)


class SampleWeighted(Average):
    r"""$\min_\theta \sum_i p_i \frac{1}{n_i} \sum_j w_j \ell(\theta; \xi_j) + \frac{l_2}{2} \|\theta\|^2$.

    Examples have a column "id", the position of their weight; those below 0 weigh one.
    """

    @classmethod
    def of(cls, loss: Loss, weights: Any) -> "SampleWeighted":
        """The problem of a loss with these weights."""
        return cls(WeightedExample(loss, jnp.asarray(weights)))

    @property
    def weighted_loss(self) -> WeightedExample:
        """The loss with its weights."""
        if not isinstance(self.loss, WeightedExample):
            raise TypeError(f"SampleWeighted: loss={self.loss!r} has no weights; use SampleWeighted.of(loss, weights)")
        return self.loss

    def weighted(self, weights: Any) -> "SampleWeighted":
        """The same problem with other weights."""
        return type(self).of(self.weighted_loss.loss, weights)

    def learn_weights(self, **options: Any) -> "ExampleWeights":
        """The bilevel problem of weights σ(x) for which models have a small loss on the clean split "valid".

        Args:
            **options: parameters of `fs.Bilevel`.
        """
        held = self.weighted_loss
        start = jax.tree.map(jnp.zeros_like, held.model.init(jax.random.key(0)))
        metrics = at_model(held.metrics)
        metrics |= {"weight_of_right": Metric(_MeanWeight(0), "max"), "weight_of_wrong": Metric(_MeanWeight(1), "min")}
        above, below = Unweighted(held.loss), _Lower(held.loss)
        return ExampleWeights(above, below, start, metrics=metrics, model=Same(held.weights.shape[0], 0.0), **options)


class ExampleWeights(Bilevel):
    """The bilevel problem of `SampleWeighted.learn_weights`."""

    def weights(self, x: Any) -> Array:
        """One weight per example, σ(x)."""
        return jax.nn.sigmoid(x.tree if isinstance(x, Vector) else x)


class _Lower(eqx.Module):
    loss: Loss

    def __call__(self, x: PyTree, theta: PyTree, example: PyTree) -> Array:
        return weighted(self.loss, jax.nn.sigmoid(x), theta, example)


class _MeanWeight(eqx.Module):
    """The weight of an example whose label is wrong (or right): its mean over those, once divided by their share."""

    wrong: int = eqx.field(static=True)

    def __call__(self, x: PyTree, theta: PyTree, example: PyTree) -> Array:
        at = jnp.maximum(example["id"], 0)
        return jnp.where(example["wrong"] == self.wrong, jax.nn.sigmoid(x)[at], 0)


def weighted(loss: Loss, weights: Array, params: PyTree, example: PyTree) -> Array:
    value = loss.data_loss(params, example)
    weight = jnp.where(example["id"] < 0, 1, weights[jnp.maximum(example["id"], 0)].astype(value.dtype))
    squares = sum(jnp.sum(jnp.square(leaf)).astype(value.dtype) for leaf in jax.tree.leaves(params))
    return weight * value + 0.5 * jnp.asarray(loss.l2, value.dtype) * squares
