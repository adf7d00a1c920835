"""What a model is: an architecture that acts on parameters held elsewhere."""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

Params = Any


class Model(eqx.Module):
    """An architecture. Its fields are its shape; the parameters are a pytree that algorithms move about.

    Data may come in any number type: a model computes in the type of its parameters.
    """

    @abc.abstractmethod
    def init(self, key: PRNGKeyArray, dtype: Any = None) -> Params:
        """Start values, in `dtype` or JAX's default float type."""

    @abc.abstractmethod
    def __call__(self, params: Params, x: Array) -> Array:
        """The outputs, a vector, for one example."""


def init_dense(key: PRNGKeyArray, inputs: int, outputs: int, dtype: Any, gain: float = 2.0) -> dict[str, Array]:
    """A layer whose weights have variance gain / inputs (2: He et al., 2015, for relu; 1: for others), bias zero."""
    weight = (gain / inputs) ** 0.5 * jax.random.normal(key, (outputs, inputs), float_type(dtype))
    return {"weight": weight, "bias": jnp.zeros(outputs, weight.dtype)}


def dense(params: dict[str, Array], x: Array) -> Array:
    return params["weight"] @ x + params["bias"]


def flat(x: Array, size: int, dtype: Any, who: str) -> Array:
    """One example as a vector of the parameters' type, or an error that names the model."""
    x = jnp.asarray(x)
    if x.size != size:
        raise ValueError(f"{who}: one example must hold {size} numbers, got shape {x.shape}; is x a whole batch?")
    return x.astype(dtype).reshape(-1)


def float_type(dtype: Any) -> Any:
    return jnp.zeros(()).dtype if dtype is None else jnp.dtype(dtype)


def positive(who: str, **sizes: int) -> None:
    """Raise unless every size is a whole number above zero."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{who}: {name} must be a whole number of at least 1, got {size!r}")
