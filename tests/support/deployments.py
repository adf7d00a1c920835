"""Flower apps of the cases, and a network namespace with nothing but loopback to run them in."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from cases import CASES, START, task_of

import fedstrata as fs
from fedstrata.deploy.flower.local_federation import LocalFederation, free_ports
from fedstrata.deploy.policy import Policy

SITES, PATIENCE = 3, 240
FULL = os.environ.get("FEDSTRATA_TEST_DEPLOY", "") == "full"  # `make test-deploy`
OPTIONS = {"params": START, "batch_size": 3}

TASK = """
    from cases import START, task_of
    from deployments import data_of, method
    from fedstrata.deploy.flower import Deployment

    import fedstrata as fs

    algorithm = method("{name}", {changes})
    task = task_of(algorithm)


    def load(settings):
        return data_of(task, settings)


    options = {{"params": START, "batch_size": 3, "seed": 5, {options}}}
    deployment = Deployment(task.problem, algorithm, load, {rounds}, {sites}, options, {quorum}, deadline={deadline})
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
    fab-include = ["{package}/*.py"]
    [tool.flwr.app.components]
    serverapp = "{package}.server_app:app"
    clientapp = "{package}.client_app:app"
    [tool.flwr.app.config]
    run = "first"
    folder = "out"
    new-code = false
"""
APP = """
    from fedstrata.deploy.flower.{side}_app import {side}_app

    app = {side}_app("{package}.task:deployment")
"""


def method(name, **changes):
    """The algorithm of a case, with few exchanges in a round: each takes seconds here."""
    few = {"terms": 2} if name == "FedNest" else {}
    return dataclasses.replace(CASES[name].algorithm, **few, **changes)


def data_of(task, settings):
    """A site's data; altered.json in its state folder may say by how much one value has changed."""
    found = task.federation.select([int(settings["number"])])
    altered = Path(settings["state"], "altered.json")
    if altered.exists():
        found["train"].examples["x"][2, 1] += json.loads(altered.read_text()).get("data", 0)
    return found


def write_app(
    folder, package, name, rounds, client=APP, sites=SITES, quorum=1.0, deadline=120.0, changes="", options=""
):
    """An app that runs one of the cases; `changes` of its algorithm and `options` of the run are Python text."""
    home = folder / package
    (home / package).mkdir(parents=True, exist_ok=True)
    write = lambda path, text, **given: path.write_text(textwrap.dedent(text).format(package=package, **given))
    write(home / "pyproject.toml", PROJECT)
    write(home / package / "__init__.py", "")
    words = {"name": name, "rounds": rounds, "sites": sites, "quorum": quorum, "deadline": deadline}
    words |= {"changes": changes, "options": options}
    write(home / package / "task.py", TASK, **words)
    write(home / package / "server_app.py", APP, side="server")
    write(home / package / "client_app.py", client, side="client")
    return home


@contextlib.contextmanager
def loopback_only():
    """The first words of a command that run it without a network but loopback; none if the machine forbids that."""
    try:
        inside = ["unshare", "--map-root-user", "--net", "sh", "-c", "ip link set lo up && echo up && exec sleep 3600"]
        holder = subprocess.Popen(inside, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        yield ()
        return
    try:
        up = holder.stdout.readline().strip() == "up"
        yield ("nsenter", "--preserve-credentials", "-U", "-n", "-t", str(holder.pid)) if up else ()
    finally:
        holder.kill()
        holder.communicate()


@contextlib.contextmanager
def federation(folder, app, secure=True, sites=SITES, policy=None, relayed=None):
    """SuperLink and SuperNodes for an app, on loopback; their policies allow what any method sends.

    One site may connect through a relay, which is the process "relay".
    """
    policy = policy or Policy(sites_at_least=min(3, sites), fields=("*",), runs_at_most=1000, parameters=1000)
    given = {f"site-{i}": {"number": i} for i in range(sites)}
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here / "altered"), *filter(None, [os.environ.get("PYTHONPATH")])])
    extra = {"PYTHONPATH": path, "JAX_ENABLE_X64": "1"}
    with loopback_only() as prefix:
        found = LocalFederation(app, folder / "home", given, secure=secure, extra=extra, prefix=prefix, policy=policy)
        if relayed:
            [port], target = free_ports(1), found.server.address.rpartition(":")[2]
            found.sites[relayed] = found.sites[relayed]._replace(server=f"127.0.0.1:{port}")
            words = [*prefix, sys.executable, str(here / "relay.py"), str(port), target]
            found.processes["relay"] = subprocess.Popen(words, start_new_session=True)
        with found:
            yield found


def started(flower, folder, run="first"):
    """A run that writes its results and its log to the folder."""
    folder.mkdir(exist_ok=True)
    with (folder / "run.log").open("a") as log:
        return flower.run(log, folder=str(folder), run=run)


def finished(process, kept):
    """The solution of a run, after it has ended."""
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert (kept / "solution.npz").exists(), (kept.parent / "run.log").read_text()[-3000:]
    return np.load(kept / "solution.npz")["params"]


def wait_until(condition, log, process=None):
    until = time.monotonic() + PATIENCE
    while not condition():
        ended = process is not None and process.poll() is not None
        assert time.monotonic() < until, log.read_text()[-3000:]
        assert not ended, log.read_text()[-3000:]
        time.sleep(0.05)


def exchanges_in(kept):
    reports = kept / "reports.jsonl"
    return reports.read_text().splitlines() if reports.exists() else []


def simulated(name, rounds, sites=SITES, **options):
    algorithm = method(name)
    task = task_of(algorithm)
    federation, options = task.federation.select(range(sites)), {**OPTIONS, **options}
    return fs.run(task.problem, algorithm, federation, rounds=rounds, seeds=[5], stationarity=False, **options)


def programs_or_skip():
    if shutil.which("flower-superlink", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("Flower's programs are not beside this interpreter")


needs_full = pytest.mark.skipif(not FULL, reason="runs in `make test-deploy`")
