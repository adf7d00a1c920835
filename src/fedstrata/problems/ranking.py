"""Ranking metrics by name, as a pairwise problem records them."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from fedstrata import metrics
from fedstrata.errors import unknown

NAMES = ("auc", "ap", "pauc_RATE", "pauc_raw_RATE", "tpauc_TPR_FPR")


def parse(name: str) -> Any:
    """The function of scores and labels that a name stands for.

    >>> parse("pauc_0.3")(jnp.array([3.0, 1.0, 2.0]), jnp.array([True, False, False])).tolist()
    1.0
    """
    kind, _, rest = name.partition("_")
    try:
        if name == "auc":
            return metrics.auc
        if name == "ap":
            return metrics.average_precision
        if kind == "tpauc":
            low, high = (float(part) for part in rest.split("_"))
            if not (0 <= low < 1 and 0 < high <= 1):
                raise ValueError("a true positive rate from 0 and a false positive rate up to 1")
            return lambda scores, labels: metrics.two_way_partial_auc(scores, labels, low, high)
        if kind == "pauc":
            raw, rate = rest.startswith("raw_"), float(rest.removeprefix("raw_"))
            if not 0 < rate <= 1:
                raise ValueError("a rate must be above 0 and at most 1")
            return lambda scores, labels: metrics.partial_auc(scores, labels, rate, standardized=not raw)
    except ValueError as error:
        raise ValueError(f"metric {name!r}: {error}; names are {', '.join(NAMES)}, e.g. pauc_0.3") from error
    raise unknown("metric of Pairwise", name, NAMES)


def measures(names: Sequence[str], scores: Array, labels: Array, client: Array, clients: int) -> dict[str, Array]:
    """The metrics, and the mean of the clients' own areas, where there are several clients."""
    out = {name: parse(name)(scores, labels) for name in names}
    if clients > 1 and "auc" in names:
        out["mean_local_auc"] = jnp.nanmean(by_client(scores, labels, client, clients))
    return out


def by_client(scores: Array, labels: Array, client: Array, clients: int) -> Array:
    return metrics.auc_by_client(scores, labels, client, clients)
