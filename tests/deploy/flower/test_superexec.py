"""A site's SuperNode and its SuperExec end with one another: without either, the site looks online and is deaf."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from fedstrata.deploy.flower import socket_frames, worker
from fedstrata.deploy.flower.supernode import only_supernode

SUPERNODE = """
import subprocess, sys, time
from pathlib import Path
from fedstrata.deploy.flower import supernode

class Popen(subprocess.Popen):
    def __init__(self, words):
        super().__init__(["sleep", "60"])
        print(self.pid, flush=True)

supernode.subprocess.Popen, supernode.STOPPING = Popen, 0.2
supernode.start_superexec(Path(sys.argv[1]), ["--host", "127.0.0.1", "--port", "1"])
time.sleep(60)
"""


def test_a_supernode_ends_with_an_error_when_its_superexec_has_ended(tmp_path):
    words = [sys.executable, "-c", SUPERNODE, str(tmp_path)]
    node = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    number = int(node.stdout.readline())
    time.sleep(1)
    assert node.poll() is None
    os.kill(number, signal.SIGKILL)
    _, said = node.communicate(timeout=30)
    assert node.returncode == 1
    assert f"the SuperExec of this site has ended (status {-signal.SIGKILL})" in said


SUPEREXEC = """
import os, sys, time
import flwr.supercore.cli as cli
from fedstrata.deploy.flower import supernode

sys.argv = ["flower-superexec", "--parent-pid", str(os.getppid())]
supernode.PARENT = 0.1
cli.flower_superexec = lambda: print(os.getpid(), flush=True) or time.sleep(60)
supernode.run_superexec()
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
time.sleep(60)
"""


def state_of(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_a_superexec_ends_when_its_supernode_is_dead_and_nobody_has_waited_for_it():
    node = subprocess.Popen([sys.executable, "-c", PARENT, SUPEREXEC], stdout=subprocess.PIPE, text=True)
    number = int(node.stdout.readline())
    time.sleep(0.5)
    assert state_of(number) not in ("", "Z")
    node.kill()
    try:
        until = time.monotonic() + 10
        while state_of(number) not in ("", "Z") and time.monotonic() < until:
            time.sleep(0.05)
        assert state_of(node.pid) == "Z"
        assert state_of(number) in ("", "Z")
    finally:
        node.wait()
        node.stdout.close()
        if state_of(number) not in ("", "Z"):
            os.kill(number, signal.SIGKILL)


WORKER = """
import sys, time
from pathlib import Path
from fedstrata.deploy.flower import socket_frames, worker
from fedstrata.deploy.flower.supernode import only_supernode

class Busy:
    def __init__(self, deployment, folder, code):
        self.folder, self.code, self.lines = folder, code, None

    def answer(self, request, body):
        Path(sys.argv[1], "busy").touch()
        time.sleep(120)

worker.Worker, worker.resolve = Busy, lambda where: None
worker.GRACE = worker.LOOK = 0.2
worker.main("package.module:name", sys.argv[1], "1")
"""


@pytest.fixture
def busy(tmp_path):
    """A worker in the middle of a long call, and what stands for its SuperNode."""
    state = tmp_path / "state"
    node = only_supernode(state)
    node.__enter__()
    words = [sys.executable, "-c", WORKER, str(state)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    connection = socket.socket(socket.AF_UNIX)
    until = time.monotonic() + 120
    while not (state / "busy").exists():
        assert process.poll() is None
        assert time.monotonic() < until
        if connection.connect_ex(str(socket_frames.address(state))) == 0:
            socket_frames.send(connection, {"code": "1"})
        time.sleep(0.05)
    yield process, state, node
    connection.close()
    process.kill()
    process.communicate()


def test_a_worker_ends_with_its_site_also_in_the_middle_of_a_call(busy):
    process, _, node = busy
    time.sleep(2)
    assert process.poll() is None
    node.__exit__(None, None, None)
    assert process.wait(20) == 1
    assert "the SuperNode of this site is gone" in process.stderr.read()


def test_a_worker_ends_when_the_state_of_its_site_was_deleted(busy):
    process, state, node = busy
    shutil.rmtree(state)
    assert process.wait(20) == 1
    node.__exit__(None, None, None)


def test_a_busy_worker_ends_within_half_a_minute():
    assert worker.GRACE + 3 * worker.LOOK <= 30
