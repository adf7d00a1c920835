"""Losses between two scores: `loss(a, b)`, with a the score of an example that should rank above one with score b.

A pairwise objective (`fs.Pairwise`) is a mean over z of f(mean over z' of ℓ(h(z), h(z'))). A loss may define its f
(`outer`). Where ℓ is an exponential, the loss returns log ℓ instead (`in_logs`) and f is a function of log u, so that
nothing overflows. All losses and their gradients are finite for scores up to ±1e4 in float32.
"""

import abc
from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

STEEP = 30.0  # exponentials are continued by their tangent beyond e^30, and weights cut there


Outer = Callable[[Array], Array]


class PairLoss(eqx.Module):
    """A loss of two scores."""

    labelled: ClassVar[bool] = False  # the second score comes with its label: b = (score, label)

    @property
    def in_logs(self) -> bool:
        """Whether the loss returns log ℓ, and `outer` takes log u."""
        return False

    @property
    def outer(self) -> Outer | None:
        """The f around the mean of ℓ; None for the identity."""
        return None

    @abc.abstractmethod
    def __call__(self, a: Array, b: Array) -> Array:
        """ℓ(a, b), or its logarithm where `in_logs`.

        Args:
            a: score of an example of the first set.
            b: score of an example of the second set; (score, label) where `labelled`.
        """


class Square(PairLoss):
    r"""$\ell(a, b) = (m - a + b)^2$: the loss of the min-max form of AUC (CODASCA).

    Args:
        margin: m.

    >>> float(Square()(jnp.array(2.0), jnp.array(0.0)))  # also penalises pairs ranked right by more than the margin
    1.0
    """

    margin: float = 1.0

    def __call__(self, a: Array, b: Array) -> Array:
        return jnp.square(_gap(self.margin, a, b))


class SquaredHinge(PairLoss):
    r"""$\ell(a, b) = \max(0, m - a + b)^2$.

    Args:
        margin: m.

    >>> float(SquaredHinge()(jnp.array(2.0), jnp.array(0.0)))
    0.0
    """

    margin: float = 1.0

    def __call__(self, a: Array, b: Array) -> Array:
        return _hinge_square(self.margin, a, b)


class Logistic(PairLoss):
    r"""$\ell(a, b) = \log(1 + e^{b - a})$.

    >>> round(float(Logistic()(jnp.array(0.0), jnp.array(0.0))), 4)  # log 2
    0.6931
    """

    def __call__(self, a: Array, b: Array) -> Array:
        return jax.nn.softplus(b - a)


class PSM(PairLoss):
    r"""The pairwise sigmoid $\ell(a, b) = 1 / (1 + e^{a - b})$: symmetric, $\ell(t) + \ell(-t) = 1$.

    Symmetry makes its minimiser robust to flipped labels (charoenphakdee2019). It is bounded, hence not convex, and
    flat where a pair is badly wrong.

    >>> float(PSM()(jnp.array(0.0), jnp.array(0.0)))
    0.5
    """

    def __call__(self, a: Array, b: Array) -> Array:
        return jax.nn.sigmoid(b - a)


class KLOPAUC(PairLoss):
    r"""Partial AUC: $\ell = e^{L / \lambda}$, $f(u) = \lambda \log u$, $L = \max(0, m - a + b)^2$ (zhu2022, KL form).

    A soft maximum over the second set. A small λ weighs the hardest negatives only (a low false positive rate); a large
    λ tends to the mean, plain AUC. With first="negatives", second="positives" and `Mirrored` it weighs the hardest
    positives instead (a high true positive rate).

    Args:
        lam: λ.
        margin: m.

    >>> loss = KLOPAUC(2.0)
    >>> float(loss.outer(loss(jnp.array(-1e4), jnp.array(1e4)))) < 4.1e8  # computed in logarithms
    True
    """

    lam: float = 1.0
    margin: float = 1.0

    def __check_init__(self) -> None:
        _positive("KLOPAUC", lam=self.lam)

    @property
    def in_logs(self) -> bool:
        return True

    @property
    def outer(self) -> Outer:
        return lambda log_u: self.lam * log_u

    def __call__(self, a: Array, b: Array) -> Array:
        return _hinge_square(self.margin, a, b) / self.lam


class TwoWay(PairLoss):
    r"""Two-way partial AUC: $\ell = e^{L / \lambda}$, $f(u) = \lambda' u^{\lambda / \lambda'}$.

    Both ends are softened: λ weighs the hardest of the second set, λ' the hardest of the first. Its minimisers are
    those of the form of zhu2022, $\lambda' \log \frac{1}{|S_1|} \sum_z u_z^{\lambda / \lambda'}$, whose outer logarithm
    is monotone and can be omitted. Beyond $u^{\lambda/\lambda'} = e^{30}$ the power is continued by its tangent.

    Args:
        lam: λ.
        lam_first: λ'.
        margin: m.

    >>> loss = TwoWay(2.0, 2.0)  # λ = λ': f(u) = λ u, the mean of e^{L / λ}
    >>> float(loss.outer(loss(jnp.array(1.0), jnp.array(0.0))))
    2.0
    """

    lam: float = 1.0
    lam_first: float = 1.0
    margin: float = 1.0

    def __check_init__(self) -> None:
        _positive("TwoWay", lam=self.lam, lam_first=self.lam_first)

    @property
    def in_logs(self) -> bool:
        return True

    @property
    def outer(self) -> Outer:
        return self._power

    def _power(self, log_u: Array) -> Array:
        power = log_u * (self.lam / self.lam_first)
        return self.lam_first * jnp.exp(jnp.minimum(power, STEEP)) * (1 + jnp.maximum(power - STEEP, 0))

    def __call__(self, a: Array, b: Array) -> Array:
        return _hinge_square(self.margin, a, b) / self.lam


class AveragePrecision(PairLoss):
    r"""Average precision: $\ell = (1_{y'=1} s, \; s)$, $f(u) = -u_1 / u_2$, $s = \max(0, m - a + b)^2$ (qi2021).

    s is a surrogate of "z' is ranked at least as high as z", so $u_1 / u_2$ is the precision at z. Use it with
    second="train": the second set is all data, positives included, and its rows carry their labels.

    The paper of FedX publishes $f = +u_1 / u_2$ around a surrogate of the opposite comparison; minimising that lowers
    the average precision.

    Args:
        margin: m.
        floor: the smallest $u_2$ that f divides by; only estimates of $u_2$ are that small.

    >>> loss = AveragePrecision()
    >>> float(loss.outer(loss(jnp.array(0.0), jnp.array([0.0, 1.0]))))  # one positive: precision 1
    -1.0
    """

    margin: float = 1.0
    floor: float = 1e-6
    labelled: ClassVar[bool] = True

    def __check_init__(self) -> None:
        _positive("AveragePrecision", margin=self.margin, floor=self.floor)

    @property
    def outer(self) -> Outer:
        return lambda u: -u[0] / jnp.maximum(u[1], self.floor)

    def __call__(self, a: Array, b: Array) -> Array:
        s = _hinge_square(self.margin, a, b[0])
        return jnp.stack([b[1] * s, s])


class Mirrored(PairLoss):
    """A loss whose first score belongs to the example that should rank below: for first="negatives".

    Args:
        loss: ℓ; its scores change places.

    >>> bool(Mirrored(PSM())(jnp.array(0.0), jnp.array(100.0)) < 1e-30)  # the first ranks below: right
    True
    """

    loss: PairLoss

    def __check_init__(self) -> None:
        if getattr(self.loss, "labelled", False):  # a plain function will do for a loss, and has no such attribute
            raise ValueError(
                f"Mirrored: {self.loss!r} needs the labels of its second set, so its scores cannot change places"
            )

    @property
    def in_logs(self) -> bool:
        return getattr(self.loss, "in_logs", False)

    @property
    def outer(self) -> Outer | None:
        return getattr(self.loss, "outer", None)

    def __call__(self, a: Array, b: Array) -> Array:
        return self.loss(b, a)


def _gap(margin: float, a: Array, b: Array) -> Array:
    return jnp.asarray(margin, a.dtype) - a + b


def _hinge_square(margin: float, a: Array, b: Array) -> Array:
    return jnp.square(jnp.maximum(_gap(margin, a, b), 0))


def _positive(who: str, **values: float) -> None:
    for name, value in values.items():
        if isinstance(value, int | float) and not 0 < value < float("inf"):
            raise ValueError(f"{who}: {name}={value} must be above 0")
