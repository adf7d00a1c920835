"""The ledger: bytes per round, field and direction, from the state's type and shapes alone."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from fedstrata.core.algorithm import Algorithm
from fedstrata.core.memory import Pool
from fedstrata.core.placement import PlacedState, field_of, part, placements
from fedstrata.engine.exchange import Exchange

if TYPE_CHECKING:
    from fedstrata.engine.context import RoundContext


class Entry(NamedTuple):
    """Bytes of one field in one direction, for one client, in an exchange with `repeat` repetitions per round.

    phase −1, repeat 0: sent once, before the first round (see `merge_at_init`), and in no round's total.
    """

    phase: int
    field: str
    placement: str
    direction: str  # "up" or "down"
    bytes: int
    repeat: int = 1
    rejoining: int | None = None  # bytes for a client that missed rounds, if more
    more_at_first: int = 0  # additional bytes while the pool of all clients lasts, before a cohort's pool replaces it


class Ledger(NamedTuple):
    """The bytes of a round per field, direction and exchange."""

    entries: tuple[Entry, ...]

    def total(self, direction: str, rejoining: bool = False) -> int:
        """Bytes per client and round in one direction."""
        size = lambda e: e.rejoining if rejoining and e.rejoining is not None else e.bytes
        return sum(size(e) * e.repeat for e in self.entries if e.direction == direction)

    @property
    def more_at_first(self) -> int:
        """Bytes that a client receives beyond `total` in each round in which the pool of all clients lasts."""
        return sum(e.more_at_first * e.repeat for e in self.entries)

    @property
    def up(self) -> int:
        return self.total("up")

    @property
    def down(self) -> int:
        return self.total("down")


def nbytes(value: PyTree) -> int:
    """Bytes of a field; of a pool, those of one client's rows."""
    tree = value.rows if isinstance(value, Pool) else value
    return sum(int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def _check_parts(algorithm: Algorithm, paths: Sequence[str], template: PlacedState) -> None:
    """A path like "h.1" must name an existing part. If some parts of a field are named, all must be."""
    named: dict[str, set[str]] = {}
    for path in paths:
        field, _, number = path.partition(".")
        named.setdefault(field, set()).add(number)
    for field, numbers in named.items():
        value = getattr(template, field)
        known = {str(i) for i in range(len(value))} if isinstance(value, tuple) else set()
        wrong = sorted(numbers - known - {""})
        lost = sorted(known - numbers) if "" not in numbers else []
        if wrong or lost:
            what = f"has no part {wrong[0]!r}" if wrong else f"is sent in parts, and part {lost[0]!r} never"
            raise ValueError(f"{type(algorithm).__name__}: the field {field!r} {what}")


def ledger(context: "RoundContext", template: PlacedState) -> Ledger:
    """Bytes that one client sends and receives in a round; none for a centralised method. `template`: its shapes."""
    if context.algorithm.centralised:
        return Ledger(())
    return ledger_of(context.algorithm, context.exchanges, template, context.cohort_size, context.clients)


def ledger_of(
    algorithm: Algorithm, exchanges: Sequence[Exchange], template: PlacedState, cohort: int, clients: int | None = None
) -> Ledger:
    """The ledger from shapes alone: `template` is the state of `init_server`.

    A pool goes down as the union of the cohort's rows, and in the first rounds as that of all clients (None: no more
    than in a cohort).
    """
    places, entries = placements(type(algorithm).State), []
    _check_parts(algorithm, [path for e in exchanges for path in (*e.sends, *e.receives)], template)
    for exchange in exchanges:
        for path in exchange.receives:
            value, kind = part(template, path), places[field_of(path)].name
            pooled = isinstance(value, Pool)
            size = nbytes(value) * (cohort if pooled else 1)
            late = size * value.history if pooled and value.history > 1 else None
            absent = (clients or cohort) - cohort if pooled and algorithm.merge_at_init else 0
            more = nbytes(value) * absent
            entries.append(Entry(exchange.number, path, kind, "down", size, exchange.repeat, late, more))
        for path in exchange.sends:
            kind, size = places[field_of(path)].name, nbytes(part(template, path))
            entries.append(Entry(exchange.number, path, kind, "up", size, exchange.repeat))
    if algorithm.merge_at_init:
        sent = {field_of(e.field) for e in entries if e.direction == "up"}
        once = [f for f, place in places.items() if place.up and f not in sent]
        entries += [Entry(-1, f, places[f].name, "up", nbytes(getattr(template, f)), repeat=0) for f in once]
    return Ledger(tuple(entries))
