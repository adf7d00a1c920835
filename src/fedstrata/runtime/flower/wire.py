"""Between a client app and its site's worker: a socket that only their owner can open, and frames over it."""

import json
import os
import socket
import struct
from hashlib import sha256
from pathlib import Path
from tempfile import gettempdir
from typing import Any

LONGEST = 100  # characters of a socket's path that every system takes


def address(folder: Path, name: str = "worker.sock") -> Path:
    """A socket of the site that keeps its state in this folder: its worker's, if nothing else is said."""
    path = folder.absolute() / name
    if len(str(path)) <= LONGEST:
        return path
    short = Path(gettempdir()) / f"fedstrata-{os.getuid()}"
    short.mkdir(mode=0o700, exist_ok=True)
    if short.stat().st_uid != os.getuid() or short.stat().st_mode & 0o077:
        raise PermissionError(f"{short} must belong to this user alone")
    return short / f"{sha256(str(path).encode()).hexdigest()[:24]}.sock"


def send(connection: socket.socket, about: dict[str, Any], body: bytes = b"") -> None:
    text = json.dumps(about).encode()
    connection.sendall(struct.pack("<IQ", len(text), len(body)) + text)
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    lengths = struct.unpack("<IQ", _exactly(connection, 12))
    text, body = (_exactly(connection, length) for length in lengths)
    return json.loads(text), body


def _exactly(connection: socket.socket, length: int) -> bytes:
    parts, left = [], length
    while left:
        part = connection.recv(min(left, 2**20))
        if not part:
            raise ConnectionError("the other side hung up")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
