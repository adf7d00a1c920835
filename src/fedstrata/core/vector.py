"""`Vector`: any pytree of arrays with arithmetic, so that a line of code reads as a line of the paper."""

import operator
from collections.abc import Callable
from typing import Any, Self, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

type_of_scalar = (int, float)
Scalar = Array | float
V = TypeVar("V", bound="Vector")


class Vector(eqx.Module):
    """Model parameters (or any pytree of arrays) as one element of a vector space.

    Vectors add, subtract, multiply and divide leaf by leaf; a scalar acts on every leaf and takes its dtype.
    `x @ y` is the inner product over all leaves. The wrapped pytree is `x.tree`.

    Args:
        tree: the pytree.

    >>> x = Vector({"w": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)})
    >>> float(x.norm()), float((2 * x - x / 2) @ x)
    (5.0, 37.5)
    """

    tree: PyTree

    # numpy scalars on the left must defer to __rmul__ and friends instead of building object arrays.
    __array_ufunc__ = None

    def __add__(self, other: "Vector | Scalar") -> Self:
        return _binary(operator.add, self, other)

    def __radd__(self, other: Scalar) -> Self:
        return _binary(operator.add, self, other)

    def __sub__(self, other: "Vector | Scalar") -> Self:
        return _binary(operator.sub, self, other)

    def __rsub__(self, other: Scalar) -> Self:
        return _binary(lambda a, b: b - a, self, other)

    def __mul__(self, other: "Vector | Scalar") -> Self:
        return _binary(operator.mul, self, other)

    def __rmul__(self, other: Scalar) -> Self:
        return _binary(operator.mul, self, other)

    def __truediv__(self, other: "Vector | Scalar") -> Self:
        return _binary(operator.truediv, self, other)

    def __rtruediv__(self, other: Scalar) -> Self:
        return _binary(lambda a, b: b / a, self, other)

    def __neg__(self) -> Self:
        return self.map(operator.neg)

    def __pow__(self, power: int | float) -> Self:
        return _binary(operator.pow, self, power)

    def __abs__(self) -> Self:
        return self.map(jnp.abs)

    def __matmul__(self, other: "Vector") -> Array:
        if not isinstance(other, Vector):
            return NotImplemented
        _same_shape(self, other)
        wide = lambda a: a.astype(widest(a.dtype, jnp.float32))
        products = jax.tree.map(lambda a, b: jnp.sum(wide(a) * wide(b)), self.tree, other.tree)
        return _total(jax.tree.leaves(products))

    def map(self, function: Callable[[Array], Array]) -> Self:
        """The function applied to every leaf.

        Args:
            function: of one array.
        """
        return type(self)(jax.tree.map(function, self.tree))

    def zeros(self) -> Self:
        """The zero vector of this shape."""
        return self.map(jnp.zeros_like)

    def sqrt(self) -> Self:
        """The square root of every entry."""
        return self.map(jnp.sqrt)

    def sign(self) -> Self:
        """The sign of every entry."""
        return self.map(jnp.sign)

    def maximum(self, low: "Vector | Scalar") -> Self:
        """The larger of every entry and `low`.

        Args:
            low: a vector of the same shape, or a number.
        """
        return _binary(jnp.maximum, self, low)

    def sum(self) -> Array:
        """The sum over all entries."""
        return _total([jnp.sum(leaf) for leaf in jax.tree.leaves(self.tree)])

    def norm_squared(self) -> Array:
        """The squared Euclidean norm over all leaves."""
        return self @ self

    def norm(self) -> Array:
        """The Euclidean norm over all leaves."""
        scaled, unit = self._scaled()
        return unit * jnp.sqrt(scaled @ scaled)

    def clip_to_ball(self, radius: Scalar) -> Self:
        """The Euclidean projection onto the ball of this radius around zero.

        Args:
            radius: of the ball.
        """
        scaled, unit = self._scaled()
        squared, radius = scaled @ scaled, jnp.asarray(radius, unit.dtype)
        outside = squared > (radius / unit) ** 2
        # The root is never taken of zero, where its derivative is infinite.
        onto = scaled * jnp.where(outside, radius / jnp.sqrt(jnp.where(outside, squared, 1)), 1)
        shorten = lambda a, new: jnp.where(outside, new.astype(a.dtype), a)
        return type(self)(jax.tree.map(shorten, self.tree, onto.tree))

    def _scaled(self) -> tuple[Self, Array]:
        """In `scalar_dtype`, divided by the power of two of the largest entry; and that power."""
        wide = self.map(lambda a: a.astype(self.scalar_dtype))
        largest = [jnp.max(jnp.abs(leaf), initial=0) for leaf in jax.tree.leaves(wide)]
        unit = power_of_two(jnp.max(jnp.stack(largest)))
        return wide / unit, unit

    @property
    def size(self) -> int:
        """The number of entries."""
        return sum(int(leaf.size) for leaf in jax.tree.leaves(self.tree))

    @property
    def dtype(self) -> Any:
        """The widest dtype among the leaves."""
        return widest(*[leaf.dtype for leaf in jax.tree.leaves(self.tree)])

    @property
    def scalar_dtype(self) -> Any:
        """The dtype of its norms, weights and step sizes: at least float32."""
        return widest(self.dtype, jnp.float32)


def where(condition: Array | bool, yes: PyTree, no: PyTree) -> Any:
    """`yes` if the condition holds, else `no`, leaf by leaf.

    Args:
        condition: one truth value, which may be traced.
        yes: a `Vector`, a number or a whole state.
        no: of the same structure.
    """
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def power_of_two(size: Array) -> Array:
    """The largest power of two that is at most `size`; 1 where that is zero or not finite.

    Divided by the power of two of their largest entry, numbers can be squared: no square overflows, and none that
    matters underflows. The division is exact, so a norm computed that way has the bits of the plain formula.
    """
    size, tiny = jax.lax.stop_gradient(size), float(jnp.finfo(size.dtype).tiny)
    power = jnp.ldexp(jnp.ones_like(size), jnp.frexp(size)[1] - 1)
    # Compilers divide by multiplying with the reciprocal, and take a reciprocal below the smallest number for zero.
    return jnp.where((size >= tiny) & jnp.isfinite(size), jnp.minimum(power, 1 / tiny), 1)


def _binary(function: Callable, left: V, right: "Vector | Scalar") -> V:
    if isinstance(right, Vector):
        _same_shape(left, right)
        return type(left)(jax.tree.map(function, left.tree, right.tree))
    # np.float64 is a float too, but one that would widen the leaves.
    if not (plain := type(right) in type_of_scalar) and jnp.ndim(right) != 0:
        raise TypeError(
            f"a Vector combines with a Vector or a number, not with an array of shape {jnp.shape(right)}; "
            "wrap the array as Vector(array) if it is one"
        )
    return left.map(lambda a: function(a, right if plain else jnp.asarray(right, a.dtype)))


def _same_shape(left: Vector, right: Vector) -> None:
    here, there = (jax.tree.map(jnp.shape, v.tree) for v in (left, right))
    if jax.tree.structure(left.tree) != jax.tree.structure(right.tree) or here != there:
        raise TypeError(f"these Vectors do not have the same shape: {here} and {there}")


def _total(parts: list[Array]) -> Array:
    dtype = widest(*[p.dtype for p in parts])
    return sum((p.astype(dtype) for p in parts[1:]), start=parts[0].astype(dtype))


def widest(*dtypes: Any) -> Any:
    """The dtype that holds them all, also where implicit promotion is forbidden."""
    with jax.numpy_dtype_promotion("standard"):  # leaves of different dtypes are meant, not a slip
        return jnp.result_type(*dtypes)
