"""A process that has imported Flower, and forks for every message.

Flower starts a new Python process for each message. Importing Flower there is most of a message's cost. Here the
program that Flower starts imports almost nothing (`hand_over`). It passes its arguments and open files to this process,
whose fork runs Flower's client app with the check of `approval`.
"""

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

LOOK = 5.0  # seconds between two checks whether this process still owns its address, and its SuperNode lives
PARENT = 1.0  # seconds between two checks whether the program that started this one lives
IDLE = 3600.0  # seconds without a message after which it ends
TOKEN = "FEDSTRATA_TOKEN"  # the variable with the token of a message: all users of a machine can read a command


def hand_over(address: str, arguments: list[str]) -> int:
    """Pass the work to the process at this address; returns its exit status.

    If there is none yet, start it, and run the client app in this process meanwhile. This function runs without the
    installed packages (python -S): finding them takes longer than all its work. What it starts imports nothing from the
    current folder (python -P), where code may lie that was not approved.

    Args:
        address: a socket's path.
        arguments: of Flower's client app.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(address)
        except OSError:
            python = sys.executable
            words = [python, "-P", "-m", "fedstrata.deploy.flower.fork_server", "serve", address]
            subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
            os.execv(python, [python, "-P", "-m", "fedstrata.deploy.flower.approval", *arguments])
        request = json.dumps({"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}).encode()
        socket.send_fds(connection, [len(request).to_bytes(4, "little")], [0, 1, 2])
        connection.sendall(request)
        parent = os.getppid()
        while not select.select([connection], [], [], PARENT)[0]:
            if os.getppid() != parent:  # Flower's process died; the fork ends with this connection
                return 1
        code = connection.recv(1)  # empty if the fork was killed
        return code[0] if code else 1


def with_token(arguments: list[str]) -> list[str]:
    """The arguments of Flower's client app, with the token that the environment of this process holds."""
    token = os.environ.pop(TOKEN, "")
    return [token if word == f"${TOKEN}" else word for word in arguments]


def serve(address: Path) -> None:
    """Fork for every connection, until another process owns the address or the site's SuperNode is gone.

    It also ends after an hour without a connection.

    Args:
        address: the path of the socket to listen at.
    """
    from fedstrata.deploy.flower import approval
    from fedstrata.deploy.flower.supernode import STATE, SiteWatch

    watch = SiteWatch(Path(os.environ.get(STATE, address.parent)))
    work = approval.prepared()
    mask = os.umask(0o177)
    with socket.socket(socket.AF_UNIX) as listener:
        with contextlib.suppress(FileNotFoundError):
            address.unlink()
        listener.bind(str(address))
        os.umask(mask)
        inode = address.stat().st_ino
        listener.listen(8)
        listener.settimeout(LOOK)
        last = time.monotonic()
        while _owns(address, inode) and time.monotonic() - last < IDLE and not watch.gone():
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


def _owns(address: Path, inode: int) -> bool:
    try:
        return address.stat().st_ino == inode
    except FileNotFoundError:
        return False


def _end_with(connection: socket.socket) -> None:
    """End this fork when its caller has ended. It sends nothing after its request, so that bytes mean the end, too.

    Flower's client app itself watches the process that started it only by number, and a dead process that nobody has
    waited for keeps its number. It would try for ever to reach a SuperNode that is gone.
    """
    select.select([connection], [], [])
    os._exit(1)


def _answer(connection: socket.socket, work: Callable[[], None]) -> None:
    """Run the client app in this fork, with the caller's arguments, environment and files."""
    code = 1
    try:
        connection.settimeout(None)
        length, files, _, _ = socket.recv_fds(connection, 4, 3)
        text = b""
        while len(text) < int.from_bytes(length, "little"):
            part = connection.recv(2**16)
            if not part:
                raise ConnectionError("the caller ended before it had sent its request")
            text += part
        request = json.loads(text)
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        sys.argv = ["flwr-clientapp", *with_token(request["arguments"])]
        work()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:  # this fork ends below, and nobody else would report it
        import traceback

        with contextlib.suppress(Exception):
            traceback.print_exc()
    finally:
        for last in (sys.stdout.flush, sys.stderr.flush, lambda: connection.sendall(bytes([code & 255]))):
            with contextlib.suppress(Exception):  # nobody may be reading; the fork must end in any case
                last()
        os._exit(code & 255)


if __name__ == "__main__":
    if sys.argv[1] == "hand-over":
        sys.exit(hand_over(sys.argv[2], sys.argv[3:]))
    serve(Path(sys.argv[2]))
