"""The clients of a round as they are worked on: in the cohort's order, or device by device where there are several."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fedstrata.algorithm import Cohort
from fedstrata.chunks import map_in_chunks
from fedstrata.memory import PerExample, is_per_example
from fedstrata.runtime.layout import Flat, read_rows, write_rows
from fedstrata.runtime.mesh import Spread, on_devices

Execution = str | int  # "vmap", "map", or the number of clients in a chunk


class Crew(NamedTuple):
    """One slot per client that is worked on."""

    ids: Array
    present: Array
    weights: Array
    everyone: bool  # the slots are all clients, in order
    full: bool  # no slot is empty
    at: Array | None = None  # where the cohort's slots are among these; None: in the same places
    spread: Spread | None = None
    seats: Array | None = None  # where the data of each slot's client are, if only those of this crew are here

    @property
    def places(self) -> Array:
        """Where the slots' clients are among those whose data are at hand: all, or on a mesh the device's own."""
        if self.seats is not None:
            return self.seats
        return self.ids if self.spread is None else self.ids % self.spread.each

    def in_order(self, stacked: PyTree) -> PyTree:
        """Rows of these slots, as the cohort names them."""
        return stacked if self.at is None else jax.tree.map(lambda a: a[self.at], stacked)

    def settled(self, new: PyTree, old: PyTree) -> PyTree:
        """New rows of the slots that are taken; what an empty one computed is nobody's."""
        if self.full:
            return new
        here = lambda a: self.present.reshape((-1,) + (1,) * (a.ndim - 1))
        return jax.tree.map(lambda a, b: jnp.where(here(a), a, b), new, old)


def crew_of(cohort: Cohort, everyone: bool, full: bool, spread: Spread | None) -> Crew:
    """The cohort's slots; on a mesh, as many on each device as it could need."""
    if spread is None:
        return Crew(cohort.ids, cohort.present, cohort.weights, everyone, full)
    if everyone:
        ids = jnp.arange(spread.slots, dtype=jnp.int32)
        fill = lambda a: jnp.pad(a, (0, spread.slots - spread.clients))
        at = None if spread.even else jnp.arange(spread.clients, dtype=jnp.int32)
        return Crew(ids, fill(cohort.present), fill(cohort.weights), True, spread.even, at, spread)
    size = min(cohort.ids.shape[0], spread.each)  # the most that one device may have to work on
    home = cohort.ids // spread.each
    there = (home[:, None] == jnp.arange(spread.devices, dtype=jnp.int32)[None, :]) & cohort.present[:, None]
    rank = jnp.sum(jnp.where(there, jnp.cumsum(there, axis=0), 0), axis=1, dtype=jnp.int32) - 1
    at = jnp.where(cohort.present, home * size + rank, spread.devices * size)
    put = lambda start, values: start.at[at].set(values, mode="drop")
    first = jnp.repeat(jnp.arange(spread.devices, dtype=jnp.int32) * spread.each, size)  # an empty slot's stand-in
    ids, present = put(first, cohort.ids), put(jnp.zeros(first.shape, bool), cohort.present)
    weights = put(jnp.zeros(first.shape, cohort.weights.dtype), cohort.weights)
    return Crew(ids, present, weights, False, False, jnp.minimum(at, first.shape[0] - 1), spread)


def over_clients(
    work: Callable[[Flat, Any, Any], Any], flat: Flat, given: Any, stacked: PyTree, crew: Crew, execution: Execution
) -> Any:
    """work(flat, given, row of stacked) for every slot, stacked: at once, one after the other, or in chunks.

    flat: the data, on a mesh those of the device; given: what all have in common.
    """
    if crew.spread is None:
        return _at_once(lambda row: work(flat, given, row), stacked, execution)

    def here(given: Any, parts: tuple) -> Any:
        flat, stacked, present = parts
        one = lambda row: work(flat, given, row)
        if crew.everyone:
            return _at_once(one, stacked, execution)
        return _present(one, stacked, present, execution, crew)

    return on_devices(crew.spread, here, given, (_bare(flat), stacked, crew.present))


def _at_once(function: Callable, stacked: PyTree, execution: Execution) -> Any:
    if execution == "vmap":
        return jax.vmap(function)(stacked)
    return map_in_chunks(function, stacked, execution if isinstance(execution, int) else None)


def _present(function: Callable, stacked: PyTree, present: Array, execution: Execution, crew: Crew) -> Any:
    """In chunks, as many as the slots that are taken need (they come first): devices share no cohort evenly."""
    slots = present.shape[0]
    quarter = -(-crew.at.shape[0] * slots // (4 * crew.ids.shape[0]))  # pyright: ignore[reportOptionalMemberAccess]
    length = min(slots, execution if isinstance(execution, int) else 1 if execution == "map" else quarter)
    chunk = lambda at: jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, at, length), stacked)
    many = jax.jit(jax.vmap(function))  # traced once, although it is asked for its shapes first
    out = jax.tree.map(
        lambda s: jnp.zeros((slots, *s.shape[1:]), s.dtype), jax.eval_shape(lambda: many(chunk(jnp.array(0))))
    )

    def more(state: tuple) -> tuple:
        at, out = state
        at = jnp.minimum(at, slots - length)
        put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, at, 0)
        return at + length, jax.tree.map(put, out, many(chunk(at)))

    taken = jnp.sum(present, dtype=jnp.int32)
    return jax.lax.while_loop(lambda state: state[0] < taken, more, (jnp.array(0, jnp.int32), out))[1]


def _bare(flat: Flat) -> Any:
    """The data without what is about all devices."""
    return {name: split.bare() for name, split in flat.items()}


def read_local(local: PyTree, flat: Flat, crew: Crew) -> PyTree:
    """The clients' own fields of these slots."""
    if crew.spread is None:
        return read_rows(local, crew.places, flat, crew.everyone)
    read = lambda _, parts: read_rows(parts[0], parts[1], parts[2], crew.everyone)
    return on_devices(crew.spread, read, None, (local, crew.places, _bare(flat)))


def write_local(local: PyTree, rows: PyTree, flat: Flat, crew: Crew) -> PyTree:
    """The clients' own fields with those of these slots replaced."""
    if crew.spread is None:
        return write_rows(local, rows, crew.places, crew.present, flat, crew.everyone)

    def write(_: None, parts: tuple) -> PyTree:
        local, rows, places, present, flat = parts
        return write_rows(local, rows, places, present, flat, crew.everyone)

    return on_devices(crew.spread, write, None, (local, rows, crew.places, crew.present, _bare(flat)))


def unspread(local: PyTree, flat: Flat, spread: Spread | None) -> PyTree:
    """The local fields of all clients as one device would keep them: no empty places, rows of examples in order."""
    if spread is None:
        return local

    def plain(node: Any) -> Any:
        if isinstance(node, PerExample):
            return PerExample(jax.tree.map(lambda a: a[flat[node.split].order], node.rows), node.split)
        return node[: spread.clients]

    return jax.tree.map(plain, local, is_leaf=is_per_example)


def spread_again(local: PyTree, flat: Flat, spread: Spread) -> PyTree:
    """The other way round; the places without a client hold zeros."""

    def wide(node: Any) -> Any:
        if isinstance(node, PerExample):
            split = flat[node.split]
            size = jax.tree.leaves(split.examples)[0].shape[0]
            put = lambda a: jnp.zeros((size, *a.shape[1:]), a.dtype).at[split.order].set(a)
            return PerExample(jax.tree.map(put, node.rows), node.split)
        return jnp.pad(node, ((0, spread.slots - spread.clients), *[(0, 0)] * (node.ndim - 1)))

    return spread.cut(jax.tree.map(wide, local, is_leaf=is_per_example))
