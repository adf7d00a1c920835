"""Code in the folder where a program is started: with a site's file in the app's folder, a package not yet approved."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from fedstrata.deploy.flower import client_app, fork_server, supernode
from fedstrata.deploy.flower.config import ServerConfig, SiteConfig

PACKAGE = "approved_hospitals"


def write_package(folder, marker):
    """A package whose module tells from where it was imported, and ends the process."""
    (folder / PACKAGE).mkdir(parents=True)
    (folder / PACKAGE / "__init__.py").write_text("")
    (folder / PACKAGE / "task.py").write_text(f"open({str(marker)!r}, 'w').write(__file__)\nraise SystemExit(3)\n")


def test_a_worker_imports_the_approved_package_and_not_that_of_the_current_folder(tmp_path, monkeypatch):
    """`deploy site app/north.toml` works in the app's folder, which has the package in its newest version."""
    for name in ("approved", "app"):
        write_package(tmp_path / name, tmp_path / "marker")
    monkeypatch.syspath_prepend(tmp_path / "approved")  # as Flower does with what it has unpacked
    monkeypatch.chdir(tmp_path / "app")
    (tmp_path / "state").mkdir()
    process = client_app._start(f"{PACKAGE}.task:deployment", tmp_path / "state", "1")
    assert process.wait(120) == 3, (tmp_path / "state" / "worker.log").read_text()
    assert (tmp_path / "marker").read_text() == str(tmp_path / "approved" / PACKAGE / "task.py")


def commands(folder, monkeypatch):
    """How every program of a site and of the server is started, as far as its module."""
    started = []

    class Started:
        def __init__(self, words, **_):
            started.append(words)

    def replaced(_, words):
        started.append(words)
        raise SystemExit

    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setattr(os, "execv", replaced)
    monkeypatch.setattr(supernode, "end_after", lambda process: None)
    supernode.start_superexec(folder, ["--host", "127.0.0.1", "--port", "1"])
    with pytest.raises(SystemExit):
        fork_server.hand_over(str(folder / "nobody.sock"), [])
    client_app._start("package.module:name", folder, "1")
    started.append(SiteConfig(folder, "north", "127.0.0.1:9", insecure=True).command())
    started.append(ServerConfig(folder, "127.0.0.1:9", insecure=True).command())
    monkeypatch.undo()
    return [words[: words.index("-m") + 2] for words in started]


def test_no_program_imports_from_the_current_folder(tmp_path, monkeypatch):
    found = commands(tmp_path, monkeypatch)
    modules = {words[-1].rpartition(".")[2] for words in found}
    assert modules == {"supernode", "fork_server", "approval", "worker", "superlink"}
    assert len(found) == 6  # the SuperExec and the SuperNode are one module
    (tmp_path / "here" / "fedstrata").mkdir(parents=True)
    (tmp_path / "here" / "fedstrata" / "__init__.py").write_text("raise SystemExit('imported from the current folder')")
    look = "import fedstrata; print(fedstrata.__file__)"
    for words in {tuple(words[:-2]) for words in found}:  # the interpreter and its options
        given = subprocess.run([*words, "-c", look], cwd=tmp_path / "here", capture_output=True, text=True, timeout=60)
        assert Path(given.stdout.strip()) == Path(sys.modules["fedstrata"].__file__), given.stderr
