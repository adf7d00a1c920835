"""Saved models: bit-exact, no pickle, and clear errors for files that are something else."""

import json
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from fedstrata.models import CNN, MLP, Linear, Model, TrainedModel, load_model, save_model

MODELS = [Linear(4, 3), MLP((4, 6, 3), activation="tanh"), CNN((4, 4, 1), channels=(2,), outputs=3, hidden=5)]


def random_params(model: Model, dtype=None):
    leaves, tree = jax.tree.flatten(model.init(jax.random.key(0), dtype))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [jax.random.normal(k, a.shape, a.dtype) for k, a in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, leaves)


class Own(Model):
    def init(self, key, dtype=None):
        return {"scale": jnp.ones(2, dtype)}

    def __call__(self, params, x):
        return params["scale"] * x


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("model", MODELS, ids=lambda m: type(m).__name__)
def test_round_trip_is_exact(model, x64, tmp_path):
    with jax.enable_x64(x64):
        params = random_params(model)
        info = {"label": "FedAvg", "rounds": 100, "nested": {"accuracy": 0.1 + 0.2}}
        path = save_model(tmp_path / "folder" / "model.npz", model, params, info)
        loaded = load_model(path)
        assert loaded.model == model
        assert loaded.info == info
        assert eqx.tree_equal(loaded.params, params)
        assert jax.tree.leaves(loaded.params)[0].dtype == (jnp.float64 if x64 else jnp.float32)


def test_scores_and_labels_match_the_model(tmp_path):
    model = MLP((4, 6, 3))
    params = random_params(model)
    x = np.random.default_rng(0).normal(size=(2100, 4)).astype(np.float32)  # more than two batches of rows
    trained = load_model(save_model(tmp_path / "m.npz", model, params, {}))
    wanted = np.stack([model(params, row) for row in jnp.asarray(x[:20])])
    np.testing.assert_allclose(trained.scores(x)[:20], wanted, rtol=1e-5, atol=1e-5)
    assert trained.scores(x).shape == (2100, 3)
    np.testing.assert_array_equal(trained.predict(x), trained.scores(x).argmax(axis=1))
    assert trained.predict(x).dtype == np.int32
    with pytest.raises(ValueError, match="one example must hold 4 numbers"):
        trained.predict(x[:, :3])
    with pytest.raises(ValueError, match="batch of at least one"):
        trained.predict(x[:0])


def test_one_output_is_log_odds_or_a_value(tmp_path):
    params = {"weight": jnp.ones((1, 1)), "bias": jnp.zeros(1)}
    x = np.array([[-2.0], [3.0]])
    path = save_model(tmp_path / "m.npz", Linear(1), params)
    np.testing.assert_array_equal(load_model(path).predict(x), [0, 1])
    path = save_model(tmp_path / "m.npz", Linear(1), params, task="regression")
    np.testing.assert_array_equal(load_model(path).predict(x), [-2.0, 3.0])


ONE = {"weight": jnp.ones((1, 1)), "bias": jnp.zeros(1)}


def test_a_ranking_has_labels_only_by_a_threshold(tmp_path):
    x = np.array([[-2.0], [0.5], [3.0]])
    bare = load_model(save_model(tmp_path / "bare.npz", Linear(1), ONE, task="ranking"))
    np.testing.assert_array_equal(bare.scores(x), [-2.0, 0.5, 3.0])
    with pytest.raises(ValueError, match=r"no natural zero.* give threshold="):
        bare.predict(x)
    np.testing.assert_array_equal(bare.predict(x, threshold=1.0), [0, 0, 1])
    limit = 0.1 + 0.2  # is not 0.3, and must come back as it was
    kept = load_model(save_model(tmp_path / "kept.npz", Linear(1), ONE, task="ranking", threshold=limit))
    assert kept.threshold == limit
    np.testing.assert_array_equal(kept.predict(x), [0, 1, 1])
    np.testing.assert_array_equal(kept.predict(x, threshold=-3), [1, 1, 1])
    np.testing.assert_array_equal(kept.predict(x, threshold=3.0), [0, 0, 0])  # above it, not at it


def test_a_threshold_is_for_one_score():
    x = np.ones((2, 4))
    several = TrainedModel(Linear(4, 3), random_params(Linear(4, 3)))
    value = TrainedModel(Linear(4), random_params(Linear(4)), task="regression")
    for model, words in ((several, "a classifier with 3 outputs"), (value, "a regression")):
        with pytest.raises(ValueError, match=f"threshold=0.5 is for a single score; this is {words}"):
            model.predict(x, threshold=0.5)
    with pytest.raises(ValueError, match="threshold='high' must be a finite number"):
        TrainedModel(Linear(1), ONE).predict(np.ones((2, 1)), threshold="high")  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["predict", "scores"])
def test_rows_that_are_not_finite_are_refused_by_name(method):
    of = lambda model: getattr(TrainedModel(model, random_params(model)), method)
    x = np.ones((5, 4))
    x[3, 1], x[4, 0] = np.nan, np.inf
    with pytest.raises(ValueError, match=r"row 3, column 1 is nan \(2 of 5 rows"):
        of(Linear(4))(x)
    with pytest.raises(ValueError, match="row 1, column 0 is inf"):
        of(Linear(4))([[1.0] * 4, [np.inf] * 4])
    frame = pd.DataFrame(x, columns=["age", "bmi", "a", "b"], index=[f"patient {i}" for i in range(5)])
    with pytest.raises(ValueError, match="row 'patient 3', column 'bmi' is nan"):
        of(Linear(4))(frame)
    with pytest.raises(ValueError, match="row 'patient 0', column 'age' is nan"):
        of(Linear(4))(frame.fillna(0.0).assign(age=pd.array([None, 1, 2, 3, 4], "Int64")))
    image = np.zeros((2, 4, 4, 1))
    image[1, 2, 3, 0] = -np.inf
    with pytest.raises(ValueError, match="row 1, column 2, 3, 0 is -inf"):
        of(CNN((4, 4, 1), channels=(2,), outputs=3, hidden=5))(image)


def test_a_model_that_gives_nan_labels_nothing():
    broken = TrainedModel(Linear(1), {"weight": jnp.full((1, 1), jnp.nan), "bias": jnp.zeros(1)})
    with pytest.raises(ValueError, match="the model gives NaN for row 0"):
        broken.predict([[1.0], [2.0]])


def test_frames_and_rows_of_mixed_kinds_are_numbers():
    model = TrainedModel(Linear(3), random_params(Linear(3)))
    frame = pd.DataFrame({"age": [1.5, -2.0], "smokes": [True, False], "n": pd.array([3, -4], "Int64")})
    wanted = model.scores(np.array([[1.5, 1, 3], [-2.0, 0, -4]]))
    np.testing.assert_array_equal(model.scores(frame), wanted)
    np.testing.assert_array_equal(model.scores(frame.to_numpy()), wanted)  # an array of objects
    np.testing.assert_array_equal(model.predict(frame), wanted > 0)
    np.testing.assert_array_equal(model.scores(frame[["smokes"] * 3]), model.scores(np.array([[1.0] * 3, [0.0] * 3])))
    with pytest.raises(TypeError, match="columns job are not numbers; choose those to use"):
        model.predict(frame.assign(job="cook"))


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ([["a", "b", "c"]], "x must hold numbers, one row per example, got dtype <U1"),
        ({"x": np.ones((2, 3))}, "got a dict"),
        (None, "got a NoneType"),
        ([[1.0, 2.0, 3.0], [1.0]], "rows of different lengths"),
        (np.ones(3), r"x is one example, of shape \(3,\); a batch of one is x\[None\]"),
    ],
)
def test_what_is_no_batch_of_numbers_is_named(x, words):
    with pytest.raises((TypeError, ValueError), match=words):
        TrainedModel(Linear(3), random_params(Linear(3))).predict(x)


class Pair(eqx.Module):
    """Parameters of a class outside FedStrata."""

    left: jax.Array
    right: jax.Array


TREES = [jnp.arange(3.0), {"a": jnp.ones((2, 1)), "b": (jnp.zeros(2), [jnp.ones(1), {"c": jnp.arange(2.0)}])}, [], {}]


@pytest.mark.parametrize("params", TREES, ids=["array", "nested", "list", "dict"])
def test_parameters_without_a_model_come_back_as_they_were(params, tmp_path):
    loaded = load_model(save_model(tmp_path / "p.npz", None, params, {"rounds": 3}))
    assert eqx.tree_equal(loaded.params, params)
    assert loaded.info == {"rounds": 3}
    for method in (loaded.predict, loaded.scores, loaded.export):
        with pytest.raises(ValueError, match=r"parameters without a model.*load_model\(path, model=function\)"):
            method(tmp_path / "x")


def test_a_function_given_with_parameters_predicts(tmp_path):
    path = save_model(tmp_path / "p.npz", lambda w, x: w @ x, jnp.array([1.0, -2.0]), task="regression")  # type: ignore
    x = np.random.default_rng(0).normal(size=(5, 2))
    np.testing.assert_allclose(load_model(path, lambda w, x: w @ x).predict(x), x @ [1.0, -2.0], rtol=1e-12)
    with pytest.raises(TypeError, match="model is the class Linear, not an instance"):
        load_model(path, Linear)
    with pytest.raises(ValueError, match="does not fit Linear"):
        load_model(path, Linear(2))


def test_parameters_of_own_classes_need_their_structure(tmp_path):
    params = Pair(jnp.ones(2), jnp.zeros((1, 3)))
    path = save_model(tmp_path / "p.npz", None, {"pair": params})
    with pytest.raises(ValueError, match="parameters of other classes; give like="):
        load_model(path)
    loaded = load_model(path, like={"pair": Pair(jnp.zeros(2), jnp.zeros((1, 3)))})
    assert eqx.tree_equal(loaded.params, {"pair": params})
    with pytest.raises(ValueError, match="does not fit these parameters"):
        load_model(path, like={"pair": Pair(jnp.zeros(5), jnp.zeros((1, 3)))})


def test_files_of_the_first_format_are_still_read(tmp_path):
    """They have neither threshold nor structure."""
    header = {"format": "fedstrata-model", "version": 1, "class": "Linear", "config": {"features": 1, "outputs": 1}}
    header |= {"task": "classification", "info": {}}
    arrays = {"params['weight']": np.ones((1, 1)), "params['bias']": np.zeros(1)}
    np.savez(tmp_path / "old.npz", fedstrata=np.array(json.dumps(header)), **arrays)
    np.testing.assert_array_equal(load_model(tmp_path / "old.npz").predict([[-1.0], [1.0]]), [0, 1])


def test_own_models_are_given_again(tmp_path):
    path = save_model(tmp_path / "m.npz", Own(), {"scale": jnp.array([2.0, 3.0])})
    with pytest.raises(ValueError, match="holds a Own, which is not part of FedStrata"):
        load_model(path)
    np.testing.assert_array_equal(load_model(path, Own()).scores(np.ones((1, 2))), [[2.0, 3.0]])
    with pytest.raises(ValueError, match="does not fit Linear"):
        load_model(path, Linear(2, 2))


def test_wrong_arguments_are_refused_before_a_file_appears(tmp_path):
    path, params = tmp_path / "m.npz", random_params(Linear(4, 3))
    with pytest.raises(ValueError, match="params do not fit"):
        save_model(path, Linear(4, 2), params)
    with pytest.raises(TypeError, match="info must hold only what JSON can"):
        save_model(path, Linear(4, 3), params, {"array": np.ones(2)})
    with pytest.raises(ValueError, match="unknown task"):
        save_model(path, Linear(4, 3), params, task="sorting")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"the class Linear, not an instance; give a model, e.g. fs.models.Linear\(3\)"):
        save_model(path, Linear, params)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="path is a Linear; give the name of a file"):
        save_model(Linear(4, 3), params, path)  # type: ignore[arg-type]
    with pytest.raises(IsADirectoryError, match="is a folder; name a file in it"):
        save_model(tmp_path, Linear(4, 3), params)
    with pytest.raises(ValueError, match="threshold=nan must be a finite number"):
        save_model(path, Linear(4, 3), params, threshold=float("nan"))
    with pytest.raises(TypeError, match="bfloat16"):
        save_model(path, Linear(4, 3), random_params(Linear(4, 3), jnp.bfloat16))
    assert not path.exists()


def test_float64_is_not_rounded_silently(tmp_path):
    with jax.enable_x64(True):
        path = save_model(tmp_path / "m.npz", Linear(4, 3), random_params(Linear(4, 3)))
    with jax.enable_x64(False), pytest.raises(ValueError, match="JAX_ENABLE_X64"):
        load_model(path)


def test_files_of_other_kinds(tmp_path: Path):
    path = tmp_path / "m.npz"
    with pytest.raises(FileNotFoundError):
        load_model(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="not a saved FedStrata model"):
        load_model(path)
    np.savez(path, weight=np.ones(3))
    with pytest.raises(ValueError, match="not a saved FedStrata model"):
        load_model(path)
    np.savez(path, fedstrata=np.array([{"format": "pickled"}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        load_model(path)


def test_a_damaged_file_is_never_read_as_another_model(tmp_path):
    model = Linear(2, 2)
    params = random_params(model)
    path = save_model(tmp_path / "m.npz", model, params, {"a": 1})
    whole = path.read_bytes()
    cut = [whole[:length] for length in range(0, len(whole), 7)]
    flipped = [whole[:i] + bytes([whole[i] ^ (1 << i % 8)]) + whole[i + 1 :] for i in range(len(whole))]
    refused = 0
    for content in cut + flipped:
        path.write_bytes(content)
        complaint, loaded = "", None
        try:
            loaded = load_model(path)
        except ValueError as error:
            complaint = str(error)
        if loaded is None:
            assert str(path) in complaint
            refused += 1
        else:  # a bit of the zip's own bookkeeping that means nothing here
            assert eqx.tree_equal(loaded.params, params)
            assert (loaded.model, loaded.info) == (model, {"a": 1})
    assert refused > len(cut) + len(flipped) // 2


def test_a_trained_model_needs_no_file():
    trained = TrainedModel(Linear(1), {"weight": jnp.ones((1, 1)), "bias": jnp.ones(1)}, task="regression")
    np.testing.assert_array_equal(trained.predict([[1.0], [2.0]]), [2.0, 3.0])


@pytest.mark.parametrize("model", MODELS, ids=lambda m: type(m).__name__)
def test_an_exported_program_computes_the_scores(model, tmp_path):
    pytest.importorskip("flatbuffers")
    trained = TrainedModel(model, random_params(model))
    x = np.random.default_rng(0).normal(size=(5, 4, 4, 1) if isinstance(model, CNN) else (5, 4))
    read = lambda path: jax.export.deserialize(bytearray(path.read_bytes()))
    program = read(trained.export(tmp_path / "folder" / "any.stablehlo"))
    for rows in (1, 5):
        np.testing.assert_allclose(program.call(x[:rows]), trained.scores(x[:rows]), rtol=1e-12)
    fixed = read(trained.export(tmp_path / "three.stablehlo", batch=3))
    np.testing.assert_allclose(fixed.call(x[:3]), trained.scores(x[:3]), rtol=1e-12)
    with pytest.raises(ValueError, match="3"):
        fixed.call(x)


def test_a_model_of_any_input_is_exported_for_a_given_one(tmp_path):
    trained = TrainedModel(Own(), {"scale": jnp.array([2.0, 3.0])})
    with pytest.raises(ValueError, match="Own fixes no input; give shape="):
        trained.export(tmp_path / "m.stablehlo")
    pytest.importorskip("flatbuffers")
    program = jax.export.deserialize(bytearray(trained.export(tmp_path / "m.stablehlo", (2,)).read_bytes()))
    np.testing.assert_array_equal(program.call(np.ones((1, 2))), [[2.0, 3.0]])


def test_what_an_export_lacks_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    monkeypatch.delitem(sys.modules, "jax._src.export.serialization", raising=False)
    with pytest.raises(ImportError, match="pip install flatbuffers"):
        TrainedModel(Linear(1), random_params(Linear(1))).export(tmp_path / "m.stablehlo")
    assert not list(tmp_path.iterdir())
