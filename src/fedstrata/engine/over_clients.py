"""Apply one function to every slot of a round: all at once, one by one or in chunks, on one device or a mesh."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fedstrata.base.chunks import map_in_chunks
from fedstrata.core.memory import PerExample, is_per_example
from fedstrata.engine.context import Execution
from fedstrata.engine.layout import Flat, read_rows, write_rows
from fedstrata.engine.mesh import Spread, on_devices
from fedstrata.engine.slots import Slots


def over_clients(
    work: Callable[[Flat, Any, Any], Any],
    flat: Flat,
    given: PyTree,
    stacked: PyTree,
    slots: Slots,
    execution: Execution,
) -> Any:
    """work(flat, given, row of stacked) for every slot, stacked: at once, one by one, or in chunks.

    flat: the data, on a mesh those of the device; given: values common to all slots.
    """
    if slots.spread is None:
        return _at_once(lambda row: work(flat, given, row), stacked, execution)

    def here(given: PyTree, parts: tuple) -> Any:
        flat, stacked, present = parts
        one = lambda row: work(flat, given, row)
        if slots.everyone:
            return _at_once(one, stacked, execution)
        return _present(one, stacked, present, execution, slots)

    return on_devices(slots.spread, here, given, (_bare(flat), stacked, slots.present))


def _at_once(function: Callable, stacked: PyTree, execution: Execution) -> Any:
    if execution == "vmap":
        return jax.vmap(function)(stacked)
    return map_in_chunks(function, stacked, execution if isinstance(execution, int) else None)


def _present(function: Callable, stacked: PyTree, present: Array, execution: Execution, slots: Slots) -> Any:
    """Only as many chunks as there are taken slots, which come first: a cohort is uneven over devices."""
    count = present.shape[0]
    cohort = count if slots.at is None else slots.at.shape[0]
    quarter = -(-cohort * count // (4 * slots.ids.shape[0]))
    length = min(count, execution if isinstance(execution, int) else 1 if execution == "map" else quarter)
    chunk = lambda at: jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, at, length), stacked)
    many = jax.jit(jax.vmap(function))  # jitted, so that shapes and loop share one trace
    out = jax.tree.map(
        lambda s: jnp.zeros((count, *s.shape[1:]), s.dtype), jax.eval_shape(lambda: many(chunk(jnp.array(0))))
    )

    def more(state: tuple) -> tuple:
        at, out = state
        at = jnp.minimum(at, count - length)
        put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, at, 0)
        return at + length, jax.tree.map(put, out, many(chunk(at)))

    taken = jnp.sum(present, dtype=jnp.int32)
    return jax.lax.while_loop(lambda state: state[0] < taken, more, (jnp.array(0, jnp.int32), out))[1]


def _bare(flat: Flat) -> Any:
    """The data as one device has them."""
    return {name: split.bare() for name, split in flat.items()}


def read_local(local: PyTree, flat: Flat, slots: Slots) -> PyTree:
    """The `Local` fields of these slots' clients."""
    if slots.spread is None:
        return read_rows(local, slots.places, flat, slots.everyone)
    read = lambda _, parts: read_rows(parts[0], parts[1], parts[2], slots.everyone)
    return on_devices(slots.spread, read, None, (local, slots.places, _bare(flat)))


def write_local(local: PyTree, rows: PyTree, flat: Flat, slots: Slots) -> PyTree:
    """The `Local` fields of all clients, with those of these slots replaced."""
    if slots.spread is None:
        return write_rows(local, rows, slots.places, slots.present, flat, slots.everyone)

    def write(_: None, parts: tuple) -> PyTree:
        local, rows, places, present, flat = parts
        return write_rows(local, rows, places, present, flat, slots.everyone)

    return on_devices(slots.spread, write, None, (local, rows, slots.places, slots.present, _bare(flat)))


def unspread(local: PyTree, flat: Flat, spread: Spread | None) -> PyTree:
    """The `Local` fields of all clients as on one device: no empty places, rows of examples in order."""
    if spread is None:
        return local

    def plain(node: PyTree) -> Any:
        if isinstance(node, PerExample):
            return PerExample(jax.tree.map(lambda a: a[flat[node.split].order], node.rows), node.split)
        return node[: spread.clients]

    return jax.tree.map(plain, local, is_leaf=is_per_example)


def spread_again(local: PyTree, flat: Flat, spread: Spread) -> PyTree:
    """The inverse of `unspread`. Places without a client are zero."""

    def wide(node: PyTree) -> Any:
        if isinstance(node, PerExample):
            split = flat[node.split]
            size = jax.tree.leaves(split.examples)[0].shape[0]
            put = lambda a: jnp.zeros((size, *a.shape[1:]), a.dtype).at[split.order].set(a)
            return PerExample(jax.tree.map(put, node.rows), node.split)
        return jnp.pad(node, ((0, spread.slots - spread.clients), *[(0, 0)] * (node.ndim - 1)))

    return spread.cut(jax.tree.map(wide, local, is_leaf=is_per_example))
