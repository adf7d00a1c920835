"""The recorded columns of a pairwise problem: ranking metrics by name."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jaxtyping import Array

from fedstrata.base.errors import unknown
from fedstrata.metrics import ranking

NAMES = ("auc", "ap", "pauc_RATE", "pauc_raw_RATE", "tpauc_TPR_FPR")


def parse(name: str) -> Callable[[Array, Array], Array]:
    """The metric with this name, as a function of scores and labels.

    Args:
        name: one of `NAMES`, with numbers for rates.

    >>> parse("pauc_0.3")(jnp.array([3.0, 1.0, 2.0]), jnp.array([True, False, False])).tolist()
    1.0
    """
    kind, _, rest = name.partition("_")
    try:
        if name == "auc":
            return ranking.auc
        if name == "ap":
            return ranking.average_precision
        if kind == "tpauc":
            low, high = (float(part) for part in rest.split("_"))
            if not (0 <= low < 1 and 0 < high <= 1):
                raise ValueError("a true positive rate from 0 and a false positive rate up to 1")
            return lambda scores, labels: ranking.two_way_partial_auc(scores, labels, low, high)
        if kind == "pauc":
            raw, rate = rest.startswith("raw_"), float(rest.removeprefix("raw_"))
            if not 0 < rate <= 1:
                raise ValueError("a rate must be above 0 and at most 1")
            return lambda scores, labels: ranking.partial_auc(scores, labels, rate, standardized=not raw)
    except ValueError as error:
        raise ValueError(f"metric {name!r}: {error}; names are {', '.join(NAMES)}, e.g. pauc_0.3") from error
    raise unknown("metric of Pairwise", name, NAMES)


def measures(names: Sequence[str], scores: Array, labels: Array, client: Array, clients: int) -> dict[str, Array]:
    """The metrics of all rows together, and with several clients the mean of the per-client areas.

    Args:
        names: of the metrics.
        scores: (n,) of all rows.
        labels: (n,) True for positives.
        client: (n,) the owner of each row.
        clients: how many there are.
    """
    out = {name: parse(name)(scores, labels) for name in names}
    if clients > 1 and "auc" in names:
        out["mean_local_auc"] = jnp.nanmean(ranking.auc_by_client(scores, labels, client, clients))
    return out
