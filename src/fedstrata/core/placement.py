"""Placements: where each field of an algorithm's state is held. *The state is the protocol*: the rest is derived.

| placement   | goes up  | goes down | merged by                                                         |
|-------------|----------|-----------|-------------------------------------------------------------------|
| `Averaged`  | yes      | yes       | weighted mean                                                     |
| `Reported`  | yes      | no        | weighted mean, seen by the server only                            |
| `Gathered`  | yes      | no        | rows of this cohort, at the server                                |
| `Pooled`    | own rows | the union | union of rows, the last rounds kept (see `Pool`)                  |
| `Broadcast` | no       | yes       | the server owns it; a client's copy may move and is then dropped  |
| `Local`     | no       | no        | never leaves its client                                           |
| `Server`    | no       | no        | never leaves the server                                           |
"""

from collections.abc import Callable
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    Self,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import jax

T = TypeVar("T")


class Placement(NamedTuple):
    """The meaning of a placement.

    Args:
        name: of the placement.
        up: whether clients send the field.
        down: whether the server sends it.
        merge: how the server merges the clients' values.
        held: how a simulator keeps it between rounds.
        client_reads: whether clients may read it.
        server_reads: whether the server may read it.
    """

    name: str
    up: bool
    down: bool
    merge: Literal["mean", "rows", "union"] | None
    held: Literal["once", "by cohort", "by client"]
    client_reads: bool = True
    server_reads: bool = True


AVERAGED = Placement("Averaged", up=True, down=True, merge="mean", held="once")
REPORTED = Placement("Reported", up=True, down=False, merge="mean", held="once")
GATHERED = Placement("Gathered", up=True, down=False, merge="rows", held="by cohort", client_reads=False)
POOLED = Placement("Pooled", up=True, down=True, merge="union", held="by cohort")
BROADCAST = Placement("Broadcast", up=False, down=True, merge=None, held="once")
LOCAL = Placement("Local", up=False, down=False, merge=None, held="by client", server_reads=False)
SERVER = Placement("Server", up=False, down=False, merge=None, held="once", client_reads=False)

# A type checker sees `Averaged[Vector]` as `Vector`; the library reads the placement behind it.
Averaged = Annotated[T, AVERAGED]
Reported = Annotated[T, REPORTED]
Gathered = Annotated[T, GATHERED]
Pooled = Annotated[T, POOLED]
Broadcast = Annotated[T, BROADCAST]
Local = Annotated[T, LOCAL]
Server = Annotated[T, SERVER]


class PlacedState(Protocol):
    """A state: a NamedTuple whose fields carry placements."""

    @property
    def _fields(self) -> tuple[str, ...]: ...

    def _replace(self, **fields: Any) -> Self: ...

    def _asdict(self) -> dict[str, Any]: ...


def placements(state: type) -> dict[str, Placement]:
    """The placement of every field of a state class, in the order of its fields.

    Args:
        state: a NamedTuple whose fields carry placements.

    >>> class State(NamedTuple):
    ...     x: Averaged[float]
    ...     c: Local[float]
    >>> {name: place.name for name, place in placements(state=State).items()}
    {'x': 'Averaged', 'c': 'Local'}
    """
    if not (isinstance(state, type) and issubclass(state, tuple) and hasattr(state, "_fields")):
        raise TypeError(f"{getattr(state, '__qualname__', state)} must be a NamedTuple whose fields carry placements")
    hints = get_type_hints(state, include_extras=True)
    return {field: _placement(state, field, hints[field]) for field in cast(Any, state)._fields}


def _placement(state: type, field: str, hint: Any) -> Placement:
    found = [p for p in get_args(hint)[1:] if isinstance(p, Placement)] if get_origin(hint) is Annotated else []
    if len(found) != 1:
        raise TypeError(
            f"field {field!r} of {state.__qualname__} has {'no placement' if not found else 'several placements'}; "
            f"give it one, e.g. `{field}: Averaged[Vector]` "
            "(one of Averaged, Reported, Gathered, Pooled, Broadcast, Local, Server)"
        )
    return found[0]


class NotVisible(TypeError):
    """A client or the server read a field that is not visible to it."""


class Hidden:
    """The placeholder of a field that is not visible: it can be passed on, but every use raises `NotVisible`.

    Args:
        reason: the message of the error.
    """

    def __init__(self, reason: str):
        self._reason = reason

    def __repr__(self) -> str:
        return f"Hidden({self._reason})"

    def __hash__(self) -> int:
        return hash(self._reason)

    def __eq__(self, other: object) -> bool:
        return self._reason == other._reason if isinstance(other, Hidden) else self._refuse()

    def __getattr__(self, name: str) -> Any:
        self._refuse()

    def _refuse(self, *_: Any) -> Any:
        raise NotVisible(object.__getattribute__(self, "_reason"))

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __neg__ = __abs__ = __pow__ = __getitem__ = __iter__ = __len__ = _refuse
    __bool__ = __float__ = __int__ = __lt__ = __le__ = __gt__ = __ge__ = __call__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = __rpow__ = __pos__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _refuse
    __index__ = __contains__ = __setitem__ = __round__ = _refuse


# No children: a hidden field takes no space in a compiled program.
jax.tree_util.register_pytree_node(
    Hidden, lambda h: ((), object.__getattribute__(h, "_reason")), lambda r, _: Hidden(r)
)


def hide(state: Any, fields: dict[str, str]) -> Any:
    """The state with placeholders for some fields.

    Args:
        state: the state.
        fields: the reason of each hidden field, by name.
    """
    return state._replace(**{field: Hidden(reason) for field, reason in fields.items()})


def field_of(path: str) -> str:
    """The field that a path names: "h" and "h.1", its second part, are both of the field h."""
    return path.partition(".")[0]


def part(state: Any, path: str) -> Any:
    """A field, or one part of a field that is a tuple."""
    field, _, number = path.partition(".")
    value = getattr(state, field)
    return value[int(number)] if number else value


def with_parts(state: Any, values: dict[str, Any]) -> Any:
    """The state with fields, or parts of them, replaced."""
    for path, new in values.items():
        field, _, number = path.partition(".")
        old = getattr(state, field)
        whole = (*old[: int(number)], new, *old[int(number) + 1 :]) if number else new
        state = state._replace(**{field: whole})
    return state


def select(state: type, wanted: Callable[[Placement], bool]) -> tuple[str, ...]:
    """The fields whose placement satisfies a predicate."""
    return tuple(field for field, place in placements(state).items() if wanted(place))
