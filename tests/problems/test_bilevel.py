"""Bilevel problems: exact solutions and hypergradients, both lower levels, group weights, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bilevel_references import lower, quadratic, upper
from layouts import prepare

import fedstrata as fs
from fedstrata.algorithms.bilevel import FedBiO
from fedstrata.core.vector import Vector
from fedstrata.data.split import Split
from fedstrata.experiments.reproduction import papers
from fedstrata.problems import hypergradients
from fedstrata.problems.bilevel import Bilevel
from fedstrata.problems.fair import Fair
from fedstrata.solvers import newton

X = np.array([0.3, -0.8])


def differences(value, x, h=1e-5):
    """∇h by central differences of the exactly solved problem's value."""
    one = lambda e: (float(value(x + h * e)) - float(value(x - h * e))) / (2 * h)
    return np.array([one(e) for e in np.eye(x.size)])


def smooth(problem):
    """Value and gradient, of x and all data, as one program: operation by operation each would be compiled alone."""
    program = jax.jit(lambda x, full: problem.smooth(Vector(x), full))
    return lambda x, full: program(jnp.asarray(x), full)


def test_quadratic_in_closed_form():
    task = quadratic(clients=3)
    full = fs.full_data(task.federation)
    y = np.stack([task.solution(m, X) for m in range(3)])
    problem = task.problem
    ask = jax.jit(lambda x: (problem.solved(x, full).y.tree, problem.objective(x, full), problem.smooth(x, full)))
    solved, objective, (value, gradient) = ask(Vector(jnp.asarray(X)))
    assert np.allclose(solved, y, atol=1e-9)
    squares = lambda at, rows: np.mean(np.sum((at - rows) ** 2, axis=1)) / 2
    mean = lambda m: squares(y[m], task.shards[m]["t"]) + squares(X, task.shards[m]["c"])
    assert float(value) == pytest.approx(np.mean([mean(m) for m in range(3)]), rel=1e-10)
    assert float(objective) == pytest.approx(float(value), rel=1e-12)
    assert np.allclose(gradient.tree, task.gradient(X), atol=1e-9)
    assert np.allclose(differences(lambda x: ask(Vector(jnp.asarray(x)))[1], X), gradient.tree, atol=1e-6)


def test_global_lower_level_in_closed_form():
    """One y for all: it solves the mean of the lower problems, and the averaged Hessian is inverted."""
    task = quadratic(clients=3, lower_level="global")
    full = fs.full_data(task.federation)
    mean = lambda name: np.mean([task.mean(m, name) for m in range(3)], axis=0)
    y = np.linalg.solve(mean("A"), mean("B") @ X + mean("b"))
    expected = X - mean("c") + mean("B").T @ np.linalg.solve(mean("A"), y - mean("t"))
    at = smooth(task.problem)
    assert np.allclose(at(X, full)[1].tree, expected, atol=1e-9)
    assert np.allclose(differences(lambda x: at(x, full)[0], X), expected, atol=1e-6)
    own = smooth(quadratic(clients=3).problem)(X, full)[1]
    assert not np.allclose(own.tree, expected, atol=1e-3)  # another objective


def test_weights_of_clients_by_size():
    task = quadratic(clients=2)
    small = {name: a[:2] for name, a in task.shards[0].items()}
    split = fs.Federation.from_clients([small, task.shards[1]])["train"]
    federation = fs.Federation({"train": split, "valid": split})
    program = smooth(task.problem)
    at = lambda full: program(X, full)[1].tree
    by_size, alike = at(fs.full_data(federation, "size")), at(fs.full_data(federation))
    one = lambda shard: at(
        fs.full_data(fs.Federation({"train": (s := fs.Federation.from_clients([shard])["train"]), "valid": s}))
    )
    first, second = one(small), one(task.shards[1])
    assert np.allclose(by_size, 2 / 7 * first + 5 / 7 * second, atol=1e-9)
    assert np.allclose(alike, (first + second) / 2, atol=1e-9)


def test_conjugate_gradients_agree_with_the_factor(monkeypatch):
    task = quadratic(clients=3)
    full, x = fs.full_data(task.federation), Vector(jnp.asarray(X))
    dense = smooth(task.problem)(X, full)
    monkeypatch.setattr(newton, "DENSE", 0)
    assert np.allclose(smooth(task.problem)(X, full)[1].tree, dense[1].tree, atol=1e-8)
    small, large = jax.jit(lambda x: newton.extremes(*_lower_problems(task, x, full), products=2000))(x)
    exact = [np.linalg.eigvalsh(task.mean(m, "A"))[[0, -1]] for m in range(3)]
    assert np.allclose(np.stack([small, large], axis=1), exact, rtol=1e-3)


def _lower_problems(task, x, full):
    rows = full["train"]
    value = lambda ys: rows.client_means(lambda y, e: lower(x.tree, y, e), ys)
    return newton.stacked(value, jnp.zeros(3), 3)


# Group weights: eq. (48).


def logistic(link, **options):
    data = papers.load("fedbio.data").federation("synthetic", iid=False, validation=5)
    model = fs.models.Linear(data["train"].examples["x"].shape[1])
    fair = Fair(fs.losses.Classification(model, l2=0.1), groups=3)
    start = jax.tree.map(jnp.zeros_like, model.init(jax.random.key(0)))
    return fair.learn_weights(start, link, **options), data


@pytest.mark.parametrize("link", ["sigmoid", "literal"])
def test_group_weights_have_the_hypergradient_of_finite_differences(link):
    problem, data = logistic(link)
    full = fs.full_data(data)
    x = np.array([0.4, 1.2, 0.7])
    at = smooth(problem)
    gradient = at(x, full)[1].tree
    assert np.abs(gradient).max() > 1e-4
    assert np.allclose(differences(lambda x: at(x, full)[0], x), gradient, atol=1e-6)
    weights = 1 / (1 + np.exp(-x)) if link == "sigmoid" else x
    assert np.allclose(problem.weights(Vector(jnp.asarray(x))), weights)


def test_lower_solution_of_group_weights_is_the_weighted_minimum():
    """scikit-learn's logistic regression with sample weights, at one client."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    problem, data = logistic("literal")
    x = np.array([0.5, 2.0, 1.5])
    y = jax.jit(lambda x: problem.solved(Vector(x), fs.full_data(data)).y.tree)(jnp.asarray(x))
    shard = data["train"].shard(1)
    n = len(shard["y"])
    # The l2 term covers the bias too, so it becomes a column, and C weighs the sum of losses against it.
    columns = np.concatenate([shard["x"], np.ones((n, 1))], axis=1).astype(float)
    fit = linear_model.LogisticRegression(C=1 / (0.1 * n), fit_intercept=False, tol=1e-12, max_iter=10_000)
    fit.fit(columns, shard["y"], sample_weight=x[shard["group"]])
    found = np.concatenate([np.ravel(y["weight"][1]), np.ravel(y["bias"][1])])
    assert np.allclose(found, fit.coef_[0], atol=1e-5)


@pytest.mark.slow
def test_negative_literal_weights_stop_the_run_and_say_why():
    problem, data = logistic("literal")
    with pytest.warns(fs.DivergenceWarning, match="weight turned negative"):
        result = fs.run(
            problem,
            FedBiO(10.0, 0.5, warm_up=200),
            data,
            rounds=20,
            params=jnp.array([0.1, 0.1, 0.1]),  # the largest group wants less still
            batch_size="all",
            evaluate=[],
            progress=False,
            stationarity=False,
        )
    assert np.all(np.isfinite(result.solution()))  # the last good state


QUICK = {"batch_size": "all", "evaluate": [], "progress": False, "stationarity": False}


@pytest.mark.slow
def test_box_keeps_weights_inside():
    problem, data = logistic("box", low=0.2, high=3.0)
    result = fs.run(problem, FedBiO(100.0, 0.5), data, rounds=10, **QUICK)
    found = np.asarray(result.solution())
    assert found.min() >= 0.2
    assert found.max() <= 3.0


@pytest.mark.slow
def test_missing_groups_are_named():
    problem, data = logistic("sigmoid")
    keep = lambda split: {k: v[v_group != 2] for k, v in split.items() for v_group in [split["group"]]}
    shards = [dict(data["train"].shard(i)) for i in range(3)]
    shards[1] = keep(shards[1])
    train = fs.Federation.from_clients(shards)["train"]
    less = fs.Federation({**data.splits, "train": train})
    with pytest.raises(ValueError, match="client 1 has no example of group 2 in split 'train'"):
        fs.run(problem, FedBiO(0.1, 0.5), less, rounds=1, progress=False)
    allowed, _ = logistic("sigmoid", allow_missing=True)
    fs.run(allowed, FedBiO(0.1, 0.5), less, rounds=1, **QUICK)


# Refusals.


def test_what_is_not_strongly_convex_is_refused():
    task = quadratic(clients=3, rows=1)
    flat = lambda x, y, e: lower(x, y, e) - jnp.where(e["t"][0] == task.shards[1]["t"][0, 0], 4.0, 0.0) * y @ y
    bad = Bilevel(upper, flat, jnp.zeros(3))
    with pytest.raises(ValueError, match=r"client 1 is not strongly convex.*eigenvalue -"):
        fs.run(bad, FedBiO(0.1, 0.1), task.federation, rounds=1, params=jnp.zeros(2), progress=False)


def test_a_hessian_that_turns_indefinite_in_the_run_is_explained():
    """The curvature is 1 − 4x₀, and x₀ grows: the factor fails, the run stops with the last good state."""
    task = quadratic(clients=2, rows=1)
    bends = lambda x, y, e: 0.5 * (1 - 4 * x[0]) * y @ y - y[0]
    pulls = lambda x, y, e: -x[0] + 0.0 * y[0]
    with pytest.warns(fs.DivergenceWarning, match="lost its strong convexity"):
        result = fs.run(
            Bilevel(pulls, bends, jnp.zeros(3)),
            FedBiO(0.1, 0.1),
            task.federation,
            rounds=10,
            params=jnp.zeros(2),
            batch_size="all",
            progress=False,
            stationarity=False,
        )
    assert np.all(np.isfinite(result.solution()))


@pytest.mark.parametrize("estimator", [hypergradients.Neumann, lambda step, _: hypergradients.Tracking(step)])
def test_too_long_steps_of_estimators_are_refused(estimator):
    task = quadratic(clients=3)
    largest = max(np.linalg.eigvalsh(task.mean(m, "A"))[-1] for m in range(3))
    start = lambda step: prepare(
        task.problem, FedBiO(0.01, 0.1, 1, estimator(step, 3)), task.federation, rounds=1, params=jnp.zeros(2)
    )
    start(1.99 / largest)
    with pytest.raises(ValueError, match="must be below 2/L"):
        start(2.01 / largest)


def test_empty_validation_is_named():
    task = quadratic(clients=2)
    valid = Split(task.shards[0], np.array([0, 5, 5]))
    federation = fs.Federation({"train": task.federation["train"], "valid": valid})
    with pytest.raises(ValueError, match="client 1 has no examples in split 'valid'"):
        fs.run(task.problem, FedBiO(0.1, 0.1), federation, rounds=1, params=jnp.zeros(2), progress=False)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Bilevel(upper, lower, ()), "start has no arrays"),
        (lambda: Bilevel(upper, None, jnp.zeros(3)), "must be functions"),  # pyright: ignore[reportArgumentType]
        (lambda: Bilevel(upper, lower, jnp.zeros(3), lower_level="both"), "lower_level"),  # pyright: ignore
        (lambda: hypergradients.Neumann(-1.0, 3), "must be > 0"),
        (lambda: hypergradients.Neumann(0.1, -1), "whole number"),
        (lambda: hypergradients.ConjugateGradients(0), "whole number"),
        (lambda: hypergradients.ConjugateGradients(3, warm=1), "warm"),  # pyright: ignore[reportArgumentType]
        (lambda: hypergradients.Tracking(lambda step: 0.1), "no schedules"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_bad_definitions_are_refused(build, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build()


def test_functions_that_do_not_fit_are_refused():
    task = quadratic(clients=2)
    run = lambda problem: fs.run(
        problem, FedBiO(0.1, 0.1), task.federation, rounds=1, params=jnp.zeros(2), progress=False
    )
    with pytest.raises(ValueError, match=r"upper.*does not take"):
        run(Bilevel(upper, lower, jnp.zeros(4)))
    with pytest.raises(ValueError, match="must return one real number"):
        run(Bilevel(lambda x, y, e: y, lower, jnp.zeros(3)))


def test_other_splits_are_measured_at_the_exact_solution():
    task = quadratic(clients=2, metrics={"size": lambda x, y, e: jnp.sum(y**2)})
    federation = fs.Federation({**task.federation.splits, "test": task.federation["train"]})
    x = Vector(jnp.asarray(X))
    found = jax.jit(lambda x: task.problem.evaluate(x, fs.full_data(federation)))(x)
    y = np.stack([task.solution(m, X) for m in range(2)])
    assert float(found["size"]) == pytest.approx(np.mean(np.sum(y**2, axis=1)), rel=1e-9)
    assert float(found["test/loss"]) == pytest.approx(float(found["objective"]), rel=1e-12)


@pytest.mark.parametrize("chunk", [4096, 4])
def test_means_by_client_are_the_same_in_windows_and_row_by_row(chunk):
    rng = np.random.default_rng(0)
    shards = [{"a": rng.normal(size=(n, 3))} for n in (4, 2, 5)]
    rows = dataclasses.replace(fs.full_data(fs.Federation.from_clients(shards))["train"], chunk=chunk)
    y = jnp.asarray(rng.normal(size=(3, 3)))
    function = lambda y, e: {"p": jnp.tanh(e["a"] @ y), "v": e["a"] * y}
    expected = [np.tanh(s["a"] @ y[i]).mean() for i, s in enumerate(shards)]
    for way in (rows, dataclasses.replace(rows, start=None)):
        means = lambda y, way=way: way.client_means(function, y)
        found, slope = jax.jit(lambda y, means=means: (means(y), jax.grad(lambda y: jnp.sum(means(y)["p"]))(y)))(y)
        assert np.allclose(found["p"], expected, atol=1e-12)
        assert np.allclose(found["v"], [s["a"].mean(axis=0) * y[i] for i, s in enumerate(shards)], atol=1e-12)
        by_hand = [((1 - np.tanh(s["a"] @ y[i]) ** 2) @ s["a"]) / len(s["a"]) for i, s in enumerate(shards)]
        assert np.allclose(slope, by_hand, atol=1e-12)
