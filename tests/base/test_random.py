"""Keys and words of our own are those of `jax.random`, whatever the key, the counter and the batching."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedstrata.base import random


def words(keys):
    return np.asarray(jax.random.key_data(keys))


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1])
@pytest.mark.parametrize("data", [0, 5, 2**31 - 1, -1])
def test_folding_is_that_of_jax(seed, data):
    key = jax.random.key(seed)
    np.testing.assert_array_equal(
        words(random.fold_in(key, data)), words(jax.random.fold_in(key, np.int32(data).astype(np.uint32)))
    )


def test_folding_may_be_batched_and_compiled():
    keys, counts = jax.random.split(jax.random.key(7), 6), jnp.arange(6, dtype=jnp.int32)
    ours = jax.jit(jax.vmap(random.fold_in))(keys, counts)
    np.testing.assert_array_equal(words(ours), words(jax.vmap(jax.random.fold_in)(keys, counts)))


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4)])
def test_words_are_those_of_jax(shape):
    key = jax.random.key(11)
    np.testing.assert_array_equal(random.bits(key, shape), jax.random.bits(key, shape, jnp.uint32))


def test_other_kinds_of_keys_go_to_jax():
    key = jax.random.key(3, impl="rbg")
    np.testing.assert_array_equal(words(random.fold_in(key, 4)), words(jax.random.fold_in(key, 4)))
    np.testing.assert_array_equal(random.bits(key, (3,)), jax.random.bits(key, (3,), jnp.uint32))


SEEDS = [0, 5, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 5, 2**40 + 5, 2**63 - 1]


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_a_seed_is_the_same_key_with_and_without_64_bit_numbers(impl):
    """With them it is jax's own."""
    with jax.default_prng_impl(impl):
        theirs = [words(jax.random.key(seed)) for seed in SEEDS]
        with jax.enable_x64(False):
            narrow = [words(random.seed_key(seed)) for seed in [*SEEDS, 2**63, 2**64 - 1]]
            assert all(np.array_equal(words(jax.random.key(s)), narrow[SEEDS.index(s)]) for s in SEEDS[:5])
        wide = [words(random.seed_key(seed)) for seed in [*SEEDS, 2**63, 2**64 - 1]]
    np.testing.assert_array_equal(wide[: len(SEEDS)], theirs)
    np.testing.assert_array_equal(narrow, wide)
    assert len({tuple(key) for key in narrow}) == len(narrow)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True, "1"])
def test_what_is_no_seed_is_refused(seed):
    with pytest.raises(ValueError, match=r"must be a whole number from 0 to 2\*\*64 - 1"):
        random.seed_key(seed)
