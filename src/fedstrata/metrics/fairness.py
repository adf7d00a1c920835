"""Group fairness of binary decisions: how far rates differ between groups, in functions that compile.

Every measure takes predictions and labels (0 or 1) and groups (0 … count − 1), one of each per example. A group in
which a rate has no meaning (no examples, or none with the label) is left out of it; with fewer than two groups left a
gap is 0. Libraries that call such a rate 0 instead report larger gaps.
"""

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array
from numpy.typing import ArrayLike


def equal_opportunity(predictions: ArrayLike, labels: ArrayLike, groups: ArrayLike, count: int | None = None) -> Array:
    """The largest difference between groups in the true positive rate, P(prediction = 1 | label = 1).

    Args:
        predictions: 0 or 1 per example.
        labels: 0 or 1 per example.
        groups: the group of each example, from 0.
        count: the number of groups; None: largest group + 1, which compiled code cannot find.

    >>> round(float(equal_opportunity([1, 0, 1, 0], [1, 1, 1, 0], [0, 0, 1, 1])), 3)  # 1/2 against 1
    0.5
    """
    return measures(confusion(predictions, labels, groups, count))["eq_opp"]


def equalized_odds(predictions: ArrayLike, labels: ArrayLike, groups: ArrayLike, count: int | None = None) -> Array:
    """The larger of the gap in equal opportunity and the same gap in P(prediction = 1 | label = 0).

    Args:
        predictions: 0 or 1 per example.
        labels: 0 or 1 per example.
        groups: the group of each example, from 0.
        count: the number of groups; None: largest group + 1, which compiled code cannot find.
    """
    return measures(confusion(predictions, labels, groups, count))["eq_odds"]


def demographic_parity(predictions: ArrayLike, labels: ArrayLike, groups: ArrayLike, count: int | None = None) -> Array:
    """The largest difference between groups in P(prediction = 1); labels do not matter.

    Args:
        predictions: 0 or 1 per example.
        labels: 0 or 1 per example.
        groups: the group of each example, from 0.
        count: the number of groups; None: largest group + 1, which compiled code cannot find.
    """
    return measures(confusion(predictions, labels, groups, count))["demographic_parity"]


def worst_group_accuracy(
    predictions: ArrayLike, labels: ArrayLike, groups: ArrayLike, count: int | None = None
) -> Array:
    """The accuracy in the group where it is lowest; NaN without examples.

    Args:
        predictions: 0 or 1 per example.
        labels: 0 or 1 per example.
        groups: the group of each example, from 0.
        count: the number of groups; None: largest group + 1, which compiled code cannot find.
    """
    return measures(confusion(predictions, labels, groups, count))["worst_group_accuracy"]


def confusion(predictions: ArrayLike, labels: ArrayLike, groups: ArrayLike, count: int | None = None) -> Array:
    """The number of examples by group, label and prediction: shape (count, 2, 2).

    Args:
        predictions: 0 or 1 per example.
        labels: 0 or 1 per example.
        groups: the group of each example, from 0.
        count: the number of groups; None: largest group + 1, which compiled code cannot find.

    >>> confusion([1, 0, 1], [1, 1, 0], [0, 0, 1]).tolist()
    [[[0, 0], [1, 1]], [[0, 1], [0, 0]]]
    """
    columns = {"predictions": predictions, "labels": labels, "groups": groups}
    shapes = {name: np.shape(column) for name, column in columns.items()}
    if len({*shapes.values()}) != 1 or len(shapes["labels"]) != 1:
        raise ValueError(f"fairness: one prediction, label and group per example are needed, got shapes {shapes}")
    if count is None:
        if isinstance(groups, Tracer):
            raise ValueError("fairness: compiled code cannot count the groups; give count=")
        count = int(np.max(groups, initial=0)) + 1
    for name, limit in (("predictions", 2), ("labels", 2), ("groups", count)):
        _in_range(name, columns[name], limit)
    guess, label, group = (jnp.asarray(column).astype(jnp.int32) for column in columns.values())
    return jnp.bincount((group * 2 + label) * 2 + guess, length=4 * count).reshape(count, 2, 2)


def measures(table: Array) -> dict[str, Array]:
    """All measures of a table of counts, as `fs.Fair` records them.

    Args:
        table: counts by group, label and prediction, as from `confusion`.
    """
    table = table if jnp.issubdtype(table.dtype, jnp.floating) else table.astype(float)
    total = table.sum(axis=(1, 2))
    positive = table.sum(axis=2)  # by group and label
    found, raised = (spread(*rate(table[:, label, 1], positive[:, label])) for label in (1, 0))
    right, known = rate(table[:, 0, 0] + table[:, 1, 1], total)
    return {
        "eq_opp": found,
        "eq_odds": jnp.maximum(found, raised),
        "demographic_parity": spread(*rate(table[:, :, 1].sum(axis=1), total)),
        "worst_group_accuracy": jnp.where(known.any(), jnp.min(jnp.where(known, right, 2)), jnp.nan),
    }


def rate(hits: Array, total: Array) -> tuple[Array, Array]:
    """hits / total, and where total is above zero.

    Args:
        hits: counts.
        total: counts of the examples that `hits` are taken from.
    """
    known = total > 0
    return hits / jnp.where(known, total, 1), known


def spread(rates: Array, known: Array) -> Array:
    """The largest minus the smallest known rate; 0 where fewer than two are known.

    Args:
        rates: numbers in [0, 1].
        known: which of them count.
    """
    gap = jnp.max(jnp.where(known, rates, -1)) - jnp.min(jnp.where(known, rates, 2))
    return jnp.where(known.sum() >= 2, gap, 0)


def _in_range(name: str, column: ArrayLike, limit: int) -> None:
    """Raise for numbers outside 0 … limit − 1; traced values are not checked."""
    if isinstance(column, Tracer):
        return
    values = np.asarray(column)
    wrong = values[(values != np.floor(values)) | (values < 0) | (values >= limit)]
    if wrong.size:
        raise ValueError(f"fairness: {name} must be whole numbers from 0 to {limit - 1}, got {wrong[0]}")
