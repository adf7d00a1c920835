"""The logarithm of a mean of exponentials, in a form that cannot overflow when it is compiled."""

import jax.numpy as jnp
from jaxtyping import Array


def log_mean_exp(logs: Array, weight: Array) -> Array:
    """log Σ_j weight_j exp(logs_j), for logarithms of any size.

    The largest is left out of the exponentials, and the others are never above it: compiled code computes logarithms
    anew where it subtracts their maximum, and may be off by a rounding, which at 1e11 is thousands.
    """
    top = jnp.argmax(jnp.where(weight > 0, logs, -jnp.inf))
    gap = logs - logs[top]
    rest = weight * jnp.exp(jnp.where(gap > 0, 0, gap))
    return logs[top] + jnp.log(jnp.sum(jnp.where(jnp.arange(logs.shape[0]) == top, weight, rest)))
