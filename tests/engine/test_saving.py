"""What a server keeps: the model can be loaded and used, and exported for those who have only JAX."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.deploy.in_process import advance, in_process_run
from fedstrata.engine.saving import keep_model, threshold_for
from fedstrata.models import MLP, Raveled

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 6, 3))
MODEL = MLP((3, 4, 1))


def kept(folder, loss, y):
    """A deployed run of two rounds, and its solution after the server has kept it."""
    federation = fs.Federation.from_clients([{"x": x, "y": y(x)} for x in X])
    problem = fs.Average(loss)
    server, _, _ = in_process_run(problem, fs.FedAvg(0.1, 2), federation, batch_size=2)
    x = server.solution(advance(server, 2))
    return keep_model(folder, server.problem, x, {"algorithm": "FedAvg", "rounds": 2}), x.tree


def expected(params, x):
    hidden = np.maximum(x @ np.asarray(params[0]["weight"]).T + np.asarray(params[0]["bias"]), 0)
    return hidden @ np.asarray(params[1]["weight"])[0] + np.asarray(params[1]["bias"])[0]


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_server_keeps_a_model_that_predicts(task, tmp_path):
    loss = {"classification": fs.losses.Classification, "regression": fs.losses.Regression}[task](MODEL)
    label = {"classification": lambda x: (x[:, 0] > 0).astype(np.int32), "regression": lambda x: x[:, 0]}[task]
    files, params = kept(tmp_path / "run", loss, label)
    assert [f.name for f in files] == ["solution.npz", "model.npz"]
    trained = fs.load_model(tmp_path / "run" / "model.npz")
    assert trained.info == {"algorithm": "FedAvg", "rounds": 2}
    x = RNG.normal(size=(50, 3))
    np.testing.assert_allclose(trained.scores(x), expected(params, x), rtol=1e-12)
    wanted = expected(params, x) if task == "regression" else expected(params, x) > 0
    np.testing.assert_allclose(trained.predict(x), wanted, rtol=1e-12)
    with np.load(tmp_path / "run" / "solution.npz") as arrays:
        np.testing.assert_array_equal(arrays["params[0]['weight']"], params[0]["weight"])
        assert len(arrays.files) == 4


def test_a_raveled_model_is_kept_with_its_names(tmp_path):
    loss = fs.losses.Regression(Raveled(MODEL))
    _, flat = kept(tmp_path, loss, lambda x: x[:, 0])
    x = RNG.normal(size=(5, 3))
    wanted = expected(Raveled(MODEL).unravel(flat), x)
    np.testing.assert_allclose(fs.load_model(tmp_path / "model.npz").predict(x), wanted, rtol=1e-12)


def test_parameters_without_a_model_are_kept_by_their_names(tmp_path):
    problem = fs.Average(lambda w, e: (w["a"] - e["x"]) ** 2)
    files = keep_model(tmp_path, problem, fs.Vector({"a": jnp.arange(3.0)}), {})
    assert [f.name for f in files] == ["solution.npz"]
    with np.load(files[0]) as arrays:
        np.testing.assert_array_equal(arrays["params['a']"], [0.0, 1.0, 2.0])


@pytest.mark.slow
def test_a_ranking_is_saved_with_the_threshold_that_keeps_the_share_of_positives(tmp_path):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(90, 3)) + 5, rng.permutation(np.repeat([0, 1], [70, 20]))
    clinics = fs.Federation.from_arrays({"x": x, "y": y}, clients=np.arange(90) % 3).by_label()
    problem = fs.Pairwise(fs.models.Linear(3), fs.pair_losses.SquaredHinge())
    result = fs.run(problem, fs.FedX1(0.001, 2), clinics, rounds=3, batch_size=4, seeds=2)
    for seed in (0, 1):
        result.save_model(tmp_path / "model.npz", seed=seed)
        trained = fs.load_model(tmp_path / "model.npz")
        assert trained.task == "ranking"
        assert trained.predict(x).sum() == 20
        scores = x @ result.solution(seed=seed)["weight"][0]  # the bias moves no rank
        np.testing.assert_array_equal(np.argsort(trained.scores(x)), np.argsort(scores))
        np.testing.assert_array_equal(np.sort(scores)[-20:], np.sort(scores[trained.predict(x) == 1]))


@pytest.mark.slow
def test_a_ranking_by_another_second_set_counts_positives_among_the_training_rows(tmp_path):
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(40, 3)), np.repeat([0, 7], [31, 9])
    clinics = fs.Federation.from_arrays({"x": x, "y": y}, clients=np.arange(40) % 2).by_label(positive=7)
    precision = fs.Pairwise(fs.models.Linear(3), fs.pair_losses.AveragePrecision(), second="train", positive=7)
    result = fs.run(precision, fs.FedX2(0.05, 2), clinics, rounds=2, batch_size=4)
    result.save_model(tmp_path / "model.npz")
    assert fs.load_model(tmp_path / "model.npz").predict(x).sum() == 9


def test_a_ranking_without_its_training_data_gives_no_labels(tmp_path):
    """A server that keeps what sites trained has seen no row of theirs."""
    problem = fs.Pairwise(fs.models.Linear(3), fs.pair_losses.SquaredHinge())
    keep_model(tmp_path, problem, fs.Vector(fs.models.Linear(3).init()), {})
    trained = fs.load_model(tmp_path / "model.npz")
    assert trained.scores(X[0]).shape == (6,)
    with pytest.raises(ValueError, match="give threshold="):
        trained.predict(X[0])
    np.testing.assert_array_equal(trained.predict(X[0], threshold=-1.0), np.ones(6))


@pytest.mark.parametrize(
    "scores", [[0.0], [2.0, 2.0, 2.0], [3.0, 1.0, 1.0, 1.0, -4.0], [1e20, -1e20, 5.0], [1.0, 1.0 + 2.0**-52]]
)
def test_a_threshold_comes_as_near_to_a_count_as_ties_allow(scores):
    scores = np.array(scores)
    possible = [int((scores > t).sum()) for t in [-np.inf, *scores]]
    for count in range(len(scores) + 1):
        found = threshold_for(scores, count)
        assert np.isfinite(found)
        assert abs((scores > found).sum() - count) == min(abs(p - count) for p in possible)


@pytest.mark.parametrize(
    "loss", [lambda w, e: (w["a"] @ e["x"] - e["y"]) ** 2, fs.losses.Regression(lambda w, x: w["a"] @ x)]
)
def test_parameters_of_a_plain_function_are_saved_and_loaded(loss, tmp_path):
    federation = fs.Federation.from_clients([{"x": x, "y": x[:, 0]} for x in X])
    params = {"a": np.zeros(3), "rest": (np.ones(2),)}
    result = fs.run(fs.Average(loss), fs.FedAvg(0.1), federation, rounds=2, params=params)
    result.save_model(tmp_path / "model.npz")
    trained = fs.load_model(tmp_path / "model.npz")
    np.testing.assert_array_equal(trained.params["a"], result.solution()["a"])
    assert isinstance(trained.params["rest"], tuple)
    assert trained.info == {"algorithm": "FedAvg", "rounds": 2}
    with pytest.raises(ValueError, match="parameters without a model"):
        trained.predict(X[0])
    model, values = lambda w, x: w["a"] @ x, X[0] @ result.solution()["a"]
    given = fs.load_model(tmp_path / "model.npz", model=model)
    np.testing.assert_allclose(given.scores(X[0]), values, rtol=1e-12)
    if isinstance(loss, fs.losses.Regression):  # which declares the kind of its outputs
        np.testing.assert_allclose(given.predict(X[0]), values, rtol=1e-12)
        return
    with pytest.raises(ValueError, match=r"does not say what its outputs mean; use scores\(x\), or load_model"):
        given.predict(X[0])
    labels = fs.load_model(tmp_path / "model.npz", model=model, task="classification").predict(X[0])
    np.testing.assert_array_equal(labels, values > 0)


USER = """
import sys
sys.modules["fedstrata"] = None  # importing it fails
import jax, numpy as np
from pathlib import Path
jax.config.update("jax_enable_x64", True)
program = jax.export.deserialize(bytearray(Path(sys.argv[1]).read_bytes()))
x = np.load(sys.argv[2])
np.save(sys.argv[3], program.call(x))
assert program.call(x[:1]).shape == (1,)
assert set(program.platforms) == {"cpu", "cuda"}
"""


def test_an_exported_model_runs_without_the_library(tmp_path):
    pytest.importorskip("flatbuffers")
    _, params = kept(tmp_path, fs.losses.Regression(MODEL), lambda x: x[:, 0])
    fs.load_model(tmp_path / "model.npz").export(tmp_path / "model.stablehlo")
    x = RNG.normal(size=(7, 3))
    np.save(tmp_path / "x.npy", x)
    names = [str(tmp_path / name) for name in ("model.stablehlo", "x.npy", "scores.npy")]
    subprocess.run([sys.executable, "-c", USER, *names], check=True, timeout=120)
    np.testing.assert_allclose(np.load(tmp_path / "scores.npy"), expected(params, x), rtol=1e-12)
