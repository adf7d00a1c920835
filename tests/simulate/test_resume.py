"""Resumption: killed runs resume bit-identical, damaged checkpoints fall back, other settings are refused."""

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from references import least_squares, squared_error
from toys import OwnStarts, Scores, Visits

import fedstrata as fs
from fedstrata.engine.checkpoint import Checkpoints

TASK = least_squares(seed=2)
X = np.zeros(3)


def run(algorithm=None, federation=TASK.federation, problem=TASK.problem, **options):
    settings = {"rounds": 6, "batch_size": 2, "params": X, "cohort": 3, "evaluate_every": 1, "checkpoint_every": 0.0}
    return fs.run(problem, algorithm or fs.SCAFFOLD(0.05, 3), federation, **{**settings, **options})


class Killed(Exception):
    pass


def kill_at(round):
    def callback(now, row):
        if now == round:
            raise Killed

    return callback


SCRIPT = """
    import sys, numpy as np
    sys.path[:0] = [{tests!r}, {tests!r} + "/support"]
    import conftest, fedstrata as fs
    from references import least_squares
    task = least_squares(seed=2)
    slow = lambda round, row: __import__("time").sleep(0.02)
    options = dict(rounds=400, batch_size=2, cohort=3, params=np.zeros(3), evaluate_every=1, seeds=2, callbacks=[slow])
    keep = dict(checkpoint={folder!r}, checkpoint_every=0.0, resume=True)
    fs.run(task.problem, fs.SCAFFOLD(0.05, 3), task.federation, **options, **keep)
"""


@pytest.mark.slow
def test_kill_9_at_any_moment_and_resume(tmp_path):
    """A real process, really killed: at its beginning and after it went on, at moments of the clock's choosing."""
    folder = tmp_path / "checkpoints"
    script = textwrap.dedent(SCRIPT).format(tests=str(Path(__file__).parents[1]), folder=str(folder))
    whole = run(rounds=400, seeds=2, checkpoint_every=1e9)
    for kills in range(2):
        process = subprocess.Popen([sys.executable, "-c", script])
        began, seen = time.monotonic(), Checkpoints(folder).rounds()
        while Checkpoints(folder).rounds() == seen and time.monotonic() - began < 90:
            time.sleep(0.01)
        time.sleep(0.013 * kills)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert 0 < Checkpoints(folder).rounds()[-1] < 400
    end = run(rounds=400, seeds=2, checkpoint=folder, resume=True, checkpoint_every=1e9)
    np.testing.assert_array_equal(end.solutions.tree, whole.solutions.tree)
    np.testing.assert_array_equal(end.local["c_i"].tree, whole.local["c_i"].tree)
    np.testing.assert_array_equal(end.history["objective"], whole.history["objective"])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [OwnStarts(), Scores(), Visits()], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("round", [1, 2])
def test_starts_pools_and_per_example_memory_survive(algorithm, round, tmp_path):
    whole = run(algorithm)
    with pytest.raises(Killed):
        run(algorithm, checkpoint=tmp_path, callbacks=[kill_at(round)])
    resumed = run(algorithm, checkpoint=tmp_path, resume=True)
    assert whole.history == resumed.history
    for field, value in whole.local.items():
        jax.tree.map(np.testing.assert_array_equal, value, resumed.local[field])


def test_a_damaged_newest_checkpoint_falls_back_with_a_warning(tmp_path, caplog):
    whole = run()
    with pytest.raises(Killed):
        run(checkpoint=tmp_path, callbacks=[kill_at(4)])
    store = Checkpoints(tmp_path)
    newest, before = store.rounds()[-1], store.rounds()[-2]
    files = [p for p in (tmp_path / f"round-{newest:09d}").rglob("*") if p.is_file()]
    biggest = max(files, key=lambda p: p.stat().st_size)
    biggest.write_bytes(biggest.read_bytes()[:-7])
    with caplog.at_level(logging.WARNING, "fedstrata"):
        resumed = run(checkpoint=tmp_path, resume=True)
    assert f"round {newest} in {tmp_path} is damaged" in caplog.text
    assert f"resuming from round {before}" in caplog.text
    assert whole.history == resumed.history


def test_other_settings_or_data_are_refused_with_the_difference(tmp_path):
    run(checkpoint=tmp_path, rounds=2)
    other = least_squares(seed=3)
    for words, change in {
        "SCAFFOLD.step_size: saved 0.05, now 0.1": {"algorithm": fs.SCAFFOLD(0.1, 3)},
        "algorithm: saved 'SCAFFOLD', now 'FedAvg'": {"algorithm": fs.FedAvg(0.05, 3)},
        "data: saved": {"federation": other.federation},
        "batch_size: saved 2, now 3": {"batch_size": 3},
        "cohort: saved 3, now 2": {"cohort": 2},
        "start: saved": {"params": X + 1},
        "problem: saved": {"problem": fs.Average(lambda w, e: 2 * squared_error(w, e))},
    }.items():
        with pytest.raises(fs.CheckpointError, match=words):
            run(checkpoint=tmp_path, resume=True, **change)


def test_a_finished_run_may_be_made_longer(tmp_path):
    run(checkpoint=tmp_path, rounds=3)
    longer = run(checkpoint=tmp_path, rounds=6, resume=True)
    assert longer.history == run().history


def test_a_longer_run_keeps_the_evaluation_period_it_began_with(tmp_path):
    run(checkpoint=tmp_path, rounds=150, evaluate_every=None)  # by default every second round
    longer = run(checkpoint=tmp_path, rounds=500, evaluate_every=None, resume=True)  # alone it would be every fifth
    assert longer.history == run(rounds=500, evaluate_every=2).history


def test_a_run_resumes_unchanged_on_a_machine_with_other_cores(tmp_path, monkeypatch):
    """How runs are grouped over cores, and how clients are executed, are part of the bits: they are kept."""
    with pytest.raises(Killed):
        run(checkpoint=tmp_path, seeds=4, callbacks=[kill_at(4)])
    whole = run(seeds=4)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("fedstrata.simulate.autotune.choose", lambda job: ("map", "another machine"))
    assert run(checkpoint=tmp_path, seeds=4, resume=True).history == whole.history


def test_an_unwritable_folder_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(fs.CheckpointError, match="cannot write checkpoints to"):
        run(checkpoint=tmp_path / "file" / "inside", params=X)


def test_a_used_folder_is_not_overwritten_by_accident(tmp_path):
    run(checkpoint=tmp_path, rounds=2)
    with pytest.raises(fs.CheckpointError, match=r"already holds checkpoints; give resume=True \(.*--resume\)"):
        run(checkpoint=tmp_path, rounds=2)


def test_resuming_nothing_starts_from_the_beginning(tmp_path):
    assert run(checkpoint=tmp_path / "new", resume=True).history == run().history


def test_a_failed_checkpoint_stops_the_run_but_loses_nothing(tmp_path, monkeypatch):
    """The disk fills up at the third checkpoint: the second is intact, and the result so far comes with the error."""
    save = Checkpoints.save

    def fill(self, round, arrays, config, paths):
        if round == 3:
            raise fs.CheckpointError("could not write the checkpoint of round 3: the disk is full")
        save(self, round, arrays, config, paths)

    monkeypatch.setattr(Checkpoints, "save", fill)
    monkeypatch.setattr("fedstrata.simulate.driver.SEGMENT_SECONDS", 0.0)  # a checkpoint after every round
    with pytest.raises(fs.CheckpointError, match="the disk is full") as error:
        run(checkpoint=tmp_path)
    assert error.value.result.history.last("round") == 3
    monkeypatch.undo()
    assert run(checkpoint=tmp_path, resume=True).history == run().history
