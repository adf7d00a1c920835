"""How a simulator keeps state: windows, rows and unions against loops in plain Python."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.core.memory import PerExample, Pool
from fedstrata.core.placement import Averaged, Broadcast, Gathered, Local, Pooled, Server
from fedstrata.engine.layout import (
    FlatSplit,
    empty_union,
    flat_union,
    local_fields,
    push_union,
    read_rows,
    stack_local,
    window,
    write_rows,
)

few = settings(max_examples=25, deadline=None)
CLIENTS, CAPACITY, ROWS, SLOTS = 5, 4, 16, 3


def split_of(counts) -> FlatSplit:
    """Ragged clients one after the other; rows beyond the last client belong to no client."""
    counts = np.asarray(counts)
    start = np.concatenate([[0], np.cumsum(counts)[:-1]])
    return FlatSplit(
        {"x": jnp.arange(float(ROWS))}, jnp.asarray(start, jnp.int32), jnp.asarray(counts, jnp.int32), CAPACITY
    )


ragged = st.lists(st.integers(0, CAPACITY), min_size=CLIENTS, max_size=CLIENTS).filter(lambda c: sum(c) <= ROWS)
cohorts = st.permutations(range(CLIENTS)).map(lambda order: order[:SLOTS])
presence = st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS)


def stored(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "c": jnp.asarray(rng.normal(size=(CLIENTS, 2))),
        "u": PerExample({"a": jnp.asarray(rng.normal(size=ROWS)), "b": jnp.asarray(rng.normal(size=(ROWS, 2)))}),
    }


@jax.jit
def read(stacked, ids, split):
    return read_rows(stacked, ids, {"train": split}, everyone=False)


@jax.jit
def write(stacked, rows, ids, present, split):
    return write_rows(stacked, rows, ids, present, {"train": split}, everyone=False)


push = jax.jit(push_union)
flat = jax.jit(flat_union)


@few
@given(ragged, cohorts)
def test_a_cohort_reads_its_own_rows(counts, ids):
    split, state = split_of(counts), stored()
    rows = read(state, jnp.array(ids, jnp.int32), split)
    for slot, i in enumerate(ids):
        np.testing.assert_array_equal(rows["c"][slot], state["c"][i])
        first = int(split.start[i])
        for name in ("a", "b"):
            seen = rows["u"].rows[name][slot]
            assert seen.shape[0] == CAPACITY
            np.testing.assert_array_equal(seen[: counts[i]], state["u"].rows[name][first : first + counts[i]])


@few
@given(ragged, cohorts, presence)
def test_a_cohort_writes_its_own_rows_and_nothing_else(counts, ids, present):
    """Windows overlap where clients are small: what is beyond a client's count must not reach its neighbour."""
    split, state, rng = split_of(counts), stored(), np.random.default_rng(1)
    new = {
        "c": rng.normal(size=(SLOTS, 2)),
        "u": PerExample({"a": rng.normal(size=(SLOTS, CAPACITY)), "b": rng.normal(size=(SLOTS, CAPACITY, 2))}),
    }
    expected = jax.tree.map(lambda a: np.array(a), state)
    for slot, i in enumerate(ids):
        if present[slot]:
            expected["c"][i] = new["c"][slot]
            for name in ("a", "b"):
                for k in range(counts[i]):
                    expected["u"].rows[name][int(split.start[i]) + k] = new["u"].rows[name][slot, k]
    # An empty slot comes with id 0, as `cohort_of` makes it, and client 0 may be in another slot.
    given_ids = jnp.array([i if p else 0 for i, p in zip(ids, present, strict=True)], jnp.int32)
    out = write(state, jax.tree.map(jnp.asarray, new), given_ids, jnp.array(present), split)
    jax.tree.map(np.testing.assert_array_equal, out, expected)


@few
@given(ragged, cohorts)
def test_writing_what_was_read_changes_nothing(counts, ids):
    split, state, ids = split_of(counts), stored(), jnp.array(ids, jnp.int32)
    back = write(state, read(state, ids, split), ids, jnp.ones(SLOTS, bool), split)
    jax.tree.map(np.testing.assert_array_equal, back, state)


def test_with_everyone_the_rows_are_the_store():
    split, state = split_of([1, 4, 2, 3, 4]), stored()
    everyone, flat = jnp.arange(CLIENTS, dtype=jnp.int32), {"train": split}
    rows = read_rows(state, everyone, flat, everyone=True)
    assert rows["c"] is state["c"]  # no copy of what is already in order
    np.testing.assert_array_equal(rows["u"].rows["a"], read_rows(state, everyone, flat, everyone=False)["u"].rows["a"])
    moved = jax.tree.map(lambda a: a + 1, rows)
    out = write_rows(state, moved, everyone, jnp.ones(CLIENTS, bool), flat, everyone=True)
    np.testing.assert_array_equal(out["c"], state["c"] + 1)
    np.testing.assert_array_equal(out["u"].rows["a"][:14], state["u"].rows["a"][:14] + 1)
    np.testing.assert_array_equal(out["u"].rows["a"][14:], state["u"].rows["a"][14:])


def test_start_values_are_repeated_for_clients_and_for_examples():
    flat = {"train": split_of([1, 4, 2, 3, 4])}
    start = {"c": jnp.array([1.0, 2.0]), "u": PerExample(jnp.array(3.0))}
    stacked = stack_local(start, CLIENTS, flat)
    np.testing.assert_array_equal(stacked["c"], np.tile([1, 2], (CLIENTS, 1)))
    np.testing.assert_array_equal(stacked["u"].rows, np.full(ROWS, 3))
    own = window(start, flat)
    np.testing.assert_array_equal(own["c"], [1, 2])
    np.testing.assert_array_equal(own["u"].rows, np.full(CAPACITY, 3))


@few
@given(st.lists(st.tuples(cohorts, presence), max_size=5), st.integers(1, 3))
def test_the_union_is_the_last_rounds_in_order(rounds, history):
    own = Pool.empty({"v": jnp.zeros(()), "w": jnp.zeros(2)}, capacity=2, history=history)
    union, pushed = empty_union(own, SLOTS), []
    assert not np.asarray(flat(union).valid).any()
    for number, (ids, present) in enumerate(rounds):
        values = 100.0 * number + np.arange(SLOTS * 2).reshape(SLOTS, 2)
        rows = {"v": jnp.asarray(values), "w": jnp.asarray(np.stack([values, -values], axis=2))}
        sent = Pool(rows, jnp.zeros((SLOTS, 2), jnp.int32), jnp.ones((SLOTS, 2), bool), 2, history)
        union = push(union, sent, jnp.array(ids, jnp.int32), jnp.array(present))
        pushed.append([(values[s, k], ids[s]) for s in range(SLOTS) if present[s] for k in range(2)])
    seen = flat(union)
    valid = np.asarray(seen.valid)
    expected = [row for rows in pushed[-history:] for row in rows]
    assert list(zip(np.asarray(seen.rows["v"])[valid], np.asarray(seen.client)[valid], strict=True)) == expected
    np.testing.assert_array_equal(seen.rows["w"][valid, 1], -np.asarray(seen.rows["v"])[valid])
    assert (np.asarray(seen.client)[~valid] == -1).all()
    assert valid.shape == (history * SLOTS * 2,)


class State(NamedTuple):
    x: Averaged[Any]
    z: Broadcast[Any]
    g: Gathered[Any]
    pool: Pooled[Any]
    c: Local[Any]
    u: Local[PerExample]
    m: Server[Any]


def test_only_local_fields_are_kept_by_client():
    assert local_fields(State) == ("c", "u")


def test_a_view_looks_at_the_flat_rows():
    split = split_of([1, 4, 2, 3, 4])
    view = split.view(split.start[2], split.count[2])
    np.testing.assert_array_equal(view.take(jnp.array([0, 1], jnp.int32))["x"], [5, 6])
    assert view.capacity == CAPACITY


def test_a_field_that_changed_its_shape_is_not_written():
    state, split = stored(), split_of([1, 4, 2, 3, 4])
    rows = {"c": jnp.zeros((SLOTS, 3)), "u": read(state, jnp.arange(SLOTS, dtype=jnp.int32), split)["u"]}
    with pytest.raises((TypeError, ValueError)):
        write(state, rows, jnp.arange(SLOTS, dtype=jnp.int32), jnp.ones(SLOTS, bool), split)
