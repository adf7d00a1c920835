"""Frames between a client app and its site's worker, over a socket that only their owner can open."""

import json
import os
import socket
import stat
import struct
from hashlib import sha256
from pathlib import Path
from tempfile import gettempdir
from typing import Any

LONGEST = 100  # characters of a socket's path that every operating system accepts


def address(folder: Path, name: str = "worker.sock") -> Path:
    """The path of a site's socket; in the temporary folder if it were too long.

    Args:
        folder: where the site keeps its state.
        name: of the socket; the default is the worker's.
    """
    path = folder.absolute() / name
    if len(str(path)) <= LONGEST:
        return path
    short = Path(gettempdir()) / f"fedstrata-{os.getuid()}"
    short.mkdir(mode=0o700, exist_ok=True)
    found = short.lstat()  # another user may have put a link there, and may change later where it leads
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{short} must be a folder that belongs to this user alone: remove it")
    return short / f"{sha256(str(path).encode()).hexdigest()[:24]}.sock"


def send(connection: socket.socket, about: dict[str, Any], body: bytes = b"") -> None:
    """Send one frame: a JSON header, and bytes."""
    text = json.dumps(about).encode()
    connection.sendall(struct.pack("<IQ", len(text), len(body)) + text)
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    """The header and the bytes of one frame; a ConnectionError if the other side closes early."""
    lengths = struct.unpack("<IQ", _exactly(connection, 12))
    text, body = (_exactly(connection, length) for length in lengths)
    return json.loads(text), body


def _exactly(connection: socket.socket, length: int) -> bytes:
    parts, left = [], length
    while left:
        part = connection.recv(min(left, 2**20))
        if not part:
            raise ConnectionError("the other side closed the connection")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
