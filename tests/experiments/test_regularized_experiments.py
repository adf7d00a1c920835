"""Regularised experiments: their optima are optima, and the gaps to them agree with theory."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import Lasso, LogisticRegression

import fedstrata as fs
from fedstrata.data.sources import store
from fedstrata.experiments import get, lasso, sparse_logistic
from fedstrata.experiments.solvers import SparseLogistic, fista, reference, soft

WEIGHT, THETA = 0.02, 40.0  # of the small logistic problem; the bend of MCP is at 0.8


@pytest.fixture(scope="module")
def disagreeing():
    return get("lasso").build()


def shards(federation):
    return [federation["train"].shard(i) for i in range(federation.clients)]


def point(w):
    """Slopes and intercept as the parameters of a linear model."""
    w = jnp.asarray(w)
    return fs.Vector({"weight": w[None, :-1], "bias": w[-1:]})


def program(function):
    """One program for all points: operation by operation each would be compiled alone."""
    compiled = jax.jit(function)
    return lambda w: compiled(point(w))


def test_the_optimum_of_the_lasso_is_one(disagreeing):
    problem, federation = disagreeing
    best = lasso.optimum(shards(federation), 0.3)
    full = fs.full_data(federation, dtype=np.float64)
    ask = program(lambda x: (problem.subdifferential_distance(x, full), problem.evaluate(x, full)))
    distance, found = ask(best)
    assert distance < 1e-13
    assert found["distance"] < 1e-13
    zeros = int((best[:-1] == 0).sum())
    assert 3 <= zeros <= 17, "some slopes are exactly zero, and not all"


def test_the_optimum_of_the_lasso_is_scikit_learns():
    parts = shards(get("lasso").build(clients=3, rows=20, features=6, weight=0.2).federation)
    best = lasso.optimum(parts, 0.2)
    x, y = (np.concatenate([part[name] for part in parts]) for name in ("x", "y"))
    other = Lasso(alpha=0.2, tol=1e-12, max_iter=100_000).fit(x, y)  # equal shards, so rows weigh the same
    np.testing.assert_allclose(best, np.append(other.coef_, other.intercept_), atol=1e-7)


@pytest.mark.slow
def test_corrected_methods_reach_the_optimum_and_naive_ones_do_not(disagreeing):
    experiment = get("lasso")
    end = {
        name: experiment.run(name, disagreeing, stationarity=False).history.last("distance")[0]
        for name in ("FedNMap", "Zhang2024", "FedAvgServerProx")
    }
    assert max(end["FedNMap"], end["Zhang2024"]) < 1e-9
    assert end["FedAvgServerProx"] > 1e-4


def test_where_naive_methods_stop_depends_on_the_step(disagreeing):
    """A tenth of the step leaves a tenth of the distance: the bias is O(ηQ)."""
    experiment = get("lasso")
    ends = [
        experiment.run(experiment.algorithm("FedAvgServerProx", step_size=step), disagreeing, **options)
        for step, rounds in ((0.004, 1000), (0.0004, 10_000))
        for options in [{"rounds": rounds, "evaluate_every": rounds, "stationarity": False}]
    ]
    far, near = (result.history.last("distance")[0] for result in ends)
    assert far / near == pytest.approx(10, rel=0.1)


def test_fast_fedda_is_given_its_true_strong_convexity(disagreeing):
    smallest = np.linalg.eigvalsh(lasso.normal_equations(shards(disagreeing.federation))[0])[0]
    given = get("lasso").methods["FastFedDA"]["strong_convexity"]
    assert 0.99 * smallest < given <= smallest


@pytest.mark.parametrize("momentum", [True, False])
def test_fista_solves_what_has_a_closed_form(momentum):
    """½(w − c)ᵀD(w − c) + |w|₁ with D diagonal: every entry is a separate soft threshold."""
    curvature, centre = np.array([1.0, 0.1, 0.01]), np.array([3.0, -5.0, 300.0])
    slope = lambda w: curvature * (w - centre)
    found = fista(slope, soft, np.zeros(3), 1.0, tolerance=1e-12, momentum=momentum)
    np.testing.assert_allclose(found.x, [2.0, 0.0, 200.0], atol=1e-8)
    assert found.residual <= 1e-12


def test_momentum_saves_steps():
    """With condition number κ the steps grow like √κ instead of κ."""
    curvature = np.linspace(1e-3, 1.0, 30)
    run = lambda momentum: fista(
        lambda w: curvature * w - 2, soft, np.zeros(30), 1.0, tolerance=1e-9, momentum=momentum, limit=100_000
    )
    steps = [run(momentum).steps for momentum in (True, False)]
    assert 10 * steps[0] < steps[1] < 100_000


@pytest.fixture(scope="module")
def few_patients():
    """Clients of different sizes and different label shares; half of the features do not matter."""
    rng = np.random.default_rng(0)
    slopes = np.array([2.0, -1.5, 1.0, 0.3, 0, 0, 0, 0])
    parts = []
    for rows, shift in ((40, 1.0), (15, -1.0), (70, 0.0)):
        x = rng.normal(size=(rows, 8))
        parts.append({"x": x, "y": (x @ slopes + shift + rng.logistic(size=rows) > 0).astype(np.int32)})
    return fs.Federation.from_clients(parts)


def penalised(penalty, federation, folder, monkeypatch):
    pytest.importorskip("skglm", reason="skglm is not installed: pip install fedstrata[experiments]")
    monkeypatch.setenv("FEDSTRATA_CACHE", str(folder))
    return sparse_logistic.problem_on(federation, penalty, WEIGHT, THETA, {"data": "patients"})


def objective_of(federation, penalty):
    return SparseLogistic.of(federation, WEIGHT, {"l1": math.inf, "mcp": THETA}[penalty])


@pytest.mark.parametrize("penalty", ["l1", "mcp"])
def test_the_objective_of_the_solver_is_that_of_the_problem(few_patients, penalty):
    phi = {"l1": fs.prox.L1(WEIGHT), "mcp": fs.prox.MCP(WEIGHT, THETA)}[penalty].on("weight")
    problem = fs.Regularized(fs.losses.Classification(fs.models.Linear(8)), phi)
    full = fs.full_data(few_patients, dtype=np.float64)
    solver = objective_of(few_patients, penalty)
    ask = program(lambda x: (problem.objective(x, full), problem.gradient(x, full).tree, phi.prox(x, 0.7).tree))
    for seed in range(3):
        w = np.random.default_rng(seed).normal(size=9) * (np.arange(9) != 2)
        value, gradient, there = ask(w)
        np.testing.assert_allclose(solver.value(w), value, rtol=1e-12)
        np.testing.assert_allclose(solver.gradient(w), [*gradient["weight"][0], *gradient["bias"]], atol=1e-14)
        np.testing.assert_allclose(solver.prox(w, 0.7), [*there["weight"][0], *there["bias"]], atol=1e-14)
    curvature = jax.jit(jax.hessian(lambda w: problem.mean_loss(point(w), full)))
    eigenvalues = np.linalg.eigvalsh(curvature(jnp.zeros(9)))
    assert solver.step() == pytest.approx(1 / eigenvalues[-1]), "the logistic curvature is largest at zero"


@pytest.mark.slow
@pytest.mark.parametrize("penalty", ["l1", "mcp"])
def test_the_reference_is_stationary_and_has_no_gap(few_patients, penalty, tmp_path, monkeypatch):
    problem = penalised(penalty, few_patients, tmp_path, monkeypatch)
    found = reference(objective_of(few_patients, penalty))
    assert found.moved < 1e-8
    full = fs.full_data(few_patients, dtype=np.float64)
    ask = program(
        lambda x: (
            problem.subdifferential_distance(x, full),
            problem.evaluate(x, full)["gap"],
            problem.objective(x, full),
        )
    )
    distance, gap, value = ask(found.x)
    assert distance < 1e-9
    assert abs(gap) < 1e-12
    assert 1 <= (found.x[:-1] == 0).sum() <= 7
    # The gap of another point is the difference of two objectives.
    other = found.x + 0.1
    _, gap, above = ask(other)
    np.testing.assert_allclose(gap, above - value, rtol=1e-10)
    # A local minimum, not a saddle: every small step away climbs.
    steps = np.random.default_rng(1).normal(size=(200, 9))
    steps *= 1e-3 / np.linalg.norm(steps, axis=1, keepdims=True)
    solver = objective_of(few_patients, penalty)
    assert min(solver.value(found.x + d) for d in steps) > solver.value(found.x)


def test_the_l1_reference_is_scikit_learns(few_patients, tmp_path, monkeypatch):
    penalised("l1", few_patients, tmp_path, monkeypatch)
    solver = objective_of(few_patients, "l1")
    rows, count = few_patients["train"].examples, solver.shares.size
    # saga's step assumes weights near 1, so the factor is in C.
    model = LogisticRegression(l1_ratio=1.0, C=1 / (WEIGHT * count), solver="saga", tol=1e-10, max_iter=100_000)
    model.fit(rows["x"], rows["y"], sample_weight=solver.shares * count)
    np.testing.assert_allclose(reference(solver).x, np.append(model.coef_, model.intercept_), atol=1e-6)


def test_mcp_shrinks_large_slopes_less_than_l1(few_patients, tmp_path, monkeypatch):
    penalised("l1", few_patients, tmp_path, monkeypatch)
    lasso_, mcp = (reference(objective_of(few_patients, penalty)).x for penalty in ("l1", "mcp"))
    large = np.abs(mcp[:-1]) > THETA * WEIGHT
    assert large.any()
    assert (np.abs(mcp[:-1])[large] > np.abs(lasso_[:-1])[large]).all()


def test_the_reference_is_kept_and_a_wrong_file_is_not_believed(few_patients, tmp_path, monkeypatch):
    penalised("l1", few_patients, tmp_path, monkeypatch)
    (path,) = (tmp_path / "references").iterdir()
    kept = np.load(path)["x"]
    calls = []
    monkeypatch.setattr("fedstrata.experiments.solvers.reference", lambda o: calls.append(o) or reference(o))
    penalised("l1", few_patients, tmp_path, monkeypatch)
    assert not calls
    np.savez(path, x=kept + 1e-3)
    penalised("l1", few_patients, tmp_path, monkeypatch)
    path.write_bytes(b"half a file")
    penalised("l1", few_patients, tmp_path, monkeypatch)
    assert len(calls) == 2
    np.testing.assert_allclose(np.load(path)["x"], kept, atol=1e-8)


def test_fednmap_closes_the_gap_on_a_small_set(few_patients, tmp_path, monkeypatch):
    problem = penalised("l1", few_patients, tmp_path, monkeypatch)
    result = fs.run(problem, fs.FedNMap(0.3, 10, gamma=6.0), few_patients, rounds=1500, batch_size="all")
    assert result.history.last("stationarity")[0] < 1e-9
    assert abs(result.history.last("gap")[0]) < 1e-10


def test_sparse_logistic_refuses_unknown_options(few_patients):
    with pytest.raises(ValueError, match="Known: l1, mcp"):
        sparse_logistic.problem_on(few_patients, "l2", WEIGHT, THETA, {})
    with pytest.raises(ValueError, match="theta"):
        sparse_logistic.problem_on(few_patients, "mcp", WEIGHT, -1.0, {})


def test_chosen_values_come_from_the_grids():
    experiment = get("sparse_logistic")
    assert {*sparse_logistic.GRIDS} == {*experiment.methods}
    assert {grid["step_size"] for grid in sparse_logistic.GRIDS.values() if "step_size" in grid} == {
        sparse_logistic.STEPS
    }
    for method, grid in sparse_logistic.GRIDS.items():
        assert all(experiment.methods[method][key] in values for key, values in grid.items())


def test_every_setting_of_the_grids_is_allowed_with_mcp():
    """θ is chosen so that no prox of the grids is longer; FedDA's grows without bound."""
    experiment = get("sparse_logistic")
    problem = fs.Regularized(fs.losses.Classification(fs.models.Linear(3)), fs.prox.MCP(0.003, 300.0).on("weight"))
    for name, grid in sparse_logistic.GRIDS.items():
        for longest in (min, max):  # FastFedDA's prox is longest where μ is smallest
            method = experiment.algorithm(name, **{key: longest(values) for key, values in grid.items()})
            if name == "FedDA":
                with pytest.raises(ValueError, match="convex"):
                    method.check(problem)
            else:
                method.check(problem)


def test_tuning_selects_the_step_that_lowers_the_objective(few_patients, tmp_path, monkeypatch):
    problem = penalised("l1", few_patients, tmp_path, monkeypatch)
    monkeypatch.setattr(sparse_logistic, "GRIDS", {"Zhang2024": {"step_size": (1e-5, 0.1, 1e5)}})
    ((name, found),) = sparse_logistic.tune(fs.experiments.Setup(problem, few_patients), rounds=30)
    assert (name, found.chosen) == ("Zhang2024", {"step_size": 0.1})


@pytest.mark.slow
def test_fednmap_closes_the_gap_on_a9a(tmp_path, monkeypatch):
    missing = [row.file for row in store.status("libsvm") if row.where == "missing" and row.file.startswith("a9a")]
    if missing:
        pytest.skip(f"libsvm: {', '.join(missing)} not found; set FEDSTRATA_DATA to the shared data folder")
    pytest.importorskip("skglm", reason="skglm is not installed: pip install fedstrata[experiments]")
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path))
    experiment = get("sparse_logistic")
    setup = experiment.build()
    assert (setup.federation.clients, setup.federation["train"].size) == (50, 32561)
    history = experiment.run("FedNMap", setup, rounds=4, evaluate_every=1, execution="map").history
    assert (np.diff(history["gap"][0]) < 0).all()
    assert 0 < history.last("gap")[0] < 0.25 * history["gap"][0, 0]
    assert {*experiment.panels} <= {*history.columns}
