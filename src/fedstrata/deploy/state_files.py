"""Small files of a state folder. Whatever the disk did to them: the content, none, or an error that names the file."""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstrata.base.errors import StateError
from fedstrata.base.files import replacing

CHECKSUM = "sha256"  # the entry of a JSON file with the hash of all others


class DamagedFile(StateError):
    """A file is missing, damaged or replaced, or cannot be written. Nothing was answered."""


def read_bytes(path: Path, remedy: str) -> bytes | None:
    """The content of a file; None if there is none.

    Args:
        path: the file itself: a link to one is refused, because it may lead to a file of somebody else.
        remedy: what to do about a damaged file, for the error.

    Raises:
        DamagedFile: it is a link or a folder, or cannot be read.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        why = "is a link" if error.errno == errno.ELOOP else f"cannot be read ({error.strerror})"
        raise DamagedFile(f"{path} {why}; {remedy}") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DamagedFile(f"{path} is no file; {remedy}")
    try:
        with os.fdopen(handle, "rb") as file:
            return file.read()
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read ({error.strerror}); {remedy}") from None


def read_text(path: Path, remedy: str) -> str | None:
    """The text of a file, as in `read_bytes`."""
    data = read_bytes(path, remedy)
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        raise DamagedFile(f"{path} is damaged (it is not a text); {remedy}") from None


def write_text(path: Path, text: str) -> None:
    """Write a file as a whole, for its owner only.

    Args:
        path: the file; it replaces the old one.
        text: its content.
    """
    try:
        with replacing(path, private=True) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DamagedFile(
            f"cannot write {path}: {error.strerror}; make room for it, or move away what is there"
        ) from None


def read_json(path: Path, remedy: str) -> dict[str, Any] | None:
    """The entries of a file that `write_json` wrote, or that somebody wrote by hand without a hash; None without one.

    Args:
        path: the file.
        remedy: as in `read_bytes`.
    """
    if (text := read_text(path, remedy)) is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise DamagedFile(f"{path} is damaged (it is not JSON); {remedy}") from None
    if not isinstance(found, dict):
        raise DamagedFile(f"{path} is damaged (it has no entries); {remedy}")
    checksum = found.pop(CHECKSUM, None)
    if checksum is not None and checksum != content_hash(found):
        raise DamagedFile(f"{path} is damaged (its content does not fit its hash); {remedy}")
    return found


def write_json(path: Path, entries: Mapping[str, Any]) -> None:
    """Write entries and their hash, as in `write_text`."""
    write_text(path, json.dumps({**entries, CHECKSUM: content_hash(entries)}, indent=2))


def content_hash(entries: Any) -> str:
    """A hash of JSON values, which does not depend on the order of their names."""
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
