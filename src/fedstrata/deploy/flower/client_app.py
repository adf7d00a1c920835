"""The client app: it passes every message to the site's worker, and starts the worker if needed. It imports no JAX."""

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedstrata import __version__
from fedstrata.base.text import one_line
from fedstrata.deploy.flower import socket_frames

CALL = "call"  # in the header of a message and of its reply: a token
CRASHES = 5  # of workers on one message, after which the site gives up
HEADER = 128  # bytes before the letter in an array of Flower
MOST_ENTRIES = 16  # in the header of a message
SHIPPED = {".py", ".toml", ".yaml", ".yml", ".json", ".jsonl"}  # an app may read settings from all of them
PATIENCE = 180.0  # seconds for a worker to start, which imports JAX and loads the site's data


class Handover(ClientApp):
    """A client app for any algorithm: the bytes of a message state what to do."""

    def __init__(self, where: str):
        """A client app.

        Args:
            where: the deployment, "package.module:name".
        """
        super().__init__()
        self.where = where

    def __call__(self, message: Message, context: Context) -> Message:
        settings, token = dict(context.node_config), {}
        try:
            given, call = opened(message.content)
            token = {CALL: given.pop(CALL)} if CALL in given else {}
            about, body = ask(self.where, settings, message.metadata.message_type, given, call)
        except Exception as error:  # sent to the server, which continues without this site
            about, body = {"error": one_line(f"{type(error).__name__}: {error}", 1000)}, b""
        return Message(record({**about, **token}, body), reply_to=message)


def new_token() -> str:
    """A random text that only the receiver of a call learns. Its reply must hold it."""
    return secrets.token_hex(16)


def client_app(where: str) -> ClientApp:
    """The client app of the deployment at "package.module:name"."""
    return Handover(where)


def record(about: Mapping[str, Any], body: bytes) -> RecordDict:
    """The content of one of Flower's messages.

    Args:
        about: a header.
        body: a call or a reply, in bytes.
    """
    letter = Array(dtype="uint8", shape=(len(body),), stype="numpy.ndarray", data=_npy_header(len(body)) + body)
    return RecordDict({"about": ConfigRecord(dict(about)), "body": ArrayRecord({"letter": letter})})


def opened(content: Any) -> tuple[dict[str, Any], bytes]:
    """The header and the bytes in the content of one of Flower's messages.

    The bytes are what follows the one header that `record` writes. No parser of array files sees what a peer sent.

    Raises:
        ValueError: it is not a message of FedStrata.
    """
    about, arrays = (content.get(name) if isinstance(content, RecordDict) else None for name in ("about", "body"))
    letter = arrays.get("letter") if isinstance(arrays, ArrayRecord) else None
    data = letter.data if isinstance(letter, Array) else None
    if not isinstance(about, ConfigRecord) or not isinstance(data, bytes) or len(about) > MOST_ENTRIES:
        raise ValueError("not a message of FedStrata")
    body = data[HEADER:]
    if data[:HEADER] != _npy_header(len(body)):
        raise ValueError("not a message of FedStrata: its bytes have another header")
    return dict(about), body


def _npy_header(size: int) -> bytes:
    """The header of a file of NumPy's format 1.0 with this many bytes, which Flower's own arrays have."""
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({size},), }}"
    return b"\x93NUMPY\x01\x00" + (HEADER - 10).to_bytes(2, "little") + text.ljust(HEADER - 11).encode() + b"\n"


def ask(
    where: str, settings: Mapping[str, Any], kind: str, about: Mapping[str, Any], body: bytes
) -> tuple[dict[str, Any], bytes]:
    """The header and the bytes of the worker's reply.

    Args:
        where: the deployment, "package.module:name".
        settings: of the site.
        kind: the type of Flower's message.
        about: its header.
        body: its bytes.
    """
    for needed in ("site", "state"):
        if needed not in settings:
            raise ValueError(f'--node-config of this SuperNode lacks {needed!r}: give it site="NAME" state="FOLDER"')
    folder, code = Path(str(settings["state"])), code_of(where)
    request = {"kind": kind, "code": code, "settings": dict(settings), "about": dict(about)}
    why, crashes, until = "it closed the connection", 0, time.monotonic() + PATIENCE
    while crashes < CRASHES and time.monotonic() < until:
        try:
            with connected(where, folder, code) as connection:
                socket_frames.send(connection, request, body)
                answer, found = socket_frames.receive(connection)
        except ConnectionError:  # killed, or about to end: the next worker starts from the same state
            crashes += 1
        else:
            if "stale" not in answer:
                return answer, found
            why = answer["stale"]  # a worker of another version ends now; the next one has this version
        time.sleep(0.2)
    raise RuntimeError(f"the worker of {settings['site']} does not reply: {why}")


def code_of(where: str) -> str:
    """The version of an app: the library's version, and a hash of all its files that Flower ships."""
    package = where.partition(":")[0].partition(".")[0]
    spec = find_spec(package)
    if spec is None:
        raise ImportError(f"there is no package {package!r} on the path of this client app")
    root = Path(next(iter(spec.submodule_search_locations or [spec.origin or ""])))
    if (root.parent / "pyproject.toml").exists():
        root = root.parent  # what Flower ships, in which the package is one folder
    files = sorted(f for f in root.rglob("*") if f.suffix in SHIPPED and f.is_file()) if root.is_dir() else [root]
    digest = sha256()
    for file in files:
        name, data = file.relative_to(root if root.is_dir() else root.parent).as_posix().encode(), file.read_bytes()
        digest.update(b"%d %d " % (len(name), len(data)) + name + data)
    return f"{__version__} {digest.hexdigest()[:16]}"


def connected(where: str, folder: Path, code: str) -> socket.socket:
    """A connection to the worker of a state folder, which is started if needed.

    Args:
        where: the deployment, "package.module:name".
        folder: the site's state.
        code: the version of the app.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path, started, until = socket_frames.address(folder), None, time.monotonic() + PATIENCE
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
            return connection
        except OSError:
            connection.close()
        if started is not None and started.poll() not in (None, 0):
            raise RuntimeError(f"the worker did not start; see {folder.name}/worker.log at the site")
        if started is None or started.poll() == 0:  # it found another worker, which may have been about to end
            started = _start(where, folder, code)
        if time.monotonic() > until:
            raise TimeoutError(f"the worker did not start within {PATIENCE:.0f} s; its worker.log tells more")
        time.sleep(0.05)


def _start(where: str, folder: Path, code: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    # -P: the current folder may hold the package, too, in a version that was not approved.
    command = [sys.executable, "-P", "-m", "fedstrata.deploy.flower.worker", where, str(folder), code]
    with (folder / "worker.log").open("ab") as log:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
