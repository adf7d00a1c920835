"""A site's own log: one line for everything that it answered or refused. Each line holds a hash of the one before.

A line that was changed, left out or moved breaks the chain (`broken`). Lines cut off at the end do not: nobody else
keeps the last hash yet. The log holds names, sizes, hashes and times, and no values of data.
"""

import errno
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedstrata.base.errors import StateError

FILE = "log.jsonl"  # in a site's state folder
FIRST = "0" * 64  # in place of a hash before the first line
LONGEST = 2**22  # bytes of a line that a crash cut short
REMEDY = "find out who did it. To begin a new log, move the file away"


class SiteLogError(StateError):
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
        self._unknown = False  # whether the file may hold a part of a line that was not written
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:
            why = "it is a link" if error.errno == errno.ELOOP else error.strerror
            raise SiteLogError(f"{site}: cannot write its log {path}: {why}; move away what is there") from error
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise SiteLogError(f"{site}: cannot write its log {path}: it is no file; move away what is there")
            os.fchmod(self._file, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            data = path.read_bytes()
            kept = data.rstrip(b"\0")  # a crash may leave zeros where the end of a line was to be
            whole, end, torn = kept.rpartition(b"\n")
            if torn and _read(torn) is not None:  # all but its end was written
                whole, end, torn = kept, b"", b""
            self.found = list(_checked(whole + end, path, site))  # the lines, until somebody has counted them
            self._count, self._last = len(self.found), self.found[-1]["hash"] if self.found else FIRST
            if not _may_be_torn(torn) or len(data) - len(whole) > LONGEST or (data and not kept):
                raise SiteLogError(f"{site}: the end of {path} is not a line that this site began; {REMEDY}")
            lost = data[len(whole + end) :]
            os.ftruncate(self._file, len(whole + end))
            if whole and not end:
                os.write(self._file, b"\n")
            elif lost:
                self.add("torn", message=hashlib.sha256(lost).hexdigest())
        except BlockingIOError:
            os.close(self._file)
            raise SiteLogError(f"{site}: another process writes {path}; stop it first") from None
        except BaseException:
            os.close(self._file)
            raise

    def add(self, kind: str, **entries: Any) -> dict[str, Any]:
        """Write a line; it is on the disk when this returns.

        Args:
            kind: what happened: policy, summary, terms, answer, refused, torn.
            entries: further entries of the line.

        Raises:
            SiteLogError: the disk does not take it; the log is as before.
        """
        if self._unknown:
            raise SiteLogError(f"{self.site}: an earlier line of {self.path} may be torn; start the site again")
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"n": self._count, "time": now, "prev": self._last, "kind": kind, "site": self.site, **entries}
        line["hash"] = line_hash(line)
        text, size = _text(line) + b"\n", os.fstat(self._file).st_size
        try:
            if os.write(self._file, text) < len(text):  # a disk that is almost full takes a part
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file)
        except OSError as error:
            try:
                os.ftruncate(self._file, size)
            except OSError:
                self._unknown = True
            raise SiteLogError(
                f"{self.site}: cannot write its log {self.path}: {error.strerror}; nothing was answered: make room"
            ) from error
        self._count, self._last = self._count + 1, line["hash"]
        return line

    def close(self) -> None:
        """Let another process write the log."""
        os.close(self._file)


def line_hash(line: Mapping[str, Any]) -> str:
    """The hash of a line, which covers the hash of the line before."""
    return hashlib.sha256(_text({k: v for k, v in line.items() if k != "hash"})).hexdigest()


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a log that another process may write; a SiteLogError at the first bad one.

    A last line without an end is being written, or a crash cut it short: the site's next start deals with it.
    """
    data = path.read_bytes()
    return _checked(data[: data.rfind(b"\n") + 1], path, path.parent.name)


def broken(path: Path) -> str:
    """What is wrong with a log, in words, with the number of the first bad line; empty if its chain is whole."""
    try:
        for _ in lines_of(path):
            pass
    except (SiteLogError, OSError) as error:
        return str(error)
    return ""


def _checked(data: bytes, path: Path, site: str) -> Iterator[dict[str, Any]]:
    last = FIRST
    for number, text in enumerate(data.splitlines()):
        line = _read(text)
        if line is None or line["n"] != number or line["prev"] != last:
            raise SiteLogError(f"{site}: line {number + 1} of {path} was changed, moved or left out; {REMEDY}")
        last = line["hash"]
        yield line


def _read(text: bytes) -> dict[str, Any] | None:
    """A line with its own hash; None if it has been changed."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(line, dict) and line.keys() >= {"n", "prev", "kind", "hash"}
    return line if whole and line["hash"] == line_hash(line) and _text(line) == text else None


def _may_be_torn(text: bytes) -> bool:
    """Whether this may be the beginning of a line, or nothing: an object without its end."""
    try:
        json.JSONDecoder().raw_decode(text.decode())
    except (ValueError, RecursionError):
        return not text or (text.startswith(b"{") and text.isascii())
    return False


def _text(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, sort_keys=True, separators=(",", ":")).encode()
