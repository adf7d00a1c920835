"""Estimators of the hypergradient: what each is exactly, and its documented bias."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bilevel_references import quadratic

import fedstrata as fs
from fedstrata.core.vector import Vector
from fedstrata.problems.bilevel import Bilevel
from fedstrata.problems.hypergradients import ConjugateGradients, Exact, Neumann, Tracking
from fedstrata.simulate.inputs import flat_split

TASK = quadratic(clients=1, sizes=(4, 2), rows=6, seed=4)
X, Y = np.array([0.5, -0.2]), np.array([0.3, 0.1, -0.4, 0.8])
A, BY_Y = TASK.mean(0, "A"), Y - TASK.mean(0, "t")
TRUE = np.linalg.solve(A, BY_Y)


def shard_of(federation):
    flat = {name: flat_split(split) for name, split in federation.splits.items()}
    return {name: split.view(split.start[0], split.count[0]) for name, split in flat.items()}


def oracle_of(batch_size="all"):
    return TASK.problem.oracle(shard_of(TASK.federation), jax.random.key(0), batch_size)


def inverse(estimator, oracle=None, v=None):
    """The v that an estimator finds, and its hypergradient."""
    asked = oracle or oracle_of()
    start = jnp.zeros(4) if v is None else jnp.asarray(v)
    ask = jax.jit(lambda *at: estimator(asked, *map(Vector, at)))  # each operation alone would be compiled alone
    phi, found = ask(jnp.asarray(X), jnp.asarray(Y), start)
    return np.asarray(phi.tree), np.asarray(found.tree)


def test_exact_solves_the_system():
    phi, v = inverse(Exact())
    assert np.allclose(v, TRUE, atol=1e-12)
    assert np.allclose(phi, TASK.hypergradient(0, X, Y), atol=1e-12)


def test_exact_uses_conjugate_gradients_for_many_unknowns(monkeypatch):
    monkeypatch.setattr("fedstrata.problems.hypergradients.DENSE", 2)
    assert np.allclose(inverse(Exact())[1], TRUE, atol=1e-8)


@pytest.mark.parametrize("estimator", [Exact(), ConjugateGradients(8)], ids=["Exact", "ConjugateGradients"])
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e20])
def test_conjugate_gradients_solve_for_small_and_large_right_sides_of_float32(monkeypatch, estimator, scale):
    """Squares of such numbers underflow or overflow; the solution is in proportion to the right side."""
    monkeypatch.setattr("fedstrata.problems.hypergradients.DENSE", 2)
    matrix, right = jnp.asarray(A, jnp.float32), Vector(jnp.asarray(scale * BY_Y, jnp.float32))
    oracle = SimpleNamespace(hvp=lambda x, y, v: v.map(lambda a: matrix @ a))
    found = jax.jit(lambda b: estimator.inverse(oracle, b, b, b, b))(right)
    np.testing.assert_allclose(np.asarray(found.tree, np.float64) / scale, TRUE, rtol=1e-3)


def test_exact_on_batches_is_the_mean_of_inverses():
    """Batches of one: E[1/h_j] is not 1/E[h_j]. The bias exists, and is as the docstring states."""
    h = np.array([1.0, 2.0, 4.0])
    split = fs.Federation.from_clients([{"h": h}])["train"]
    problem = Bilevel(
        lambda x, y, e: y[0] + 0.0 * x[0] * e["h"],
        lambda x, y, e: 0.5 * e["h"] * y[0] ** 2 - x[0] * y[0],
        jnp.zeros(1),
    )
    shard, zero = shard_of(fs.Federation({"train": split, "valid": split})), Vector(jnp.zeros(1))

    @jax.jit
    def hypergradient(row):
        draws = dict.fromkeys(("upper", "lower", "cross", "hessian"), (row, None))
        oracle = problem.oracle(shard, jax.random.key(0), 1, draws=draws)
        return Exact()(oracle, zero, zero, zero)[0].tree[0]

    found = [float(hypergradient(jnp.asarray([j], jnp.int32))) for j in range(3)]
    assert np.mean(found) == pytest.approx(np.mean(1 / h), rel=1e-12)
    assert np.mean(found) > 1.1 / np.mean(h)


@pytest.mark.parametrize("terms", [0, 1, 4, 60])
def test_neumann_is_the_truncated_series(terms):
    eta = 0.4 / np.linalg.eigvalsh(A)[-1]
    left = np.linalg.matrix_power(np.eye(4) - eta * A, terms + 1)
    assert np.allclose(inverse(Neumann(eta, terms))[1], np.linalg.solve(A, (np.eye(4) - left) @ BY_Y), atol=1e-12)


def test_neumann_bias_falls_at_its_rate():
    values = np.linalg.eigvalsh(A)
    eta, mu = 0.4 / values[-1], values[0]
    error = lambda terms: np.linalg.norm(inverse(Neumann(eta, terms))[1] - TRUE)
    bound = lambda terms: (1 - eta * mu) ** (terms + 1) * np.linalg.norm(BY_Y) / mu
    assert all(error(q) <= bound(q) for q in (0, 5, 20))
    assert error(41) / error(40) == pytest.approx(1 - eta * mu, rel=1e-2)  # the slowest direction is left


def test_neumann_multiplies_in_the_published_order():
    """B_Q acts first. The other order gives something else, so a reversal would be caught."""
    eta, terms = 0.3, 3
    oracle = oracle_of(1)
    rows = {j: np.asarray(oracle.fresh(j).samples["hessian"].position) for j in range(1, terms + 1)}
    assert len({int(r[0]) for r in rows.values()}) == terms  # three different Hessians
    by_y = Y - TASK.shards[0]["t"][np.asarray(oracle.samples["upper"].position)].mean(axis=0)

    def series(order):
        r, total = by_y, by_y
        for j in order:
            r = r - eta * TASK.mean(0, "A", rows[j]) @ r
            total = total + r
        return eta * total

    found = inverse(Neumann(eta, terms), oracle)[1]
    assert np.allclose(found, series([3, 2, 1]), atol=1e-12)
    assert not np.allclose(found, series([1, 2, 3]), atol=1e-3)


def test_neumann_is_unbiased_for_its_series():
    """Over many draws the mean with batches of one is the truncated series with all data."""
    estimator = Neumann(0.2, 3)
    shard = shard_of(TASK.federation)
    at = Vector(jnp.asarray(X)), Vector(jnp.asarray(Y))
    by_y = Vector(jnp.asarray(BY_Y))
    one = lambda key: estimator.inverse(TASK.problem.oracle(shard, key, 1), *at, by_y, by_y).tree
    draws = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), 20_000)))
    error = draws.mean(axis=0) - inverse(estimator)[1]
    assert np.all(np.abs(error) < 5 * draws.std(axis=0) / np.sqrt(20_000))


def test_conjugate_gradients_end_after_as_many_steps_as_unknowns():
    errors = [np.linalg.norm(inverse(ConjugateGradients(k))[1] - TRUE) for k in (1, 2, 4)]
    kappa = np.linalg.cond(A)
    rate = (np.sqrt(kappa) - 1) / (np.sqrt(kappa) + 1)
    assert errors[2] < 1e-10 < errors[1] < errors[0]
    norm = lambda e: np.sqrt(e @ A @ e)
    for k in (1, 2):
        left = inverse(ConjugateGradients(k))[1] - TRUE
        assert norm(left) <= 2 * rate**k * norm(TRUE)


def test_warm_conjugate_gradients_go_on():
    assert np.allclose(inverse(ConjugateGradients(1, warm=True), v=TRUE)[1], TRUE, atol=1e-12)
    assert not np.allclose(inverse(ConjugateGradients(1), v=TRUE)[1], TRUE, atol=1e-3)


def test_tracking_contracts_at_rest():
    """v_k − v = (I − ρA)^k (v_0 − v), exactly."""
    rho, v = 0.3, np.array([1.0, -1.0, 0.5, 0.0])
    start = v.copy()
    for k in range(1, 5):
        v = inverse(Tracking(rho), v=v)[1]
        assert np.allclose(v - TRUE, np.linalg.matrix_power(np.eye(4) - rho * A, k) @ (start - TRUE), atol=1e-12)


@pytest.mark.slow
def test_ridge_agrees_with_implicit_differentiation():
    """The penalty of ridge regression that FedBiO chooses is where optimistix's implicit gradient is zero."""
    optimistix = pytest.importorskip("optimistix")
    from fedstrata.algorithms.bilevel import FedBiO

    rng = np.random.default_rng(0)
    a, w = rng.normal(size=(40, 5)), rng.normal(size=5)
    b = a @ w + 2.0 * rng.normal(size=40)
    part = lambda rows: fs.Federation.from_clients([{"a": a[rows], "b": b[rows]}])["train"]
    federation = fs.Federation({"train": part(slice(0, 12)), "valid": part(slice(12, 40))})
    fit = lambda y, e: 0.5 * (e["a"] @ y - e["b"]) ** 2
    problem = Bilevel(lambda x, y, e: fit(y, e), lambda x, y, e: fit(y, e) + 0.5 * jnp.exp(x) * y @ y, jnp.zeros(5))
    options = {"rounds": 3000, "params": jnp.array(0.0), "batch_size": "all", "evaluate_every": 3000}
    options["stationarity"] = False  # the implicit gradient below is stricter
    result = fs.run(problem, FedBiO(0.1, 0.2, 1), federation, progress=False, **options)
    found = float(result.solution())

    def score(x):
        """The validation loss at a root of the lower gradient; its derivative is by the implicit function theorem."""
        slope = lambda y, x: a[:12].T @ (a[:12] @ y - b[:12]) / 12 + jnp.exp(x) * y
        y = optimistix.root_find(slope, optimistix.Newton(rtol=1e-12, atol=1e-12), jnp.zeros(5), x).value
        return 0.5 * jnp.mean((a[12:] @ y - b[12:]) ** 2)

    slope = jax.jit(jax.grad(score))
    assert abs(float(slope(found))) < 1e-9
    assert abs(float(slope(found + 0.1))) > 1e-4
    full = fs.full_data(federation)
    ours = jax.jit(lambda x: problem.gradient(Vector(x), full).tree)(jnp.array(0.7))
    assert float(ours) == pytest.approx(float(slope(0.7)), rel=1e-8)
