"""`Vector` is a Euclidean space: its axioms, NumPy on the flattened leaves as oracle, dtypes, transforms, messages."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedstrata.core.vector import Vector, where

few = settings(max_examples=20, deadline=None)
numbers = st.floats(-100, 100, width=32)
flat = arrays(np.float64, 9, elements=numbers)
FLOATS = ["float16", "bfloat16", "float32", "float64"]


def vector(values) -> Vector:
    """Nine numbers as a tree of three leaves, one of them a scalar."""
    a = jnp.asarray(values)
    return Vector({"w": a[:6].reshape(2, 3), "b": a[6], "rest": [a[7:]]})


def flatten(v: Vector) -> np.ndarray:
    # The order of `vector`, written out: JAX sorts the keys of a dictionary.
    tree = v.tree
    return np.concatenate([np.ravel(tree["w"]), np.ravel(tree["b"]), np.ravel(tree["rest"][0])])


def same(left: Vector, right: Vector) -> None:
    np.testing.assert_allclose(flatten(left), flatten(right), rtol=1e-12, atol=1e-9)


@few
@given(flat, flat, flat, numbers, numbers)
def test_vector_space_axioms(x, y, z, a, b):
    x, y, z = map(vector, (x, y, z))
    same((x + y) + z, x + (y + z))
    same(x + y, y + x)
    same(x + x.zeros(), x)
    same(x - x, x.zeros())
    same(-x, x.zeros() - x)
    same(a * (b * x), (a * b) * x)
    same(1 * x, x)
    same(a * (x + y), a * x + a * y)
    same((a + b) * x, a * x + b * x)


@few
@given(flat, flat, flat, numbers)
def test_inner_product_axioms(x, y, z, a):
    x, y, z = map(vector, (x, y, z))
    close = lambda left, right: np.testing.assert_allclose(left, right, rtol=1e-10, atol=1e-7)
    close(x @ y, y @ x)
    close((a * x + y) @ z, a * (x @ z) + y @ z)
    close(x.norm() ** 2, x @ x)
    assert abs(x @ y) <= x.norm() * y.norm() * (1 + 1e-12)
    assert (x + y).norm() <= (x.norm() + y.norm()) * (1 + 1e-12)


@few
@given(flat, flat, numbers)
def test_every_operation_equals_numpy_on_flattened_leaves(x, y, a):
    left, right, a = vector(x), vector(y), float(a) + 300  # never a division by zero
    expected = {
        "add": (left + right, x + y),
        "subtract": (left - right, x - y),
        "times": (left * right, x * y),
        "over": (left / (abs(right) + 1), x / (abs(y) + 1)),
        "scalar right": ((left + a) * a - a, (x + a) * a - a),
        "scalar left": (a - (a + left), a - (a + x)),
        "reciprocal": (a / (left + a), a / (x + a)),
        "power": (left**2 + abs(left) ** 0.5, x**2 + abs(x) ** 0.5),
        "root": (abs(left).sqrt(), np.sqrt(abs(x))),
        "sign": (left.sign(), np.sign(x)),
        "maximum": (left.maximum(right), np.maximum(x, y)),
        "floor": (left.maximum(0.5), np.maximum(x, 0.5)),
    }
    for name, (ours, theirs) in expected.items():
        np.testing.assert_allclose(flatten(ours), theirs, rtol=1e-12, atol=1e-9, err_msg=name)
    np.testing.assert_allclose(left @ right, x @ y, rtol=1e-10, atol=1e-9)
    np.testing.assert_allclose(left.sum(), x.sum(), rtol=1e-10, atol=1e-9)
    np.testing.assert_allclose(left.norm_squared(), x @ x, rtol=1e-12)
    assert left.size == 9


@few
@given(flat, flat, st.floats(0.01, 300))
def test_clip_to_ball_is_the_projection(x, y, radius):
    """P x is in the ball and ⟨x − Px, z − Px⟩ ≤ 0 for every z in it: that characterises the projection."""
    point, other = vector(x), vector(y)
    p, z = point.clip_to_ball(radius), other.clip_to_ball(radius)
    assert p.norm() <= radius * (1 + 1e-12)
    assert (point - p) @ (z - p) <= 1e-9 * (1 + float(point.norm())) ** 2
    if np.linalg.norm(x) <= radius:
        np.testing.assert_array_equal(flatten(p), x)
    else:
        np.testing.assert_allclose(p.norm(), radius, rtol=1e-12)


def test_clip_to_ball_of_zero_and_to_radius_zero():
    zero = vector(np.zeros(9))
    np.testing.assert_array_equal(flatten(zero.clip_to_ball(1.0)), np.zeros(9))
    np.testing.assert_array_equal(flatten(vector(np.ones(9)).clip_to_ball(0.0)), np.zeros(9))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "two",
    [2, 2.0, np.float64(2), np.float32(2), np.int64(2), np.array(2.0), jnp.float64(2), jnp.float32(2), jnp.asarray(2)],
    ids=lambda s: type(s).__name__ + str(getattr(s, "dtype", "")),
)
def test_a_scalar_of_any_kind_takes_the_dtype_of_the_leaf(dtype, two):
    x = Vector({"a": jnp.arange(1, 4).astype(dtype)})
    by_hand = {
        "left": (two * x, [2, 4, 6]),
        "right": (x * two, [2, 4, 6]),
        "from": (two - x, [1, 0, -1]),
        "under": (two / x, [2, 1, 2 / 3]),
        "power": (x**two, [1, 4, 9]),
        "floor": (x.maximum(two), [2, 2, 3]),
    }
    for name, (ours, expected) in by_hand.items():
        assert ours.tree["a"].dtype == dtype, name
        np.testing.assert_allclose(np.asarray(ours.tree["a"], float), expected, rtol=1e-2, err_msg=name)


def test_leaves_of_different_dtypes_keep_them_and_total_in_the_widest():
    x = Vector({"a": jnp.array([3.0], "bfloat16"), "b": jnp.array([4.0], "float32"), "c": jnp.array(12.0)})
    assert (x.dtype, x.norm().dtype, x.sum().dtype) == (jnp.float64,) * 3
    assert float(x.norm()) == 13.0
    for moved in (x + x, 0.5 * x, x.clip_to_ball(1.0), np.float64(2) * x, where(True, x, -x)):
        assert [a.dtype for a in jax.tree.leaves(moved.tree)] == ["bfloat16", "float32", "float64"]
    narrow = Vector([jnp.ones(2, "float16"), jnp.ones(2, "float32")])
    assert narrow.dtype == jnp.float32


def test_promotion_between_vectors_stays_strict():
    """float32 + float64 is a slip, not a wish: the suite's strict mode must see it."""
    with pytest.raises(jax.dtypes.TypePromotionError, match="promotion"):
        _ = Vector(jnp.ones(2, "float32")) + Vector(jnp.ones(2, "float64"))


def test_numpy_leaves_are_as_good_as_jax_leaves():
    x = Vector({"a": np.ones(3, np.float32)})
    assert (np.float64(2) * x).tree["a"].dtype == np.float32
    assert float((x * 2) @ x) == 6.0


def test_jit_and_vmap_see_a_vector_as_its_leaves():
    rng = np.random.default_rng(0)
    xs, ys = rng.normal(size=(2, 5, 9))
    f = lambda x, y: ((2 * x - y).clip_to_ball(1.5), x @ y)
    clipped, product = jax.jit(jax.vmap(f))(jax.vmap(vector)(xs), jax.vmap(vector)(ys))
    for i in range(5):
        one, inner = f(vector(xs[i]), vector(ys[i]))
        same(jax.tree.map(lambda a, i=i: a[i], clipped), one)
        np.testing.assert_allclose(product[i], inner, rtol=1e-12)


def test_gradients_are_vectors_and_have_their_closed_forms():
    rng = np.random.default_rng(1)
    x, y = vector(rng.normal(size=9)), vector(rng.normal(size=9))
    same(jax.grad(lambda v: v.norm_squared() / 2)(x), x)
    same(jax.grad(lambda v: v @ y)(x), y)
    same(jax.grad(lambda v: v.norm())(x), x / x.norm())


def test_derivative_of_the_projection():
    """Outside: (r/‖x‖)(I − x xᵀ/‖x‖²); inside, zero included, the identity."""
    x = np.random.default_rng(2).normal(size=4)
    project = lambda a: Vector(a).clip_to_ball(0.5).tree
    norm = np.linalg.norm(x)
    np.testing.assert_allclose(
        jax.jacobian(project)(x), 0.5 / norm * (np.eye(4) - np.outer(x, x) / norm**2), rtol=1e-9, atol=1e-12
    )
    np.testing.assert_allclose(jax.jacobian(project)(0.1 * x / norm), np.eye(4), atol=1e-15)
    np.testing.assert_allclose(jax.jacobian(project)(np.zeros(4)), np.eye(4), atol=1e-15)


def test_where_chooses_whole_states():
    x, y = vector(np.ones(9)), vector(np.zeros(9))
    choose = jax.jit(lambda c: where(c, (x, 1.0, jnp.array(3)), (y, 2.0, jnp.array(4))))
    for condition, (v, number, count) in ((True, (x, 1.0, 3)), (False, (y, 2.0, 4))):
        chosen = choose(condition)
        same(chosen[0], v)
        assert (float(chosen[1]), int(chosen[2])) == (number, count)


@pytest.mark.parametrize("array", [np.ones(3), jnp.ones(3), np.ones((1,))])
@pytest.mark.parametrize("op", [operator.add, operator.mul, operator.sub, operator.truediv])
def test_an_array_is_not_broadcast_over_leaves(array, op):
    x = Vector({"a": jnp.ones(3)})
    for left, right in ((x, array), (array, x)):
        with pytest.raises(TypeError, match=r"not with an array of shape .*wrap the array as Vector"):
            op(left, right)


def test_vectors_of_other_shape_or_structure_are_refused_with_both_shapes():
    x = Vector({"a": jnp.ones(3)})
    trees = [{"a": jnp.ones(1)}, {"a": jnp.ones((3, 1))}, {"b": jnp.ones(3)}, jnp.ones(3)]
    others = [Vector(tree) for tree in trees]
    for other in others:
        for op in (operator.add, operator.mul, operator.matmul):
            with pytest.raises(TypeError, match=r"do not have the same shape: \{'a': \(3,\)\} and "):
                op(x, other)
    with pytest.raises(TypeError, match="do not have the same shape"):
        x.maximum(others[0])


@pytest.mark.parametrize("other", [3, 2.5, "x", None, np.ones(3), jnp.ones(3)])
def test_an_inner_product_needs_two_vectors(other):
    x = Vector(jnp.ones(3))
    for left, right in ((x, other), (other, x)):
        with pytest.raises(TypeError, match=r"@|matmul|ufunc"):
            _ = left @ right


SCALES = [1e-37, 1e-30, 1e-25, 1e-20, 1.0, 1e20, 1e30, 1e38]


@pytest.mark.parametrize("scale", SCALES)
def test_norm_and_projection_at_any_scale_of_float32(scale):
    """Squares of such entries overflow or underflow; float64 is the reference."""
    x = vector(np.array([1.0, -2, 0.5, 0, 0.25, 2, -1, 1.5, 0.1]) * scale).map(lambda a: a.astype(jnp.float32))
    exact = flatten(x).astype(np.float64)
    length = np.linalg.norm(exact)
    if length < np.finfo(np.float32).max:
        np.testing.assert_allclose(jax.jit(Vector.norm)(x), length, rtol=1e-6)
    for radius in (1e-30, 1e-25, 1.0, 1e20, 1e38):
        expected = exact * min(1, radius / length)
        np.testing.assert_allclose(flatten(jax.jit(Vector.clip_to_ball)(x, radius)), expected, rtol=1e-6, atol=1e-37)


@few
@given(flat, st.floats(0.125, 1000, width=32))
def test_norm_and_projection_of_ordinary_numbers_have_the_bits_of_the_plain_formulas(x, radius):
    v = vector(x)
    assert v.norm() == jnp.sqrt(v @ v)
    outside = v @ v > radius**2
    plain = v * (radius / jnp.sqrt(v @ v)) if outside else v
    np.testing.assert_array_equal(flatten(v.clip_to_ball(radius)), flatten(plain))


def test_derivatives_of_the_projection_are_finite_at_zero_and_at_any_scale():
    slope = jax.grad(lambda x, r: jnp.sum(Vector(x).clip_to_ball(r).tree))
    np.testing.assert_array_equal(slope(jnp.zeros(3), 1.0), np.ones(3))
    # In one dimension the projection is constant outside, and in two it turns with the point.
    assert slope(jnp.array([1e20], jnp.float32), 1.0) == 0
    np.testing.assert_allclose(slope(jnp.array([2e25, 0.0], jnp.float32), 1e25), [0, 0.5], rtol=1e-6)
