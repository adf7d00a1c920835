"""Nested problems of practice: meta-learning, distributionally robust learning, risk-averse portfolios."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fedstrata.problems.average import Loss
from fedstrata.problems.nested import Level, Nested
from fedstrata.prox import Regularizer, Zero


def maml(loss: Loss, step_size: float, steps: int = 1, **options: Any) -> Nested:
    r"""Model-agnostic meta-learning, one task per client: $\min_x \sum_i p_i f_i(x - \eta \nabla f_i(x))$.

    Metrics of the loss are evaluated at the adapted model.

    Args:
        loss: `loss(params, example) -> scalar`, for one example.
        step_size: η of the adaptation.
        steps: the number of adaptation steps; each is a level, so K = steps + 1.
        **options: further parameters of `fs.Nested`.

    >>> maml(lambda w, example: 0.5 * (w - example["x"]) ** 2, step_size=0.1, steps=2).inner
    'client'
    """
    if not steps >= 1:
        raise ValueError(f"maml: steps={steps!r} must be a whole number >= 1")
    adapt: Level = Adapt(loss, step_size)
    options = {"metrics": getattr(loss, "metrics", {}), "model": getattr(loss, "model", None), **options}
    return Nested([*[adapt] * steps, loss], inner="client", metrics_level=steps, **options)


class Adapt(eqx.Module):
    """One gradient step on one example; its mean over a sample is a gradient step on the sample.

    Args:
        loss: `loss(params, example) -> scalar`, for one example.
        step_size: η.
    """

    loss: Loss
    step_size: float

    def __call__(self, x: PyTree, example: PyTree) -> PyTree:
        gradient = jax.grad(self.loss)(x, example)
        return jax.tree.map(lambda a, g: a - jnp.asarray(self.step_size, a.dtype) * g, x, gradient)


def robust(loss: Loss, temperature: float = 1.0, **options: Any) -> Nested:
    r"""Distributionally robust learning: $\min_x \sum_i p_i \exp(f_i(x) / \lambda)$.

    Clients with large losses dominate. λ times the logarithm of the objective is the largest expected loss over
    reweightings of the clients, minus λ times their KL divergence from p.

    Args:
        loss: `loss(params, example) -> scalar`, for one example.
        temperature: λ, above 0; with small values almost only the worst client counts.
        **options: further parameters of `fs.Nested`.

    >>> robust(lambda w, example: 0.5 * (w - example["x"]) ** 2, temperature=0.5).inner
    'client'
    """
    if not temperature > 0:
        raise ValueError(f"robust: temperature={temperature!r} must be > 0")
    options = {
        "metrics": {"mean_loss": loss, **getattr(loss, "metrics", {})},
        "model": getattr(loss, "model", None),
        **options,
    }
    return Nested([loss, Exponential(temperature)], inner="client", **options)


class Exponential(eqx.Module):
    """The last level of `robust`, exp(y / λ).

    Args:
        temperature: λ.
    """

    temperature: float

    def __call__(self, y: Array) -> Array:
        return jnp.exp(y / jnp.asarray(self.temperature, y.dtype))


def risk_averse(
    risk_aversion: float = 1.0,
    eps: float = 0.0,
    floor: float | None = None,
    regularizer: Regularizer | None = None,
    **options: Any,
) -> Nested:
    r"""Risk-averse portfolio: $\min_x \lambda \sqrt{\mathrm{Var}(r^\top x) + \epsilon} - E[r^\top x]$, K = 3.

    An example is `{"r": returns of one day}` and x the holdings. Levels: $(E[r^\top x], x)$, then
    $(y_1, E[(r^\top y_2 - y_1)^2])$, then the square root. A recursive estimate of the variance may be negative; the
    root is then not a number, and the run stops. `eps` and `floor` guard the root.

    Args:
        risk_aversion: λ.
        eps: added to the variance; it helps only where the estimate is never below −eps (not with small batches).
        floor: the root is taken of at least this value, with zero slope below; None: no floor.
        regularizer: a constraint on x, e.g. `fs.prox.Simplex()` for a budget. Without one the objective is homogeneous
            and, for λ above the best Sharpe ratio, minimal at x = 0: nothing is bought.
        **options: further parameters of `fs.Nested`.

    >>> len(risk_averse(eps=1e-4).levels)
    3
    """
    if not eps >= 0:
        raise ValueError(f"risk_averse: eps={eps!r}, which is added to the variance, must be >= 0")
    if floor is not None and not floor > 0:
        raise ValueError(f"risk_averse: floor={floor!r}, below which no root is taken, must be > 0")
    low = f"below {-eps:g}" if eps else "negative"
    advice = (
        "this portfolio problem takes the square root of an estimated variance, and recursive estimates of a variance "
        f"may be {low}; give risk_averse(floor=...), or take smaller steps or larger batches"
    )
    options = {"when_not_finite": advice if floor is None else "", **options}
    levels = [expected_return, variance, Risk(risk_aversion, eps, floor)]
    return Nested(levels, inner="global", regularizer=Zero() if regularizer is None else regularizer, **options)


def expected_return(x: Array, example: Mapping[str, Array]) -> tuple[Array, Array]:
    """The first level of `risk_averse`."""
    return example["r"] @ x, x


def variance(y: tuple[Array, Array], example: Mapping[str, Array]) -> Array:
    """The second level of `risk_averse`."""
    mean, x = y
    return jnp.stack([mean, (example["r"] @ x - mean) ** 2])


class Risk(eqx.Module):
    """The last level of `risk_averse`.

    Args:
        risk_aversion: λ.
        eps: added to the variance.
        floor: the root is taken of at least this value.
    """

    risk_aversion: float
    eps: float
    floor: float | None

    def __call__(self, z: Array) -> Array:
        mean, spread = z[0], z[1] + jnp.asarray(self.eps, z.dtype)
        if self.floor is not None:
            spread = jnp.maximum(spread, jnp.asarray(self.floor, z.dtype))
        return jnp.asarray(self.risk_aversion, z.dtype) * jnp.sqrt(spread) - mean
