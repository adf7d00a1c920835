"""What operators of a server and of sites do, and what happens to their machines, in tests over real processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from deployments import PATIENCE, exchanges_in, wait_until, write_app

from fedstrata.deploy.flower.approval import approve


def write_server_file(flower):
    """server.toml in the app's folder: with it, `fedstrata deploy` works there."""
    keys, database = flower.home / "keys", flower.home / "superlink.db"
    lines = [
        f'address = "{flower.server.address}"',
        'listen = "127.0.0.1"',
        f'keys = "{keys}"',
        f'database = "{database}"',
    ]
    (flower.app / "server.toml").write_text("\n".join(lines))


class Command:
    """A `fedstrata deploy` command in the app's folder."""

    def __init__(self, flower, *words):
        program = [*flower.prefix, str(Path(sys.executable).parent / "fedstrata"), "deploy", *words]
        self.log = flower.home / f"command-{time.monotonic_ns()}.log"
        with self.log.open("w") as log:
            given = {**os.environ, **flower.extra}
            both = {"stdout": log, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
            self.process = subprocess.Popen(program, **both, env=given, cwd=flower.app, start_new_session=True)
        flower.processes[self.log.name] = self.process  # ends with the federation

    def ended(self):
        """The exit code, and all that was said; the last line is the reason of a failure."""
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            pytest.fail(self.log.read_text()[-3000:])
        return self.process.returncode, self.log.read_text()


def deploy(flower, *words):
    """The exit code of a `fedstrata deploy` command, and all that it said."""
    return Command(flower, *words).ended()


def running(flower, name, *words, exchanges=1):
    """A run that was started with `fedstrata deploy run` and has finished some exchanges."""
    command = Command(flower, "run", "--name", name, *words)
    wait_until(lambda: len(exchanges_in(flower.app / "out" / name)) >= exchanges, command.log, command.process)
    return command


@contextlib.contextmanager
def paused(*numbers):
    """While these processes are stopped: they answer nothing, and close nothing."""
    for number in numbers:
        os.kill(number, signal.SIGSTOP)
    try:
        yield
    finally:
        for number in numbers:
            os.kill(number, signal.SIGCONT)


@contextlib.contextmanager
def rewritten(flower, rounds, name="SCAFFOLD", **changes):
    """While the app has other code, which all sites approve."""
    task = flower.app / flower.app.name / "task.py"
    before = task.read_text()
    write_app(flower.app.parent, flower.app.name, name, rounds, **changes)
    approve(flower.app, flower.home / "approved.txt")
    try:
        yield
    finally:
        task.write_text(before)


def alter(flower, name, **changes):
    """Change a site's data, clock or versions, from the next start of its processes on; none: as it was."""
    (flower.home / name / "altered.json").write_text(json.dumps(changes))


def stop(flower, name):
    """Stop a site's SuperNode as its owner would."""
    process = flower.processes.pop(name)
    process.terminate()
    process.wait(30)


def restart(flower, name):
    """Stop a site's SuperNode, and start it again."""
    stop(flower, name)
    flower.start_site(name)


def solution(flower, name):
    """The parameters of a run, by name."""
    with np.load(flower.app / "out" / name / "solution.npz") as found:
        return dict(found)
