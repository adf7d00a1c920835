"""The server's half of a deployed exchange, compiled: from what the sites of a cohort sent to its next state."""

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.algorithm import Cohort
from fedstrata.core.grid import Noise
from fedstrata.deploy.agreement import Agreement
from fedstrata.engine import initialise
from fedstrata.engine.exchange import Exchange
from fedstrata.engine.server import run_server
from fedstrata.engine.slots import Slots

Fields = Mapping[str, Any]  # by path


def stack(sent: Mapping[int, Fields], ids: Sequence[int]) -> dict[str, Any]:
    """The fields of all sites, stacked by slot of the cohort; zeros for a site that sent nothing.

    Args:
        sent: by site number.
        ids: the site number of every slot.
    """
    nothing = jax.tree.map(jnp.zeros_like, next(iter(sent.values())))
    rows = [sent.get(i, nothing) for i in ids]
    return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(a) for a in leaves]), *rows)


def present(cohort: Cohort, sent: Mapping[int, Any]) -> Cohort:
    """The cohort without the sites that sent nothing; the weights of the others sum to one."""
    here = np.array([int(i) in sent for i in np.asarray(cohort.ids)]) & np.asarray(cohort.present)
    if here.all():
        return cohort
    weights = jnp.where(here, cohort.weights, 0)
    total = jnp.sum(weights)
    share = cohort.share * total.astype(cohort.share.dtype)  # which may be wider than the weights
    return cohort._replace(present=jnp.asarray(here), weights=weights / total, share=share)


def _slots(cohort: Cohort) -> Slots:
    return Slots(cohort.ids, cohort.present, cohort.weights, everyone=False, full=False)


@eqx.filter_jit
def merge_and_step(
    agreement: Agreement,
    exchange: Exchange,
    shared: Any,
    sent: dict[str, Any],
    cohort: Cohort,
    *,
    reference: Any,
    noise: Noise | None,
    merged_already: dict[str, Any],
) -> Any:
    """The server's state after an exchange.

    Args:
        agreement: of the run.
        exchange: which one.
        shared: the server's state before.
        sent: the sites' fields, stacked by slot.
        cohort: the sites that take part.
        reference: in a private run, the values around which sites clipped their changes.
        noise: in a private run, if the server adds it.
        merged_already: fields that came merged, from a secure sum.
    """
    given = {"reference": reference, "noise": noise, "merged_already": merged_already}
    return run_server(agreement.started(), exchange, shared, sent, cohort, _slots(cohort), **given)


@eqx.filter_jit
def merge_starts(
    agreement: Agreement,
    shared: Any,
    sent: dict[str, Any],
    cohort: Cohort,
    noise: Noise | None,
    merged_already: dict[str, Any],
) -> Any:
    """The server's state after all sites have sent their starts; arguments as in `merge_and_step`."""
    slots = _slots(cohort)
    return initialise.merge_starts(
        agreement.started(), shared, sent, cohort, slots, noise=noise, merged_already=merged_already
    )


@eqx.filter_jit
def pool_again(agreement: Agreement, empty: Any, merged: Any, sent: dict[str, Any], cohort: Cohort) -> Any:
    """The server's state after the sites have pooled their rows once more."""
    return initialise.pool_again(agreement.started(), empty, merged, sent, cohort, _slots(cohort))
