"""`fedstrata launch`: one run in several processes of this machine."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


LAUNCH = (sys.executable, "-c", "import sys; from fedstrata.cli.main import main; sys.exit(main())", "launch")


def environment():
    return {**os.environ, "JAX_ENABLE_X64": "1", "XLA_FLAGS": "--xla_backend_optimization_level=0"}


def launch(*words, folder):
    command = [*LAUNCH, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=folder, env=environment())


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


def test_a_failure_of_the_first_alone_ends_all(tmp_path):
    (tmp_path / "both").mkdir()
    earlier = {"fedstrata": "1.0", "settings": {"experiment": "iris"}, "files": []}
    (tmp_path / "both" / "config.json").write_text(json.dumps(earlier))
    words = ["run", "digits", "--algorithm", "FedAvg", "--rounds", "1", "--mesh", "all", "--out", "both", "--resume"]
    done = launch("--processes", "2", "--", *words, folder=tmp_path)
    assert done.returncode == 2
    assert "experiment: saved 'iris', now 'digits'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_launch_that_is_terminated_ends_its_processes(tmp_path):
    words = ["run", "digits", "--algorithm", "FedAvg", "--rounds", "1000000", "--mesh", "all", "--out", "both"]
    process = subprocess.Popen([*LAUNCH, "--processes", "2", "--", *words], cwd=tmp_path, env=environment())
    try:
        while not (tmp_path / "both" / "config.json").exists():
            assert process.poll() is None
            time.sleep(0.1)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 2
        process.terminate()
        assert process.wait(60) == 143
        assert not any(Path(f"/proc/{child}").exists() for child in children)
    finally:
        process.kill()


def test_only_runs_can_be_launched(mistake):
    assert "fedstrata launch --processes 2 -- run" in mistake("launch", "--processes", "2", "--", "list")
    assert "--processes" in mistake("launch", "--", "run", "digits")


def test_a_mesh_is_a_number_or_all(mistake, answer):
    assert "--mesh" in mistake("run", "digits", "--mesh", "some")
    words = ["run", "digits", "--algorithm", "FedAvg", "--rounds", "1", "--seeds", "1"]
    one, four = answer(*words), answer(*words, "--mesh", "4")
    value = lambda found: found["table"]["rows"][0]["values"]["objective"]["mean"]
    assert value(four) == pytest.approx(value(one), rel=1e-6)
