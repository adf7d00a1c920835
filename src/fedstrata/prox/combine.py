"""Regularisers made of others: on chosen leaves, scaled, summed."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from fedstrata.prox.base import Regularizer, number
from fedstrata.prox.sparse import SquaredL2
from fedstrata.prox.trees import Leaves, Selector, chosen, spelled, squared, total, wide


class On(Regularizer):
    r"""φ on the chosen leaves, 0 on the others: made by `regularizer.on(...)`.

    >>> tree = {"weight": jnp.array([3.0]), "bias": jnp.array([3.0])}
    >>> {name: x.tolist() for name, x in SquaredL2(0.5).on("weight").prox(tree, step=2.0).items()}
    {'bias': [3.0], 'weight': [1.0]}

    Args:
        inner: φ.
        selectors: names, patterns or functions, see `Regularizer.on`.
    """

    inner: Regularizer
    selectors: tuple[Selector, ...] = eqx.field(static=True, converter=tuple)

    def __check_init__(self) -> None:
        if not self.selectors:
            raise ValueError(f"{self.inner!r}.on() needs at least one leaf name, pattern or function(name, leaf)")
        for selector in self.selectors:
            if not (isinstance(selector, str) or callable(selector)):
                raise TypeError(f"{self.inner!r}.on({selector!r}): choose leaves by a string or a function(name, leaf)")

    @property
    def rho(self) -> float:
        return self.inner.rho

    @property
    def has_distance(self) -> bool:
        return self.inner.has_distance

    def _own(self, leaves: Leaves) -> Leaves:
        return self.inner._own(chosen(leaves, self.selectors, repr(self)))

    def _check_on(self, leaves: Leaves) -> None:
        self.inner._check_on(chosen(leaves, self.selectors, repr(self)))

    def _value_on(self, leaves: Leaves) -> Array:
        return self.inner._value_on(self._own(leaves))

    def _prox_on(self, leaves: Leaves, step: Array) -> Leaves:
        return leaves | self.inner._prox_on(self._own(leaves), step)

    def _distance_on(self, leaves: Leaves, gradients: Leaves) -> Array:
        return _by_part([(self.inner, self._own(leaves))], gradients)

    def check_step(self, step: Any) -> None:
        self.inner.check_step(step)

    def __repr__(self) -> str:
        return f"{_bracketed(self.inner)}.on({', '.join(spelled(s) for s in self.selectors)})"


class Scaled(Regularizer):
    r"""$c\varphi$: made by `c * regularizer`. Its prox is that of φ with the step cγ.

    >>> from fedstrata.prox import MCP
    >>> (3 * MCP(1.0, theta=6.0)).rho
    0.5

    Args:
        inner: φ.
        factor: c, above 0.
    """

    inner: Regularizer
    factor: float = number(above=0)

    @property
    def rho(self) -> float:
        return self.factor * self.inner.rho

    @property
    def has_distance(self) -> bool:
        return self.inner.has_distance

    def _own(self, leaves: Leaves) -> Leaves:
        return self.inner._own(leaves)

    def _check_on(self, leaves: Leaves) -> None:
        self.inner._check_on(leaves)

    def _value_on(self, leaves: Leaves) -> Array:
        return self.factor * self.inner._value_on(leaves)

    def _prox_on(self, leaves: Leaves, step: Array) -> Leaves:
        return self.inner._prox_on(leaves, self.factor * step)

    def _distance_on(self, leaves: Leaves, gradients: Leaves) -> Array:
        smaller = {name: wide(g) / self.factor for name, g in gradients.items()}
        return self.factor**2 * self.inner._distance_on(leaves, smaller)

    def __repr__(self) -> str:
        return f"{self.factor:g} * {_bracketed(self.inner)}"


class Sum(Regularizer):
    """φ₁ + φ₂ + … on disjoint leaves: made by `one.on(...) + other.on(...)`. The prox is taken part by part.

    Args:
        parts: the φ's; no two may act on the same leaf.
    """

    parts: tuple[Regularizer, ...] = eqx.field(converter=tuple)

    @property
    def rho(self) -> float:
        return max(part.rho for part in self.parts)

    @property
    def has_distance(self) -> bool:
        return all(part.has_distance for part in self.parts)

    def check_step(self, step: Any) -> None:
        for part in self.parts:  # one by one: infinite ρ of one part must not hide the bound of another
            part.check_step(step)

    def _own(self, leaves: Leaves) -> Leaves:
        owned = {name for part in self.parts for name in part._own(leaves)}
        return {name: leaf for name, leaf in leaves.items() if name in owned}

    def _check_on(self, leaves: Leaves) -> None:
        for part in self.parts:
            part._check_on(leaves)
        owner: dict[str, Regularizer] = {}
        for part in self.parts:
            for name in part._own(leaves):
                if name in owner:
                    raise ValueError(
                        f"{self!r}: {owner[name]!r} and {part!r} both act on leaf {name!r}. The prox of a sum has no "
                        "closed form in general: give the parts different leaves with .on(...). Only a SquaredL2 may "
                        "be added on the same leaves."
                    )
                owner[name] = part

    def _value_on(self, leaves: Leaves) -> Array:
        return total([part._value_on(part._own(leaves)) for part in self.parts])

    def _prox_on(self, leaves: Leaves, step: Array) -> Leaves:
        new = dict(leaves)
        for part in self.parts:
            new |= part._prox_on(part._own(leaves), step)
        return new

    def _distance_on(self, leaves: Leaves, gradients: Leaves) -> Array:
        return _by_part([(part, part._own(leaves)) for part in self.parts], gradients)

    def __repr__(self) -> str:
        return " + ".join(repr(part) for part in self.parts)


class PlusSquare(Regularizer):
    r"""$\varphi + \nu |x|^2$ on all leaves: made by `regularizer + SquaredL2(nu)`. The square only shifts the problem.

    $$ \mathrm{prox}_{\gamma(\varphi + \nu|\cdot|^2)}(z) =
       \mathrm{prox}_{\frac{\gamma}{1 + 2\gamma\nu} \varphi}\Big(\frac{z}{1 + 2\gamma\nu}\Big),
       \qquad \rho = (\rho_\varphi - 2\nu)_+ $$

    >>> from fedstrata.prox import L1
    >>> (L1(2.0) + SquaredL2(0.5)).prox(jnp.array([4.0, -0.5]), step=1.0).tolist()
    [1.0, 0.0]

    Args:
        inner: φ.
        weight: ν, at least 0.
    """

    inner: Regularizer
    weight: float = number(at_least=0)

    @property
    def rho(self) -> float:
        return max(self.inner.rho - 2 * self.weight, 0.0)

    @property
    def has_distance(self) -> bool:
        return self.inner.has_distance

    def _check_on(self, leaves: Leaves) -> None:
        super()._check_on(leaves)  # the square needs floats everywhere
        self.inner._check_on(leaves)

    def _value_on(self, leaves: Leaves) -> Array:
        return total([self.inner._value_on(leaves), SquaredL2(self.weight)._value_on(leaves)])

    def _prox_on(self, leaves: Leaves, step: Array) -> Leaves:
        shrink = 1 + 2 * self.weight * step
        nearer = {n: wide(z) / shrink.astype(wide(z).dtype) for n, z in leaves.items()}
        new = nearer | self.inner._prox_on(nearer, step / shrink)
        return {n: jnp.asarray(x).astype(leaves[n].dtype) for n, x in new.items()}

    def _distance_on(self, leaves: Leaves, gradients: Leaves) -> Array:
        slope = lambda x: 2 * self.weight * wide(x)
        moved = {n: wide(g).astype(wide(leaves[n]).dtype) + slope(leaves[n]) for n, g in gradients.items()}
        return self.inner._distance_on(leaves, moved)

    def __repr__(self) -> str:
        return f"{self.inner!r} + SquaredL2(weight={self.weight:g})"


def _by_part(parts: list[tuple[Regularizer, Leaves]], gradients: Leaves) -> Array:
    """Squared distances of the parts on their leaves, and |g|² on leaves without a part."""
    inside = [part._distance_on(own, {name: gradients[name] for name in own}) for part, own in parts]
    owned = {name for _, own in parts for name in own}
    return total(inside + [squared(jnp.asarray(g)) for name, g in gradients.items() if name not in owned])


def _bracketed(regularizer: Regularizer) -> str:
    return f"({regularizer!r})" if isinstance(regularizer, (Sum, PlusSquare, Scaled)) else repr(regularizer)
