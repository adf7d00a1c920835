"""Pools and per-example memory against lists in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.core.memory import PerExample, Pool, is_per_example

few = settings(max_examples=20, deadline=None)


def test_an_empty_pool_has_its_capacity_and_nothing_valid():
    pool = Pool.empty({"score": jnp.zeros(()), "z": jnp.zeros(2, jnp.float32)}, capacity=3, history=2)
    assert jax.tree.map(jnp.shape, pool.rows) == {"score": (3,), "z": (3, 2)}
    assert pool.rows["z"].dtype == jnp.float32
    assert not pool.valid.any()
    assert (np.asarray(pool.client) == -1).all()
    assert (pool.capacity, pool.history) == (3, 2)
    assert float(pool.mean(jnp.full(3, jnp.nan))) == 0.0  # by definition


@pytest.mark.parametrize(("capacity", "history"), [(0, 1), (1, 0), (-2, 1)])
def test_a_pool_needs_room(capacity, history):
    with pytest.raises(ValueError, match=f"capacity >= 1 and history >= 1, got {capacity} and {history}"):
        Pool.empty(0.0, capacity, history)


@few
@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-10, 10)), max_size=4))
def test_writes_equal_a_list(writes):
    """Two rows at a time into six, at traced positions; later writes win."""
    pool, rows, valid = Pool.empty({"a": jnp.zeros(()), "b": jnp.zeros(3)}, 6), np.zeros(6), np.zeros(6, bool)
    write = jax.jit(lambda pool, at, v: pool.write(at, {"a": v, "b": jnp.stack([v, v, v], axis=1)}))
    for at, value in writes:
        pool = write(pool, at, jnp.array([value, value + 1]))
        rows[at : at + 2], valid[at : at + 2] = [value, value + 1], True
    np.testing.assert_array_equal(pool.rows["a"], rows)
    np.testing.assert_array_equal(pool.rows["b"], np.stack([rows] * 3, axis=1))
    np.testing.assert_array_equal(pool.valid, valid)
    scores = jnp.where(valid, pool.rows["a"], jnp.nan)  # what is not valid must not matter
    expected = rows[valid].mean() if valid.any() else 0.0
    np.testing.assert_allclose(pool.mean(scores), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(pool.mean(pool.rows["b"]), [expected] * 3, rtol=1e-12, atol=1e-12)


def test_rows_take_the_dtype_of_the_pool():
    pool = Pool.empty(jnp.zeros((), jnp.float32), 2).write(0, jnp.array([1.5, 2.5], jnp.float64))
    assert pool.rows.dtype == jnp.float32
    np.testing.assert_array_equal(pool.rows, [1.5, 2.5])


def test_more_rows_than_a_pool_holds_are_refused():
    with pytest.raises((TypeError, ValueError)):
        Pool.empty(0.0, 2).write(0, jnp.zeros(3))


def test_a_write_past_the_end_does_not_overwrite_earlier_rows():
    with pytest.raises((TypeError, ValueError)):
        Pool.empty(0.0, 4).write(0, jnp.ones(2)).write(3, jnp.zeros(2))


def test_rows_of_another_shape_are_refused():
    with pytest.raises((TypeError, ValueError)):
        Pool.empty(jnp.zeros(3), 4).write(0, jnp.ones((2, 2)))


def test_the_gradient_of_a_pool_mean_ignores_invalid_rows():
    pool = Pool.empty(0.0, 4).write(0, jnp.ones(3))
    np.testing.assert_allclose(jax.grad(lambda v: pool.mean(v))(jnp.arange(4.0)), [1 / 3, 1 / 3, 1 / 3, 0], rtol=1e-12)


@few
@given(st.lists(st.integers(0, 5), min_size=3, max_size=3, unique=True), st.floats(-5, 5))
def test_per_example_memory_equals_an_array(positions, value):
    start = np.arange(6.0)
    memory = PerExample({"u": jnp.asarray(start), "v": jnp.zeros((6, 2), jnp.float32)}, "valid")
    where, new = jnp.array(positions), jnp.array([value, value + 1, value + 2])
    after = jax.jit(PerExample.set)(memory, where, {"u": new, "v": jnp.stack([new, new], axis=1)})
    start[positions] = np.asarray(new)
    np.testing.assert_array_equal(after.rows["u"], start)
    np.testing.assert_array_equal(after[where]["u"], new)
    assert after.rows["v"].dtype == jnp.float32
    assert after.split == "valid"


def test_a_position_beyond_the_window_writes_nothing():
    memory = PerExample(jnp.zeros(3)).set(jnp.array([1, 3, 7]), jnp.array([5.0, 6.0, 7.0]))
    np.testing.assert_array_equal(memory.rows, [0, 5, 0])


def test_a_repeated_position_keeps_one_of_its_rows():
    memory = PerExample(jnp.zeros(3)).set(jnp.array([1, 1]), jnp.array([5.0, 6.0]))
    assert float(memory.rows[1]) in (5.0, 6.0)
    assert float(memory.rows[0]) == float(memory.rows[2]) == 0.0


def test_per_example_memory_is_recognised():
    assert is_per_example(PerExample(jnp.zeros(3)))
    assert not is_per_example(jnp.zeros(3))
    assert PerExample(jnp.zeros(3)).split == "train"
