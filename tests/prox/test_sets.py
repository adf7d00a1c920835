"""Constraint sets against constrained solvers, optax, and normal cones written out as generators."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax.projections
import pytest
from scipy.optimize import minimize, nnls

from fedstrata import prox

SIZE = 5


def random_points(count=12, seed=0):
    random = np.random.default_rng(seed)
    points = [size * random.normal(size=SIZE) for size in (0.1, 1.0, 3.0) for _ in range(count // 3)]
    return [*points, np.zeros(SIZE), np.ones(SIZE), np.array([2.0, 0, 0, 0, 0]), np.array([1.0, 1, -1, 0, 0])]


def signed(z, radius):
    """The projection onto the l1 ball as a smooth problem in the positive and negative parts."""
    inside = {"type": "ineq", "fun": lambda pq: radius - pq.sum()}
    cost = lambda pq: np.sum((pq[:SIZE] - pq[SIZE:] - z) ** 2)
    found = minimize(cost, np.full(2 * SIZE, 0.05), bounds=[(0, None)] * (2 * SIZE), constraints=[inside], tol=1e-14)
    return found.x[:SIZE] - found.x[SIZE:]


def on_simplex(z, total):
    whole = {"type": "eq", "fun": lambda x: x.sum() - total}
    cost = lambda x: np.sum((x - z) ** 2)
    return minimize(cost, np.full(SIZE, total / SIZE), bounds=[(0, None)] * SIZE, constraints=[whole], tol=1e-14).x


def in_ball(z, radius):
    inside = {"type": "ineq", "fun": lambda x: radius**2 - x @ x}
    return minimize(lambda x: np.sum((x - z) ** 2), 0.1 * np.ones(SIZE), constraints=[inside], tol=1e-14).x


@pytest.mark.parametrize(
    ("regularizer", "solve"),
    [(prox.Simplex(2.0), on_simplex), (prox.L1Ball(2.0), signed), (prox.L2Ball(2.0), in_ball)],
    ids=lambda v: getattr(v, "__name__", repr(v)),
)
def test_projections_solve_the_constrained_problem(regularizer, solve):
    for z in random_points():
        np.testing.assert_allclose(regularizer.prox(z, 1.0), solve(z, 2.0), atol=2e-5)


@pytest.mark.parametrize(
    ("regularizer", "theirs"),
    [
        (prox.Simplex(1.7), lambda z: optax.projections.projection_simplex(z, 1.7)),
        (prox.L1Ball(1.7), lambda z: optax.projections.projection_l1_ball(z, 1.7)),
        (prox.L2Ball(1.7), lambda z: optax.projections.projection_l2_ball(z, 1.7)),
        (prox.LInfBall(1.7), lambda z: optax.projections.projection_linf_ball(z, 1.7)),
        (prox.NonNegative(), optax.projections.projection_non_negative),
        (prox.Box(-0.3, 0.8), lambda z: optax.projections.projection_box(z, -0.3, 0.8)),
    ],
    ids=lambda v: repr(v) if isinstance(v, prox.Regularizer) else "",
)
def test_projections_are_those_of_optax(regularizer, theirs):
    project = jax.jit(regularizer.prox)
    for z in random_points():
        with jax.numpy_dtype_promotion("standard"):  # theirs mixes integers in
            expected = jax.jit(theirs)(jnp.array(z))
        np.testing.assert_allclose(project(z, 1.0), expected, atol=1e-14)


def box_normals(x):
    eye = np.eye(SIZE)
    return [*eye[x == 1.5], *-eye[x == -0.5]]


def simplex_normals(x):
    return [np.ones(SIZE), -np.ones(SIZE), *-np.eye(SIZE)[x == 0]]


def cross_normals(x):
    if np.abs(x).sum() < 1.5 - 1e-12:
        return []
    choices = [[np.sign(v)] if v else [-1.0, 1.0] for v in x]
    return [np.array(vertex) for vertex in itertools.product(*choices)]


NORMALS = {
    "box": (prox.Box(-0.5, 1.5), box_normals),
    "linf": (prox.LInfBall(1.5), lambda x: [*np.eye(SIZE)[x == 1.5], *-np.eye(SIZE)[x == -1.5]]),
    "nonnegative": (prox.NonNegative(), lambda x: [*-np.eye(SIZE)[x == 0]]),
    "point": (prox.Box(0.25, 0.25), lambda x: [*np.eye(SIZE), *-np.eye(SIZE)]),
    "simplex": (prox.Simplex(1.5), simplex_normals),
    "l1": (prox.L1Ball(1.5), cross_normals),
    "l2": (prox.L2Ball(1.5), lambda x: [x] if np.linalg.norm(x) > 1.5 - 1e-12 else []),
}


@pytest.mark.parametrize("name", NORMALS)
def test_distance_is_that_of_minus_g_to_the_normal_cone(name):
    """The cone is what its generators span with weights ≥ 0, so the distance is a nonnegative least squares."""
    regularizer, normals = NORMALS[name]
    distance = jax.jit(regularizer.distance)
    random, boundary = np.random.default_rng(1), 0
    for z in random_points(seed=1):
        x = np.asarray(regularizer.prox(z, 1.0))
        generators = normals(x)
        boundary += bool(generators)
        for g in (random.normal(size=SIZE), -np.abs(random.normal(size=SIZE)), np.sign(x) - 0.5, 2 * x, -2 * x):
            expected = nnls(np.array(generators).T, -g)[1] if generators else np.linalg.norm(g)
            assert float(distance(x, g)) == pytest.approx(expected, abs=1e-10)
    assert boundary > 5


@pytest.mark.parametrize("name", NORMALS)
def test_outside_the_set_value_and_distance_are_infinite(name):
    regularizer, _ = NORMALS[name]
    far = jnp.array([-3.0, 2.0, 0.0, 1.0, 5.0])
    assert float(regularizer.value(far)) == float(regularizer.distance(far, far)) == np.inf
    inside = regularizer.prox(far, 1.0)
    for sign in (-1, 1):
        moved = [regularizer.value(inside + sign * 1e-9 * e) for e in jnp.eye(SIZE)]
        if name != "nonnegative" or sign < 0:  # one side of every entry leads out, of a cone's inner entries none
            assert np.inf in [float(v) for v in moved]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", NORMALS)
def test_projections_belong_to_the_set_in_every_dtype(name, dtype):
    regularizer, _ = NORMALS[name]
    random = np.random.default_rng(2)
    project = jax.jit(lambda z: (x := regularizer.prox(z, jnp.float32(0.5)), regularizer.value(x)))
    for size in (1, 3000):
        for scale in (0.01, 3.0, 100.0):
            z = {"a": scale * random.normal(size=size), "b": random.normal(size=(2, 2))}
            x, value = project({name: jnp.array(leaf, dtype) for name, leaf in z.items()})
            assert float(value) == 0
            assert {leaf.dtype for leaf in x.values()} == {jnp.dtype(dtype)}


def test_projecting_keeps_digits_when_entries_are_large():
    z = jnp.array([1e8, 1e8 - 16, 0.0], jnp.float32)
    assert prox.Simplex(1.0).prox(z, 1.0).tolist() == [1.0, 0.0, 0.0]
    assert prox.L1Ball(24.0).prox(-z, 1.0).tolist() == [-20.0, -4.0, 0.0]


def test_projecting_twice_is_projecting_once_and_inside_nothing_moves():
    for name, (regularizer, _) in NORMALS.items():
        for z in random_points(seed=3):
            x = regularizer.prox(z, 1.0)
            np.testing.assert_allclose(regularizer.prox(x, 1.0), x, rtol=0, atol=1e-15, err_msg=name)
    inside = 0.1 * jnp.array([0.3, -0.7, 1.1, 0.0, 0.9])
    for regularizer in (prox.L1Ball(0.7), prox.L2Ball(0.7), prox.LInfBall(0.7), prox.Box(-0.7, 0.7)):
        assert regularizer.prox(inside, 1.0).tolist() == inside.tolist()


@pytest.mark.parametrize("name", ["simplex", "l1", "l2", "box"])
def test_projections_have_the_derivative_of_their_finite_differences(name):
    regularizer, _ = NORMALS[name]
    z = jnp.array([1.3, -0.2, 0.9, 0.4, -1.1])
    jacobian = jax.jacrev(lambda z: regularizer.prox(z, 1.0))(z)
    h = 1e-6
    numeric = [(regularizer.prox(z + h * e, 1.0) - regularizer.prox(z - h * e, 1.0)) / (2 * h) for e in jnp.eye(SIZE)]
    np.testing.assert_allclose(jacobian, np.array(numeric).T, atol=1e-8)


@pytest.mark.parametrize("scale", [1e-30, 1e-25, 1e-20, 1.0, 1e20, 1e30, 1e38])
def test_l2_ball_at_any_scale_of_float32(scale):
    """Squares of such entries overflow or underflow; float64 is the reference."""
    z = jnp.asarray(np.array([1.0, -2, 0.5, 0, 0.25]) * scale, jnp.float32)
    exact = np.asarray(z, np.float64)
    for radius in (1e-30, 1e-25, 1.0, 1e20, 1e38):
        ball, expected = prox.L2Ball(radius), exact * min(1, radius / np.linalg.norm(exact))
        np.testing.assert_allclose(ball.prox(z, 1.0), expected, rtol=1e-6, atol=1e-37)
        assert float(ball.value(ball.prox(z, 1.0))) == 0
        assert (float(ball.value(z)) == 0) == (np.linalg.norm(exact) <= radius)
    # On the boundary what points outward is normal to the ball, and what is tangent counts in full.
    edge, across = prox.L2Ball(float(np.linalg.norm(exact))), jnp.array([2.0, 1, 0, 0, 0], jnp.float32)
    outward = -exact / np.linalg.norm(exact)
    np.testing.assert_allclose(edge.distance(z, jnp.asarray(outward, jnp.float32)), 0, atol=1e-6)
    np.testing.assert_allclose(edge.distance(z, across), np.sqrt(5), rtol=1e-6)


def test_l2_ball_of_ordinary_numbers_has_the_bits_of_the_plain_formula():
    for z in random_points(60):
        norm = jnp.sqrt(jnp.sum(jnp.asarray(z) ** 2))
        expected = z * (2.0 / norm) if norm > 2.0 else z
        np.testing.assert_array_equal(prox.L2Ball(2.0).prox(z, 1.0), expected)
