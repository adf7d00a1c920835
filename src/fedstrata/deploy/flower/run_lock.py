"""One server per run: a lock in the run's folder, and the state of the run for `deploy status`.

A second server on the same run would send other messages under the same name and count privacy a second time.
"""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedstrata.base.errors import StateError
from fedstrata.base.text import one_line
from fedstrata.deploy import state_files

LOCK, STATUS = "server.lock", "status.json"
NOT_RESUMED = "it was not resumed: "  # of a run that has finished before
LONGEST = 2000  # characters of the reason why a run failed
PROBES = 1.0  # seconds for which a new holder tries again, because a probe holds the lock for an instant


class RunningError(StateError):
    """Another process holds the lock."""


@contextlib.contextmanager
def only_server(folder: Path, about: Mapping[str, Any], patience: float = PROBES) -> Iterator[None]:
    """Be the only server of a run; a RunningError if there is another one.

    Args:
        folder: the run's folder; from now on readable by its owner alone.
        about: what to tell a second server, e.g. {"flower_run": "17"}.
        patience: seconds to wait for another server that is about to end.
    """
    private(folder)
    who = {"pid": os.getpid(), "host": socket.gethostname(), "started": _now(), **about}
    with held(folder / LOCK, json.dumps(who), patience) as mine:
        if not mine:
            other = _read(folder / LOCK)
            flower = f", Flower's run {other['flower_run']}" if other.get("flower_run") else ""
            raise RunningError(
                f"run {folder.name!r} has a server already: process {other.get('pid')} on {other.get('host')}{flower}, "
                f"since {other.get('started')}; `fedstrata deploy status` shows it, and `fedstrata deploy stop --name "
                f"{folder.name}` stops it"
            )
        yield


@contextlib.contextmanager
def held(path: Path, text: str, patience: float = PROBES) -> Iterator[bool]:
    """Hold the lock of a file, for this process alone; False if another process holds it.

    Args:
        path: the file, which only its owner can read.
        text: what is written into it.
        patience: seconds to wait for the lock.
    """
    try:
        lock, until = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600), time.monotonic() + patience
    except OSError as error:
        why = f"the lock {path} cannot be opened: {error.strerror}; move away what is there"
        raise state_files.DamagedFile(why) from None
    try:
        while not (mine := _locked(lock, fcntl.LOCK_EX)) and time.monotonic() < until:
            time.sleep(0.05)
        if mine:
            os.fchmod(lock, 0o600)
            os.truncate(lock, 0)
            os.write(lock, text.encode())
        yield mine
    finally:
        os.close(lock)


def is_held(path: Path) -> bool | None:
    """Whether a process holds the lock of this file; None if there is no such file."""
    try:
        lock = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        return not _locked(lock, fcntl.LOCK_SH)
    finally:
        os.close(lock)


def server_of(folder: Path) -> dict[str, Any] | None:
    """Who serves the run in this folder now: pid, host, flower_run, started. None: nobody."""
    return _read(folder / LOCK) if is_held(folder / LOCK) else None


def write_status(folder: Path, **state: Any) -> None:
    """Change entries of the run's status.json, which is replaced as a whole.

    Args:
        folder: the run's folder.
        state: any of run, flower_run, state ("waiting", "running", "finished", "failed" or "stopped"), round, rounds,
            why, sites, cleaned, wanted_rounds (of the last command that named a number and was not refused).
    """
    private(folder)
    content = json.dumps({**read_status(folder), **state, "updated": _now()}, indent=1)
    state_files.write_text(folder / STATUS, content)


def read_status(folder: Path) -> dict[str, Any]:
    """The content of status.json in a run's folder; empty if there is none."""
    return _read(folder / STATUS)


@contextlib.contextmanager
def reported(folder: Path, **state: Any) -> Iterator[None]:
    """Write how the block ends to status.json; an exception is passed on.

    Args:
        folder: the run's folder.
        state: entries of status.json at the beginning.
    """
    if read_status(folder).get("cleaned"):
        raise ValueError(
            f"the checkpoints of run {folder.name!r} were removed by `fedstrata deploy clean`; choose another --name"
        )
    before = read_status(folder)
    write_status(folder, **{"state": "waiting", "why": None, "sites": {}, **state})
    try:
        yield
    except Exception as error:
        why = _line(error)
        if read_status(folder).get("state") != "waiting":
            write_status(folder, state="failed", why=why)
        else:  # it was refused, and changes nothing of what was known before
            write_status(folder, wanted_rounds=before.get("wanted_rounds"))
            if before.get("state") == "finished":
                write_status(folder, state="finished", sites=before.get("sites", {}), why=f"{NOT_RESUMED}{why}")
            else:
                write_status(folder, state="failed", why=why)
        raise
    except BaseException:  # Flower ends a server app with SystemExit
        write_status(folder, state="failed", why="interrupted: Flower stopped its run, or the SuperLink ended")
        raise
    write_status(folder, state="finished", why=None)


def private(folder: Path) -> None:
    """Create a folder, or take an existing one, and let only its owner in."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)


def _line(error: BaseException) -> str:
    """The error in one line, with its whole text: settings that differ are listed below one another."""
    text = "; ".join(" ".join(line.split()) for line in str(error).splitlines()).replace(":; ", ": ")
    return one_line(f"{type(error).__name__}: {text}" if text else type(error).__name__, LONGEST)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(state_files.read_text(path, "remove it") or "")
    except (state_files.DamagedFile, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _locked(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # of a network file system
        raise state_files.DamagedFile(
            f"files in this folder cannot be locked ({error.strerror}): move it to a local disk"
        ) from None
    return True
