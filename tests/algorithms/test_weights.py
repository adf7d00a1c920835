"""Clients that weigh by size: what methods remember of all clients, where they end, and which split is counted."""

import jax.numpy as jnp
import numpy as np
import pytest
from bilevel_references import lower, quadratic, upper
from references import least_squares, soft

import fedstrata as fs
from fedstrata.data.split import Split

SIZES = (40, 3, 11, 1, 25, 8)
START = np.array([0.5, -1.0, 2.0])


def uneven_least_squares():
    """Heterogeneous clients of very different sizes; each repeats its rows, so its loss does not depend on its size."""
    task = least_squares(clients=len(SIZES), dimension=3, sizes=(4, 4), seed=7)
    rows = [
        {name: a[task.federation["train"].owners == i] for name, a in task.federation["train"].examples.items()}
        for i in range(len(SIZES))
    ]
    shards = [
        {name: np.resize(a, (4 * n, *a.shape[1:])) for name, a in shard.items()}
        for shard, n in zip(rows, SIZES, strict=True)
    ]
    return task, fs.Federation.from_clients(shards)


TASK, FEDERATION = uneven_least_squares()
P = np.array(SIZES) / sum(SIZES)
OPTIMUM = TASK.optimum(P)
PENALTY = 0.4


def penalised_optimum():
    """By the proximal gradient method, run long enough to stand still."""
    w = np.zeros(3)
    for _ in range(20_000):
        w = soft(w - 0.1 * sum(p * TASK.gradient(i, w) for i, p in enumerate(P)), 0.1 * PENALTY)
    return w


SPARSE = fs.Regularized(TASK.problem.loss, fs.prox.L1(PENALTY))
META = fs.Nested([lambda x, e: e["x"] @ x - e["y"], lambda r: 0.5 * r**2], inner="client")


def remembered(result, mean, own):
    """What the server holds of all clients, and what each of them last sent."""
    return np.asarray(getattr(result.state, mean).tree)[0], np.asarray(result.local[own].tree)[0]


AVERAGES = {
    "SCAFFOLD": (TASK.problem, fs.SCAFFOLD(0.05, 4), "c", "c_i"),
    "FedNMap": (SPARSE, fs.FedNMap(0.05, 4, 1.5), "h", "h_i"),
    "Zhang2024": (SPARSE, fs.Zhang2024(0.05, 4), "h", "h_i"),
    "FedCanon": (SPARSE, fs.FedCanon(0.05, 4), "h", "h_i"),
    "SCAFFOLDServerProx": (SPARSE, fs.SCAFFOLDServerProx(0.05, 4), "c", "c_i"),
    "TrackedMFCGD": (META, fs.TrackedMFCGD(0.05, 4, 0.3), "mean", "w_i"),
    "TrackedAdaMFCGD": (META, fs.TrackedAdaMFCGD(0.05, 4, 0.3, rho=0.5), "mean", "w_i"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AVERAGES)
def test_the_server_remembers_the_weighted_mean_of_all_clients(name):
    problem, method, mean, own = AVERAGES[name]
    options = {"params": START, "batch_size": 2, "weights": "size", "cohort": 2, "stationarity": False}
    for rounds in (1, 2, 7):
        result = fs.run(problem, method, FEDERATION, rounds=rounds, evaluate_every=rounds, **options)
        held, sent = remembered(result, mean, own)
        assert np.abs(sent).max() > 0.1
        np.testing.assert_allclose(held, P @ sent, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "optimum"), [("SCAFFOLD", OPTIMUM), ("FedNMap", penalised_optimum()), ("Zhang2024", penalised_optimum())]
)
def test_a_cohort_of_unequal_clients_reaches_the_optimum(name, optimum):
    problem, method, *_ = AVERAGES[name]
    options = {"params": START, "batch_size": "all", "weights": "size", "evaluate_every": 4000, "stationarity": False}
    result = fs.run(problem, method, FEDERATION, rounds=4000, cohort=2, **options)
    np.testing.assert_allclose(result.solution(), optimum, atol=1e-9)


def test_a_tracked_nested_method_with_a_cohort_of_unequal_clients_is_exact():
    options = {"params": START, "batch_size": "all", "weights": "size", "evaluate_every": 4000}
    result = fs.run(META, AVERAGES["TrackedMFCGD"][1], FEDERATION, rounds=4000, cohort=2, **options)
    assert result.history.last("stationarity") < 1e-9


# Two splits: a client has one weight, the size of its upper (outermost) split, in the merge and in the objective.

TRAIN, VALID = (60, 10, 10), (5, 10, 40)


def two_splits(lower_level="client"):
    """Other rows in each split; a client's hypergradient in closed form, its means taken from the split they are of."""
    above, below = (quadratic(clients=3, rows=60, seed=seed) for seed in (3, 4))
    cut = lambda task, sizes: [{k: a[:n] for k, a in s.items()} for s, n in zip(task.shards, sizes, strict=True)]
    splits = {"train": cut(below, TRAIN), "valid": cut(above, VALID)}
    federation = fs.Federation({name: fs.Federation.from_clients(s)["train"] for name, s in splits.items()})
    problem = fs.Bilevel(upper, lower, jnp.zeros(3), lower_level=lower_level)
    mean = lambda split, name: np.stack([s[name].mean(axis=0) for s in splits[split]])
    return federation, problem, {n: mean("train", n) for n in "ABb"} | {n: mean("valid", n) for n in "tc"}


def affine_root(gradient, size):
    at_zero = gradient(np.zeros(size))
    return np.linalg.solve(np.stack([gradient(e) - at_zero for e in np.eye(size)], axis=1), -at_zero)


def own_lower(m, p):
    """∇h of Σ p_i f_i(x, y_i(x))."""

    def one(i, x):
        y = np.linalg.solve(m["A"][i], m["B"][i] @ x + m["b"][i])
        return x - m["c"][i] + m["B"][i].T @ np.linalg.solve(m["A"][i], y - m["t"][i])

    return lambda x: sum(p[i] * one(i, x) for i in range(3))


def common_lower(m, p):
    """∇h of Σ p_i f_i(x, y(x)), y that of Σ p_i g_i."""
    A, B, b, t, c = (np.tensordot(p, m[name], 1) for name in "ABbtc")

    def gradient(x):
        y = np.linalg.solve(A, B @ x + b)
        return x - c + B.T @ np.linalg.solve(A, y - t)

    return gradient


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "cohort"),
    [(fs.FedBiO(0.1, 0.3, 1), None), (fs.TrackedBiO(0.1, 0.3, 4), None), (fs.TrackedBiO(0.1, 0.3, 4), 2)],
)
def test_bilevel_methods_weigh_clients_by_their_upper_rows(method, cohort):
    federation, problem, m = two_splits()
    x = affine_root(own_lower(m, np.array(VALID) / sum(VALID)), 2)
    options = {"params": np.zeros(2), "batch_size": "all", "weights": "size", "evaluate_every": 3000}
    result = fs.run(problem, method, federation, rounds=3000, cohort=cohort, **options)
    np.testing.assert_allclose(result.solution(), x, atol=1e-10)
    assert result.history.last("stationarity") < 1e-10


@pytest.mark.slow
def test_a_common_lower_problem_has_the_same_weights_as_the_upper_one():
    federation, problem, m = two_splits("global")
    x = affine_root(common_lower(m, np.array(VALID) / sum(VALID)), 2)
    options = {"params": np.zeros(2), "batch_size": "all", "weights": "size", "evaluate_every": 400}
    method = fs.FedNest(0.1, 0.2, 0.15, 2, 5, terms=100, series="sum")
    result = fs.run(problem, method, federation, rounds=400, **options)
    np.testing.assert_allclose(result.solution(), x, atol=1e-6)
    assert result.history.last("stationarity") < 1e-6
    full = fs.full_data(federation, "size", problem=problem)
    np.testing.assert_allclose(problem.gradient(fs.Vector(jnp.asarray(x)), full).tree, 0, atol=1e-9)


def first_moment(x, e):
    return e["x"] @ x - e["y"]


def around(r, e):
    return 0.5 * (r - e["y"]) ** 2


@pytest.mark.parametrize("inner", ["global", "client"])
def test_nested_levels_of_several_splits_have_the_weights_of_the_last(inner):
    """With momentum 1 every round but the first is a step of gradient descent on the recorded objective."""
    rng = np.random.default_rng(5)
    rows = lambda n: {"x": rng.normal(size=(n, 3)), "y": rng.normal(size=n)}
    splits = {"train": [rows(n) for n in TRAIN], "valid": [rows(n) for n in VALID]}
    federation = fs.Federation({name: fs.Federation.from_clients(s)["train"] for name, s in splits.items()})
    problem = fs.Nested([first_moment, around], inner=inner, splits=("train", "valid"))
    p = np.array(VALID) / sum(VALID)
    x, h = np.stack([s["x"].mean(axis=0) for s in splits["train"]]), np.stack([s["y"].mean() for s in splits["train"]])
    y = np.stack([s["y"].mean() for s in splits["valid"]])
    if inner == "global":
        gradient = lambda w: (p @ x @ w - p @ h - p @ y) * (p @ x)
        method = fs.LevelwiseDRSCGD(0.1, 1.0, 1)
    else:
        gradient = lambda w: p @ ((x @ w - h - y)[:, None] * x)
        method = fs.MFCGD(0.1, 1, 1.0)
    options = {"params": START, "batch_size": "all", "weights": "size"}
    before, after = (fs.run(problem, method, federation, rounds=rounds, **options) for rounds in (1, 2))
    x1 = before.solution()
    np.testing.assert_allclose(before.history.last("stationarity"), np.linalg.norm(gradient(x1)), rtol=1e-12)
    np.testing.assert_allclose(after.solution(), x1 - 0.1 * gradient(x1), rtol=1e-12)


def test_a_problem_with_several_splits_must_say_which_one_is_counted():
    class Silent(fs.Bilevel):
        size_split = fs.Average.size_split

    federation, *_ = two_splits()
    problem, method = Silent(upper, lower, jnp.zeros(3)), fs.FedBiO(0.1, 0.3, 1)
    with pytest.raises(TypeError, match="must define size_split"):
        fs.run(problem, method, federation, rounds=1, params=np.zeros(2), weights="size")


# A pooled split belongs to no client.


def test_a_pooled_split_is_no_training_split():
    federation, problem, _ = two_splits()
    split = federation["valid"]
    pooled = Split(split.examples, np.array([0, split.size]), pooled=True)
    mixed = fs.Federation({"train": federation["train"], "valid": pooled})
    with pytest.raises(ValueError, match="split 'valid' is pooled"):
        fs.run(problem, fs.FedBiO(0.1, 0.3, 1), mixed, rounds=1, params=np.zeros(2))
