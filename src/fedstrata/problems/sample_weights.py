"""A weight for every training example: to train with them, or to learn them from clean examples."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fedstrata.problems.average import Average
from fedstrata.problems.base import Metric
from fedstrata.problems.bilevel import Bilevel
from fedstrata.problems.group_weights import Same, Unweighted, at_model
from fedstrata.problems.losses import Loss
from fedstrata.vector import Vector


class WeightedExample(eqx.Module):
    """The loss of an example times its weight, plus the l2 term; an `id` below 0 weighs one."""

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
        return cls(WeightedExample(loss, jnp.asarray(weights)))

    def weighted(self, weights: Any) -> "SampleWeighted":
        return type(self).of(self.loss.loss, weights)  # pyright: ignore[reportFunctionMemberAccess]

    def learn_weights(self, **options: Any) -> "ExampleWeights":
        """The bilevel problem: weights σ(x) with which models do well on the clean split "valid".

        options: those of `fs.Bilevel`.
        """
        held: Any = self.loss
        start = jax.tree.map(jnp.zeros_like, held.loss.model.init(jax.random.key(0)))
        metrics = at_model(held.metrics)
        metrics |= {"weight_of_right": Metric(_MeanWeight(0), "max"), "weight_of_wrong": Metric(_MeanWeight(1), "min")}
        above, below = Unweighted(held.loss), _Lower(held.loss)
        return ExampleWeights(above, below, start, metrics=metrics, model=Same(held.weights.shape[0], 0.0), **options)


class ExampleWeights(Bilevel):
    """Made by `SampleWeighted.learn_weights`."""

    def weights(self, x: Any) -> Array:
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
