"""Data and `Local` fields on the host, for federations that are larger than the device.

Arrays are NumPy's, in memory or mapped from files. A cohort's rows are copied, one client after another, into arrays of
a fixed size. Only these go to the device.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from fedstrata.core.memory import PerExample, is_per_example
from fedstrata.data.split import Split
from fedstrata.engine.layout import FlatSplit


class HostSplit:
    """A split on the host, from which the rows of a few clients are copied."""

    def __init__(self, split: Split, slots: int):
        self.examples = jax.tree.map(np.asarray, split.examples)
        self.offsets, self.counts = np.asarray(split.offsets), np.asarray(split.counts)
        self.capacity = int(self.counts.max())
        self.rows = self.room(slots)

    @property
    def size(self) -> int:
        return int(self.offsets[-1])

    def room(self, slots: int) -> int:
        """The largest number of rows that this many clients have together."""
        return int(np.sort(self.counts)[-slots:].sum())

    def of(self, ids: np.ndarray, room: int | None = None) -> FlatSplit:
        """The rows of these clients, one after the other, for the device; −1 for an empty slot.

        room: the number of rows of the arrays, if not that of a cohort.
        """
        present = ids >= 0
        counts = np.where(present, self.counts[ids], 0)
        ends = np.cumsum(counts)
        size = self.rows if room is None else room

        def gather(leaf: np.ndarray) -> np.ndarray:
            out = np.zeros((size, *leaf.shape[1:]), jax.dtypes.canonicalize_dtype(leaf.dtype))
            for id, end, count in zip(ids, ends, counts, strict=True):
                out[end - count : end] = leaf[self.offsets[id] : self.offsets[id] + count] if count else 0
            return out

        start = np.minimum(ends - counts, size - 1).astype(np.int32)
        filled = np.maximum(counts, ~present).astype(np.int32)  # an empty slot has some row
        return FlatSplit(jax.tree.map(gather, self.examples), start, filled, self.capacity)

    def window(self, ids: np.ndarray) -> np.ndarray:
        """Row numbers of these clients, each padded to the longest client with the rows that follow."""
        first = self.offsets[np.maximum(ids, 0)][:, None]
        return first + np.arange(self.capacity)


class Host:
    """The splits that training draws from, on the host.

    Compared by identity, so it can be a static argument of a jitted function.
    """

    def __init__(self, splits: Mapping[str, HostSplit]):
        self.splits = splits


class HostLocal:
    """The Local fields of all clients on the host: (runs, clients, …) on every leaf, (runs, rows, …) by example."""

    def __init__(self, fields: PyTree, splits: Mapping[str, HostSplit]):
        self.fields, self.splits = fields, splits

    @classmethod
    def filled(cls, template: PyTree, runs: int, clients: int, splits: Mapping[str, HostSplit]) -> "HostLocal":
        """Every client, or example, starts from the template."""

        def many(value: Any, count: int) -> np.ndarray:
            value = np.asarray(value)
            wide = np.zeros((runs, count, *value.shape[1:]), value.dtype)  # zeros use no memory until written
            if value.any():
                wide[:] = value[:, None]
            return wide

        def fill(node: Any) -> Any:
            if isinstance(node, PerExample):
                size = splits[node.split].size
                return PerExample(jax.tree.map(lambda a: many(a, size), node.rows), node.split)
            return many(node, clients)

        return cls(jax.tree.map(fill, template, is_leaf=is_per_example), splits)

    @staticmethod
    def shapes(template: PyTree, clients: int, splits: Mapping[str, HostSplit]) -> PyTree:
        """Shapes of the result of `filled`."""

        def shape(node: Any) -> Any:
            size = splits[node.split].size if isinstance(node, PerExample) else clients
            many = lambda a: jax.ShapeDtypeStruct((a.shape[0], size, *a.shape[1:]), a.dtype)
            return jax.tree.map(many, node)

        return jax.tree.map(shape, template, is_leaf=is_per_example)

    def read(self, ids: np.ndarray) -> PyTree:
        """The rows of a cohort; ids: (runs, slots)."""
        runs = np.arange(ids.shape[0])[:, None]

        def of(node: Any) -> Any:
            if not isinstance(node, PerExample):
                return node[runs, np.maximum(ids, 0)]
            split = self.splits[node.split]
            at = np.minimum(split.window(ids.reshape(-1)), split.size - 1).reshape((*ids.shape, -1))
            return PerExample(jax.tree.map(lambda a: a[runs[..., None], at], node.rows), node.split)

        return jax.tree.map(of, self.fields, is_leaf=is_per_example)

    def write(self, ids: np.ndarray, rows: PyTree) -> None:
        """Write a cohort's rows back, in place."""
        run, slot = np.nonzero(ids >= 0)
        who = ids[run, slot]

        def put(old: Any, new: Any) -> Any:
            if not isinstance(old, PerExample):
                old[run, who] = np.asarray(new)[run, slot]
                return old
            split = self.splits[old.split]
            at, own = split.window(who), np.arange(split.capacity) < split.counts[who][:, None]
            number, place = np.nonzero(own)

            def set(a: np.ndarray, b: Any) -> np.ndarray:
                a[run[number], at[number, place]] = np.asarray(b)[run[number], slot[number], place]
                return a

            return PerExample(jax.tree.map(set, old.rows, new.rows), old.split)

        jax.tree.map(put, self.fields, rows, is_leaf=is_per_example)
