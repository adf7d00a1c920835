"""The grid on which changes and noise are integers, so that a release reveals nothing through the bits of floats."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from fedstrata.core.clipping import bounded, flat, split

LEAST = 0.05  # noise multiplier: with less, the cut of the Gaussian at 30 standard deviations would matter

Noise = PRNGKeyArray | Array  # the key of a simulation, or samples of ⌊2^s G⌋, as many as numbers are released


class Grid(NamedTuple):
    """The integers of one exchange: q and the noise, in steps of clip × weight / bound.

    Args:
        bits: s; the noise has a standard deviation of 2^s steps.
        bound: B, the largest norm of one client's integers.
        size: d, how many integers are released.
    """

    bits: int
    bound: float
    size: int

    @classmethod
    def of(cls, noise: float, clients: int, size: int) -> "Grid":
        """The finest grid on which neither a client's integers (24 bits of float32) nor a sum (int32) overflows.

        Args:
            noise: the noise multiplier.
            clients: the most that are summed.
            size: how many integers are released.
        """
        if noise < LEAST:
            raise ValueError(
                f"Privacy: noise={noise:g} hides next to nothing; give at least {LEAST}, or 0 to clip only"
            )
        bits = math.floor(math.log2(noise) + math.log2(min(2.0**22, 2.0**30 / (clients + 32 * noise))))
        grid = cls(bits, 2.0**bits / noise * (1 - 1e-12), size)  # the quotient may be rounded up
        if math.sqrt(size) > grid.bound / 40:
            raise ValueError(
                f"Privacy: rounding {size} numbers to integers would use up more than 5 % of the clip, since the sum "
                f"of {clients} clients with noise={noise:g} must fit 32 bits; use less noise, "
                f"{'a smaller cohort, ' if clients > 1 else ''}or a smaller model"
            )
        return grid

    @property
    def kept(self) -> float:
        """The share of the clip to which clients clip."""
        return 1 - 2 * math.sqrt(self.size) / self.bound

    def integers(self, change: Array, clip: float, ratio: Array | float = 1.0) -> Array:
        """rint(ratio × change × B / clip), of a norm of at most B: the change is shortened to leave room for rounding.

        Precisely, the norm is at most ratio × (B − √d / 2) + √d / 2.

        Args:
            change: of one client.
            clip: the largest norm of its change.
            ratio: its weight over the largest.
        """
        rounding = 1 - 16 * float(jnp.finfo(change.dtype).eps)  # of the products, and of numbers cast to this dtype
        short = bounded(change, clip * (1 - math.sqrt(self.size) / 2 / self.bound) * rounding)
        scale = jnp.asarray(ratio, change.dtype) * jnp.asarray(self.bound / clip, change.dtype)
        return jnp.rint(short * scale).astype(jnp.int32)

    def nearest(self, mean: np.ndarray, reference: np.ndarray, step: float) -> np.ndarray:
        """rint((mean − reference) / step) of a mean that a secure sum computed, in float64, as int32, at most 2³⁰.

        Whether it is refused depends on the reference alone, which is public, and not on what sites sent.

        Args:
            mean: from the secure sum.
            reference: the values around which clients clipped.
            step: of the grid.
        """
        size = float(np.abs(reference).max(initial=0))
        # Up to three roundings of 2⁻⁵³, and 2³⁰ steps more than the reference: a quarter of a step for each of two
        # neighbours. The resolution of the sum is the other half of what is left for both.
        if size * 2.0**-49 > step:
            raise ValueError(
                f"Privacy: values as large as {size:.3g} are rounded more coarsely, in 64 bits, than the grid of the "
                f"noise, {step:.3g}; subtract an offset from the parameters, or use a larger clip"
            )
        return np.clip(np.rint((mean - reference.astype(np.float64)) / step), -(2**30), 2**30).astype(np.int32)

    def noise(self, noise: Noise, dtype: Any) -> Array:
        """The integers of the noise: those given, or from a key, with a Gaussian of this dtype."""
        if not jnp.issubdtype(noise.dtype, jax.dtypes.prng_key):
            return noise.astype(jnp.int32)
        return jnp.floor(2.0**self.bits * jax.random.normal(noise, (self.size,), dtype)).astype(jnp.int32)

    def values(self, integers: Array, like: Any, clip: float, weight: Array | float = 1.0) -> Any:
        """reference + γ (K + 1/2), in the dtypes of the reference.

        Args:
            integers: K.
            like: the reference.
            clip: the largest norm of a client's change.
            weight: the largest.
        """
        start = flat(like)
        step = jnp.asarray(weight, start.dtype) * (clip / self.bound)
        new = start + step * (integers.astype(start.dtype) + 0.5)
        return jax.tree.map(lambda a, b: a.astype(b.dtype), split(new, like), like)
