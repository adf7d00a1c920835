"""A SuperLink and a `flwr` command that answer as a test says, for `fedstrata deploy` without processes of Flower."""

import os
import signal

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from fedstrata.cli.operations import runs
from fedstrata.deploy.flower import app_template, control
from fedstrata.deploy.flower.control import FlowerRun
from fedstrata.deploy.flower.keys import server_keys, site_keys
from fedstrata.deploy.flower.run_lock import write_status


class SuperLink:
    """What the SuperLink would answer."""

    def __init__(self, server):
        self.address = server.own_address

    server = None  # the process of the run's server app
    nodes_found, runs_found, starting, silent, stopped, removed = (), {}, [], False, [], []

    def nodes(self):
        if self.silent:
            raise ConnectionError("no response from the SuperLink")
        return list(self.nodes_found)

    def run(self, number):
        if self.silent:
            raise ConnectionError("no response from the SuperLink")
        return self.runs_found.get(number)

    def unfinished(self, name, folder):
        return list(self.starting)

    def stop(self, number):
        self.stopped.append(number)
        if self.server is not None:
            os.kill(self.server, signal.SIGKILL)

    def unregister(self, node):
        self.removed.append(node)

    def close(self):
        pass


@pytest.fixture
def link(monkeypatch):
    found = type("Here", (SuperLink,), {"stopped": [], "removed": []})
    monkeypatch.setattr(control, "Control", found)
    monkeypatch.setattr(runs, "SETTLE", 0.1)
    return found


@pytest.fixture
def app(tmp_path, monkeypatch):
    app_template.write(tmp_path / "hospitals", 2)
    server_keys(tmp_path / "hospitals" / "keys", ["127.0.0.1"])
    for name in ("site-1", "site-2"):
        site_keys(tmp_path / "hospitals" / "keys", name)
    monkeypatch.chdir(tmp_path / "hospitals")
    return tmp_path / "hospitals"


@pytest.fixture
def flwr(tmp_path, monkeypatch, link):
    """Replace the `flwr` command: it prints lines, after the run's status was written; `flwr.run` is Flower's view."""
    programs = tmp_path / "bin"
    programs.mkdir()

    def say(*lines, state="finished", why=None, flower=("finished", "completed", "")):
        script = "\n".join(f"echo '{line}'" for line in lines)
        (programs / "flwr").write_text(f"#!/bin/sh\n{script}\n")
        (programs / "flwr").chmod(0o700)
        link.runs_found = {17: FlowerRun(17, *flower)}
        write_status(tmp_path / "hospitals/out/first", state=state, why=why, flower_run="17")

    monkeypatch.setattr(runs, "at", lambda server: {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"})
    return say
