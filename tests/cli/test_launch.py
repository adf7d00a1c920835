"""`fedstrata launch`: one run in several processes of this machine."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def launch(*words, folder):
    command = [
        sys.executable,
        "-c",
        "import sys; from fedstrata.cli.main import main; sys.exit(main())",
        "launch",
        *words,
    ]
    env = {**os.environ, "JAX_ENABLE_X64": "1", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=folder, env=env)


def test_a_run_in_two_processes_is_the_run_of_one(answer, tmp_path):
    words = ["run", "digits", "--algorithm", "SCAFFOLD", "--rounds", "2", "--seeds", "1", "--cohort", "7", "--quiet"]
    alone = answer(*words)
    both = launch("--processes", "2", "--json", "--", *words, "--mesh", "all", "--out", "both", folder=tmp_path)
    assert both.returncode == 0, both.stderr
    found = json.loads(both.stdout)  # nothing else is printed
    ours, theirs = (t["table"]["rows"][0]["values"] for t in (found, alone))
    for column in ("objective", "accuracy", "test/loss", "bytes_up"):
        assert ours[column]["mean"] == pytest.approx(theirs[column]["mean"], rel=1e-11)
    assert {"config.json", "picture.png", "SCAFFOLD.npz"} <= {p.name for p in (tmp_path / "both").iterdir()}


def test_a_failure_of_one_ends_all(tmp_path):
    done = launch("--processes", "2", "--", "run", "digits", "--mesh", "3", folder=tmp_path)
    assert done.returncode == 2
    assert "mesh=3" in done.stderr
    assert "Traceback" not in done.stderr


def test_only_runs_can_be_launched(mistake):
    assert "fedstrata launch --processes 2 -- run" in mistake("launch", "--processes", "2", "--", "list")
    assert "--processes" in mistake("launch", "--", "run", "digits")


def test_a_mesh_is_a_number_or_all(mistake, answer):
    assert "--mesh" in mistake("run", "digits", "--mesh", "some")
    words = ["run", "digits", "--algorithm", "FedAvg", "--rounds", "1", "--seeds", "1"]
    one, four = answer(*words), answer(*words, "--mesh", "4")
    value = lambda found: found["table"]["rows"][0]["values"]["objective"]["mean"]
    assert value(four) == pytest.approx(value(one), rel=1e-6)
