"""Placements are declared once and enforced: at class definition, and wherever a hidden field is used."""

import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata.placement
from fedstrata.core.algorithm import Algorithm
from fedstrata.core.placement import (
    Averaged,
    Broadcast,
    Gathered,
    Hidden,
    Local,
    NotVisible,
    Placement,
    Pooled,
    Reported,
    Server,
    hide,
    placements,
    select,
)
from fedstrata.core.vector import Vector, where
from fedstrata.engine.visibility import ClientView

ALL = {"Averaged", "Reported", "Gathered", "Pooled", "Broadcast", "Local", "Server"}


class Everything(NamedTuple):
    averaged: Averaged[Vector]
    reported: Reported[Vector]
    gathered: Gathered[Vector]
    pooled: Pooled[Any]
    broadcast: Broadcast[Vector]
    local: Local[Vector]
    server: Server[Vector]


def test_the_documented_table_is_what_the_library_does():
    lines = [
        line.strip("|").split("|") for line in fedstrata.core.placement.__doc__.splitlines() if line.startswith("| `")
    ]
    table = {cells[0].strip().strip("`"): [c.strip() for c in cells[1:]] for cells in lines}
    assert set(table) == ALL
    for place in placements(Everything).values():
        up, down, merged = table[place.name]
        assert place.up == (up != "no"), place.name
        assert place.down == (down != "no"), place.name
        words = {"mean": "weighted mean", "rows": "rows of this cohort", "union": "union of rows"}
        assert (place.merge is not None) == place.up
        assert place.merge is None or merged.startswith(words[place.merge])


def test_who_reads_what():
    """What never leaves a side is not read by the other; Gathered rows are the server's alone."""
    assert select(Everything, lambda p: not p.client_reads) == ("gathered", "server")
    assert select(Everything, lambda p: not p.server_reads) == ("local",)
    assert select(Everything, lambda p: p.held == "by client") == ("local",)


def test_placements_come_in_the_order_of_fields():
    assert list(placements(Everything)) == list(Everything._fields)
    assert all(isinstance(p, Placement) for p in placements(Everything).values())


class Unplaced(NamedTuple):
    x: Averaged[Vector]
    forgotten: Vector


class Twice(NamedTuple):
    x: Averaged[Local[Vector]]


class Optional(NamedTuple):
    x: Averaged[Vector] | None


@pytest.mark.parametrize(
    ("state", "field", "what"),
    [(Unplaced, "forgotten", "no placement"), (Twice, "x", "several placements"), (Optional, "x", "no placement")],
)
def test_a_field_without_one_placement_is_refused_by_name(state, field, what):
    with pytest.raises(TypeError, match=rf"field '{field}' of {state.__name__} has {what}; .*Averaged\[Vector\]"):
        placements(state)


@pytest.mark.parametrize("state", [dict, tuple, int, "State", None, type("Plain", (), {"x": 1})])
def test_a_state_must_be_a_named_tuple(state):
    with pytest.raises(TypeError, match="must be a NamedTuple whose fields carry placements"):
        placements(state)


def test_an_algorithm_is_refused_where_its_class_is_defined():
    with pytest.raises(TypeError, match=r"field 'v' of .*State has no placement; give it one"):

        class Forgetful(Algorithm):
            local_steps: int = 1

            class State(NamedTuple):
                x: Averaged[Vector]
                v: Vector

    with pytest.raises(TypeError, match="must be a NamedTuple"):

        class Dictionary(Algorithm):
            local_steps: int = 1
            State = dict


def test_a_subclass_is_checked_again_only_where_it_has_a_state_of_its_own():
    class Good(Algorithm):
        local_steps: int = 1

        class State(NamedTuple):
            x: Averaged[Vector]

    class Better(Good):
        pass

    assert Better.State is Good.State
    with pytest.raises(TypeError, match="field 'y'"):

        class Worse(Good):
            class State(NamedTuple):
                y: Vector


REASON = "FedTest: a client cannot read the Server field 'memory'"
VECTOR = Vector(jnp.ones(3))
BINARY = [
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "and_",
    "or_",
    "xor",
]
USES = {
    **{f"{n} left": (lambda h, f=getattr(operator, n): f(h, 2)) for n in BINARY},
    **{f"{n} right": (lambda h, f=getattr(operator, n): f(2, h)) for n in BINARY},
    **{n: getattr(operator, n) for n in ("neg", "pos", "invert", "abs", "index", "not_", "truth")},
    **{f.__name__: f for f in (float, int, complex, len, iter, list, round, range, math.sqrt)},
    "divmod": lambda h: divmod(h, 2),
    "attribute": lambda h: h.shape,
    "item": lambda h: h[0],
    "set item": lambda h: operator.setitem(h, 0, 1),
    "contains": lambda h: 1 in h,
    "call": lambda h: h(),
    "if": lambda h: 1 if h else 2,
    "numpy": np.asarray,
    "numpy function": np.sin,
    "jax": jnp.asarray,
    "jax function": jnp.sin,
    "jax where": lambda h: jnp.where(True, h, 1.0),
    "vector plus": lambda h: VECTOR + h,
    "plus vector": lambda h: h + VECTOR,
    "vector product": lambda h: VECTOR @ h,
    "product vector": lambda h: h @ VECTOR,
    "jax array plus": lambda h: jnp.ones(3) + h,
    "numpy array plus": lambda h: np.ones(3) + h,
    "numpy scalar times": lambda h: np.float64(3) * h,
    "in jit": lambda h: jax.jit(lambda s: s * 2)(h),
    "in scan": lambda h: jax.lax.scan(lambda c, _: (c + h, None), jnp.zeros(()), None, length=2),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_of_a_hidden_field_says_whose_it_is(use):
    with pytest.raises(NotVisible, match="Server field 'memory'"):
        use(Hidden(REASON))


def test_a_hidden_field_can_be_handed_on_through_transformations():
    state = hide(Everything(*[jnp.ones(2)] * 7), {"server": REASON, "gathered": "other"})
    assert jax.tree.leaves(Hidden(REASON)) == []
    assert len(jax.tree.leaves(state)) == 5
    for transform in (jax.jit, jax.vmap):
        out = transform(lambda s: s._replace(averaged=s.averaged * 2))(state)
        assert out.server == Hidden(REASON)
        np.testing.assert_array_equal(out.averaged, [2, 2])
    carried, _ = jax.lax.scan(lambda s, _: (s, None), state, None, length=3)
    assert carried.gathered == Hidden("other")
    assert where(True, state, state).server == Hidden(REASON)


def test_a_hidden_field_prints_compares_and_hashes_by_its_reason():
    assert repr(Hidden(REASON)) == f"Hidden({REASON})"
    assert Hidden("a") == Hidden("a")
    assert Hidden("a") != Hidden("b")
    assert len({Hidden("a"), Hidden("a"), Hidden("b")}) == 2


def test_hiding_an_unknown_field_is_an_error():
    with pytest.raises(ValueError, match="nothing"):
        hide(Everything(*[0.0] * 7), {"nothing": REASON})


class Seen(Algorithm):
    local_steps: int = 1
    State = Everything


def test_a_hidden_field_cannot_stand_in_for_another():
    """x = state.memory would otherwise be dropped without a word, as if x had not been written."""
    sight, state = ClientView(Seen(), received=("averaged", "pooled", "broadcast")), Everything(*[jnp.ones(2)] * 7)
    untouched = sight.call(lambda oracle, start, state: state, None, state, state)
    np.testing.assert_array_equal(untouched.server, state.server)
    with pytest.raises(NotVisible, match="client cannot read the Server field 'server'"):
        sight.call(lambda oracle, start, state: state._replace(averaged=state.server), None, state, state)
