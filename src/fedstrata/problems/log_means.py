"""The logarithm of a mean of exponentials, without overflow in compiled code."""

import jax.numpy as jnp
from jaxtyping import Array


def log_mean_exp(logs: Array, weight: Array) -> Array:
    """log Σ_j weight_j exp(logs_j), for logarithms of any size.

    The largest is left out of the exponentials, and the gaps of the others are clipped at 0: compiled code may
    recompute the logarithms where it subtracts their maximum, with a rounding error that at 1e11 is thousands.
    """
    top = jnp.argmax(jnp.where(weight > 0, logs, -jnp.inf))
    gap = logs - logs[top]
    rest = weight * jnp.exp(jnp.where(gap > 0, 0, gap))
    return logs[top] + jnp.log(jnp.sum(jnp.where(jnp.arange(logs.shape[0]) == top, weight, rest)))
