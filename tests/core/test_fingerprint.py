"""A run in words: equal settings give equal words, in this process and the next; other settings give others."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedstrata as fs
from fedstrata.core.fingerprint import describe, fingerprint

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
trees = st.recursive(scalars, lambda t: st.lists(t, max_size=3) | st.dictionaries(st.text(max_size=3), t, max_size=3))


@settings(max_examples=50, deadline=None)
@given(trees)
def test_plain_values_are_their_own_words(value):
    words = describe(value)
    assert words == value
    assert json.loads(json.dumps(words)) == words


class Box(eqx.Module):
    size: int
    start: jax.Array
    inner: "Box | None" = None


class Other(eqx.Module):
    size: int
    start: jax.Array
    inner: "Box | None" = None


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def loss(self, x):
        return self.scale * x


class Pair(NamedTuple):
    a: int
    b: float


def scale(a):
    return lambda x: a * x


def shift(a):
    def by(x):
        return x + a

    return by


ARRAY = np.arange(6.0).reshape(2, 3)
DIFFERENT = {
    "numbers": (0.1, 0.2),
    "int and float array": (np.arange(3), np.arange(3.0)),
    "values": (ARRAY, ARRAY + 1e-15),
    "shape": (ARRAY, ARRAY.reshape(3, 2)),
    "width": (ARRAY, ARRAY.astype(np.float32)),
    "module field": (Box(1, ARRAY), Box(2, ARRAY)),
    "module array": (Box(1, ARRAY), Box(1, ARRAY * 2)),
    "module inside": (Box(1, ARRAY, Box(1, ARRAY)), Box(1, ARRAY, Box(1, ARRAY * 2))),
    "module type": (Box(1, ARRAY), Other(1, ARRAY)),
    "named tuple": (Pair(1, 2.0), Pair(1, 3.0)),
    "closure": (scale(1.0), scale(2.0)),
    "array in closure": (scale(ARRAY), scale(ARRAY * 2)),
    "function": (scale(1.0), shift(1.0)),
    "constant": (lambda x: x * 2, lambda x: x * 3),
    "called function": (lambda x: jnp.sin(x), lambda x: jnp.cos(x)),
    "schedule": (optax.cosine_decay_schedule(0.1, 100), optax.cosine_decay_schedule(0.1, 200)),
    "optimizer": (optax.sgd, optax.adam),
    "order": ([1, 2], [2, 1]),
}
HIDDEN = {  # unseen, they would let a run be resumed with another loss or optimizer
    "partial": (functools.partial(optax.sgd, momentum=0.9), functools.partial(optax.sgd, momentum=0.5)),
    "default": (lambda x, a=1.0: a * x, lambda x, a=2.0: a * x),
    "nested function": (lambda x: jax.vmap(lambda y: y * 2)(x), lambda x: jax.vmap(lambda y: y * 3)(x)),
    "jitted": (jax.jit(scale(1.0)), jax.jit(scale(2.0))),
    "bound method": (Scaled(1).loss, Scaled(2).loss),
    "set": ({1, 2}, {1, 3}),
    "complex": (1j, 2j),
}


@pytest.mark.parametrize(("left", "right"), DIFFERENT.values(), ids=DIFFERENT)
def test_different_things_have_different_words(left, right):
    assert describe(left) != describe(right)
    for thing in (left, right):
        assert json.loads(json.dumps(describe(thing))) == describe(thing)


@pytest.mark.parametrize(("left", "right"), HIDDEN.values(), ids=HIDDEN)
def test_hidden_differences_are_seen_too(left, right):
    assert describe(left) != describe(right)


@pytest.mark.parametrize(
    "make",
    [
        lambda: scale(2.0),
        lambda: scale(np.ones(3)),
        lambda: shift(Box(1, ARRAY)),
        lambda: Box(3, jnp.asarray(ARRAY)),
        lambda: optax.cosine_decay_schedule(0.1, 100),
        lambda: {"optimizer": optax.adam, "rates": [0.1, np.float32(0.5)], "key": np.arange(2)},
    ],
)
def test_equal_things_made_twice_have_equal_words(make):
    assert describe(make()) == describe(make())


def test_an_array_has_the_same_words_wherever_it_lies():
    turned = np.asfortranarray(ARRAY)
    assert describe(ARRAY) == describe(jnp.asarray(ARRAY)) == describe(turned) == describe(ARRAY[::1])
    assert describe(np.float64(0.5)) == describe(jnp.asarray(0.5)) == describe(0.5) == 0.5
    assert describe(np.int64(3)) == describe(jnp.asarray(3)) == 3


def weighted(factor):
    return lambda w, example: factor * jnp.sum((w - example["x"]) ** 2)


def shards(shift=0.0, rows=5, test=False):
    clients = [{"x": np.arange(2.0 * rows).reshape(rows, 2) + i + shift} for i in range(3)]
    return fs.Federation.from_clients(clients, test=clients if test else None)


def test_a_fingerprint_is_of_the_objective_and_its_data():
    plain = fingerprint(fs.Average(weighted(1.0)), shards(), "uniform")
    metric = fs.Average(weighted(1.0), metrics={"m": weighted(2.0)})
    for same in (
        fingerprint(fs.Average(weighted(1.0)), shards(), "uniform"),
        fingerprint(metric, shards(), "uniform"),
        fingerprint(fs.Average(weighted(1.0)), shards(test=True), "uniform"),
    ):
        assert same == plain
    others = [
        fingerprint(fs.Average(weighted(2.0)), shards(), "uniform"),
        fingerprint(fs.Regularized(weighted(1.0), fs.prox.L1(0.1)), shards(), "uniform"),
        fingerprint(fs.Regularized(weighted(1.0), fs.prox.L1(0.2)), shards(), "uniform"),
        fingerprint(fs.Average(weighted(1.0)), shards(shift=1.0), "uniform"),
        fingerprint(fs.Average(weighted(1.0)), shards(rows=6), "uniform"),
        fingerprint(fs.Average(weighted(1.0)), shards(), "size"),
    ]
    assert len({plain, *others}) == 7
    assert plain.startswith("Average ")


def test_a_problem_without_words_has_an_empty_fingerprint():
    class Stubborn:
        def __getattribute__(self, name):
            raise RuntimeError(name)

    stubborn = Stubborn()
    assert fingerprint(fs.Average(lambda w, example: stubborn), shards(), "uniform") == ""


PROCESS = """
import jax, jax.numpy as jnp, optax
from fedstrata.core.fingerprint import describe
names = {"w": 1.0, "bias": 2.0}
loss = lambda p, e: sum(names[k] * jnp.sum(p[k]) for k in p)
chosen = lambda name: name in {"w", "bias", "scale", "shift", "kernel"}
print(describe({"loss": loss, "schedule": optax.cosine_decay_schedule(0.1, 10), "adam": optax.adam}))
print(describe(chosen))
"""


def words_under(seed: str) -> list[str]:
    path = {"PYTHONPATH": str(Path(fs.__file__).parents[1]), "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROCESS]
    return subprocess.run(
        command, env={**os.environ, **path}, capture_output=True, text=True, check=True, timeout=120
    ).stdout.splitlines()


@pytest.fixture(scope="module")
def two_processes():
    return list(zip(words_under("1"), words_under("2"), strict=True))


def test_words_survive_a_restart(two_processes):
    assert two_processes[0][0] == two_processes[0][1]


def test_words_with_a_set_of_names_survive_a_restart(two_processes):
    assert two_processes[1][0] == two_processes[1][1]


def recursive():
    def factorial(n):
        return 1 if n == 0 else n * factorial(n - 1)

    return factorial


def unfinished():
    def use():
        return later

    return use
    later = 1


@pytest.mark.parametrize("make", [recursive, unfinished, lambda: optax.exponential_decay(0.1, 10, 0.5)])
def test_functions_that_refer_to_themselves_or_to_nothing_yet_have_words(make):
    assert describe(make()) == describe(make())


def test_a_random_key_has_words():
    assert describe(jax.random.key(0)) != describe(jax.random.key(1))
