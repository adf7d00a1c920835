"""Permutations by look-up: bijections for every n, and uniform as far as tens of thousands of keys can show."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from fedstrata.base.permutation import below, key_words, permute

KEYS = 40_000
words_of = lambda numbers: key_words(jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.asarray(numbers)))


@jax.jit
def first(words, count, n):
    """Where 0 … len(count) − 1 go, for a traced n; beyond n − 1, where n − 1 goes."""
    return permute(words, jnp.minimum(jnp.arange(count.shape[0], dtype=jnp.int32), n - 1), n)


def whole(words, n, room):
    return np.asarray(first(words, jnp.zeros(room), jnp.int32(n)))[:n]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_bijection_for_every_n(seed):
    words = words_of([seed])[0]
    for n in range(1, 301):
        assert sorted(whole(words, n, 300).tolist()) == list(range(n)), n


@pytest.mark.parametrize("n", [4095, 4096, 4097, 46340, 65536, 65537])
def test_a_bijection_for_larger_n(n):
    """Also where n is a square, one more, and one less: there the grid changes its shape."""
    out = whole(words_of([3])[0], n, 65537)
    np.testing.assert_array_equal(np.sort(out), np.arange(n))
    assert np.mean(out == np.arange(n)) < 0.01


@pytest.mark.parametrize("n", [10**6, 2**30, 2**31 - 1])
def test_injective_and_in_range_for_the_largest_n(n):
    index = np.unique(np.random.default_rng(0).integers(0, n, 5000)).astype(np.int32)
    out = np.asarray(permute(words_of([5])[0], jnp.asarray(index), n))
    assert len(np.unique(out)) == len(index)
    assert out.min() >= 0
    assert out.max() < n
    # A uniform sample of [0, n): its quartiles are where they should be, to six standard errors.
    share = [np.mean(out < n * q) for q in (0.25, 0.5, 0.75)]
    np.testing.assert_allclose(share, [0.25, 0.5, 0.75], atol=6 * 0.5 / math.sqrt(len(out)))


def test_a_look_up_does_not_depend_on_other_indices():
    words = words_of([7])[0]
    every = permute(words, jnp.arange(50, dtype=jnp.int32), 50)
    some = permute(words, jnp.array([13, 2, 44], jnp.int32), 50)
    np.testing.assert_array_equal(some, every[jnp.array([13, 2, 44])])


def test_each_index_may_have_a_different_key():
    words = words_of(np.arange(4))
    out = permute(words, jnp.full(4, 9, jnp.int32), 20)
    alone = jax.vmap(lambda w: permute(w, jnp.array([9], jnp.int32), 20)[0])(words)
    np.testing.assert_array_equal(out, alone)


@pytest.fixture(scope="module")
def drawn():
    """The permutations that many keys name, by n."""
    words = words_of(np.arange(KEYS))
    many = jax.jit(jax.vmap(first, in_axes=(0, None, None)))
    return {n: np.asarray(many(words, jnp.zeros(7), jnp.int32(n)))[:, :n] for n in (2, 3, 4, 5, 7)}


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7])
def test_positions_pairs_and_whole_orders_are_uniform(drawn, n):
    """χ² against exact uniformity. With 8 rounds of mixing instead of 24, n = 4 and 5 fail by far."""
    out = drawn[n]
    for i in range(n):
        assert chisquare(np.bincount(out[:, i], minlength=n)).pvalue > 1e-4, i
    different = ~np.eye(n, dtype=bool).ravel()
    for i, j in [(0, 1), (0, n - 1), (n - 2, n - 1)]:
        pairs = np.bincount(out[:, i] * n + out[:, j], minlength=n * n)
        assert pairs[~different].sum() == 0
        assert n == 2 or chisquare(pairs[different]).pvalue > 1e-4, (i, j)
    if n <= 5:
        orders = np.unique(out @ n ** np.arange(n), return_counts=True)[1]
        assert len(orders) == math.factorial(n)
        assert chisquare(orders).pvalue > 1e-4


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 2**31) | st.sampled_from([1, 2, 3, 2**16, 2**16 + 1, 2**31 - 1]))
def test_below_is_the_high_half_of_the_exact_product(bits, n):
    """⌊bits · n / 2³²⌋ in unbounded integers: then every value has ⌊2³²/n⌋ or ⌈2³²/n⌉ words, all but uniform."""
    out = below(jnp.array([bits], jnp.uint32), n)
    assert out.dtype == jnp.int32
    assert int(out[0]) == bits * n >> 32 < n


def test_below_reaches_both_ends():
    ends = jnp.array([0, 2**32 - 1], jnp.uint32)
    for n in (1, 2, 7, 2**16, 2**31 - 1):
        assert below(ends, n).tolist() == [0, n - 1]
