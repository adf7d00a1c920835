"""Regularisers of groups of entries that become zero together."""

import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from fedstrata.prox.base import Regularizer, number
from fedstrata.prox.trees import root, unit


class GroupLasso(Regularizer):
    r"""The group lasso $\nu \sum_g |x_g|_2$: its prox shortens every group by γν and stops at zero.

    $$ \mathrm{prox}(z)_g = \Big( 1 - \frac{\gamma\nu}{|z_g|_2} \Big)_+ z_g $$

    Args:
        weight: ν, at least 0.
        axis: the groups of a leaf are its slices along this axis. 0: rows, the output units of a weight matrix (of a
            bias: single entries). None: the whole leaf is one group.
        scaled: whether to multiply ν by the square root of a group's size, as Yuan and Lin (2006) do, so that groups of
            different sizes are treated alike.

    >>> GroupLasso(5.0).prox(jnp.array([[6.0, 8.0], [3.0, 2.0]]), step=1.0).tolist()
    [[3.0, 4.0], [0.0, 0.0]]
    """

    weight: float = number(at_least=0)
    axis: int | None = eqx.field(static=True, default=0)
    scaled: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        if self.axis is not None and (isinstance(self.axis, bool) or not isinstance(self.axis, int)):
            raise TypeError(f"GroupLasso: axis = {self.axis!r} must be a whole number, or None for one group per leaf")

    def _check_leaf(self, name: str, leaf: Any) -> None:
        if self.axis is not None and not -leaf.ndim <= self.axis < leaf.ndim:
            raise ValueError(
                f"{self!r}: leaf {name!r} has {leaf.ndim} dimension(s) and no axis {self.axis}; choose other leaves "
                "with .on(...), or use axis=None to make the whole leaf one group"
            )

    def _value(self, x: Array) -> Array:
        return self._level(x) * jnp.sum(self._norms(x))

    def _prox(self, z: Array, step: Array) -> Array:
        norms, threshold = self._norms(z), step * self._level(z)
        kept = norms > threshold
        return z * jnp.where(kept, 1 - threshold / jnp.where(kept, norms, 1), 0)

    def _distance(self, x: Array, g: Array) -> Array:
        norms, level = self._norms(x), self._level(x)
        there = self._norms(g + level * x / jnp.where(norms > 0, norms, 1))
        at_zero = jnp.maximum(self._norms(g) - level, 0)
        return jnp.sum(jnp.where(norms > 0, there, at_zero) ** 2)

    def _norms(self, x: Array) -> Array:
        """|x_g| of every group; the other axes are kept with length one."""
        others = tuple(i for i in range(x.ndim) if self.axis is None or i != self.axis % x.ndim)
        units = unit(x, others)
        return units * root(jnp.sum((x / units) ** 2, axis=others, keepdims=True))

    def _level(self, x: Array) -> float:
        groups = 1 if self.axis is None else x.shape[self.axis]
        return self.weight * (math.sqrt(x.size / max(groups, 1)) if self.scaled else 1.0)
