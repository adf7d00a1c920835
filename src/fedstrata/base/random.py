"""Keys and random words as arithmetic without loops, bit-identical to `jax.random`.

On a CPU jax compiles Threefry as a loop of small kernels, which can cost more than the small steps of an algorithm.
Written out, the compiler fuses it with its surroundings. Other kinds of keys are left to `jax.random`.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, UInt32

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def seed_key(seed: int) -> PRNGKeyArray:
    """The key of a seed of up to 64 bits; with 64-bit numbers enabled in jax, and below 2³², `jax.random.key(seed)`.

    Without 64-bit numbers jax drops the upper half of a seed: 1 and 2³² + 1 would be the same run.
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**64:
        raise ValueError(f"seed {seed!r} must be a whole number from 0 to 2**64 - 1")
    key = jax.random.key(int(seed) % 2**32)
    if seed < 2**32:
        return key
    words = np.array(divmod(int(seed), 2**32), np.uint32)
    data = np.resize(words, jax.random.key_data(key).shape)  # other kinds of keys repeat the two words
    return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(key))


def fold_in(key: PRNGKeyArray, data: Array | int) -> PRNGKeyArray:
    """`jax.random.fold_in`.

    >>> key = jax.random.key(3)
    >>> bool(fold_in(key, 7) == jax.random.fold_in(key, 7))
    True
    """
    if not _is_threefry(key):
        return jax.random.fold_in(key, data)
    word = jnp.asarray(data, jnp.int32).astype(jnp.uint32)
    return jax.random.wrap_key_data(jnp.stack(_threefry(key, jnp.zeros_like(word), word)), impl="threefry2x32")


def bits(key: PRNGKeyArray, shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """`jax.random.bits` of 32 bits.

    >>> key = jax.random.key(3)
    >>> bool(jnp.all(bits(key, (2, 3)) == jax.random.bits(key, (2, 3), jnp.uint32)))
    True
    """
    partitionable = cast(Any, jax.config).jax_threefry_partitionable
    if not (_is_threefry(key) and partitionable):
        return jax.random.bits(key, shape, jnp.uint32)
    size = 1
    for length in shape:
        size *= length
    low = jnp.arange(size, dtype=jnp.uint32).reshape(shape)
    first, second = _threefry(key, jnp.zeros_like(low), low)
    return first ^ second


def _is_threefry(key: PRNGKeyArray) -> bool:
    return str(jax.random.key_impl(key)) == "threefry2x32"


def _threefry(key: PRNGKeyArray, first: Array, second: Array) -> tuple[Array, Array]:
    return _rounds(jax.random.key_data(key), first, second)


@jax.jit  # traced once for each shape, not wherever it is used
def _rounds(words: UInt32[Array, " 2"], first: Array, second: Array) -> tuple[Array, Array]:
    """Threefry-2x32 with twenty rounds (salmon2011) of the two counters under the key."""
    keys = (words[0], words[1], words[0] ^ words[1] ^ jnp.uint32(0x1BD11BDA))
    first, second = first + keys[0], second + keys[1]
    for group in range(5):
        for by in _ROTATIONS[group % 2]:
            first = first + second
            second = ((second << jnp.uint32(by)) | (second >> jnp.uint32(32 - by))) ^ first
        first = first + keys[(group + 1) % 3]
        second = second + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return first, second
