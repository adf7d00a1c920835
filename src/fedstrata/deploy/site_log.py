"""A site's own log: one line for everything that it answered or refused. Each line holds a hash of the one before.

A line that was changed, left out or moved breaks the chain (`broken`). Lines cut off at the end do not: nobody else
keeps the last hash yet. The log holds names, sizes, hashes and times, and no values of data.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedstrata.base.text import one_line

FILE = "log.jsonl"  # in a site's state folder
FIRST = "0" * 64  # in place of a hash before the first line


class SiteLogError(RuntimeError):
    """The log cannot be written, or was changed by somebody else: then the site answers nothing."""


class SiteLog:
    """The log of one site, in one file, written by one process."""

    def __init__(self, path: Path, site: str):
        """A log that continues the one in this file. A line that a crash cut short is replaced by one that says so.

        Args:
            path: the file; created if needed, readable by its owner only.
            site: its name.
        """
        self.path, self.site = path, site
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            os.fchmod(self._file, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SiteLogError(f"{site}: another process writes {path}; stop it first") from None
        except OSError as error:
            raise SiteLogError(f"{site}: cannot write its log {path}: {error.strerror}") from error
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        self.lines = [json.loads(line) for line in _checked(whole, path, site)]
        self._last = self.lines[-1]["hash"] if self.lines else FIRST
        if torn := data[len(whole) :]:
            os.ftruncate(self._file, len(whole))
            self.add("torn", letter=hashlib.sha256(torn).hexdigest())

    def add(self, kind: str, **entries: Any) -> dict[str, Any]:
        """Write a line; it is on the disk when this returns.

        Args:
            kind: what happened: summary, terms, answer, refused, torn.
            entries: further entries of the line.
        """
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"n": len(self.lines), "time": now, "prev": self._last, "kind": kind, "site": self.site, **entries}
        line["hash"] = line_hash(line)
        try:
            os.write(self._file, _text(line) + b"\n")
            os.fsync(self._file)
        except OSError as error:
            raise SiteLogError(
                f"{self.site}: cannot write its log {self.path}: {error.strerror}; nothing was answered"
            ) from error
        self.lines.append(line)
        self._last = line["hash"]
        return line

    def refused(self, run: str, stage: Any, why: str) -> None:
        """Write down that a call was refused."""
        self.add("refused", run=one_line(run, 128), stage=stage, way="in", why=one_line(why), verdict="refused")

    def close(self) -> None:
        """Let another process write the log."""
        os.close(self._file)


def line_hash(line: Mapping[str, Any]) -> str:
    """The hash of a line, which covers the hash of the line before."""
    return hashlib.sha256(_text({k: v for k, v in line.items() if k != "hash"})).hexdigest()


def broken(path: Path) -> str:
    """What is wrong with a log, in words, with the number of the first bad line; empty if its chain is whole."""
    try:
        list(_checked(path.read_bytes(), path, path.parent.name))
    except SiteLogError as error:
        return str(error)
    return ""


def _checked(data: bytes, path: Path, site: str) -> Iterator[bytes]:
    last = FIRST
    for number, text in enumerate(data.splitlines()):
        try:
            line = json.loads(text)
            good = line["n"] == number and line["prev"] == last and line["hash"] == line_hash(line)
            last = line["hash"]
        except (ValueError, KeyError, TypeError):
            good = False
        if not good:
            raise SiteLogError(
                f"{site}: line {number + 1} of {path} was changed, moved or left out; find out who did it. To begin a "
                "new log, move the file away"
            )
        yield text


def _text(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, sort_keys=True, separators=(",", ":")).encode()
