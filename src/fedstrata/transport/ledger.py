"""The byte ledger: what travels in a round, per field, from the state's type and shapes alone."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedstrata.algorithm import Algorithm, Phase
from fedstrata.errors import unknown
from fedstrata.memory import Pool
from fedstrata.placement import field_of, part, placements, select


class Exchange(NamedTuple):
    """A phase with its messages settled: which fields come down at its start and go up at its end."""

    receives: tuple[str, ...]
    sends: tuple[str, ...]


class Entry(NamedTuple):
    """Bytes of one field in one direction, for one client in one exchange that happens `repeat` times a round.

    phase −1, repeat 0: sent once, before the first round (see `merge_at_init`), and in no round's total.
    """

    phase: int
    field: str
    placement: str
    direction: str  # "up" or "down"
    bytes: int
    repeat: int = 1
    rejoining: int | None = None  # bytes for a client that missed rounds, where that is more
    more_at_first: int = 0  # bytes more while the pool of all clients lasts, which a cohort's pool then replaces


class Ledger(NamedTuple):
    entries: tuple[Entry, ...]

    def total(self, direction: str, rejoining: bool = False) -> int:
        """Bytes per client and round in one direction."""
        size = lambda e: e.rejoining if rejoining and e.rejoining is not None else e.bytes
        return sum(size(e) * e.repeat for e in self.entries if e.direction == direction)

    @property
    def more_at_first(self) -> int:
        """Bytes that a client receives beyond `total` in each round whose pool is of all clients, not of a cohort."""
        return sum(e.more_at_first * e.repeat for e in self.entries)

    @property
    def up(self) -> int:
        return self.total("up")

    @property
    def down(self) -> int:
        return self.total("down")


def exchanges(algorithm: Algorithm, phases: Sequence[Phase]) -> list[Exchange]:
    """The messages of every phase, with defaults filled in and impossible ones refused."""
    state, where = type(algorithm).State, type(algorithm).__name__
    places = placements(state)
    up, down = select(state, lambda p: p.up), select(state, lambda p: p.down)
    out: list[Exchange] = []
    for number, phase in enumerate(phases):
        sends = up if phase.sends is None else phase.sends
        if phase.receives is not None:
            receives = phase.receives
        elif number == 0:
            receives = down
        else:
            merged = tuple(path for path in out[-1].sends if places[field_of(path)].down)
            receives = (*merged, *(f for f in down if not places[f].up))
        for kind, given, allowed in (("sends", sends, up), ("receives", receives, down)):
            for path in given:
                field = field_of(path)
                if field not in places:
                    raise unknown(f"field in {kind} of phase {number} of {where}", field, places)
                if field not in allowed:
                    kinds = f"a {places[field].name} field does not go that way"
                    raise ValueError(f"{where}: phase {number} {kind} {path!r}, but {kinds}")
        out.append(Exchange(tuple(receives), tuple(sends)))
    never = [f for f in up if places[f].down and not any(f == field_of(path) for e in out for path in e.sends)]
    if never:
        raise ValueError(
            f"{where}: no phase sends the {places[never[0]].name} field {never[0]!r}, so its work would be lost"
        )
    return out


def nbytes(value: Any) -> int:
    """Bytes of a field's numbers; of a pool, one client's rows."""
    tree = value.rows if isinstance(value, Pool) else value
    return sum(int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def _check_parts(algorithm: Algorithm, paths: Sequence[str], template: Any) -> None:
    """A path like "h.1" must name a part that is there, and where parts of a field are named all of them must be."""
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


def ledger(algorithm: Algorithm, problem: Any, template: Any, cohort: int, clients: int | None = None) -> Ledger:
    """What one client sends and receives in a round; `template` is the state of `init_server`, shapes only.

    clients: in the whole federation (None: no more than in a cohort).
    """
    places, entries = placements(type(algorithm).State), []
    phases = algorithm.phases(problem)
    _check_parts(algorithm, [path for e in exchanges(algorithm, phases) for path in (*e.sends, *e.receives)], template)
    for number, (phase, exchange) in enumerate(zip(phases, exchanges(algorithm, phases), strict=True)):
        for path in exchange.receives:
            value, kind = part(template, path), places[field_of(path)].name
            pooled = isinstance(value, Pool)
            size = nbytes(value) * (cohort if pooled else 1)
            late = size * value.history if pooled and value.history > 1 else None
            absent = (clients or cohort) - cohort if pooled and algorithm.merge_at_init else 0
            entries.append(Entry(number, path, kind, "down", size, phase.repeat, late, nbytes(value) * absent))
        for path in exchange.sends:
            kind = places[field_of(path)].name
            entries.append(Entry(number, path, kind, "up", nbytes(part(template, path)), phase.repeat))
    if algorithm.merge_at_init:
        sent = {field_of(e.field) for e in entries if e.direction == "up"}
        once = [f for f, place in places.items() if place.up and f not in sent]
        entries += [Entry(-1, f, places[f].name, "up", nbytes(getattr(template, f)), repeat=0) for f in once]
    return Ledger(tuple(entries))
