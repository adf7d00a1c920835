"""Losses between two scores: `loss(a, b)`, with a the score of an example that should rank above one with score b.

A pairwise objective (`fs.Pairwise`) is a mean over z of f(mean over z' of ℓ(h(z), h(z'))).
A loss here may bring its own f (`outer`). Where ℓ is an exponential, the loss gives log ℓ instead (`in_logs`) and f is
a function of log u: nothing overflows. All are finite, with finite gradients, for scores up to ±1e4 in float32.
"""

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

STEEP = 30.0  # exponentials are continued by their tangent beyond e^30, and weights cut there


class PairLoss(eqx.Module):
    """A loss of two scores; `outer` is the f around its mean, None for the identity."""

    in_logs: ClassVar[bool] = False  # the loss gives log ℓ, and outer takes log u
    labelled: ClassVar[bool] = False  # the second score comes with its label: b = (score, label)
    outer: ClassVar[Callable[[Any, Array], Array] | None] = None

    @abc.abstractmethod
    def __call__(self, a: Array, b: Array) -> Array:
        """ℓ(a, b), or its logarithm."""


class Square(PairLoss):
    r"""$\ell(a, b) = (m - a + b)^2$, with margin m: the loss behind the min-max form of AUC (CODASCA).

    >>> float(Square()(jnp.array(2.0), jnp.array(0.0)))  # also punishes what is ranked right by more than the margin
    1.0
    """

    margin: float = 1.0

    def __call__(self, a: Array, b: Array) -> Array:
        return jnp.square(_gap(self.margin, a, b))


class SquaredHinge(PairLoss):
    r"""$\ell(a, b) = \max(0, m - a + b)^2$, with margin m.

    >>> float(SquaredHinge()(jnp.array(2.0), jnp.array(0.0)))
    0.0
    """

    margin: float = 1.0

    def __call__(self, a: Array, b: Array) -> Array:
        return _hinge_square(self.margin, a, b)


class Logistic(PairLoss):
    r"""$\ell(a, b) = \log(1 + e^{b - a})$."""

    def __call__(self, a: Array, b: Array) -> Array:
        return jax.nn.softplus(b - a)


class PSM(PairLoss):
    r"""The pairwise sigmoid $\ell(a, b) = 1 / (1 + e^{a - b})$: symmetric, $\ell(t) + \ell(-t) = 1$.

    Symmetry makes its minimiser robust to flipped labels (charoenphakdee2019). Bounded, hence not convex, and flat
    where a pair is badly wrong.

    >>> float(PSM()(jnp.array(0.0), jnp.array(0.0)))
    0.5
    """

    def __call__(self, a: Array, b: Array) -> Array:
        return jax.nn.sigmoid(b - a)


class KLOPAUC(PairLoss):
    r"""Partial AUC: $\ell = e^{L / \lambda}$, $f(u) = \lambda \log u$, $L = \max(0, m - a + b)^2$ (zhu2022, KL form).

    The softer maximum over the second set: small λ looks at the hardest negatives only (a low false positive rate),
    large λ tends to the mean, plain AUC. With first="negatives", second="positives" and `Mirrored` it looks at the
    hardest positives instead (a high true positive rate).

    >>> loss = KLOPAUC(2.0)
    >>> float(loss.outer(loss(jnp.array(-1e4), jnp.array(1e4)))) < 4.1e8  # computed in logarithms
    True
    """

    lam: float = 1.0
    margin: float = 1.0
    in_logs: ClassVar[bool] = True

    def __check_init__(self) -> None:
        _positive("KLOPAUC", lam=self.lam)

    def __call__(self, a: Array, b: Array) -> Array:
        return _hinge_square(self.margin, a, b) / self.lam

    def outer(self, log_u: Array) -> Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.lam * log_u


class TwoWay(PairLoss):
    r"""Two-way partial AUC: $\ell = e^{L / \lambda}$, $f(u) = \lambda' u^{\lambda / \lambda'}$.

    Both ends are softened: λ for the hardest of the second set, λ' for the hardest of the first. Its minimisers are
    those of the form of zhu2022, $\lambda' \log \frac{1}{|S_1|} \sum_z u_z^{\lambda / \lambda'}$, whose outer logarithm
    is monotone and can be left away. Beyond $u^{\lambda/\lambda'} = e^{30}$ the power is continued by its tangent.
    """

    lam: float = 1.0
    lam_first: float = 1.0
    margin: float = 1.0
    in_logs: ClassVar[bool] = True

    def __check_init__(self) -> None:
        _positive("TwoWay", lam=self.lam, lam_first=self.lam_first)

    def __call__(self, a: Array, b: Array) -> Array:
        return _hinge_square(self.margin, a, b) / self.lam

    def outer(self, log_u: Array) -> Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        power = log_u * (self.lam / self.lam_first)
        return self.lam_first * jnp.exp(jnp.minimum(power, STEEP)) * (1 + jnp.maximum(power - STEEP, 0))


class AveragePrecision(PairLoss):
    r"""Average precision: $\ell = (1_{y'=1} s, \; s)$, $f(u) = -u_1 / u_2$, $s = \max(0, m - a + b)^2$ (qi2021).

    s stands for "z' is ranked at least as high as z", so $u_1 / u_2$ is the precision at z. Use it with
    second="train": the second set is all data, positives included, and its rows carry their labels.

    The paper of FedX prints $f = +u_1 / u_2$ around a surrogate of the opposite comparison; minimising that lowers the
    average precision. Where $u_2$ falls below `floor`, which only happens to estimates, it is taken for `floor`.
    """

    margin: float = 1.0
    floor: float = 1e-6
    labelled: ClassVar[bool] = True

    def __check_init__(self) -> None:
        _positive("AveragePrecision", margin=self.margin, floor=self.floor)

    def __call__(self, a: Array, b: Array) -> Array:
        s = _hinge_square(self.margin, a, b[0])
        return jnp.stack([b[1] * s, s])

    def outer(self, u: Array) -> Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        return -u[0] / jnp.maximum(u[1], self.floor)


class Mirrored(PairLoss):
    """A loss whose first score is that of the example which should rank below: for first="negatives"."""

    loss: PairLoss

    def __check_init__(self) -> None:
        if getattr(self.loss, "labelled", False):
            raise ValueError(f"Mirrored: {self.loss!r} takes labels of its second set, which cannot change places")

    @property
    def in_logs(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self.loss, "in_logs", False)

    @property
    def outer(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self.loss, "outer", None)

    def __call__(self, a: Array, b: Array) -> Array:
        return self.loss(b, a)


def _gap(margin: float, a: Array, b: Array) -> Array:
    return jnp.asarray(margin, a.dtype) - a + b


def _hinge_square(margin: float, a: Array, b: Array) -> Array:
    return jnp.square(jnp.maximum(_gap(margin, a, b), 0))


def _positive(who: str, **values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, int | float) and not 0 < value < float("inf"):
            raise ValueError(f"{who}: {name}={value} must be above 0")
