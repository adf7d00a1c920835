"""The server's half of a deployed exchange, compiled: from what the sites of a cohort sent to its next state."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.algorithm import Cohort
from fedstrata.runtime import start as starting
from fedstrata.runtime.crew import Crew
from fedstrata.runtime.round import server_part
from fedstrata.runtime.site import Terms
from fedstrata.transport.ledger import Exchange


def stack(said: Mapping[int, dict[str, Any]], ids: list[int]) -> dict[str, Any]:
    """What was sent, by slot of the cohort; zeros in the slots of those who sent nothing."""
    some = next(iter(said.values()))
    nothing = jax.tree.map(jnp.zeros_like, some)
    rows = [said.get(i, nothing) for i in ids]
    return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(a) for a in leaves]), *rows)


def present(cohort: Cohort, said: Mapping[int, Any]) -> Cohort:
    """The cohort, less those who did not answer; the others' weights sum to one."""
    here = np.array([int(i) in said for i in np.asarray(cohort.ids)]) & np.asarray(cohort.present)
    if here.all():
        return cohort
    weights = jnp.where(here, cohort.weights, 0)
    answered = jnp.sum(weights)
    return cohort._replace(present=jnp.asarray(here), weights=weights / answered, share=cohort.share * answered)


def _crew(cohort: Cohort) -> Crew:
    return Crew(cohort.ids, cohort.present, cohort.weights, False, False)


@eqx.filter_jit
def settle(
    terms: Terms, plan: Exchange, number: int, shared: Any, sent: dict[str, Any], cohort: Cohort, noise: Any, known: Any
) -> Any:
    return server_part(terms.setting(), plan, number, shared, sent, cohort, _crew(cohort), noise, known)


@eqx.filter_jit
def merge_starts(terms: Terms, shared: Any, sent: dict[str, Any], cohort: Cohort, noise: Any, known: Any) -> Any:
    return starting.merge_starts(terms.setting(), shared, sent, cohort, _crew(cohort), noise, known)


@eqx.filter_jit
def pool_again(terms: Terms, empty: Any, merged: Any, sent: dict[str, Any], cohort: Cohort) -> Any:
    return starting.pool_again(terms.setting(), empty, merged, sent, cohort, _crew(cohort))
