"""Visibility: each side reads only the fields that it may see. Its result is checked field by field."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from fedstrata.core.algorithm import Algorithm
from fedstrata.core.memory import Pool
from fedstrata.core.placement import Hidden, NotVisible, PlacedState, hide, placements, select
from fedstrata.engine.layout import flat_union
from fedstrata.problems.base import Oracle


class ClientView:
    """The state as a client may read it: no `Server` or `Gathered` fields, of the others those it has received."""

    def __init__(self, algorithm: Algorithm, received: Iterable[str]):
        self.name, received = type(algorithm).__name__, set(received)
        self.reasons: dict[str, str] = {}
        self.writable: set[str] = set()
        for field, place in placements(type(algorithm).State).items():
            if not place.client_reads:
                self.reasons[field] = f"{self.name}: a client cannot read the {place.name} field {field!r}"
            elif place.down and field not in received:
                self.reasons[field] = f"{self.name}: in this phase clients have not received the field {field!r}"
            if place.up or place.down:
                self.writable.add(field)

    def call(self, function: Callable[..., Any], oracle: Oracle, start: PlacedState, state: PlacedState) -> Any:
        out = function(oracle, hide(start, self.reasons), hide(state, self.reasons))
        where = f"{self.name}.{getattr(function, '__name__', 'step')}"
        _check_type(out, state, where)
        values = {}
        for field in state._fields:
            old, new = getattr(state, field), getattr(out, field)
            if isinstance(new, Hidden):
                values[field] = old if new == Hidden(self.reasons.get(field, "")) else new._refuse()
                continue
            if field in self.reasons and field not in self.writable:
                raise NotVisible(f"{self.reasons[field]}, nor write it (in {where})")
            values[field] = _same(old, new, field, where)
        return type(state)(**values)


def show_server(state: PlacedState) -> Any:
    """A server state as an algorithm sees it: pools with one axis of rows."""
    pools = {f: flat_union(v) for f in state._fields if isinstance(v := getattr(state, f), Pool)}
    return state._replace(**pools)


def server_view(where: str, step: Callable[[Any], Any], merged: PlacedState) -> Any:
    """A server step on what the server may see (`Local` fields are hidden from the outset)."""
    out = step(show_server(merged))
    _check_type(out, merged, where)
    values = {}
    for field, place in placements(type(merged)).items():
        old, new = getattr(merged, field), getattr(out, field)
        if not place.server_reads and not isinstance(new, Hidden):
            raise NotVisible(f"{where}: the server cannot write the {place.name} field {field!r}")
        if isinstance(old, Pool) or place.merge == "rows":
            values[field] = old  # pooled and gathered rows stay as clients sent them
        else:
            values[field] = _same(old, new, field, where)
    return type(merged)(**values)


def hide_local(state: PlacedState, algorithm: Algorithm) -> Any:
    """A state as the server holds it."""
    name, unseen = type(algorithm).__name__, select(type(state), lambda p: not p.server_reads)
    return hide(state, {f: f"{name}: the server cannot read the Local field {f!r}" for f in unseen})


def _check_type(out: PlacedState, state: PlacedState, where: str) -> None:
    if type(out) is not type(state):
        raise TypeError(f"{where} must return a {type(state).__qualname__}, not {type(out).__qualname__}")


def _same(old: PyTree, new: PyTree, field: str, where: str) -> Any:
    """`new`, if it has the shape and dtype of `old`. Weak types (Python numbers) become strong."""
    if isinstance(old, Hidden) or new is old:
        return new
    shapes = [jax.tree.map(lambda a: (jnp.shape(a), str(jnp.result_type(a))), tree) for tree in (old, new)]
    if jax.tree.structure(old) != jax.tree.structure(new):
        before, after = jax.tree.structure(old), jax.tree.structure(new)
        raise TypeError(f"{where} changed the structure of field {field!r} from {before} to {after}")
    if shapes[0] != shapes[1] and not (isinstance(new, (int, float)) and jnp.shape(old) == ()):
        change = f"from {shapes[0]} to {shapes[1]}"
        raise TypeError(f"{where} changed field {field!r} {change}; a field keeps its shape and dtype")
    return jax.tree.map(lambda a, b: jnp.asarray(b, jnp.result_type(a)), old, new)
