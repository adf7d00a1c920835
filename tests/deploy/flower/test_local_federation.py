"""A real SuperLink and three SuperNodes, with TLS and keys, on loopback alone, give the simulated results."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from cases import CASES
from deployments import FULL, federation, finished, programs_or_skip, simulated, started, write_app

from fedstrata.deploy.flower.approval import approve
from fedstrata.deploy.policy import Policy

pytestmark = pytest.mark.slow

ROUNDS = 2
FEW = ["FedAvg", "FedNMap", "FedX2", "FedNest"]
ALL = [name for name, case in CASES.items() if not case.algorithm.centralised]


@pytest.fixture(scope="module")
def flower(tmp_path_factory):
    programs_or_skip()
    folder = tmp_path_factory.mktemp("loopback")
    # Sites have a few rows of each group.
    policy = Policy(rows_at_least=1, fields=("*",), runs_at_most=1000, parameters=1000)
    with federation(folder, write_app(folder, "firstapp", "FedAvg", ROUNDS), policy=policy) as found:
        yield found


@pytest.mark.parametrize("name", ALL if FULL else FEW)
def test_a_deployed_run_equals_the_simulated_one(flower, tmp_path, name):
    flower.app = write_app(tmp_path, f"app{name.lower()}", name, ROUNDS)
    approve(flower.app, flower.home / "approved.txt")
    found = finished(started(flower, tmp_path, name), tmp_path / name)
    np.testing.assert_allclose(found, simulated(name, ROUNDS).solution(), rtol=1e-12, atol=1e-14)


def test_only_loopback_can_be_reached(flower):
    if not flower.prefix:
        pytest.skip("this machine allows no network namespace")
    out = "import socket; socket.create_connection(('192.0.2.1', 80), 5)"
    found = subprocess.run([*flower.prefix, sys.executable, "-c", out], capture_output=True, text=True)
    assert "Network is unreachable" in found.stderr


def test_a_local_federation_that_is_terminated_leaves_no_program_behind(tmp_path):
    programs_or_skip()
    app = write_app(tmp_path, "terminatedapp", "FedAvg", ROUNDS)
    (app / "sites").mkdir(exist_ok=True)
    for number in range(3):
        text = f'site = "site-{number}"\nserver = "127.0.0.1:9092"\nstate = "site-{number}"\n'
        (app / "sites" / f"site-{number}.toml").write_text(f"{text}[settings]\nnumber = {number}\n")
    command = [sys.executable, "-m", "fedstrata.cli.main", "deploy", "local", "--app", str(app)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    home = app / "out" / "local"
    until = time.monotonic() + 60
    while not list(home.glob("site-0*")) and time.monotonic() < until:
        time.sleep(0.2)
    assert len(programs_of(home)) >= 2
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    until = time.monotonic() + 30
    while programs_of(home) and time.monotonic() < until:
        time.sleep(0.2)
    assert programs_of(home) == []


def programs_of(home):
    """The processes whose command or environment names a folder."""
    found = []
    for about in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (about / "cmdline").read_bytes() + (about / "environ").read_bytes()
            if str(home).encode() in words:
                found.append(words.split(b"\0")[:3])
    return found
