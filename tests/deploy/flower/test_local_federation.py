"""A real SuperLink and three SuperNodes, with TLS and keys, on loopback alone, give the simulated results."""

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from cases import CASES
from deployments import FULL, federation, finished, programs_or_skip, simulated, started, write_app

from fedstrata.deploy.flower.approval import approve

pytestmark = pytest.mark.slow

ROUNDS = 2
FEW = ["FedAvg", "FedNMap", "FedX2", "FedNest"]
ALL = [name for name, case in CASES.items() if not case.algorithm.centralised]


@pytest.fixture(scope="module")
def flower(tmp_path_factory):
    programs_or_skip()
    folder = tmp_path_factory.mktemp("loopback")
    with federation(folder, write_app(folder, "firstapp", "FedAvg", ROUNDS)) as found:
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
