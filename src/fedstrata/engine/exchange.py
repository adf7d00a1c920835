"""An exchange: one phase of a round with its messages filled in. Derived once per run from an algorithm's phases."""

from typing import NamedTuple

from fedstrata.base.errors import unknown
from fedstrata.core.algorithm import Algorithm
from fedstrata.core.placement import field_of, placements, select
from fedstrata.problems.base import Problem


class Exchange(NamedTuple):
    """The fields that go down at the start of a phase and up at its end, and its repetitions in a round."""

    number: int  # of the phase
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    repeat: int = 1

    @property
    def fields(self) -> frozenset[str]:
        """The fields of which clients have a value after this exchange."""
        return frozenset(field_of(path) for path in (*self.receives, *self.sends))


def exchanges(algorithm: Algorithm, problem: Problem) -> tuple[Exchange, ...]:
    """The messages of every phase, with defaults filled in and impossible ones refused."""
    state, where = type(algorithm).State, type(algorithm).__name__
    places = placements(state)
    up, down = select(state, lambda p: p.up), select(state, lambda p: p.down)
    found: list[Exchange] = []
    for number, phase in enumerate(algorithm.phases(problem)):
        sends = up if phase.sends is None else phase.sends
        if phase.receives is not None:
            receives = phase.receives
        elif number == 0:
            receives = down
        else:
            merged = tuple(path for path in found[-1].sends if places[field_of(path)].down)
            receives = (*merged, *(f for f in down if not places[f].up))
        for kind, given, allowed in (("sends", sends, up), ("receives", receives, down)):
            for path in given:
                field = field_of(path)
                if field not in places:
                    raise unknown(f"field in {kind} of phase {number} of {where}", field, places)
                if field not in allowed:
                    kinds = f"a {places[field].name} field does not go that way"
                    raise ValueError(f"{where}: phase {number} {kind} {path!r}, but {kinds}")
        found.append(Exchange(number, tuple(receives), tuple(sends), phase.repeat))
    sent = {field_of(path) for exchange in found for path in exchange.sends}
    never = [f for f in up if places[f].down and f not in sent]
    if never:
        raise ValueError(
            f"{where}: no phase sends the {places[never[0]].name} field {never[0]!r}, so its work would be lost"
        )
    return tuple(found)
