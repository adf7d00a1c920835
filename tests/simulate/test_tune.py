"""Tuning chooses on validation and reruns on fresh seeds; estimates count what a run then does; execution is chosen."""

import json

import numpy as np
import pytest
from layouts import prepare
from references import least_squares

import fedstrata as fs
from fedstrata.simulate import autotune as execution

TASK = least_squares(clients=3, sizes=(12, 16), seed=7)
VALID = TASK.federation.hold_out("valid", 0.3)
OPTIONS = {"batch_size": 4, "params": np.zeros(3)}


def test_tuning_picks_the_best_validation_loss_and_reruns_on_fresh_seeds():
    grid = {"step_size": [1e-4, 0.05, 1e3], "local_steps": [1, 4]}
    tuned = fs.tune(TASK.problem, fs.FedAvg(0.1), VALID, grid, rounds=15, seeds=2, final_seeds=3, **OPTIONS)
    assert len(tuned.scores) == 6
    by_hand = {}
    for step in (1e-4, 0.05):
        for q in (1, 4):
            result = fs.run(TASK.problem, fs.FedAvg(step, q), VALID, rounds=15, seeds=2, **OPTIONS)
            by_hand[step, q] = result.history.last("valid/loss").mean()
    for setting, mean, _ in tuned.scores:
        expected = by_hand.get((setting["step_size"], setting["local_steps"]), np.nan)
        np.testing.assert_allclose(mean, expected, rtol=1e-9)  # step 1000 diverges: NaN, never chosen
    best = min(by_hand, key=lambda k: by_hand[k])
    assert (tuned.chosen["step_size"], tuned.chosen["local_steps"]) == best
    assert tuned.at_edge == ["local_steps"]
    assert tuned.result.history.seeds == [1000, 1001, 1002]
    assert tuned.algorithm == fs.FedAvg(*best)


def test_tuning_refuses_what_would_not_be_a_fair_choice():
    for words, options in {
        "needs a split 'valid'; make one with federation.hold_out": {"federation": TASK.federation},
        "the grid is empty": {"grid": {}},
        "diverged at every setting": {"grid": {"step_size": [1e3, 1e4]}},
        "must not contain a seed that was used": {"seeds": [1, 2], "final_seeds": [2, 3]},
    }.items():
        given = {"federation": VALID, "grid": {"step_size": [0.05]}, "rounds": 15, **OPTIONS, **options}
        federation, grid = given.pop("federation"), given.pop("grid")
        with pytest.raises(ValueError, match=words):
            fs.tune(TASK.problem, fs.FedAvg(0.1), federation, grid, **given)


def test_with_patience_a_run_is_scored_by_its_best_value():
    """One client with target 4, validation at 2: step s gives x_r = 4 (1 − (1 − s)^r), which passes by 2 and leaves."""
    path = [{"x": np.eye(1), "y": np.array([4.0])}]
    federation = fs.Federation.from_clients(path).with_split("valid", {"x": np.eye(1), "y": np.array([2.0])})
    given = {"rounds": 100, "params": np.zeros(1), "batch_size": "all", "evaluate_every": 1, "seeds": 1}
    grid = {"step_size": [0.1, 0.4], "local_steps": [1]}
    tuned = fs.tune(TASK.problem, fs.FedAvg(0.1), federation, grid, patience=3, final_seeds=1, **given)
    losses = {s: 0.5 * (4 * (1 - (1 - s) ** np.arange(101)) - 2) ** 2 for s in grid["step_size"]}
    for setting, score, _ in tuned.scores:
        np.testing.assert_allclose(score, losses[setting["step_size"]].min(), rtol=1e-12)
    best = min(losses, key=lambda s: losses[s].min())
    assert tuned.chosen["step_size"] == best
    assert tuned.result.endings.item() == "stopped early"
    np.testing.assert_allclose(tuned.result.solution(), 4 * (1 - (1 - best) ** losses[best].argmin()), rtol=1e-12)


def test_a_run_that_diverges_is_never_chosen_however_good_its_best_value_was():
    path = [{"x": np.eye(1), "y": np.array([4.0])}]
    federation = fs.Federation.from_clients(path).with_split("valid", {"x": np.eye(1), "y": np.array([12.0])})
    given = {"rounds": 60, "params": np.zeros(1), "batch_size": "all", "evaluate_every": 1, "seeds": 1}
    tuned = fs.tune(TASK.problem, fs.FedAvg(0.1), federation, {"step_size": [0.1, 3.0]}, patience=90, **given)
    assert tuned.chosen == {"step_size": 0.1}  # step 3 is at 12 after one round, exactly, and then explodes
    assert np.isnan(tuned.scores[1][1])


def test_a_grid_that_goes_too_far_warns_of_nothing():
    """Its largest step ends at a thousand times the start: that is what a grid is for."""
    bowl = fs.Average(lambda w, e: 0.5 * (w[0] - e["y"] * 0) ** 2)
    options = {"rounds": 5, "params": np.ones(1), "batch_size": "all", "seeds": 1, "final_seeds": 1}
    tuned = fs.tune(bowl, fs.FedAvg(0.1), VALID, {"step_size": [0.5, 3.0]}, **options)
    assert tuned.chosen == {"step_size": 0.5}
    np.testing.assert_allclose(tuned.scores[1][1], 0.5 * 4.0**5)


def test_nothing_runs_before_all_of_the_grid_was_checked(monkeypatch):
    monkeypatch.setattr("fedstrata.simulate.tune.run", lambda *_, **__: pytest.fail("a run was started"))
    grid = {"step_size": [0.05]}
    for words, options in {
        "unknown column to tune by 'valid/los'": {"select": "valid/los"},
        "must not contain a seed that was used": {"seeds": [1, 2], "final_seeds": [2, 3]},
        "'step_size' has the value 0.05 twice": {"grid": {"step_size": [0.05, 0.05]}},
        "'local_steps' has the value 2 twice": {"grid": {"local_steps": [2, 2]}},
        "local_steps = 0 must be": {"grid": {"local_steps": [1, 0]}},
        "'step_size' has no values": {"grid": {"step_size": []}},
        "step_size = .* is out of range": {"grid": {"step_size": [0.1, -1.0], "local_steps": [1, 2]}},
        "sweep is an option of one run": {"sweep": grid},
        "checkpoint is an option of one run": {"checkpoint": "folder"},
        "unknown option of fs.tune 'bath_size'; did you mean batch_size": {"bath_size": 3},
    }.items():
        given = {"grid": grid, "rounds": 15, **OPTIONS, **options}
        with pytest.raises(ValueError, match=words):
            fs.tune(TASK.problem, fs.FedAvg(0.1), VALID, **given)
    for words, options in {
        "'step_size' must have a list of values, not 0.1; for one value, .0.1.": {"grid": {"step_size": 0.1}},
        "grid is a list; give a dictionary": {"grid": [0.1]},
        "select=None must name a column": {"select": None},
        "federation is a dict, not a Federation; .*from_clients": {"federation": {"train": []}},
        "is not an Algorithm; create one": {"algorithm": "FedAvg"},
    }.items():
        given = {"algorithm": fs.FedAvg(0.1), "federation": VALID, "grid": grid, "rounds": 15, **OPTIONS, **options}
        with pytest.raises(TypeError, match=words):
            fs.tune(TASK.problem, **given)


def test_an_estimate_takes_the_options_of_a_run():
    guess = fs.estimate(TASK.problem, fs.FedAvg(0.05), VALID, rounds=2, label="a", checkpoint="nowhere", **OPTIONS)
    assert guess.rounds == 2
    for made in (fs.estimate, fs.profile):
        name = f"fs.{made.__name__}"
        with pytest.raises(ValueError, match=f"unknown option of {name} 'bath_size'; did you mean batch_size"):
            made(TASK.problem, fs.FedAvg(0.05), VALID, rounds=2, bath_size=3)
        with pytest.raises(TypeError, match="federation is a list, not a Federation"):
            made(TASK.problem, fs.FedAvg(0.05), [VALID], rounds=2)
    with pytest.raises(ValueError, match=r'execution=.threads. must be "vmap"'):
        fs.estimate(TASK.problem, fs.FedAvg(0.05), VALID, rounds=2, execution="threads", **OPTIONS)


def test_an_estimate_counts_the_bytes_that_the_run_sends():
    options = {"rounds": 7, "cohort": 2, "seeds": 3, **OPTIONS}
    guess = fs.estimate(TASK.problem, fs.SCAFFOLD(0.05, 2), VALID, **options)
    result = fs.run(TASK.problem, fs.SCAFFOLD(0.05, 2), VALID, **options)
    assert guess.up_bytes == result.history.last("bytes_up").sum() == 7 * 2 * 3 * (2 * 3 * 8)
    assert guess.down_bytes == result.history.last("bytes_down").sum()
    assert (guess.runs, guess.cohort, guess.clients) == (3, 2, 3)
    train = VALID["train"].size + VALID["valid"].size
    assert guess.data_bytes >= train * (3 + 1) * 8
    assert guess.memory_bytes > guess.data_bytes + guess.state_bytes
    assert guess.seconds > 0
    assert guess.rich().row_count == 5


def job(rounds=10, **options):
    return prepare(TASK.problem, fs.FedAvg(0.05, 2), VALID, rounds=rounds, **OPTIONS, **options)


def test_auto_execution_measures_long_runs_once_and_remembers(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path))
    assert job().context.execution == "vmap"  # too short to be worth it
    assert not (tmp_path / "execution.json").exists()
    monkeypatch.setattr(execution, "WORTH_MEASURING", 0)
    times = {"vmap": 0.3, "map": 0.1}
    monkeypatch.setattr(execution, "_time", lambda job: times[job.context.execution])
    chosen, why = execution.choose(job(execution="vmap"))
    assert (chosen, "map: 100.0 ms" in why) == ("map", True)
    assert list(json.loads((tmp_path / "execution.json").read_text()).values()) == ["map"]
    times["map"] = 9.0  # not measured again
    assert execution.choose(job(execution="vmap")) == ("map", "measured before")
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path / "execution.json" / "not a folder"))
    assert execution.choose(job(execution="vmap"))[0] == "vmap"  # a cache that cannot be written is no error


def test_auto_execution_really_times_a_round():
    assert 0 < execution._time(job(execution="map")) < 60
