"""Experiments: found by folder, runnable as they are, and showing what they are there to show."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from pictures import drawn_texts, overlapping

import fedstrata as fs
from fedstrata import experiments
from fedstrata.base.directions import column
from fedstrata.data.sources import missing
from fedstrata.experiments import Experiment, get, sparse_logistic
from fedstrata.experiments.least_squares import optimum
from fedstrata.experiments.picture import picture
from fedstrata.experiments.tuning import tuned
from fedstrata.report import History
from fedstrata.simulate.evaluate import modes_of
from fedstrata.simulate.options import RunOptions
from fedstrata.simulate.run import prepare, recorded

BIB = Path(__file__).parents[2] / "docs" / "papers.bib"
EMBEDDED = ("digits", "breast_cancer", "lasso", "least_squares")  # need no files


def test_names_are_unique_and_known():
    for name, experiment in experiments.available().items():
        assert name == experiment.name
        assert experiment.summary
        assert {*experiment.methods} <= {*fs.algorithms.known()}
    with pytest.raises(ValueError, match="did you mean digits"):
        get("digit")
    for name, paper in experiments.reproductions().items():
        assert name == paper.paper
        assert paper.figures
        assert f"{{{paper.reference}," in BIB.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", EMBEDDED)
def test_the_default_methods_improve_the_objective(name):
    experiment = get(name)
    setup = experiment.build()
    for method in experiment.methods:
        shown = "stationarity" in experiment.panels
        result = experiment.run(method, setup, rounds=5, seeds=1, stationarity=shown)
        history = result.history
        assert not result.diverged
        assert history.last("objective")[0] < 0.9 * history["objective"][0, 0]
        assert {*experiment.panels} <= {*history.columns}


@pytest.mark.parametrize("name", ["digits", "breast_cancer", "heart_disease", "mnist"])
def test_chosen_values_come_from_the_grid(name):
    experiment = get(name)
    assert {*experiment.grids} == {*experiment.methods}
    steps = {tuple(grid["step_size"]) for grid in experiment.grids.values()}
    assert len(steps) == 1, "every method is given the same step sizes"
    for method, grid in experiment.grids.items():
        assert all(experiment.methods[method][key] in values for key, values in grid.items())


FILES = {
    **{"fednmap": "mnist", "mnist": "mnist", "sparse_logistic": "libsvm"},
    **{"heart_disease": "heart_disease", "hospitals": "heart_disease"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(experiments.available()))
def test_every_recorded_column_declares_its_direction(name, monkeypatch):
    if name in FILES and missing(FILES[name]):
        pytest.skip(f"needs the files of {FILES[name]}")
    zeros = lambda objective, settings: np.zeros(objective.x.shape[1] + 1)
    monkeypatch.setattr(sparse_logistic, "kept_reference", zeros)  # takes seconds, and only its shape matters here
    experiment = get(name)
    setup, kinds = experiment.build(), {}
    for method in map(experiment.algorithm, experiment.methods):
        problem = experiment.problem_for(method, setup)
        kinds[type(problem), type(method).diagnose, type(method).observe] = method, problem
    undeclared = {}
    for method, problem in kinds.values():
        options = experiment.run_options(method, setup, seeds=1) | {"execution": "vmap", "per_client": True}
        columns = recorded(prepare(problem, method, setup.federation, RunOptions(**options)))
        undeclared |= {c: method for c in columns if column(c, modes_of(problem, method)) is None}
    assert undeclared == {}


@pytest.mark.slow
@pytest.mark.parametrize("column", ["objective", "test/accuracy"])
@pytest.mark.parametrize("heaviest", [1.0, 100.0])  # megabytes beside those of the others
def test_no_two_words_of_the_picture_overlap(column, heaviest, tmp_path):
    """As in the demonstration: several methods that send nothing end at almost the same value."""
    rounds = np.broadcast_to(np.arange(20), (3, 20))
    alike = lambda gap: 0.9 + gap - 0.3 / (1 + rounds) + 0.01 * np.arange(3)[:, None]
    sent = lambda megabytes: {"bytes_up": megabytes * 1e6 * rounds, "bytes_down": 0 * rounds}

    def history(number):
        values = {name: alike(1e-3 * number) for name in ("objective", "test/accuracy", "other")}
        traffic = sent(0.0 if number < 5 else heaviest if number == 5 else 1.0)
        return History({"seed": [0, 1, 2]}, {"round": rounds, **values, **traffic})

    histories = {f"method, trained_on=site {number}": history(number) for number in range(9)}
    figure = picture(histories, [column, "other"], "demo: 4 clients, 3 seeds", path=tmp_path / "p.png")
    assert overlapping(figure) == []
    assert len(drawn_texts(figure)) > 2 * 9 + 4
    edge = figure.bbox
    assert all(edge.contains(*corner) for t in drawn_texts(figure) for corner in t.get_window_extent().get_points())
    assert figure.axes[0].get_xscale() == ("log" if heaviest == 100 else "linear")


def test_digits_has_different_clients_and_a_test_split():
    federation = get("digits").build().federation
    assert (federation.clients, federation.classes) == (20, 10)
    assert sum(split.size for split in federation.splits.values()) == 1797
    labels = [np.bincount(federation["train"].shard(i)["y"], minlength=10) for i in range(20)]
    shares = np.array([counts / counts.sum() for counts in labels])
    assert shares.max(axis=1).mean() > 0.3, "some label dominates a typical client"


def test_the_optimum_of_least_squares_is_one():
    setup = get("least_squares").build(clients=4, rows=9, features=3)
    full = fs.full_data(setup.federation, dtype=np.float64)
    parts = [setup.federation["train"].shard(i) for i in range(4)]
    best = optimum(parts)
    x = fs.Vector({"weight": np.asarray(best[None, :3]), "bias": np.asarray(best[3:])})
    stationarity, found = jax.jit(lambda x: (setup.problem.stationarity(x, full), setup.problem.evaluate(x, full)))(x)
    assert stationarity < 1e-12
    assert found["distance"] < 1e-12


def test_scaffold_finds_the_optimum_where_fedavg_drifts():
    experiment = get("least_squares")
    setup = experiment.build()
    end = {
        name: experiment.run(name, setup, stationarity=False).history.last("distance")[0]
        for name in ("FedAvg", "SCAFFOLD")
    }
    assert end["SCAFFOLD"] < 1e-8
    assert end["FedAvg"] > 1e-2


def test_without_disagreement_fedavg_needs_no_correction():
    """Equal slopes and no noise worth the name: every client's minimum is the same, so there is nothing to drift to."""
    experiment = get("least_squares")
    ends = [
        experiment.run("FedAvg", experiment.build(spread=spread), rounds=200, stationarity=False).history.last(
            "distance"
        )[0]
        for spread in (0.0, 1.0)
    ]
    assert ends[0] < 0.1 * ends[1]


def test_settings_fall_back_to_the_extended_method_then_to_common():
    digits = get("digits")
    assert digits.algorithm("FedYogi").server_step_size == digits.methods["FedAdam"]["server_step_size"]
    assert digits.algorithm("FedOpt").step_size == digits.common["step_size"]
    assert digits.algorithm("FedAvg", step_size=0.7).step_size == 0.7
    with pytest.raises(ValueError, match="did you mean mu"):
        digits.algorithm("FedProx", muu=1)
    bare = dataclasses.replace(digits, methods={}, common={})
    with pytest.raises(ValueError, match="step_size"):
        bare.algorithm("FedAvg")


def test_a_centralised_reference_uses_as_many_examples():
    experiment = get("digits")
    setup = experiment.build(clients=5)
    ends = {
        n: experiment.run(n, setup, rounds=1, seeds=1, cohort=3, stationarity=False).history.last("samples")[0]
        for n in ("CentralSGD", "FedAvg")
    }
    assert ends["CentralSGD"] == ends["FedAvg"] == 3 * 10 * experiment.batch_size


def test_tuning_picks_the_step_that_converges():
    """Of a useless, a good and a diverging step size the good one is chosen."""
    original = get("breast_cancer")
    grids = {"FedAvg": {"step_size": (1e-6, 0.3, 1e7)}}
    experiment: Experiment = dataclasses.replace(original, grids=grids, rounds=5)
    ((name, found),) = tuned(experiment)
    assert (name, found.chosen) == ("FedAvg", {"step_size": 0.3})


@pytest.mark.slow
def test_the_picture_has_a_row_per_column_and_every_label(tmp_path):
    experiment = get("least_squares")
    setup = experiment.build(clients=3, rows=5, features=2)
    names = ("CentralSGD", "FedAvg", "SCAFFOLD")
    histories = {name: experiment.run(name, setup, rounds=5).history for name in names}
    figure = picture(histories, experiment.panels, "title", path=tmp_path / "p.png")
    assert len(figure.axes) == 4
    left, right = figure.axes[:2]
    assert {*names} <= {text.get_text() for text in right.texts}
    end = histories["CentralSGD"].last("distance")[0]
    np.testing.assert_allclose(left.lines[0].get_ydata(), [end, end])
    assert "horizontal lines on the left" in figure._supxlabel.get_text()
    assert "rounds" in figure.axes[3].get_xlabel()
    megabytes = left.lines[-1].get_xdata()
    history = histories["SCAFFOLD"]
    np.testing.assert_allclose(megabytes, (history["bytes_up"] + history["bytes_down"])[0] / 1e6)
    assert (tmp_path / "p.png").stat().st_size > 0
