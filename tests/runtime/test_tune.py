"""Tuning chooses on validation and reruns on fresh seeds; estimates count what a run then does; execution is chosen."""

import json

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.runtime import execution
from fedstrata.runtime.run import prepare
from references import least_squares

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


def test_an_estimate_counts_the_bytes_that_the_run_sends():
    options = {"rounds": 7, "cohort": 2, "seeds": 3, **OPTIONS}
    guess = fs.estimate(TASK.problem, fs.Scaffold(0.05, 2), VALID, **options)
    result = fs.run(TASK.problem, fs.Scaffold(0.05, 2), VALID, **options)
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
    assert job().plan.execution == "vmap"  # too short to be worth it
    assert not (tmp_path / "execution.json").exists()
    monkeypatch.setattr(execution, "WORTH_MEASURING", 0)
    times = {"vmap": 0.3, "map": 0.1}
    monkeypatch.setattr(execution, "_time", lambda job: times[job.plan.execution])
    chosen, why = execution.choose(job(execution="vmap"))
    assert (chosen, "map: 100.0 ms" in why) == ("map", True)
    assert list(json.loads((tmp_path / "execution.json").read_text()).values()) == ["map"]
    times["map"] = 9.0  # not asked again
    assert execution.choose(job(execution="vmap")) == ("map", "measured before")
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path / "execution.json" / "not a folder"))
    assert execution.choose(job(execution="vmap"))[0] == "vmap"  # a cache that cannot be written is no error


def test_auto_execution_really_times_a_round():
    assert 0 < execution._time(job(execution="map")) < 60
