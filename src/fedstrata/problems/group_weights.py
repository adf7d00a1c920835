"""Group weights learned on a balanced validation set: group fairness as a bilevel problem."""

from collections.abc import Mapping
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree

from fedstrata.base.errors import unknown
from fedstrata.core.vector import Vector
from fedstrata.problems import groups
from fedstrata.problems.base import Metric
from fedstrata.problems.bilevel import Bilevel
from fedstrata.problems.fair import Fair
from fedstrata.prox import Box

Link = Literal["sigmoid", "box", "literal"]


class GroupWeights(Bilevel):
    r"""$\min_x \sum_i p_i \, \bar\ell_i^{valid}(\theta_i(x))$, $\theta_i(x)$ minimising $w_a(x)$-weighted losses.

    Made by `fair.learn_weights`. x has one number per group; the lower variable θ is a client's model. The upper loss
    has no weights and no l2 term, the lower one has both. `problem.weights(x)` are the weights, and
    `fair.weighted(problem.weights(x))` the problem to train the final model on.
    """

    fair: Fair | None = None
    link: Link = eqx.field(default="sigmoid", static=True)
    allow_missing: bool = eqx.field(default=False, static=True)

    def weights(self, x: Vector | PyTree) -> Array:
        """One weight per group."""
        values = x.tree if isinstance(x, Vector) else x
        return jax.nn.sigmoid(values) if self.link == "sigmoid" else jnp.asarray(values)

    def check(self, x: Vector, federation: Any) -> None:
        assert self.fair is not None
        total = groups.count(self.fair.group, self.fair.groups, federation)
        if x.size != total:
            raise ValueError(f"GroupWeights: x has {x.size} numbers and there are {total} groups; give one for each")
        super().check(x, federation)
        if self.allow_missing:
            return
        for split in (self.lower_split, self.upper_split):
            rows = federation[split]
            present = np.zeros((federation.clients, total), bool)
            present[np.asarray(rows.owners), groups.codes(self.fair.group, rows, f"split {split!r}")] = True
            missing = np.argwhere(~present)
            if missing.size:
                client, group = missing[0]
                raise ValueError(
                    f"GroupWeights: {federation.names[int(client)]} has no example of group {group} in split {split!r} "
                    f"({len(missing)} such pairs), so it gives no gradient for the weight of that group. Merge small "
                    "groups, leave the client out with federation.select, or give allow_missing=True"
                )

    def parts(self, federation: Any) -> dict[str, Any]:
        assert self.fair is not None
        return self.fair.parts(federation)


class GroupWeightedLoss(eqx.Module):
    """The lower objective: a weight times the loss, plus the l2 term.

    Args:
        fair: the problem.
        link: the weights as a function of x.
    """

    fair: Fair
    link: Link = eqx.field(static=True)

    def __call__(self, x: PyTree, theta: PyTree, example: PyTree) -> Array:
        values = jax.nn.sigmoid(x) if self.link == "sigmoid" else x
        if self.link == "literal":  # NaN, so that the run stops with a reason
            values = jnp.where(values < 0, jnp.nan, values)
        loss = self.fair.data_loss(theta, example)
        penalty = self.fair.penalty(Vector(theta)).astype(loss.dtype)
        return self.fair.weight_of(example, values, loss.dtype) * loss + penalty


class Unweighted(eqx.Module):
    """The upper objective: the loss, without weights and l2 term.

    Args:
        loss: an object with a method `data_loss`.
    """

    loss: Any

    def __call__(self, x: PyTree, theta: PyTree, example: PyTree) -> Array:
        return self.loss.data_loss(theta, example)


class AtModel(eqx.Module):
    """A metric of the model, as a function of both variables.

    Args:
        metric: of the model's parameters and one example.
    """

    metric: Any

    def __call__(self, x: PyTree, theta: PyTree, example: PyTree) -> Array:
        return self.metric(theta, example)


def at_model(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of the model as those of both variables, with the directions that they declare."""
    at = lambda metric: Metric(AtModel(metric), metric.mode) if isinstance(metric, Metric) else AtModel(metric)
    return {name: at(metric) for name, metric in metrics.items()}


class Same(eqx.Module):
    """Start values of x: the same number for every weight.

    Args:
        size: the number of weights.
        value: of each.
    """

    size: int = eqx.field(static=True)
    value: float = eqx.field(static=True)

    def init(self, key: PRNGKeyArray, dtype: Any = None) -> Array:
        return jnp.full((self.size,), self.value, dtype)


def learn_weights(
    fair: Fair, start: PyTree, link: Link = "sigmoid", low: float = 0.01, high: float = 10.0, **options: Any
) -> GroupWeights:
    """See `Fair.learn_weights`."""
    if link not in ("sigmoid", "box", "literal"):
        raise unknown("link of learn_weights", str(link), ["sigmoid", "box", "literal"])
    if fair.weights is not None:
        raise ValueError("learn_weights: this Fair problem has weights already; start from the one without")
    constraint = {"regularizer": Box(low, high)} if link == "box" else {}
    negative = "a group's weight turned negative, and a loss with a negative weight need not have a minimum"
    advice = f"{negative}: use link='sigmoid' or link='box', or a smaller step" if link == "literal" else ""
    return GroupWeights(
        upper=Unweighted(fair),
        lower=GroupWeightedLoss(fair, link),
        start=start,
        metrics=at_model(fair.all_metrics()),
        model=Same(fair.group_count, 0.0 if link == "sigmoid" else 1.0),
        when_not_finite=advice,
        fair=fair,
        link=link,
        **constraint,
        **options,
    )
