r"""How well scores rank positives above negatives: exact AUC, partial AUC and average precision, in compiled code.

Every measure takes scores and labels, one of each per row: label 1 or True is a positive, anything else a negative,
and positives should have the higher scores. `weights` ≥ 0 are the weights of the rows; rows of weight 0 (padding) do
not count, and a Boolean mask keeps the arithmetic of the case without weights.

With TPR and FPR the shares of positives and negatives whose score reaches a threshold, the ROC curve joins the points
(FPR, TPR) of all thresholds by straight lines: equal scores make one point, so a tie counts 1/2.

The result is NaN, not an error, where a class is missing or a row that counts has the score NaN. The cost is that of
one sort. Results have JAX's default float. Without weights the points of the curve are whole numbers (up to 2³⁰ rows),
and only the last sum rounds, which XLA takes in blocks. Running sums of weights are taken in pairs: their relative
error is at most about $\epsilon \log_2 n$, 1e-6 for a million rows in float32, and an area far below 1/2 may have a
larger one. A million rows in float32 with 1 % positives come out right to 1e-6 either way, which the tests check.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from numpy.typing import ArrayLike

FEW = 2**16  # rows whose wins are summed one after the other; more of them in pairs, which takes longer to compile


def auc(scores: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> Array:
    r"""The area under the ROC curve, $P(s^+ > s^-) + \frac12 P(s^+ = s^-)$ for a random positive and negative.

    Args:
        scores: one number per row; higher means more likely positive.
        labels: 1 or True for a positive row, anything else for a negative one.
        weights: how much each row counts, at least 0; None: all rows count the same.

    >>> float(auc([0.1, 0.4, 0.4, 0.8], [0, 0, 1, 1]))  # of four pairs three are right, and one is a tie
    0.875
    >>> float(auc([0.1, 0.4, 0.4, 0.8], [0, 0, 1, 1], [1, 0, 1, 1]))  # without the negative of the tie
    1.0
    """
    return _area(*_rows(scores, labels, weights), 0.0, 1.0)


def partial_auc(
    scores: ArrayLike,
    labels: ArrayLike,
    max_fpr: ArrayLike,
    standardized: bool = True,
    weights: ArrayLike | None = None,
) -> Array:
    r"""The area $A$ under the ROC curve where FPR ≤ max_fpr $= \alpha$, in one of two conventions.

    The standardized one is McClish's (1989), as in scikit-learn's `roc_auc_score(max_fpr=...)`:
    $$\frac12 \left(1 + \frac{A - \alpha^2/2}{\alpha - \alpha^2/2}\right).$$
    Chance has 1/2 there. The raw one is the share $A / \alpha$, where chance has $\alpha / 2$. Both give a perfect
    ranking 1 and both are the AUC at $\alpha = 1$. Otherwise they differ: report the convention with the number.

    Args:
        scores: one number per row; higher means more likely positive.
        labels: 1 or True for a positive row, anything else for a negative one.
        max_fpr: α, above 0 and at most 1.
        standardized: True for the standardized convention, False for the raw share.
        weights: how much each row counts, at least 0; None: all rows count the same.

    >>> scores, labels = [0.1, 0.3, 0.4, 0.8], [0, 1, 0, 1]
    >>> float(partial_auc(scores, labels, 0.5, standardized=False))  # TPR is 1/2 up to FPR 1/2
    0.5
    >>> round(float(partial_auc(scores, labels, 0.5)), 4)
    0.6667
    """
    _check("partial_auc", max_fpr)
    raw = _area(*_rows(scores, labels, weights), 0.0, max_fpr)
    chance = jnp.asarray(max_fpr).astype(raw.dtype) / 2
    return (1 + (raw - chance) / (1 - chance)) / 2 if standardized else raw


def two_way_partial_auc(
    scores: ArrayLike, labels: ArrayLike, min_tpr: ArrayLike, max_fpr: ArrayLike, weights: ArrayLike | None = None
) -> Array:
    r"""The area under the ROC curve where TPR ≥ min_tpr and FPR ≤ max_fpr, as a share of that rectangle.

    $$\frac{1}{\alpha (1 - \beta)} \int_0^\alpha \max(\mathrm{TPR}(f) - \beta, 0) \, df,
    \quad \alpha = \text{max\_fpr}, \; \beta = \text{min\_tpr}.$$

    A perfect ranking has 1, a curve that passes below the corner (α, β) has 0; chance has $(\alpha - \beta)_+^2 /
    (2 \alpha (1 - \beta))$. With $\beta = 0$ it is the raw partial AUC.

    Args:
        scores: one number per row; higher means more likely positive.
        labels: 1 or True for a positive row, anything else for a negative one.
        min_tpr: β, at least 0 and below 1.
        max_fpr: α, above 0 and at most 1.
        weights: how much each row counts, at least 0; None: all rows count the same.

    >>> float(two_way_partial_auc([0, 0], [0, 1], min_tpr=0.5, max_fpr=1.0))  # a tie: the diagonal, a quarter of it
    0.25
    """
    _check("two_way_partial_auc", max_fpr, min_tpr)
    return _area(*_rows(scores, labels, weights), min_tpr, max_fpr)


def average_precision(scores: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> Array:
    r"""Average precision, $\sum_k (R_k - R_{k-1}) P_k$ over thresholds $k$, of recall $R$ (TPR) and precision $P$.

    Scikit-learn's measure, which does not interpolate; chance has about the share of positives. Without positives it
    is NaN (scikit-learn: 0); without negatives it is 1.

    Args:
        scores: one number per row; higher means more likely positive.
        labels: 1 or True for a positive row, anything else for a negative one.
        weights: how much each row counts, at least 0; None: all rows count the same.

    >>> round(float(average_precision([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])), 4)  # (1 + 2/3) / 2
    0.8333
    """
    return _average_precision(*_rows(scores, labels, weights))


def auc_by_client(scores: ArrayLike, labels: ArrayLike, client: ArrayLike, clients: int) -> Array:
    """The AUC within the rows of every client 0 … clients − 1, from one sort; shape (clients,).

    A client is NaN where one of its classes is missing or one of its scores is NaN.

    Args:
        scores: one number per row; higher means more likely positive.
        labels: 1 or True for a positive row, anything else for a negative one.
        client: the client of each row; rows of any other number (padding) do not count.
        clients: the number of clients.

    >>> auc_by_client([1, 2, 3, 4, 5], [0, 1, 1, 0, 1], [0, 0, 1, 1, 2], 3).tolist()
    [1.0, 0.0, nan]
    """
    if clients < 1:
        raise ValueError(f"auc_by_client: clients={clients} must be at least 1")
    return _auc_by_client(*_rows(scores, labels, client, "client"), clients=clients)


def local_auc_mean(scores: ArrayLike, labels: ArrayLike, client: ArrayLike, clients: int) -> Array:
    """The plain mean of `auc_by_client` over the clients that have both classes; NaN where none has.

    This is **not** the global AUC: it never compares a positive of one client with a negative of another. In the
    example every client ranks its two rows correctly, but one of the four global pairs is wrong.

    Args:
        scores: one number per row; higher means more likely positive.
        labels: 1 or True for a positive row, anything else for a negative one.
        client: the client of each row; rows of any other number (padding) do not count.
        clients: the number of clients.

    >>> scores, labels, client = [1, 2, 3, 4], [0, 1, 0, 1], [0, 0, 1, 1]
    >>> float(local_auc_mean(scores, labels, client, 2)), float(auc(scores, labels))
    (1.0, 0.75)
    """
    each = auc_by_client(scores, labels, client, clients)
    scores, client = jnp.asarray(scores), jnp.asarray(client)
    broken = jnp.any((scores != scores) & (client >= 0) & (client < clients))
    return jnp.where(broken, jnp.nan, jnp.nanmean(each))


@jax.jit
def _area(scores: Array, positive: Array, weights: Array | None, min_tpr: ArrayLike, max_fpr: ArrayLike) -> Array:
    """The share under the curve of the rectangle TPR ≥ min_tpr, FPR ≤ max_fpr; one segment per tie group."""
    tp, fp, broken = _roc(scores, positive, weights)
    bottom, right = (jnp.asarray(end).astype(float) for end in (min_tpr, max_fpr))
    positives, negatives = tp[-1].astype(float), fp[-1].astype(float)
    dtp, dfp = jnp.diff(tp).astype(float), jnp.diff(fp).astype(float)
    width = jnp.clip(right * negatives - fp[:-1].astype(float), 0, dfp)
    rise = dtp * (width / jnp.where(dfp > 0, dfp, 1))
    low = tp[:-1].astype(float) - bottom * positives
    high = low + rise
    # A segment that crosses the bottom counts from there on; low < 0 < high implies rise > 0.
    above = jnp.where((low < 0) & (high > 0), high / jnp.where(rise > 0, rise, 1), 1)
    area = jnp.sum(width * above * (jnp.maximum(low, 0) + jnp.maximum(high, 0)) / 2)
    return jnp.where(broken, jnp.nan, area / (positives * (1 - bottom)) / (negatives * right))


@jax.jit
def _average_precision(scores: Array, positive: Array, weights: Array | None) -> Array:
    tp, fp, broken = _roc(scores, positive, weights)
    found, raised = tp[1:].astype(float), (tp[1:] + fp[1:]).astype(float)
    terms = jnp.diff(tp).astype(float) * (found / jnp.where(raised > 0, raised, 1))
    return jnp.where(broken, jnp.nan, jnp.sum(terms) / tp[-1].astype(float))


@partial(jax.jit, static_argnames="clients")
def _auc_by_client(scores: Array, positive: Array, client: Array, clients: int) -> Array:
    client, scores, positive = jax.lax.sort((client.astype(jnp.int32), scores, positive), num_keys=2)
    fresh = client[1:] != client[:-1]
    tp, fp = (_ends((scores[1:] != scores[:-1]) | fresh, rows.astype(jnp.int32)) for rows in (positive, ~positive))
    bounds = jnp.searchsorted(client, jnp.arange(clients + 1, dtype=jnp.int32))
    positives, negatives = (jnp.diff(count[bounds]).astype(float) for count in (tp, fp))
    # From the lowest score up, a positive beats the negatives so far, less those of the clients before.
    first = jnp.concatenate([jnp.ones(min(client.size, 1), bool), fresh])
    before = jax.lax.cummax(jnp.where(first, fp[:-1], 0))
    beaten = (fp[:-1] - before + fp[1:] - before).astype(float) / 2
    wins = jnp.where(scores != scores, jnp.nan, jnp.diff(tp).astype(float) * beaten)
    if client.size <= FEW:
        total = jax.ops.segment_sum(wins, client, clients)
    else:
        sums = jnp.concatenate([jnp.zeros(1, float), jax.lax.associative_scan(_restarting, (first, wins))[1]])
        total = jnp.where(jnp.diff(bounds) > 0, sums[bounds[1:]], 0)
    return total / positives / negatives


def _restarting(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
    """The sum of two segments of rows; where the right one has a first row, earlier rows are dropped."""
    return left[0] | right[0], jnp.where(right[0], right[1], left[1] + right[1])


def _roc(scores: Array, positive: Array, weights: Array | None) -> tuple[Array, Array, Array]:
    """Positives and negatives at or above each score, 0 first, and whether a row that counts has the score NaN."""
    counts = jnp.ones(scores.shape, bool) if weights is None else weights
    counts = counts.astype(jnp.int32 if counts.dtype == bool else float)
    if counts.dtype != jnp.int32:  # only ratios matter, and products of weights as they come could overflow
        counts = counts / jnp.where(jnp.any(counts > 0), jnp.max(counts, initial=0), 1)
    broken = jnp.any((scores != scores) & (counts != 0))
    # Sorted upwards and turned round: not every dtype of scores has a negative.
    scores, positive, counts = map(jnp.flip, jax.lax.sort((scores, positive, counts), num_keys=1))
    tp, fp = (_ends(scores[1:] != scores[:-1], jnp.where(rows, counts, 0)) for rows in (positive, ~positive))
    return tp, fp, broken


def _ends(steps: Array, counts: Array) -> Array:
    """0 and the running sums; a row before the end of its tie group repeats the sum of the group before."""
    # Floats in pairs on every device, which cumsum does not promise; that takes longer to compile.
    in_pairs = lambda numbers: jax.lax.associative_scan(jnp.add, numbers)
    sums = (jnp.cumsum if counts.dtype == jnp.int32 else in_pairs)(counts)
    last = jnp.concatenate([steps, jnp.ones(min(counts.size, 1), bool)])
    return jnp.concatenate([jnp.zeros(1, sums.dtype), jax.lax.cummax(jnp.where(last, sums, 0))])


def _rows(scores: ArrayLike, labels: ArrayLike, third: ArrayLike | None, name: str = "weights") -> tuple[Any, ...]:
    columns = {"scores": scores, "labels": labels} | ({} if third is None else {name: third})
    shapes = {name: np.shape(column) for name, column in columns.items()}
    if len({*shapes.values()}) != 1 or len(shapes["scores"]) != 1:
        raise ValueError(f"metrics: one entry per row is needed in each column, got shapes {shapes}")
    labels = jnp.asarray(labels)
    return jnp.asarray(scores), labels == jnp.ones_like(labels), None if third is None else jnp.asarray(third)


def _check(who: str, max_fpr: ArrayLike, min_tpr: ArrayLike = 0) -> None:
    if isinstance(max_fpr, int | float | np.number) and not 0 < float(max_fpr) <= 1:  # not checked in compiled code
        raise ValueError(f"{who}: max_fpr={max_fpr} must be above 0 and at most 1")
    if isinstance(min_tpr, int | float | np.number) and not 0 <= float(min_tpr) < 1:
        raise ValueError(f"{who}: min_tpr={min_tpr} must be at least 0 and below 1")
