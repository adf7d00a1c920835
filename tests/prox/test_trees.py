"""Trees, Vectors, dtypes and transformations; sparsity measures; a regulariser of one's own."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from regularizers import CASES, points

from fedstrata import prox
from fedstrata.core.vector import Vector
from fedstrata.prox.base import number

VARIANTS = ("GroupLasso columns", "GroupLasso scaled", "SCAD long step", "LInfBall", "NonNegative", "scaled")
KINDS = [name for name in CASES if name not in VARIANTS]  # one of each kind, to compile less


def tree_of(case, dtype=None, seed=0):
    return {name: jnp.array(x, dtype) for name, x in points(case, count=1, seed=seed)[0].items()}


def kind(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_structure_and_dtypes_are_kept(name):
    case = CASES[name]
    phi, short = case.regularizer, min(case.step, 0.5)
    mixed = dict(zip(case.shapes, ["bfloat16", "float32", "float64"], strict=False))
    z = {leaf: x.astype(mixed[leaf]) for leaf, x in tree_of(case).items()}
    for tree in (z, Vector(z)):
        for step in (short, np.float32(short), jnp.bfloat16(short), jnp.float32(short), jnp.float64(short)):
            assert kind(jax.eval_shape(lambda: phi.prox(tree, step))) == kind(tree)  # noqa: B023
        out = jax.eval_shape(jax.jit(phi.prox), tree, jax.ShapeDtypeStruct((), jnp.bfloat16))
        assert kind(out) == kind(tree)
        numbers = [phi.value] + [lambda x: phi.distance(x, x)] * phi.has_distance
        for number_of in numbers:
            out = jax.eval_shape(number_of, tree)
            assert out.shape == ()
            assert out.dtype in (jnp.float32, jnp.float64)
    narrow = jax.eval_shape(phi.value, tree_of(case, jnp.bfloat16))
    assert narrow.dtype == jnp.float32


@pytest.mark.parametrize("name", KINDS)
def test_narrow_leaves_are_rounded_once(name):
    """The prox of a bfloat16 tree is the float64 one of the same numbers, rounded."""
    case = CASES[name]
    phi, z = case.regularizer, Vector(tree_of(case, jnp.bfloat16))
    exact = z.map(lambda x: x.astype(jnp.float64))
    narrow, exact = jax.jit(lambda: (phi.prox(z, jnp.float32(0.25)), phi.prox(exact, 0.25).tree))()
    for leaf, x in narrow.tree.items():
        assert x.dtype == jnp.bfloat16
        np.testing.assert_allclose(x.astype(jnp.float64), exact[leaf], rtol=2.0**-8, atol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_mapping_over_clients_and_steps_is_one_by_one(name):
    case = CASES[name]
    phi, steps = case.regularizer, (0.1, 0.5)
    trees = [tree_of(case), jax.tree.map(lambda x: x - 0.3, tree_of(case))]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *trees)
    many = jax.jit(jax.vmap(jax.vmap(phi.prox, in_axes=(None, 0)), in_axes=(0, None)))(stacked, jnp.array(steps))
    one = jax.jit(phi.prox)
    for i, tree in enumerate(trees):
        for j, step in enumerate(steps):
            for leaf, x in one(tree, step).items():
                np.testing.assert_allclose(many[leaf][i, j], x, atol=1e-13)


@pytest.mark.parametrize("name", KINDS)
def test_derivatives_are_finite_also_at_zero(name):
    case = CASES[name]
    phi, z = case.regularizer, tree_of(case)
    first = lambda z, step: phi.prox(z, step)["a"].sum()
    both = jax.jit(lambda x: (jax.grad(phi.value)(x), jax.grad(first, argnums=(0, 1))(x, 0.3)))
    for x in (z, jax.tree.map(jnp.zeros_like, z)):
        assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(both(x)))


SMOOTH_AT_RANDOM = [n for n, c in CASES.items() if not isinstance(c.regularizer, prox.ConstraintSet) and "set" not in n]


@pytest.mark.parametrize("name", SMOOTH_AT_RANDOM)
def test_gradients_of_the_value_are_subgradients(name):
    """Where φ is smooth its subdifferential is its gradient, so g = −∇φ is stationary."""
    case = CASES[name]
    phi, x, h = case.regularizer, tree_of(case, seed=1), 1e-6
    minus = lambda tree: jax.tree.map(jnp.negative, tree)
    direction = jax.tree.map(lambda a: jnp.sin(5 * a), x)
    value = jax.jit(jax.value_and_grad(phi.value))
    gradient = value(x)[1]
    if phi.has_distance:
        assert float(jax.jit(phi.distance)(x, minus(gradient))) == pytest.approx(0, abs=1e-12)
    ahead, behind = (value({n: x[n] + s * direction[n] for n in x})[0] for s in (h, -h))
    slope = sum(float(jnp.sum(gradient[n] * direction[n])) for n in x)
    assert slope == pytest.approx(float(ahead - behind) / (2 * h), abs=1e-7)


def test_regularizers_are_static():
    for case in CASES.values():
        assert jax.tree.leaves(case.regularizer) == []
        hash(case.regularizer)


def test_hoyer_and_zeros():
    assert float(prox.hoyer(jnp.array([0.0, -3.0, 0.0]))) == pytest.approx(1)
    assert float(prox.hoyer({"a": jnp.full(4, 2.0), "b": -jnp.full((2, 3), 2.0)})) == pytest.approx(0, abs=1e-15)
    x = np.array([3.0, -4.0, 0.0, 12.0])
    expected = (2 - 19 / 13) / (2 - 1)
    assert float(prox.hoyer(Vector([x[:1], x[1:]]))) == pytest.approx(expected, rel=1e-14)
    assert float(jax.jit(prox.hoyer)(1e30 * jnp.array(x, jnp.float32))) == pytest.approx(expected, rel=1e-6)
    assert float(prox.hoyer(jnp.zeros(5))) == float(prox.hoyer(jnp.array([2.0]))) == 1
    mixed = {"a": jnp.array([0.0, 1.0], jnp.bfloat16), "b": jnp.array([[0.0, -0.0, 1e-300]])}
    assert int(prox.zeros(mixed)) == int(jax.jit(prox.zeros)(mixed)) == 3
    assert math.isclose(float(prox.hoyer(mixed)), 1.0)


class Huber(prox.Regularizer):
    """A regulariser of one's own: |x|²/2 up to 1, then |x| − ½."""

    weight: float = number(above=0)

    def _value(self, x):
        near = jnp.minimum(jnp.abs(x), 1)
        return self.weight * jnp.sum(near * (jnp.abs(x) - near / 2))

    def _prox(self, z, step):
        scale = self.weight * step
        return z - scale * jnp.clip(z / (1 + scale), -1, 1)

    def _distance(self, x, g):
        return jnp.sum((g + self.weight * jnp.clip(x, -1, 1)) ** 2)


def test_a_regularizer_of_ones_own_needs_three_formulas():
    phi = 2 * Huber(0.5).on("a") + prox.L1(1.0).on("b")
    z = Vector({"a": jnp.array([3.0, 0.5], jnp.float32), "b": jnp.array([0.2])})
    x = phi.prox(z, 1.0)
    assert kind(x) == kind(z)
    assert float(phi.distance(x, x - z)) == pytest.approx(0, abs=1e-7)
    with pytest.raises(ValueError, match="Huber: weight = 0 must be finite and > 0"):
        Huber(0)
