"""The interface of a model: an architecture without its parameters, which are passed to every call."""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray, PyTree

Params = PyTree


class Model(eqx.Module):
    """An architecture. Its fields are sizes and options; the parameters are a separate pytree.

    Data may have any number type: a model computes in the type of its parameters.
    """

    @abc.abstractmethod
    def init(self, key: PRNGKeyArray, dtype: DTypeLike | None = None) -> Params:
        """Start values of the parameters.

        Args:
            key: the random key.
            dtype: of the parameters; None: JAX's default float type.
        """

    @abc.abstractmethod
    def __call__(self, params: Params, x: Array) -> Array:
        """The outputs, a vector, for one example.

        Args:
            params: the parameters.
            x: one example, without a batch axis.
        """


def init_dense(
    key: PRNGKeyArray, inputs: int, outputs: int, dtype: DTypeLike | None, gain: float = 2.0
) -> dict[str, Array]:
    """Start values of a layer: weights of variance gain / inputs, bias zero.

    Args:
        key: the random key.
        inputs: the number of inputs.
        outputs: the number of outputs.
        dtype: of the parameters; None: JAX's default float type.
        gain: 2 for relu (He et al., 2015), 1 for other activations.
    """
    weight = (gain / inputs) ** 0.5 * jax.random.normal(key, (outputs, inputs), float_type(dtype))
    return {"weight": weight, "bias": jnp.zeros(outputs, weight.dtype)}


def dense(params: dict[str, Array], x: Array) -> Array:
    """W x + b."""
    return params["weight"] @ x + params["bias"]


def flat(x: Array, size: int, dtype: DTypeLike, who: str) -> Array:
    """One example as a vector of the parameters' type, or an error that names the model."""
    x = jnp.asarray(x)
    if x.size != size:
        raise ValueError(f"{who}: one example must hold {size} numbers, got shape {x.shape}; is x a whole batch?")
    return x.astype(dtype).reshape(-1)


def float_type(dtype: DTypeLike | None) -> Any:
    """The given dtype; for None JAX's default float type."""
    return jnp.zeros(()).dtype if dtype is None else jnp.dtype(dtype)


def positive(who: str, **sizes: int) -> None:
    """Raise unless every size is a whole number above zero."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{who}: {name} must be a whole number of at least 1, got {size!r}")
