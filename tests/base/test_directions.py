"""Directions of columns: declared, never guessed; what chooses by an undeclared column is refused before it runs."""

import jax.numpy as jnp
import numpy as np
import pytest
from references import least_squares, squared_error
from sklearn.metrics import roc_curve

import fedstrata as fs
from fedstrata.base.directions import COLUMNS, column, sign
from fedstrata.problems.sample_weights import SampleWeighted
from fedstrata.report import History

TASK = least_squares(clients=3, sizes=(12, 16), seed=7)
VALID = TASK.federation.hold_out("valid", 0.3)
OPTIONS = {"rounds": 6, "batch_size": "all", "params": np.zeros(3)}


def share(w, example):
    """A metric of a user: how often the sign of the target is found."""
    return (jnp.dot(w, example["x"]) * example["y"] > 0).astype(w.dtype)


PLAIN = fs.Average(squared_error, metrics={"share": share})
DECLARED = fs.Average(squared_error, metrics={"share": fs.Metric(share, "max")})


@pytest.fixture(scope="module")
def clinics():
    """Two features, of which the first ranks: short steps stay at the bad start, longer ones turn the score round."""
    rng = np.random.default_rng(0)
    label = (np.arange(240) % 3 == 0).astype(int)
    x = np.stack([label + 0.4 * rng.normal(size=240), rng.normal(size=240)], axis=1)
    federation = fs.Federation.from_arrays({"x": x, "y": label}, np.arange(240) % 4, classes=2)
    return federation.hold_out("valid", 0.4).by_label()


RANKING = fs.Pairwise(lambda w, e: w @ e["x"], fs.pair_losses.Square(), metrics=("tpauc_0.5_0.5",))
AWAY = np.array([-0.2, 0.4])  # ranks badly, and long before the last round well


def two_way(w, split, low=0.5, high=0.5):
    """The area with TPR ≥ low and FPR ≤ high, from scikit-learn's curve."""
    fpr, tpr, _ = roc_curve(split.examples["y"], np.asarray(split.examples["x"]) @ w)
    grid = np.linspace(0, high, 20001)
    return np.trapezoid(np.maximum(np.interp(grid, fpr, tpr) - low, 0), grid) / (high * (1 - low))


@pytest.mark.slow
def test_two_way_partial_auc_is_maximised(clinics):
    options = {"rounds": 40, "batch_size": "all", "params": AWAY}
    method, steps = fs.FedX1(0.01, 1), [1e-6, 0.03]
    ends = {}
    for step in steps:
        run = fs.run(RANKING, fs.FedX1(step, 1), clinics, **options)
        ends[step] = two_way(np.asarray(run.solution()), clinics["valid"])
        assert run.history.last("valid/tpauc_0.5_0.5")[0] == pytest.approx(ends[step], abs=1e-3)
    assert ends[0.03] > ends[1e-6] + 0.3, "the long step is the good one"
    tuned = fs.tune(
        RANKING, method, clinics, {"step_size": steps}, select="valid/tpauc_0.5_0.5", seeds=1, final_seeds=1, **options
    )
    assert tuned.chosen == {"step_size": 0.03}
    swept = fs.run(RANKING, method, clinics, sweep={"step_size": steps}, select="valid/tpauc_0.5_0.5", **options)
    history = swept.history
    assert history.best_setting("valid/tpauc_0.5_0.5") == {"step_size": 0.03}
    np.testing.assert_array_equal(
        history.best("valid/tpauc_0.5_0.5"), history["valid/tpauc_0.5_0.5"].max(axis=-1), strict=True
    )
    kept = [two_way(np.asarray(swept.solution(step_size=step)), clinics["valid"]) for step in steps]
    np.testing.assert_allclose(kept, history["valid/tpauc_0.5_0.5"].max(axis=-1)[:, 0], atol=1e-3)
    marked = fs.compare(swept, columns=["valid/tpauc_0.5_0.5"]).cells
    assert [row[0].best for row in marked] == [False, True]


@pytest.mark.parametrize(
    "name", ["pauc_0.3", "pauc_raw_.5", "tpauc_1e-2_0.3", "test/ap", "client/auc", "mean_local_auc"]
)
def test_ranking_metrics_are_gains(name):
    assert sign(name) == 1


def test_names_are_exact_and_words_inside_of_them_count_for_nothing():
    for name in ("auc_rank", "my_accuracy", "accuracy_gap", "error", "f1", "recall", "pauc_low", "objective2", "{}"):
        assert column(name) is None
    assert column("stationarity_{}") is None, "a pattern is no name"
    assert column("monitor/test/loss") == COLUMNS["loss"]


def test_a_user_declares_and_a_prefix_is_stripped():
    assert sign("test/share", declared={"share": "max"}) == 1
    assert sign("monitor/share", declared={"share": "max", "monitor/share": "min"}) == -1
    assert sign("accuracy", declared={"accuracy": "min"}) == -1
    assert sign("test/a/b", declared={"a/b": "min"}) == -1


def test_modes_that_are_no_modes_are_refused():
    with pytest.raises(ValueError, match="unknown mode 'up'"):
        sign("objective", "up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Metric: the direction 'high' must be"):
        fs.Metric(share, "high")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a function"):
        fs.Metric("share", "max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="column 'share': the direction 'up' must be"):
        History({"seed": [0]}, {"round": [[0]], "share": [[0.0]]}, modes={"share": "up"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="mode='max' needs select"):
        fs.run(PLAIN, fs.FedAvg(0.1), VALID, mode="max", **OPTIONS)


UNDECLARED = r"column '(valid/)?share' does not declare which end is better: give mode=\"max\" or mode=\"min\""


def test_an_undeclared_column_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setattr("fedstrata.simulate.run.Driver.start", lambda executable: pytest.fail("something ran"))
    with pytest.raises(ValueError, match=UNDECLARED):
        fs.run(PLAIN, fs.FedAvg(0.1), VALID, select="valid/share", **OPTIONS)
    tune = lambda **options: fs.tune(
        PLAIN, fs.FedAvg(0.1), VALID, {"step_size": [0.1]}, **{"select": "valid/share", **OPTIONS, **options}
    )
    with pytest.raises(ValueError, match=UNDECLARED):
        tune()
    with pytest.raises(ValueError, match="column 'samples' has no better end"):
        tune(select="samples")
    with pytest.raises(ValueError, match="unknown column to tune by 'valid/shar'; did you mean valid/share"):
        tune(select="valid/shar", mode="max")
    with pytest.raises(ValueError, match="unknown column to select by 'client/share'"):
        fs.run(PLAIN, fs.FedAvg(0.1), VALID, select="client/share", mode="max", per_client=True, **OPTIONS)


def test_a_history_refuses_what_has_no_direction():
    history = fs.run(PLAIN, fs.FedAvg(0.1), VALID, **OPTIONS).history
    for choose in (history.best, history.best_setting):
        with pytest.raises(ValueError, match=UNDECLARED):
            choose("share")
        with pytest.raises(ValueError, match="column 'round' has no better end"):
            choose("round")
    assert history.best("share", "min")[0] == history["share"].min()
    assert history.best("round", "max")[0] == 6


def test_mode_and_metric_choose_alike():
    """Both ways of saying it keep the solution with the largest recorded value, and tune to the largest end."""
    sweep, steps = {"sweep": {"step_size": [1e-6, 0.3]}}, {"step_size": [1e-6, 0.3]}
    told = fs.run(PLAIN, fs.FedAvg(0.1), VALID, select="valid/share", mode="max", **sweep, **OPTIONS)
    declared = fs.run(DECLARED, fs.FedAvg(0.1), VALID, select="valid/share", **sweep, **OPTIONS)
    for i, step in enumerate(steps["step_size"]):
        w = np.asarray(told.solution(step_size=step))
        np.testing.assert_array_equal(w, declared.solution(step_size=step))
        clients = [VALID["valid"].shard(k) for k in range(3)]
        found = np.mean([np.mean((np.asarray(s["x"]) @ w) * np.asarray(s["y"]) > 0) for s in clients])
        assert found == pytest.approx(told.history["valid/share"][i].max())
    ends = {s["step_size"]: h.last("valid/share")[0] for s, h in declared.history.settings()}
    assert declared.history.modes == {"share": "max"}
    options = {"select": "valid/share", "seeds": 1, "final_seeds": 1, **OPTIONS}
    for mode, pick in (("max", max), ("min", min)):
        tuned = fs.tune(PLAIN, fs.FedAvg(0.1), VALID, steps, mode=mode, **options)
        assert tuned.chosen["step_size"] == pick(ends, key=lambda s: ends[s])
    assert fs.tune(DECLARED, fs.FedAvg(0.1), VALID, steps, **options).chosen["step_size"] == max(ends, key=ends.get)


def test_a_monitor_declares_its_own():
    monitor = fs.Average(squared_error, metrics={"other": fs.Metric(share, "min")})
    history = fs.run(DECLARED, fs.FedAvg(0.1), VALID, monitor=monitor, **OPTIONS).history
    assert history.modes == {"share": "max", "monitor/other": "min"}
    assert history.best("monitor/other")[0] == history["monitor/other"].min()


def test_an_algorithm_and_learned_weights_declare_theirs():
    penalised = fs.Regularized(squared_error, fs.prox.L1(0.1))
    assert fs.run(penalised, fs.FedNMap(0.1, gamma=0.5), VALID, **OPTIONS).history.modes == {"normal_map": "min"}
    loss = fs.losses.Classification(fs.models.Linear(3))
    learned = SampleWeighted.of(loss, np.ones(4)).learn_weights()
    assert learned.modes() == {"weight_of_right": "max", "weight_of_wrong": "min"}
    fair = fs.Fair(loss, groups=2, metrics={"share": fs.Metric(share, "max")})
    assert fair.learn_weights({"weight": np.zeros((1, 3)), "bias": np.zeros(1)}).modes() == {"share": "max"}
