"""The client app: it hands every message to the site's worker, which it starts if there is none. No JAX in here."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedstrata import __version__
from fedstrata.runtime.flower import wire

CRASHES = 5  # of workers over one message, after which the site gives up on it
PATIENCE = 180.0  # seconds for a worker to start, which imports JAX and loads the site's data


class Handover(ClientApp):
    """A client app for any algorithm: what a message asks for is in its letter."""

    def __init__(self, where: str):
        super().__init__()
        self.where = where

    def __call__(self, message: Message, context: Context) -> Message:
        settings = dict(context.node_config)
        try:
            about, body = ask(self.where, settings, message.metadata.message_type, *opened(message.content))
        except Exception as error:  # the server is told, with the site's name, and goes on without it
            about, body = {"error": f"{type(error).__name__}: {error}"}, b""
        return Message(record(about, body), reply_to=message)


def client_app(where: str) -> ClientApp:
    """The client app of the deployment at "package.module:name"."""
    return Handover(where)


def record(about: Mapping[str, Any], body: bytes) -> RecordDict:
    """A message's content: what it is about, and a letter."""
    letter = ArrayRecord({"letter": Array(np.frombuffer(body, np.uint8))})
    return RecordDict({"about": ConfigRecord(dict(about)), "body": letter})


def opened(content: RecordDict) -> tuple[dict[str, Any], bytes]:
    about, arrays = content["about"], content["body"]
    if not isinstance(about, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise ValueError("not a message of FedStrata")
    return dict(about), arrays["letter"].numpy().astype(np.uint8).tobytes()


def ask(where: str, settings: Mapping[str, Any], kind: str, about: Mapping[str, Any], body: bytes) -> Any:
    """What the site's worker answers."""
    for needed in ("site", "state"):
        if needed not in settings:
            raise ValueError(f'--node-config of this SuperNode lacks {needed!r}: give it site="NAME" state="FOLDER"')
    folder, code = Path(str(settings["state"])), code_of(where)
    request = {"kind": kind, "code": code, "settings": dict(settings), "about": dict(about)}
    why, crashes, until = "it hung up", 0, time.monotonic() + PATIENCE
    while crashes < CRASHES and time.monotonic() < until:
        try:
            with connected(where, folder, code) as connection:
                wire.send(connection, request, body)
                answer, found = wire.receive(connection)
        except ConnectionError:  # killed at work, or about to leave: the next one does it, from the same state
            crashes += 1
        else:
            if "stale" not in answer:
                return answer, found
            why = answer["stale"]  # a worker of another version leaves now; the next one is of this version
        time.sleep(0.2)
    raise RuntimeError(f"the worker of {settings['site']} does not answer: {why}")


def code_of(where: str) -> str:
    """What tells one version of the app from another: the library's version, and the app's own source."""
    package = where.partition(":")[0].partition(".")[0]
    spec = find_spec(package)
    if spec is None:
        raise ImportError(f"no package {package!r} on the path of this client app")
    root = Path(next(iter(spec.submodule_search_locations or [spec.origin or ""])))
    files = sorted(root.rglob("*.py")) if root.is_dir() else [root]
    digest = sha256(b"\0".join(f.name.encode() + b"\0" + f.read_bytes() for f in files))
    return f"{__version__} {digest.hexdigest()[:16]}"


def connected(where: str, folder: Path, code: str) -> socket.socket:
    """A connection to the folder's worker; the first one who asks starts it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path, started, until = wire.address(folder), None, time.monotonic() + PATIENCE
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
            return connection
        except OSError:
            connection.close()
        if started is not None and started.poll() not in (None, 0):
            tail = (folder / "worker.log").read_text(errors="replace").strip().splitlines()[-3:]
            raise RuntimeError("the worker did not start: " + " | ".join(tail))
        if started is None or started.poll() == 0:  # it found another one there, which may have been about to leave
            started = _start(where, folder, code)
        if time.monotonic() > until:
            raise TimeoutError(f"the worker did not start within {PATIENCE:.0f} s; see {folder / 'worker.log'}")
        time.sleep(0.05)


def _start(where: str, folder: Path, code: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "fedstrata.runtime.flower.worker", where, str(folder), code]
    with (folder / "worker.log").open("ab") as log:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
