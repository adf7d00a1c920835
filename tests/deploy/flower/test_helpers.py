"""The helper processes of a site end with whoever needs them, and not before."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from fedstrata.deploy.flower import fork_server, socket_frames, supernode, worker
from fedstrata.deploy.flower.config import SiteConfig
from fedstrata.deploy.flower.supernode import SiteWatch, only_supernode

# A forking process whose client app writes its number to a file and then works for ever.
SERVE = """
import os, sys, time
from pathlib import Path
from fedstrata.deploy.flower import approval, fork_server, supernode

def work():
    Path(os.environ["NUMBER"]).write_text(str(os.getpid()))
    if os.environ.get("SPEAK"):
        print("x" * 100_000)
        raise ValueError("and now it fails")
    while True:
        time.sleep(0.01)

approval.prepared = lambda: work
fork_server.LOOK, supernode.GRACE = 0.1, 2.0
supernode.SiteWatch.__init__.__defaults__ = (2.0,)
fork_server.serve(Path(sys.argv[1]))
"""
GRACE = 2.0  # seconds that a worker outlives its SuperNode in these tests
HAND_OVER = [sys.executable, "-I", "-S", fork_server.__file__, "hand-over"]


def eventually(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)


def runs(number):
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def forking(tmp_path):
    address = tmp_path / "clientapp.sock"
    given = {**os.environ, supernode.STATE: str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", SERVE, str(address)], env=given)
    eventually(address.exists)
    yield process, address, tmp_path / "number"
    process.kill()
    process.wait()


def fork_of(number):
    eventually(lambda: number.exists() and number.read_text())
    return int(number.read_text())


def test_a_fork_ends_when_its_caller_is_killed(forking):
    _, address, number = forking
    caller = subprocess.Popen([*HAND_OVER, str(address)], env={**os.environ, "NUMBER": str(number)})
    fork = fork_of(number)
    assert runs(fork)
    caller.kill()
    caller.wait()
    eventually(lambda: not runs(fork))


def test_a_fork_ends_when_the_process_that_started_its_caller_is_killed(forking):
    """As Flower's SuperExec, which starts a program per message and is killed with the SuperNode."""
    _, address, number = forking
    start = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"
    words = [sys.executable, "-c", start, *HAND_OVER, str(address)]
    starter = subprocess.Popen(words, env={**os.environ, "NUMBER": str(number)})
    fork = fork_of(number)
    starter.kill()
    starter.wait()
    eventually(lambda: not runs(fork))


def test_a_fork_ends_when_nobody_reads_what_it_prints(forking):
    process, address, number = forking
    read, write = os.pipe()
    given = {**os.environ, "NUMBER": str(number), "SPEAK": "1"}
    caller = subprocess.Popen([*HAND_OVER, str(address)], env=given, stdout=write, stderr=write)
    os.close(read)
    os.close(write)
    assert caller.wait(60) == 1  # its exit status arrives
    eventually(lambda: not runs(fork_of(number)))
    assert process.poll() is None


def test_the_forking_process_ends_with_the_supernode(forking, tmp_path):
    process, *_ = forking
    with only_supernode(tmp_path):
        time.sleep(0.5)
        assert process.poll() is None
    assert process.wait(60) == 0


@pytest.fixture
def listening(tmp_path, monkeypatch):
    """A worker that listens in a thread."""
    monkeypatch.setattr(worker, "LOOK", 0.05)
    monkeypatch.setattr(worker, "SiteWatch", lambda folder: SiteWatch(folder, grace=GRACE))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(socket_frames.address(tmp_path)))
        listener.listen(1)
        found = threading.Thread(target=worker.serve, args=(worker.Worker(None, tmp_path, "1"), listener), daemon=True)
        with only_supernode(tmp_path):
            found.start()
            time.sleep(0.5)
            assert found.is_alive()
        yield found
        found.join(60)


def test_a_worker_ends_after_its_supernode(listening):
    time.sleep(0.1)
    assert listening.is_alive()  # for the time of grace
    listening.join(60)
    assert not listening.is_alive()


def test_a_worker_survives_a_supernode_that_is_restarted(listening, tmp_path):
    time.sleep(0.15)
    with only_supernode(tmp_path):
        time.sleep(GRACE + 0.5)
        assert listening.is_alive()


HOLD = """
import fcntl, os, sys, time
file = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
fcntl.flock(file, fcntl.LOCK_EX)
os.write(file, str(os.getpid()).encode())
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("name", ["fedstrata.deploy.flower.worker", "another.program"])
def test_a_new_supernode_ends_the_worker_of_an_earlier_one_and_no_other_process(tmp_path, monkeypatch, name):
    """The worker has the site's data in memory, and they may have changed since."""
    monkeypatch.setattr(supernode, "GRACE", 0.3)
    words = [sys.executable, "-c", HOLD, str(tmp_path / "worker.lock"), name]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    supernode.end_worker(tmp_path)
    if name == "another.program":
        assert process.poll() is None
    else:
        assert process.wait(60) == -signal.SIGKILL
    process.kill()
    process.communicate()
    supernode.end_worker(tmp_path)  # there is none


def test_helpers_of_a_folder_without_a_lock_stay(tmp_path):
    """A SuperNode that was started in another way holds no lock."""
    assert not SiteWatch(tmp_path, grace=0.0).gone()


def test_a_grace_and_a_look_end_within_half_a_minute():
    assert supernode.GRACE + max(worker.LOOK, fork_server.LOOK) <= 30


def test_a_second_supernode_of_a_state_folder_is_refused(tmp_path):
    site = SiteConfig(tmp_path, "north", "127.0.0.1:9", state="north", insecure=True)
    given = site.environment()
    socket_frames.address(tmp_path / "north", "clientapp.sock").write_text("")  # that of the first
    with only_supernode(tmp_path / "north"):
        found = subprocess.run(site.command(), env=site.environment(), capture_output=True, text=True, timeout=120)
        assert found.returncode == 1
        assert f"runs already (process {os.getpid()}" in found.stderr
        assert "a state folder of its own" in found.stderr
        assert socket_frames.address(tmp_path / "north", "clientapp.sock").exists()
    assert given[supernode.STATE] == str(tmp_path / "north")


def test_the_lock_is_not_inherited_by_programs_that_the_supernode_starts(tmp_path):
    """Otherwise a child that outlives a killed SuperNode would keep the next one out."""
    with only_supernode(tmp_path):
        child = subprocess.Popen(["sleep", "30"], close_fds=False)
    with only_supernode(tmp_path):
        pass
    child.send_signal(signal.SIGKILL)
    child.wait()
