"""A split: the rows of all clients in one flat data set. And default client names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import equinox as eqx
import jax
import numpy as np


@dataclass(frozen=True)
class DefaultNames(Sequence[str]):
    """The names "client 0", "client 1", …, made on access: a million clients need no million strings.

    Args:
        length: the number of clients.

    >>> names = DefaultNames(1_000_000)
    >>> names[7], names[-1], len(names)
    ('client 7', 'client 999999', 1000000)
    """

    length: int

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        picked = range(self.length)[index]
        return f"client {picked}" if isinstance(picked, int) else tuple(f"client {i}" for i in picked)


class Split(eqx.Module):
    """The rows of all clients, one client after the other.

    Args:
        examples: a tree of arrays, by convention {"x": (n, …), "y": (n,)}; every leaf has n rows.
        offsets: client i has the rows offsets[i] to offsets[i + 1]; int64 of shape (N + 1,), traced inside `jax.jit`.
        pooled: whether the rows belong to no client; offsets are then (0, n).
    """

    examples: Any
    offsets: Any
    pooled: bool = eqx.field(static=True, default=False)

    @property
    def size(self) -> int:
        """Number of rows."""
        return jax.tree.leaves(self.examples)[0].shape[0]

    @property
    def clients(self) -> int:
        """Number of clients; 1 for a pooled split."""
        return self.offsets.shape[0] - 1

    @property
    def counts(self) -> Any:
        """Rows of each client."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def owners(self) -> np.ndarray:
        """The client of each row."""
        return np.repeat(np.arange(self.clients), self.counts)

    def shard(self, client: int) -> Any:
        """The rows of one client, as views.

        Args:
            client: its number, from 0.
        """
        if not 0 <= client < self.clients:
            raise IndexError(
                f"Split.shard: there is no client {client}; this split has clients 0 to {self.clients - 1}."
            )
        start, stop = int(self.offsets[client]), int(self.offsets[client + 1])
        return jax.tree.map(lambda leaf: leaf[start:stop], self.examples)
