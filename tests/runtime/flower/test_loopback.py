"""A real SuperLink and three SuperNodes on loopback follow the simulation, to the last digits."""

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

import fedstrata as fs
from cases import CASES, START, task_of

pytestmark = pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="flwr is not installed")
TESTS, SITES, PATIENCE = Path(__file__).parents[2], 3, 240
OPTIONS = {"params": START, "batch_size": 3}

TASK = """
    from cases import CASES, START, task_of
    from fedstrata.runtime.flower.deployment import Deployment

    algorithm = CASES["{name}"].algorithm
    task = task_of(algorithm)


    def load(settings):
        return task.federation.select([int(settings["number"])])


    options = {{"params": START, "batch_size": 3, "seed": 5}}
    deployment = Deployment(task.problem, algorithm, load, {rounds}, {sites}, options, deadline=120.0)
"""
PROJECT = """
    [project]
    name = "{package}"
    version = "1.0.0"
    description = "a test"
    license = "Apache-2.0"
    dependencies = []
    [tool.flwr.app]
    publisher = "tests"
    [tool.flwr.app.components]
    serverapp = "{package}.server_app:app"
    clientapp = "{package}.client_app:app"
    [tool.flwr.app.config]
    run = "first"
    folder = "{runs}"
"""
APP = """
    from fedstrata.runtime.flower.{side} import {side}_app

    app = {side}_app("{package}.task:deployment")
"""


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


class Flower:
    """A SuperLink and its SuperNodes, in processes of their own."""

    def __init__(self, folder):
        self.folder, (self.port, *self.ports) = folder, free_ports(1 + SITES)
        path = [str(Path(sys.executable).parent), os.environ["PATH"]]
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join(path),  # Flower finds its own programs by name
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
            "PYTHONPATH": str(TESTS),
            "JAX_ENABLE_X64": "1",
        }
        (folder / "home").mkdir()
        (folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "loop"\n[superlink.loop]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        self.processes = [
            self.start("link", "flower-superlink", *self.at(self.port), "--disable-runtime-dependency-installation")
        ]
        self.wait_for_port(self.port)
        self.processes += [self.node(i) for i in range(SITES)]

    def at(self, port):
        return "--insecure", "--host", "127.0.0.1", "--port", str(port)

    def node(self, number):
        settings = f'site="site {number}" state="{self.folder}/site{number}" number={number}'
        link = ("--superlink", f"127.0.0.1:{self.port}", "--node-config", settings)
        return self.start(f"node{number}", "flower-supernode", *self.at(self.ports[number]), *link)

    def start(self, name, *command):
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def wait_for_port(self, port):
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            time.sleep(0.2)
        pytest.fail((self.folder / "link.log").read_text()[-2000:])

    def app(self, package, name, rounds):
        """An app in a folder of its own; returns that folder and the one of its runs."""
        home, runs = self.folder / package, self.folder / "runs" / package
        (home / package).mkdir(parents=True)
        write = lambda path, text, **given: path.write_text(textwrap.dedent(text).format(package=package, **given))
        write(home / "pyproject.toml", PROJECT, runs=runs)
        write(home / package / "__init__.py", "")
        write(home / package / "task.py", TASK, name=name, rounds=rounds, sites=SITES)
        for side in ("server", "client"):
            write(home / package / f"{side}_app.py", APP, side=side)
        return home, runs

    def run(self, home):
        return subprocess.Popen(
            ["flwr", "run", str(home), "loop", "--stream"],
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def stop(self):
        for process in reversed(self.processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for lock in self.folder.glob("site*/worker.lock"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(lock.read_text()), signal.SIGKILL)


@pytest.fixture(scope="module")
def flower(tmp_path_factory):
    if shutil.which("flower-superlink", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("Flower's programs are not beside this interpreter")
    found = Flower(tmp_path_factory.mktemp("flower"))
    yield found
    found.stop()


def finished(process, runs):
    """The solution of a run, once it has ended."""
    try:
        said = process.communicate(timeout=PATIENCE)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said = process.communicate()[0]
    kept = runs / "first" / "solution.npz"
    assert kept.exists(), said[-3000:]
    return np.load(kept)["params"]


def simulated(name, rounds):
    algorithm = CASES[name].algorithm
    task = task_of(algorithm)
    federation = task.federation.select(range(SITES))
    return fs.run(task.problem, algorithm, federation, rounds=rounds, seeds=[5], stationarity=False, **OPTIONS)


def test_a_deployed_run_is_the_simulated_one(flower):
    home, runs = flower.app("apart", "FedX2", 2)
    found = finished(flower.run(home), runs)
    np.testing.assert_allclose(found, simulated("FedX2", 2).solution(), rtol=1e-12)


def test_a_worker_that_is_killed_is_started_again_and_nothing_is_lost(flower):
    home, runs = flower.app("again", "Scaffold", 3)
    process = flower.run(home)
    reports, until = runs / "first" / "reports.jsonl", time.monotonic() + PATIENCE
    while not (reports.exists() and len(reports.read_text().splitlines()) > 1):
        assert time.monotonic() < until, process.stdout.read()
        time.sleep(0.1)
    os.kill(int((flower.folder / "site1" / "worker.lock").read_text()), signal.SIGKILL)
    np.testing.assert_allclose(finished(process, runs), simulated("Scaffold", 3).solution(), rtol=1e-12)
