"""Data cleaning: the share of wrong labels is as given, and learned weights separate them."""

import jax
import numpy as np
from fedstrata_papers.fedbio import two_stage
from fedstrata_papers.fedbio.hyperclean import build
from fedstrata_papers.fedbio.two_stage import second_stage as after

import fedstrata as fs
from fedstrata.experiments import get

SMALL = {"source": "digits", "clients": 3, "rows": 120, "clean_rows": 60}


def test_wrong_labels_are_as_many_as_asked_for():
    right = build(**SMALL, wrong=0.0).federation["train"].examples
    dirty = build(**SMALL).federation["train"].examples
    changed = np.asarray(right["y"]) != np.asarray(dirty["y"])
    assert changed.sum() == round(0.4 * 360)
    assert np.array_equal(changed, np.asarray(dirty["wrong"]) == 1)
    assert np.array_equal(right["x"], dirty["x"])


def test_the_oracle_trains_on_right_labels_alone():
    problem, federation = build(**SMALL, known=True)
    full = fs.full_data(federation)
    x = fs.Vector(problem.init(jax.random.key(0)))
    only, _ = build(**SMALL, wrong=0.0)
    rows, right = full["train"], np.asarray(federation["train"].examples["wrong"]) == 0
    kept = fs.full_data(fs.Federation.from_clients([{k: np.asarray(v)[right] for k, v in rows.examples.items()}]))
    # Weights 1/0.6 on six tenths of the rows: the mean over the right ones.
    ours, theirs = jax.jit(lambda x: (problem.objective(x, full), only.objective(x, kept)))(x)
    assert np.isclose(ours, theirs, rtol=1e-5)


def test_learned_weights_trust_right_labels_more(monkeypatch):
    experiment = get("hyperclean")
    setup = experiment.build(**SMALL)
    options = {"rounds": 30, "seeds": 1, "evaluate_every": 30, "progress": False, "stationarity": False}
    stages = []
    monkeypatch.setattr(two_stage, "second_stage", lambda first, *rest: stages.append(first) or after(first, *rest))
    result = experiment.run("FedBiO", setup, **options)
    plain = experiment.run("FedAvg", setup, **options)
    assert result.history.last("test/accuracy")[0] > plain.history.last("test/accuracy")[0]
    weights = np.asarray(result.problem.loss.weights)  # the model of stage two is trained on the task itself
    assert np.all(weights == 1)
    (first,) = stages
    assert first.rounds == 30
    learned = np.asarray(first.problem.weights(first.solution()))
    wrong = np.asarray(setup.federation["train"].examples["wrong"]) == 1
    assert learned[~wrong].mean() > 2 * learned[wrong].mean()
    assert result.history.last("bytes_up")[0] > plain.history.last("bytes_up")[0]  # both stages are counted
    assert result.rounds == 60
