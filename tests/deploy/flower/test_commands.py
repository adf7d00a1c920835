"""The commands of `fedstrata deploy`, from `init` to `unregister`, as operators of a server and of sites use them."""

import contextlib
import json
import os
import re
import runpy
import signal
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from deployments import loopback_only, needs_full, programs_or_skip, wait_until
from operators import Command, deploy, running, solution

import fedstrata as fs
from fedstrata.deploy.flower.local_federation import free_ports

pytestmark = [pytest.mark.slow, needs_full]

SITES, ROUNDS = ("site-1", "site-2", "site-3"), "6"


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """A new app with its keys, and a SuperLink that listens."""
    programs_or_skip()
    home = tmp_path_factory.mktemp("commands")
    with loopback_only() as prefix:
        found = SimpleNamespace(app=home, home=home, prefix=prefix, extra={}, processes={})
        try:
            assert deploy(found, "init", "hospitals")[0] == 0
            found.app = home / "hospitals"
            write_ports(found.app)
            for name in ("server", *SITES):
                assert deploy(found, "keys", name)[0] == 0
            assert deploy(found, "approve")[0] == 0
            link = Command(found, "server")
            wait_until(lambda: "Uvicorn running" in link.log.read_text(), link.log, link.process)
            yield found
        finally:
            end(found)


def write_ports(app):
    """Ports that are free on this machine, in place of the app's."""
    given = [app / "server.toml", *(app / "sites" / f"{site}.toml" for site in SITES)]
    link, *ports = free_ports(len(given))
    for path, port in zip(given, [link, *ports], strict=True):
        text = path.read_text().replace("127.0.0.1:9092", f"127.0.0.1:{link}")
        path.write_text(re.sub(r"(?m)^port = \d+", f"port = {port}", text))


def end(machine):
    for process in machine.processes.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for site in SITES:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((machine.app / "sites" / site / "worker.lock").read_text()), signal.SIGKILL)


@pytest.fixture(scope="module")
def sites(machine):
    """All sites are registered and run; `check` had told that the first was not registered."""
    code, said = deploy(machine, "check", "sites/site-1.toml")
    assert code == 1
    assert "deploy register site-1.pub" in " ".join(said.split())
    for site in SITES:
        code, said = deploy(machine, "register", f"keys/{site}.pub")
        assert code == 0, said
    code, said = deploy(machine, "check", "sites/site-1.toml")
    assert code == 0, said
    return {site: Command(machine, "site", f"sites/{site}.toml") for site in SITES}


@pytest.fixture(scope="module")
def first(machine, sites):
    code, said = deploy(machine, "run", "--rounds", ROUNDS)
    assert code == 0, said
    return said


def status(machine):
    code, said = deploy(machine, "status", "--json")
    assert code == 0, said
    return json.loads(said)


def test_a_finished_run_says_where_its_model_is_and_how_to_use_it(machine, first):
    line = next(line for line in first.splitlines() if line.startswith("model:"))
    path = re.search(r'fs\.load_model\("(.+)"\)', line)[1]
    assert path == str(machine.app / "out" / "first" / "model.npz")
    task = runpy.run_path(str(machine.app / "hospitals" / "task.py"))
    rows = np.genfromtxt(machine.app / "example" / "site-1.csv", delimiter=",", skip_header=1)
    scores = fs.load_model(path).scores((rows[:, :-1] - task["CENTRE"]) / task["SCALE"])
    malignant = rows[:, -1] == 1
    assert np.mean(scores[malignant][:, None] > scores[~malignant]) > 0.5  # better than chance


def test_a_stopped_run_resumes_to_the_same_parameters(machine, first):
    command = running(machine, "second", "--rounds", ROUNDS, exchanges=2)
    [run] = [run for run in status(machine)["runs"] if run["run"] == "second"]
    assert run["state"] == "running"
    assert run["server"]["pid"]
    code, said = deploy(machine, "stop", "--name", "second")
    assert code == 0, said
    assert "deploy run --name second` resumes it" in said
    code, said = command.ended()
    assert code == 1
    assert "stop" in said.splitlines()[-1]
    [run] = [run for run in status(machine)["runs"] if run["run"] == "second"]
    assert (run["state"], run["server"]) == ("stopped", None)
    code, said = deploy(machine, "run", "--name", "second", "--rounds", ROUNDS)
    assert code == 0, said
    found, uninterrupted = solution(machine, "second"), solution(machine, "first")
    assert found.keys() == uninterrupted.keys()
    for part, values in uninterrupted.items():
        np.testing.assert_array_equal(found[part], values)


def test_a_run_whose_server_fails_is_an_error_with_the_reason(machine, sites):
    task = machine.app / "hospitals" / "task.py"
    before = task.read_text()
    task.write_text(before + '\nraise ValueError("the task has a mistake")\n')
    code, said = deploy(machine, "run", "--name", "third")
    task.write_text(before)
    assert code == 1
    assert "ValueError: the task has a mistake" in said.splitlines()[-1]


def test_a_site_that_is_unregistered_is_out(machine, sites):
    code, said = deploy(machine, "unregister", "keys/site-3.pub")
    assert code == 0, said
    assert {node["key"] for node in status(machine)["nodes"]} == {"site-1.pub", "site-2.pub"}
    assert sites["site-3"].ended()[0] is not None
    code, said = deploy(machine, "check", "sites/site-3.toml")
    assert code == 1
    assert "the server does not know this key" in " ".join(said.split())
