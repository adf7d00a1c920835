"""One server per run, and what a run's folder says about it."""

import json
import os
import stat
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from flwr.supercore.task_identity import TaskIdentity

from fedstrata.deploy.flower import run_lock, server_app
from fedstrata.deploy.flower.run_lock import (
    RunningError,
    only_server,
    read_status,
    reported,
    server_of,
    write_status,
)

HOLD = """
import sys, time
from pathlib import Path
from fedstrata.deploy.flower.run_lock import only_server
with only_server(Path(sys.argv[1]), {"flower_run": "17"}):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other(tmp_path):
    """Another process that serves the run."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "first")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def main_of(folder, run="first"):
    """The server app's function, as Flower calls it."""
    app = server_app.server_app("nowhere.task:deployment")
    return app(SimpleNamespace(), SimpleNamespace(run_config={"run": run, "folder": str(folder)}))


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    monkeypatch.setattr(TaskIdentity, "_run_id", 23)
    monkeypatch.setattr(server_app, "ENDING", 0.1)
    mask = os.umask(0o022)
    yield
    os.umask(mask)


def test_a_second_server_is_refused_and_told_who_is_there(other, tmp_path):
    write_status(tmp_path / "first", state="running", round=3)
    with pytest.raises(
        RunningError, match=rf"process {other.pid} on .*run 17.*deploy status.*deploy stop --name first"
    ):
        main_of(tmp_path)
    assert read_status(tmp_path / "first")["state"] == "running"  # that of the server that is there
    assert server_of(tmp_path / "first")["pid"] == other.pid
    main_of_another_run = pytest.raises(ModuleNotFoundError, match="nowhere")
    with main_of_another_run:
        main_of(tmp_path, "second")


def test_the_lock_of_a_killed_server_is_free(other, tmp_path):
    other.kill()
    other.wait()
    assert server_of(tmp_path / "first") is None
    with only_server(tmp_path / "first", {}):
        assert server_of(tmp_path / "first")["pid"] == os.getpid()
    assert server_of(tmp_path / "first") is None


def test_a_server_waits_for_one_that_is_about_to_end(other, tmp_path):
    other.terminate()
    with only_server(tmp_path / "first", {}, patience=5.0):
        pass


def test_a_probe_does_not_keep_a_server_out(tmp_path, monkeypatch):
    """It holds the lock for an instant."""
    monkeypatch.setattr(run_lock, "_locked", _busy_once(run_lock._locked))
    with only_server(tmp_path / "first", {}):
        pass


def _busy_once(locked):
    seen = []

    def wrapped(lock, kind):
        seen.append(kind)
        return len(seen) > 1 and locked(lock, kind)

    return wrapped


def test_a_failed_server_says_why_and_still_fails(tmp_path):
    with pytest.raises(ModuleNotFoundError):
        main_of(tmp_path)
    found = read_status(tmp_path / "first")
    assert (found["state"], found["flower_run"], found["run"]) == ("failed", "23", "first")
    assert found["why"] == "ModuleNotFoundError: No module named 'nowhere'"


def test_a_server_that_flower_ends_is_not_finished(tmp_path):
    with pytest.raises(SystemExit), reported(tmp_path / "first"):
        raise SystemExit(0)
    assert read_status(tmp_path / "first")["state"] == "failed"
    assert "interrupted" in read_status(tmp_path / "first")["why"]
    with reported(tmp_path / "first", run="first"):
        assert read_status(tmp_path / "first")["state"] == "waiting"
    assert read_status(tmp_path / "first")["state"] == "finished"


def test_status_keeps_what_is_not_said_again(tmp_path):
    write_status(tmp_path / "first", run="first", round=1, sites={"Ulm": {"last": [1, 0]}})
    write_status(tmp_path / "first", round=2)
    found = json.loads((tmp_path / "first" / "status.json").read_text())
    assert (found["round"], found["run"], found["sites"]) == (2, "first", {"Ulm": {"last": [1, 0]}})
    assert found["updated"].startswith(time.strftime("%Y-"))


def test_lock_and_status_are_for_their_owner(tmp_path):
    (tmp_path / "first").mkdir(mode=0o755)
    with only_server(tmp_path / "first", {}):
        write_status(tmp_path / "first", state="running")
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in [tmp_path / "first", *(tmp_path / "first").iterdir()]}
    assert modes == {"first": 0o700, "server.lock": 0o600, "status.json": 0o600}


def test_a_reason_of_several_lines_is_one_line_with_marks_between_its_parts(tmp_path):
    with pytest.raises(ValueError), reported(tmp_path / "first"):
        raise ValueError("cannot be resumed:\n  step: saved 1, now 2\n  seed: saved 3, now 4\nresume it")
    why = read_status(tmp_path / "first")["why"]
    assert why == "ValueError: cannot be resumed: step: saved 1, now 2; seed: saved 3, now 4; resume it"
