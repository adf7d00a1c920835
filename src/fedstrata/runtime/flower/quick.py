"""A process that has Flower imported, and forks for every message.

Flower starts a new Python for each message, which imports Flower anew: most of what a message costs. Here the program
that Flower starts is a few lines without imports (`hand_over`); it gives its arguments and its open files to this
process, whose fork does what Flower's client app does, behind the check of `approved`.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

LOOK = 5.0  # seconds between looks whether the site still wants this process
IDLE = 3600.0  # seconds without a message after which it leaves


def hand_over(address: str, arguments: list[str]) -> int:
    """The program that Flower starts. Where nobody is there yet, it starts the process and does the work itself.

    It runs without the packages that are installed, which take longer to find than all that it does.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(address)
        except OSError:
            python = sys.executable
            words = [python, "-m", "fedstrata.runtime.flower.quick", "serve", address]
            subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
            os.execv(python, [python, "-m", "fedstrata.runtime.flower.approved", *arguments])
        about = json.dumps({"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}).encode()
        socket.send_fds(connection, [len(about).to_bytes(4, "little")], [0, 1, 2])
        connection.sendall(about)
        code = connection.recv(1)  # nothing, if the fork was killed
        return code[0] if code else 1


def serve(address: Path) -> None:
    """Fork for everyone who comes, until the address belongs to somebody else."""
    from fedstrata.runtime.flower import approved

    work = approved.prepared()
    mask = os.umask(0o177)
    with socket.socket(socket.AF_UNIX) as listener:
        with contextlib.suppress(FileNotFoundError):
            address.unlink()
        listener.bind(str(address))
        os.umask(mask)
        mine = address.stat().st_ino
        listener.listen(8)
        listener.settimeout(LOOK)
        last = time.monotonic()
        while address.exists() and address.stat().st_ino == mine and time.monotonic() - last < IDLE:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:  # forks that have ended
                    pass
            with contextlib.suppress(TimeoutError, ConnectionError):
                connection, _ = listener.accept()
                last = time.monotonic()
                with connection:
                    if os.fork() == 0:
                        listener.close()
                        _answer(connection, work)


def _answer(connection: socket.socket, work: Callable[[], None]) -> None:
    """As if this fork had been started with the other's arguments, environment and files."""
    code = 1
    try:
        connection.settimeout(None)
        length, files, _, _ = socket.recv_fds(connection, 4, 3)
        about = b""
        while len(about) < int.from_bytes(length, "little"):
            about += connection.recv(2**16)
        told = json.loads(about)
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.environ.clear()
        os.environ.update(told["environment"])
        os.chdir(told["folder"])
        sys.argv = ["flwr-clientapp", *told["arguments"]]
        work()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(OSError):
            connection.sendall(bytes([code & 255]))
        os._exit(code & 255)


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        sys.exit(hand_over(sys.argv[2], sys.argv[3:]))
    serve(Path(sys.argv[2]))
