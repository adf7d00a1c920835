"""Fully connected networks."""

from typing import Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray

from fedstrata.base.errors import unknown
from fedstrata.models.base import Model, Params, dense, flat, init_dense, positive

Activation = Literal["relu", "sigmoid", "tanh"]
_ACTIVATIONS = {"relu": jax.nn.relu, "sigmoid": jax.nn.sigmoid, "tanh": jnp.tanh}


class MLP(Model):
    """A fully connected network, with an activation after each layer but the last.

    Args:
        sizes: the number of inputs, the sizes of the hidden layers and the number of outputs.
        activation: "relu", "sigmoid" or "tanh".

    >>> model = MLP((784, 200, 10))
    >>> params = model.init(jax.random.key(0))
    >>> [layer["weight"].shape for layer in params]
    [(200, 784), (10, 200)]
    """

    sizes: tuple[int, ...] = eqx.field(static=True, converter=tuple)
    activation: Activation = eqx.field(static=True, default="relu")

    def __check_init__(self) -> None:
        if len(self.sizes) < 2:
            raise ValueError(f"MLP: sizes needs at least inputs and outputs, got {self.sizes}")
        positive("MLP", **{f"sizes[{i}]": size for i, size in enumerate(self.sizes)})
        if self.activation not in get_args(Activation):
            raise unknown("activation", str(self.activation), get_args(Activation))

    def init(self, key: PRNGKeyArray, dtype: DTypeLike | None = None) -> Params:
        keys = jax.random.split(key, len(self.sizes) - 1)
        gains = [2.0 if self.activation == "relu" else 1.0] * (len(keys) - 1) + [1.0]
        return [
            init_dense(k, n, m, dtype, gain)
            for k, n, m, gain in zip(keys, self.sizes[:-1], self.sizes[1:], gains, strict=True)
        ]

    def __call__(self, params: Params, x: Array) -> Array:
        x = flat(x, self.sizes[0], params[0]["weight"].dtype, "MLP")
        for layer in params[:-1]:
            x = _ACTIVATIONS[self.activation](dense(layer, x))
        return dense(params[-1], x)
