"""Newton's method for stacked problems: closed forms and SciPy at any scale, in both precisions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

import fedstrata as fs
from fedstrata.core.vector import Vector
from fedstrata.problems.bilevel import Bilevel
from fedstrata.solvers import newton

SCALES = [1e-10, 1e-7, 1e-5, 1e-2, 1.0, 1e3, 1e7, 1e10]
TOLERANCE = {"float32": 1e-5, "float64": 1e-9}
RANDOM = np.random.default_rng(0)
A, B, SIGNS = RANDOM.normal(size=(3, 20, 4)), RANDOM.normal(size=(3, 20)), RANDOM.choice([-1.0, 1.0], (3, 20))
L2 = 0.1
FAR = np.array([1.0, -2, 3, 4])

both_solvers = pytest.mark.parametrize("dense", [512, 0], ids=["factor", "conjugate gradients"])
both_precisions = pytest.mark.parametrize("dtype", ["float32", "float64"])


def squares(ys, a, b, l2):
    """½ mean (aᵀy − b)² + ½ l2 |y|² of every problem."""
    return jnp.mean((jnp.einsum("nij,nj->ni", a, ys) - b) ** 2, 1) / 2 + l2 * jnp.sum(ys**2, 1) / 2


def logistic(ys, a, signs, l2):
    margins = signs * jnp.einsum("nij,nj->ni", a, ys)
    return jnp.mean(jax.nn.softplus(-margins), 1) + l2 * jnp.sum(ys**2, 1) / 2


def solver(value, dtype, steps=50):
    """Minima of value(ys, *data) from a start, compiled once for all data of a shape."""

    @jax.jit
    def solve(start, *data):
        problems, rows = newton.stacked(lambda ys: value(ys, *data), start, data[0].shape[0])
        return newton.minimise(problems, rows, TOLERANCE[dtype], steps)

    return lambda start, *data: np.asarray(solve(*(jnp.asarray(a, dtype) for a in (start, *data))), np.float64)


def ridge(a, b, l2):
    each = zip(a.astype(np.float64), b.astype(np.float64), strict=True)
    return np.stack([np.linalg.solve(m.T @ m / len(m) + l2 * np.eye(4), m.T @ r / len(m)) for m, r in each])


def close(found, expected, dtype):
    accuracy = 20 * TOLERANCE[dtype] ** 2 + (1e-5 if dtype == "float32" else 1e-12)
    np.testing.assert_allclose(found, expected, rtol=0, atol=accuracy * np.abs(expected).max())


@both_solvers
@both_precisions
def test_least_squares_at_any_scale_are_the_closed_form(monkeypatch, dense, dtype):
    """Scaled are all data (the same y), the design alone (y / c), and the targets alone (c y)."""
    monkeypatch.setattr(newton, "DENSE", dense)
    solve = solver(squares, dtype)
    for c in SCALES:
        for by_a, by_b in ((c, c), (c, 1.0), (1.0, c)):
            a, b, l2 = (by_a * A).astype(dtype), (by_b * B).astype(dtype), L2 * by_a**2
            for start in (np.zeros(4), FAR):
                close(solve(start, a, b, l2), ridge(a, b, l2), dtype)


@both_precisions
def test_logistic_regression_at_any_scale_is_scipys(dtype):
    def value(y, a, signs):
        margins = signs * (a @ y)
        slope = -a.T @ (signs / (1 + np.exp(margins))) / len(a) + L2 * y
        return np.mean(np.logaddexp(0, -margins)) + L2 * y @ y / 2, slope

    best = [minimize(value, np.zeros(4), args=of, jac=True, tol=1e-13).x for of in zip(A, SIGNS, strict=True)]
    solve = solver(logistic, dtype)
    for c in SCALES:
        for start in (np.zeros(4), FAR):
            found = solve(start, c * A, SIGNS, L2 * c**2)
            np.testing.assert_allclose(c * found, best, atol=1e-6 if dtype == "float32" else 1e-8)


@both_solvers
def test_a_small_problem_beside_large_ones_is_solved_as_if_alone(monkeypatch, dense):
    monkeypatch.setattr(newton, "DENSE", dense)
    scale = np.array([1.0, 1e-8, 1e5])[:, None, None]
    a, b = scale * A, scale[:, 0] * B
    value = lambda ys, a, b: squares(ys, a, b, 0.0)
    close(solver(value, "float64")(np.zeros(4), a, b), ridge(a, b, 0.0), "float64")


@both_precisions
def test_a_start_at_the_minimum_stops_at_once(dtype):
    a, b, best = A[:1].astype(dtype), B[:1].astype(dtype), ridge(A[:1], B[:1], L2)[0]
    once, often = (solver(squares, dtype, steps)(best, a, b, L2) for steps in (1, 50))
    np.testing.assert_array_equal(once, often)
    close(once[0], best, dtype)
    still = solver(squares, dtype, 50)(np.zeros(4), a, np.zeros_like(b), L2)  # the gradient is zero there
    np.testing.assert_array_equal(still, np.zeros((1, 4)))


@both_precisions
def test_a_minimum_at_zero_stops_at_the_rounding_of_the_gradient(dtype):
    """There no step is small beside y: targets orthogonal to the design, up to rounding, in few steps."""
    full = np.linalg.qr(A[0])[0]
    b = B[0] - full @ (full.T @ B[0])
    few, many = (solver(squares, dtype, steps)(FAR, A[:1], b[None], L2) for steps in (6, 50))
    np.testing.assert_array_equal(few, many)
    assert np.abs(many).max() < 50 * np.finfo(dtype).eps


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_steps_are_shortened_at_any_scale(scale):
    """log cosh: from 3 a whole Newton step overshoots, and the next goes further still."""
    assert abs(3.0 - np.tanh(3.0) * np.cosh(3.0) ** 2) > 3
    value = lambda ys, c: c[:, 0] * jnp.log(jnp.cosh(ys))[:, 0]
    assert np.abs(solver(value, "float64")(np.array([3.0]), np.full((1, 1), scale))).max() < 1e-10


def test_a_nearly_singular_hessian_is_solved_to_its_rounding_and_an_indefinite_one_is_seen():
    directions = np.linalg.qr(A[0][:4])[0]
    for condition in (1e3, 1e6):
        hessian, y = (directions * np.geomspace(1, 1 / condition, 4)) @ directions.T, np.ones(4)
        value = lambda ys, h, b: jnp.einsum("ni,nij,nj->n", ys, h, ys) / 2 - jnp.sum(b * ys, 1)
        found = solver(value, "float64")(np.zeros(4), hessian[None], (hessian @ y)[None])
        assert np.abs(found - y).max() < 10 * condition * np.finfo(float).eps
        bent = hessian - 0.1 * np.eye(4)
        assert np.isnan(solver(value, "float64")(np.zeros(4), bent[None], y[None])).all()


@pytest.mark.parametrize("scale", [1e-5, 1.0])
def test_bilevel_objective_of_float32_data_of_any_scale(scale):
    """The lower solution does not change with the scale of its data, so neither does what is recorded."""
    data = [{"a": (scale * a).astype("float32"), "b": (scale * b).astype("float32")} for a, b in zip(A, B, strict=True)]
    train = fs.Federation.from_clients(data)["train"]
    target = np.array([1.0, 0, -1, 2], "float32")
    lower = lambda x, y, e: 0.5 * (e["a"] @ y - e["b"]) ** 2 + 0.5 * scale**2 * jnp.exp(x[0]) * y @ y
    problem = Bilevel(lambda x, y, e: 0.5 * jnp.sum((y - target) ** 2), lower, start=jnp.zeros(4, jnp.float32))
    full = fs.full_data(fs.Federation({"train": train, "valid": train}))
    x = np.array([-1.0], "float32")
    value, gradient = jax.jit(lambda x, full: problem.smooth(Vector(x), full))(jnp.asarray(x), full)
    y = ridge(A, B, np.exp(-1.0))
    assert float(value) == pytest.approx(np.mean(np.sum((y - target) ** 2, 1)) / 2, rel=1e-4)
    # ∂y/∂x = −H⁻¹ e^x y
    solves = [
        np.linalg.solve(m.T @ m / 20 + np.exp(-1.0) * np.eye(4), np.exp(-1.0) * r) for m, r in zip(A, y, strict=True)
    ]
    assert float(gradient.tree[0]) == pytest.approx(-np.mean(np.sum((y - target) * solves, 1)), rel=1e-3)
