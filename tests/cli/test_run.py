"""`fedstrata run`: what it prints and leaves, what it refuses, and going on after kill -9."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.cli import run_methods
from fedstrata.core.hyperparameters import reals
from fedstrata.engine.checkpoint import Checkpoints
from fedstrata.experiments import Setup, get, lasso
from fedstrata.report import History

SMALL = ("least_squares", "--data", "clients=3", "--data", "features=2", "--data", "rows=5", "--quiet", "--no-cache")


def files(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.slow
def test_a_run_leaves_histories_models_table_and_picture(answer, tmp_path):
    found = answer("run", *SMALL, "--algorithm", "FedAvg", "--algorithm", "SCAFFOLD", "--rounds", "4", "--out", "o")
    assert [row["label"] for row in found["table"]["rows"]] == ["FedAvg", "SCAFFOLD"]
    assert files(tmp_path / "o") == {*found["files"], "checkpoints"}
    history = History.from_jsonl(tmp_path / "o" / "FedAvg.jsonl")
    setup = get("least_squares").build(clients=3, features=2, rows=5)
    method = fs.FedAvg(step_size=0.05, local_steps=10)
    same = fs.run(setup.problem, method, setup.federation, rounds=4, batch_size="all", evaluate_every=1)
    assert history == same.history, "the command line runs what the library runs"
    model = fs.load_model(tmp_path / "o" / "FedAvg.npz")
    x = setup.federation["train"].examples["x"]
    weights = same.solution()
    np.testing.assert_allclose(model.predict(x), x @ weights["weight"][0] + weights["bias"][0])
    assert model.info["hyperparameters"]["step_size"] == 0.05
    assert json.loads((tmp_path / "o" / "table.json").read_text()) == found["table"]
    assert "SCAFFOLD" in (tmp_path / "o" / "table.md").read_text()
    assert (tmp_path / "o" / "picture.png").read_bytes().startswith(b"\x89PNG")
    settings = json.loads((tmp_path / "o" / "config.json").read_text())["settings"]
    assert settings == found["settings"]
    assert (settings["rounds"], settings["data"]["clients"]) == (4, 3)


def test_without_out_nothing_is_written(command, tmp_path):
    code, out, _ = command("run", *SMALL, "--rounds", "2", "--algorithm", "FedAvg")
    assert code == 0
    assert "FedAvg" in out
    assert files(tmp_path) <= {"cache"}


def test_progress_goes_to_standard_error(command):
    loud = [word for word in SMALL if word != "--quiet"]
    code, out, err = command("run", *loud, "--rounds", "2", "--algorithm", "FedAvg", "--json")
    assert code == 0
    assert "round 2/2" in err
    json.loads(out)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(fs.algorithms.known()))
def test_every_algorithm_runs_by_name(name, answer, command, monkeypatch):
    """One of each family to the end; the others up to where everything is checked and only the compiling is left."""
    cls = fs.algorithms.known()[name]
    nested = ("nested", "--data", "clients=3", "--data", "rows=5", "--quiet", "--no-cache")
    two = ("bilevel", "--data", "clients=3", "--data", "rows=5", "--quiet", "--no-cache")
    fair = ("fairness", "--data", "data=synthetic", "--quiet", "--no-cache")
    tasks = [(fs.Average, SMALL), (fs.Regularized, ("lasso", *SMALL[1:])), (fs.Nested, nested)]
    tasks += [(fs.Bilevel, two), (fs.Fair, fair), (fs.Pairwise, ("clinics", "--quiet", "--no-cache"))]
    task = next(words for problem, words in tasks if issubclass(problem.Oracle, cls.oracle))
    task = (*task, "--data", "inner=client") if task is nested and cls.solves == "client" else task
    task = (*task, "--data", "lower_level=global") if task is two and cls.solves == "global" else task
    value = next(iter(reals(cls)))
    words = ("run", *task, "--algorithm", name, "--rounds", "2", "--set", f"{value}=0.01")
    if name not in ("FedAvg", "FedNMap", "TrackedSCGD", "TrackedBiO", "FedMinMax"):
        plans = []
        monkeypatch.setattr(run_methods, "run", lambda plan, *_: plans.append(plan) or 0)
        assert command(*words)[0] == 0
        assert getattr(plans[0].methods[name][0], value) == 0.01
        return
    found = answer(*words)
    assert found["diverged"] == []
    assert found["settings"]["methods"][name][value] == 0.01


def test_methods_that_cannot_solve_a_variant_are_left_out_unless_given(command, monkeypatch):
    def folded() -> Setup:
        problem, federation = lasso.build(rows=5)
        return Setup(fs.Regularized(problem.loss, fs.prox.MCP(0.1, theta=30.0)), federation)

    two = {name: lasso.EXPERIMENT.methods[name] for name in ("FedMid", "FedDA")}
    monkeypatch.setattr(lasso, "EXPERIMENT", dataclasses.replace(lasso.EXPERIMENT, build=folded, methods=two))
    code, out, err = command("run", "lasso", "--rounds", "1", "--quiet")
    assert code == 0
    assert "warning: FedDA is left out: " in err
    assert "FedMid" in out
    code, out, err = command("run", "lasso", "--rounds", "1", "--algorithm", "FedDA")
    assert code == 2
    assert "must be convex" in err


def test_set_reaches_the_methods_that_have_it(answer):
    chosen = ["--algorithm", "FedAvg", "--algorithm", "FedProx", "--algorithm", "FedOpt"]
    words = ["step_size=0.01", "mu=0.5", "FedProx.step_size=0.02", "optimizer=adagrad", "local_steps=3"]
    given = [part for word in words for part in ("--set", word)]
    methods = answer("run", *SMALL, *chosen, *given, "--rounds", "1")["settings"]["methods"]
    assert methods["FedAvg"] == {"step_size": 0.01, "local_steps": 3}
    assert methods["FedProx"] == {"step_size": 0.02, "local_steps": 3, "mu": 0.5}
    assert methods["FedOpt"]["optimizer"].startswith("adagrad")


def test_a_sweep_and_seeds_are_rows_of_the_table(answer):
    found = answer(
        "run", *SMALL, "--algorithm", "FedAvg", "--sweep", "step_size=0.01,0.1", "--seeds", "4,5", "--rounds", "2"
    )
    rows = found["table"]["rows"]
    assert [row["setting"] for row in rows] == [{"step_size": 0.01}, {"step_size": 0.1}]
    assert all(row["seeds"] == [4, 5] for row in rows)


def test_a_diverged_method_is_reported_and_the_others_finish(command, tmp_path):
    words = ["--algorithm", "FedAvg", "--algorithm", "SCAFFOLD", "--set", "FedAvg.step_size=1e8", "--rounds", "6"]
    code, out, err = command("run", *SMALL, *words, "--out", "o", "--json")
    assert code == 3
    found = json.loads(out)
    assert len(found["diverged"]) == 1
    assert f"warning: {found['diverged'][0]}" in err
    end = {row["label"]: row["values"]["objective"]["mean"] for row in found["table"]["rows"]}
    assert end["FedAvg"] is None
    assert np.isfinite(end["SCAFFOLD"])
    assert "picture.png" in files(tmp_path / "o")


def test_what_looks_like_a_mistake_is_one_line_before_the_run(command):
    words = ["--algorithm", "FedAvg", "--algorithm", "SCAFFOLD", "--batch-size", "1000", "--rounds", "1"]
    code, _, err = command("run", *SMALL, *words)
    assert code == 0
    lines = [line for line in err.splitlines() if "batch_size" in line]
    assert len(lines) == 1
    assert lines[0].startswith("warning: batch_size=1000 is more than 20 times the 5 rows of 'client 0'")


def test_a_method_that_got_worse_is_reported_and_has_not_diverged(command):
    words = ["--algorithm", "FedAvg", "--set", "step_size=10", "--local-steps", "1", "--rounds", "2", "--seeds", "1"]
    code, out, err = command("run", *SMALL, *words, "--json")
    assert code == 0
    (note,) = json.loads(out)["diverged"]
    assert "got worse: its objective was" in note
    assert f"warning: {note}" in err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--algorithm", "FedAvgg"], "did you mean FedAvg"),
        (["--algorithm", "FedAvg", "--algorithm", "FedAvg"], "given twice"),
        (["--set", "stepsize=1"], "did you mean step_size"),
        (["--set", "step_size"], "expected name=value"),
        (["--set", "step_size=fast"], "must be a number"),
        (["--set", "local_steps=1.5"], "must be a whole number"),
        (["--set", "step_size=-1"], "step_size = -1.0 is out of range"),
        (["--set", "FedAvgg.step_size=1"], "did you mean FedAvg"),
        (["--algorithm", "FedOpt", "--set", "optimizer=addam"], "did you mean adam"),
        (["--sweep", "step_size=0.1,-1"], "out of range"),
        (["--sweep", "local_steps=1,2"], "cannot be swept"),
        (["--sweep", "mu=1", "--set", "mu=2"], "both set and swept"),
        (["--data", "client=4"], "did you mean clients"),
        (["--data", "spread=wide"], "must be a number"),
        (["--cohort", "0"], ">= 1"),
        (["--cohort", "4"], "a cohort of 4 clients cannot be drawn from 3"),
        (["--rounds", "0"], ">= 1"),
        (["--seeds", "1,1"], "different"),
        (["--batch-size", "most"], ">= 1"),
        (["--checkpoint-every", "-1"], ">= 0"),
        (["--resume"], "needs --out"),
        (["--out", "o", "--resume", "--force"], "choose one"),
    ],
)
def test_mistakes_are_refused_before_anything_runs(words, expected, mistake, tmp_path):
    assert expected in mistake("run", *SMALL, *words)
    assert files(tmp_path) <= {"cache"}


def test_an_existing_folder_is_not_overwritten(mistake, command, tmp_path):
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "thesis.tex").write_text("years of work")
    once = ["run", *SMALL, "--algorithm", "FedAvg", "--rounds", "2", "--out", "o"]
    assert "not empty" in mistake(*once)
    assert "does not hold a run" in mistake(*once, "--resume")
    assert command(*once, "--force")[0] == 0
    assert "--resume" in mistake(*once)
    stale = tmp_path / "o" / "FedAvg.npz"
    assert stale.exists()
    assert command("run", *SMALL, "--algorithm", "SCAFFOLD", "--rounds", "2", "--out", "o", "--force")[0] == 0
    assert not stale.exists()
    assert (tmp_path / "o" / "thesis.tex").read_text() == "years of work"


def test_a_refused_force_destroys_nothing(mistake, command, tmp_path):
    once = ["run", *SMALL, "--algorithm", "FedAvg", "--rounds", "2", "--out", "o"]
    assert command(*once)[0] == 0
    before = files(tmp_path / "o")
    mistake(*once, "--force", "--set", "step_size=-1")
    assert files(tmp_path / "o") == before


@pytest.mark.parametrize("place", ["file", "file/inside", "/proc/nowhere"])
def test_an_unwritable_folder_is_refused_first(place, mistake, tmp_path):
    (tmp_path / "file").write_text("")
    assert "--out" in mistake("run", *SMALL, "--out", place)


def test_resuming_with_other_settings_shows_the_difference(mistake, command):
    once = ["run", *SMALL, "--algorithm", "FedAvg", "--rounds", "2", "--out", "o"]
    assert command(*once)[0] == 0
    err = mistake(*once, "--resume", "--set", "step_size=0.01")
    assert "0.05" in err
    assert "0.01" in err


def test_a_finished_run_can_be_made_longer(answer, tmp_path):
    words = ["run", *SMALL, "--algorithm", "FedAvg", "--evaluate-every", "2"]
    answer(*words, "--rounds", "4", "--out", "o")
    answer(*words[:-2], "--rounds", "8", "--out", "o", "--resume")
    answer(*words, "--rounds", "8", "--out", "whole")
    longer, whole = (History.from_jsonl(tmp_path / folder / "FedAvg.jsonl") for folder in ("o", "whole"))
    assert longer == whole


def test_dry_run_estimates_and_writes_nothing(answer, tmp_path):
    found = answer("run", *SMALL, "--algorithm", "FedAvg", "--rounds", "10", "--dry-run", "--out", "o")
    (row,) = found["methods"]
    model = 3 * 8  # two slopes and an intercept in float64, up once for each client and round
    assert row["up_bytes"] == model * 3 * 10
    assert row["memory_bytes"] > 0
    assert files(tmp_path) <= {"cache"}


BOTH = "import json, sys; from fedstrata.cli.main import main; sys.exit(max(map(main, json.loads(sys.argv[1]))))"


@pytest.mark.slow
def test_kill_and_resume_gives_the_same_history(tmp_path):
    run = ["run", "least_squares", "--algorithm", "SCAFFOLD", "--rounds", "12000", "--quiet", "--out"]
    words = lambda folder, *more: [*run, str(tmp_path / folder), *more]
    environment = {**os.environ, "FEDSTRATA_CACHE": str(tmp_path / "cache")}
    start = lambda *words: subprocess.Popen([sys.executable, *words], env=environment)
    killed = start("-m", "fedstrata.cli.main", *words("killed", "--checkpoint-every", "0"))
    store = Checkpoints(tmp_path / "killed" / "checkpoints" / "SCAFFOLD")
    while not store.rounds() and killed.poll() is None:
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert 0 < store.rounds()[-1] < 12000
    assert not (tmp_path / "killed" / "SCAFFOLD.jsonl").exists()
    rest = json.dumps([words("killed", "--resume"), words("whole")])
    assert start("-c", BOTH, rest).wait() == 0  # in one process, which starts once
    resumed, whole = (History.from_jsonl(tmp_path / name / "SCAFFOLD.jsonl") for name in ("killed", "whole"))
    assert resumed == whole
    assert any((tmp_path / "cache" / "jax").iterdir()), "compiled programs are kept by default"


def test_a_cache_that_cannot_be_written_is_no_error(command, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path / "file" / "inside"))
    cached = [word for word in SMALL if word != "--no-cache"]
    code, _, err = command("run", *cached, "--algorithm", "FedAvg", "--rounds", "1")
    assert code == 0
    assert err.startswith("warning: compiled programs cannot be kept")
