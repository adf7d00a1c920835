"""Slots: where the clients of a round are computed, in the cohort's order or device by device on a mesh."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fedstrata.core.algorithm import Cohort
from fedstrata.engine.context import RoundContext
from fedstrata.engine.mesh import Spread
from fedstrata.engine.participation import Everyone


class Slots(NamedTuple):
    """The slots of a round, one per client."""

    ids: Array
    present: Array
    weights: Array
    everyone: bool  # the slots are all clients, in order
    full: bool  # no slot is empty
    at: Array | None = None  # positions of the cohort's slots among these; None: the same
    spread: Spread | None = None
    seats: Array | None = None  # position of the data of each slot's client, if the data are only those of these slots

    @property
    def places(self) -> Array:
        """Positions of the slots' clients in the data: of all clients, or on a mesh of the device's."""
        if self.seats is not None:
            return self.seats
        return self.ids if self.spread is None else self.ids % self.spread.each

    def in_order(self, stacked: PyTree) -> PyTree:
        """Rows of these slots, in the cohort's order."""
        return stacked if self.at is None else jax.tree.map(lambda a: a[self.at], stacked)

    def keep_present(self, new: PyTree, old: PyTree) -> PyTree:
        """New rows for taken slots, old rows for empty ones."""
        if self.full:
            return new
        here = lambda a: self.present.reshape((-1,) + (1,) * (a.ndim - 1))
        return jax.tree.map(lambda a, b: jnp.where(here(a), a, b), new, old)


def slots_of(context: RoundContext, cohort: Cohort) -> Slots:
    """The slots of a round's cohort."""
    full = context.participation.full
    if context.in_cohort_order:
        seats = jnp.arange(cohort.ids.shape[0], dtype=jnp.int32)
        return Slots(cohort.ids, cohort.present, cohort.weights, False, full, seats=seats)
    if isinstance(context.participation, Everyone):
        return all_slots(cohort, context.spread)
    return _some_slots(cohort, full, context.spread)


def all_slots(cohort: Cohort, spread: Spread | None) -> Slots:
    """The slots of a cohort of all clients, in order; on a mesh also the places without one."""
    if spread is None:
        return Slots(cohort.ids, cohort.present, cohort.weights, True, True)
    ids = jnp.arange(spread.slots, dtype=jnp.int32)
    fill = lambda a: jnp.pad(a, (0, spread.slots - spread.clients))
    at = None if spread.even else jnp.arange(spread.clients, dtype=jnp.int32)
    return Slots(ids, fill(cohort.present), fill(cohort.weights), True, spread.even, at, spread)


def _some_slots(cohort: Cohort, full: bool, spread: Spread | None) -> Slots:
    """The cohort's slots; on a mesh, as many on each device as it could need."""
    if spread is None:
        return Slots(cohort.ids, cohort.present, cohort.weights, False, full)
    size = min(cohort.ids.shape[0], spread.each)  # the most clients of one device
    home = cohort.ids // spread.each
    there = (home[:, None] == jnp.arange(spread.devices, dtype=jnp.int32)[None, :]) & cohort.present[:, None]
    rank = jnp.sum(jnp.where(there, jnp.cumsum(there, axis=0), 0), axis=1, dtype=jnp.int32) - 1
    at = jnp.where(cohort.present, home * size + rank, spread.devices * size)
    put = lambda start, values: start.at[at].set(values, mode="drop")
    first = jnp.repeat(jnp.arange(spread.devices, dtype=jnp.int32) * spread.each, size)  # stand-in for empty slots
    ids, present = put(first, cohort.ids), put(jnp.zeros(first.shape, bool), cohort.present)
    weights = put(jnp.zeros(first.shape, cohort.weights.dtype), cohort.weights)
    return Slots(ids, present, weights, False, False, jnp.minimum(at, first.shape[0] - 1), spread)


def every_client(clients: int, spread: Spread | None) -> Slots:
    """Slots of all clients, independent of any cohort; on a mesh also the places without one."""
    size = clients if spread is None else spread.slots
    ids = jnp.arange(size, dtype=jnp.int32)
    here = ids < clients
    return Slots(ids, here, here.astype(float), True, size == clients, None, spread)


def seated(ids: Array, weights: Array | None = None) -> Slots:
    """Slots of these clients (−1: empty), whose data are in this order."""
    here, seats = ids >= 0, jnp.arange(ids.shape[0], dtype=jnp.int32)
    weights = here.astype(float) if weights is None else jnp.where(here, weights[ids], 0)
    return Slots(jnp.maximum(ids, 0), here, weights, False, True, seats=seats)
