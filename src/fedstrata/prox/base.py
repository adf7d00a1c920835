"""The interface of a regulariser φ: its value, proximal operator, weak convexity and stationarity measure."""

import dataclasses
import math
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree

from fedstrata.core.vector import widest
from fedstrata.prox.trees import Leaves, Selector, named_leaves, root, total, wide


def number(default: Any = dataclasses.MISSING, *, above: float = -math.inf, at_least: float = -math.inf) -> Any:
    """Declare a constant of a regulariser, a plain number in a range: `weight: float = number(at_least=0)`.

    Args:
        default: the value if none is given; without it the constant is required.
        above: the constant must be larger.
        at_least: the constant must not be smaller.
    """
    given = {} if default is dataclasses.MISSING else {"default": default}
    return eqx.field(static=True, converter=plain, metadata={"range": (above, at_least)}, **given)


def plain(value: Any) -> Any:
    """A Python float for anything that is one number; other values unchanged, so that the check can reject them."""
    if isinstance(value, Tracer) or np.ndim(value) != 0:
        return str(value)  # equinox would warn of a static array before the check can explain
    if isinstance(value, (bool, np.bool_)) or not jnp.issubdtype(np.asarray(value).dtype, jnp.number):
        return value
    return float(value)


class Regularizer(eqx.Module):
    r"""A function φ of the parameters whose proximal operator is known.

    $$ \mathrm{prox}_{\gamma\varphi}(z) = \arg\min_x \; \varphi(x) + \frac{1}{2\gamma} |x - z|^2 $$

    Arguments are arrays, any pytree of arrays, or a `Vector`; results have the same structure and dtypes. Formulas are
    computed in float32 or wider. Multiply by a positive number, add what acts on other leaves (or a `SquaredL2`), and
    choose leaves with `on`.

    To write a regulariser, subclass and define `_value(x)`, `_prox(z, step)` and `_distance(x, g)` (the distance
    *squared*) for one array; the base class handles trees, dtypes and checks. With `joint = True` these methods get all
    leaves as one vector.
    """

    joint: ClassVar[bool] = False
    # numpy scalars on the left must defer to __rmul__ instead of building object arrays.
    __array_ufunc__ = None

    def __check_init__(self) -> None:
        for field in dataclasses.fields(self):
            if "range" in field.metadata:
                _in_range(type(self).__name__, field.name, getattr(self, field.name), *field.metadata["range"])

    @property
    def rho(self) -> float:
        """The smallest known ρ for which φ + (ρ/2)|x|² is convex: 0 for convex φ, infinite where there is none."""
        return 0.0

    @property
    def convex(self) -> bool:
        """Whether φ is convex."""
        return self.rho == 0

    @property
    def has_distance(self) -> bool:
        """Whether `distance` has a closed form."""
        return True

    def value(self, x: PyTree) -> Array:
        """φ(x). For a constraint set: 0 inside (within rounding), infinite outside.

        Args:
            x: the point, an array or a tree of arrays.
        """
        return self._value_on(self._fitting(x)[0])

    def prox(self, z: PyTree, step: Any) -> Any:
        """The minimiser of φ(x) + |x − z|²/(2 step); `step = 0` gives z (constraint sets: its projection).

        A step outside the allowed range raises, see `check_step`. A traced step cannot raise: the result is then NaN
        throughout, never a wrong point.

        Args:
            z: the point, an array or a tree of arrays.
            step: γ, at least 0 and below 1/ρ.
        """
        leaves, rebuild = self._fitting(z)
        self.check_step(step)
        # Steps of compositions (c·γ, γ/(1+2γν)) must not be rounded to a dtype narrower than the leaves'.
        step = wide(step if isinstance(step, Tracer) or hasattr(step, "dtype") else float(step))
        step = step.astype(widest(step.dtype, *[leaf.dtype for leaf in leaves.values() if _is_float(leaf)]))
        return rebuild(leaves | self._prox_on(leaves, step))

    def distance(self, x: PyTree, g: PyTree) -> Array:
        r"""$\min_{v \in \partial\varphi(x)} |g + v|$: zero where g + φ is stationary, infinite outside φ's domain.

        With g the gradient of f at x this measures how far x is from a stationary point of f + φ.

        Args:
            x: the point, an array or a tree of arrays.
            g: the gradient of the smooth part at x.
        """
        if not self.has_distance:
            raise TypeError(
                f"{self!r} has no closed form for the distance to its subdifferential; measure |x − prox(x − γg)|/γ "
                "instead, which is zero at the same points"
            )
        (leaves, _), (gradients, _) = self._fitting(x), named_leaves(g)
        shapes = [{name: jnp.shape(leaf) for name, leaf in tree.items()} for tree in (leaves, gradients)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"{self!r}.distance: x and g must have the same leaves; got {shapes[0]} and {shapes[1]}")
        return root(self._distance_on(leaves, gradients))

    def check(self, x: PyTree) -> None:
        """Raise a ValueError if this regulariser does not fit this tree.

        Args:
            x: arrays, or only their shapes and dtypes.
        """
        self._fitting(x)

    def check_step(self, step: Any) -> None:
        """Raise a ValueError if the prox is not defined for this step.

        Args:
            step: γ; a traced one is not checked.
        """
        if jnp.ndim(step) != 0:
            raise ValueError(
                f"{self!r}: step must be one number, got an array of shape {jnp.shape(step)}; use jax.vmap for many"
            )
        if isinstance(step, Tracer):
            return
        gamma = plain(step)
        if not isinstance(gamma, float):
            raise TypeError(f"{self!r}: step = {step!r} must be a number")
        if not 0 <= gamma < math.inf:
            raise ValueError(f"{self!r}: step = {gamma:g} must be finite and at least 0")
        if self.rho < math.inf and gamma * self.rho >= 1:
            raise ValueError(
                f"{self!r}: step = {gamma:g} is too long: with weak convexity ρ = {self.rho:g} the problem "
                f"φ(x) + |x − z|²/(2 step) is strongly convex only if step < 1/ρ = {1 / self.rho:g}; otherwise its "
                "minimiser need not exist or be unique. Take a shorter step, or a φ with a smaller ρ."
            )

    def on(self, *leaves: Selector) -> "Regularizer":
        """The same regulariser on the chosen leaves only; φ = 0 on the others.

        Args:
            *leaves: strings or functions. A string is a leaf's whole name ("0/weight"), a pattern ("*/weight") or one
                part of the name ("weight"). A function `choose(name, leaf) -> bool`, such as `prox.kernels`, selects
                leaves.
        """
        from fedstrata.prox.combine import On  # combinations are regularisers, so their module imports this one

        return On(self, leaves)

    def __add__(self, other: "Regularizer") -> "Regularizer":
        from fedstrata.prox.algebra import add

        return add(self, other) if isinstance(other, Regularizer) else NotImplemented

    def __mul__(self, factor: Any) -> "Regularizer":
        from fedstrata.prox.algebra import scale

        if isinstance(factor, (Regularizer, str)):
            return NotImplemented
        _in_range(repr(self), "factor", factor := plain(factor), above=0)
        return scale(self, factor)

    __rmul__ = __mul__

    # One array.

    def _value(self, x: Array) -> Array:
        raise NotImplementedError(f"{type(self).__name__} must define _value(x)")

    def _prox(self, z: Array, step: Array) -> Array:
        raise NotImplementedError(f"{type(self).__name__} must define _prox(z, step)")

    def _distance(self, x: Array, g: Array) -> Array:
        raise NotImplementedError(f"{type(self).__name__} must define _distance(x, g)")

    def _check_leaf(self, name: str, leaf: Any) -> None:
        """Raise a ValueError if the shape of this leaf does not fit."""

    # All leaves. Combinations override these and pass the leaves of their parts on.

    def _own(self, leaves: Leaves) -> Leaves:
        """The leaves on which φ acts."""
        return leaves

    def _check_on(self, leaves: Leaves) -> None:
        if not leaves:
            raise ValueError(f"{self!r}: this tree has no arrays to act on")
        for name, leaf in leaves.items():
            if not _is_float(leaf):
                raise ValueError(
                    f"{self!r}: leaf {name!r} holds {leaf.dtype}, not floats; choose the others with .on(...)"
                )
            self._check_leaf(name, leaf)

    def _value_on(self, leaves: Leaves) -> Array:
        return total([self._value(x) for x in self._blocks(leaves)])

    def _prox_on(self, leaves: Leaves, step: Array) -> Leaves:
        new = [self._guarded(z, step.astype(z.dtype)) for z in self._blocks(leaves)]
        if self.joint:
            ends = np.cumsum([np.size(leaf) for leaf in leaves.values()])
            new = jnp.split(new[0], ends[:-1])
        return {n: x.reshape(leaf.shape).astype(leaf.dtype) for (n, leaf), x in zip(leaves.items(), new, strict=True)}

    def _distance_on(self, leaves: Leaves, gradients: Leaves) -> Array:
        pairs = zip(self._blocks(leaves), self._blocks(gradients), strict=True)
        return total([self._distance(x, g.astype(x.dtype)) for x, g in pairs])

    def _blocks(self, leaves: Leaves) -> list[Array]:
        """The arguments of the formulas: leaf by leaf, or all leaves as one vector."""
        blocks = [wide(leaf) for leaf in leaves.values()]
        if not self.joint:
            return blocks
        dtype = widest(*[block.dtype for block in blocks])
        return [jnp.concatenate([block.astype(dtype).ravel() for block in blocks])]

    def _eps(self, leaves: Leaves) -> list[float]:
        """The relative rounding error of each block as it was stored, for decisions within rounding."""
        each = [float(jnp.finfo(leaf.dtype).eps) for leaf in leaves.values()]
        return [max(each)] if self.joint else each

    def _guarded(self, z: Array, step: Array) -> Array:
        allowed = (step >= 0) & (step < math.inf)
        if self.rho < math.inf:
            allowed &= step * self.rho < 1
        # The formula gets 0 instead of a forbidden step, whose infinities would spoil derivatives.
        x = self._prox(z, jnp.where(allowed, step, 0))
        return jnp.where(allowed, x, math.nan)

    def _fitting(self, tree: PyTree) -> tuple[Leaves, Any]:
        leaves, rebuild = named_leaves(tree)
        self._check_on(leaves)
        return leaves, rebuild


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _in_range(who: str, name: str, value: Any, above: float = -math.inf, at_least: float = -math.inf) -> None:
    if not isinstance(value, float):
        raise TypeError(
            f"{who}: {name} = {value!r} must be a plain number, known before anything compiles (to sweep it, build one "
            "regulariser per value, or scale the step)"
        )
    if not (math.isfinite(value) and value > above and value >= at_least):
        bound = f"> {above:g}" if above > -math.inf else f">= {at_least:g}"
        raise ValueError(f"{who}: {name} = {value:g} must be finite and {bound}")
