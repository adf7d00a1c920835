"""Checkpoints: atomic, versioned, with checksums. They hold the whole state of a run."""

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedstrata.base.errors import StateError
from fedstrata.base.files import replacing

VERSION = 1
KEEP = 2  # the newest, and one to fall back on

log = logging.getLogger("fedstrata")


class CheckpointError(StateError):
    """A checkpoint could not be written, read, or does not belong to this run."""

    result: Any = None  # the result so far, if a failed write stopped the run


class Saved(NamedTuple):
    """The contents of a checkpoint."""

    round: int
    arrays: dict[str, np.ndarray]
    config: dict[str, Any]
    paths: list[str] | None = None  # of the state's fields, in the order of its arrays; older checkpoints have none


class Checkpoints:
    """The checkpoints of one run, in one folder; the newest `KEEP` stay."""

    def __init__(self, folder: str | os.PathLike[str], resume: str = "resume=True, on the command line --resume"):
        """The checkpoints in a folder, which may not exist yet.

        Args:
            folder: of the run.
            resume: what resumes the run, for errors.
        """
        self.folder, self.resume = Path(folder).absolute(), resume

    def prepare(self, size: int) -> None:
        """Refuse a folder that cannot be written, or a disk that cannot hold the checkpoints, before anything runs."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / ".writable"
            probe.write_bytes(b"")
            probe.unlink()
            self._clear("round-*.orbax-checkpoint-tmp*")  # left by a killed writer
        except OSError as error:
            raise CheckpointError(
                f"cannot write checkpoints to {self.folder}: {error.strerror}; choose another folder"
            ) from error
        free, needed = shutil.disk_usage(self.folder).free, (KEEP + 1) * size
        if free < needed:
            raise CheckpointError(
                f"{self.folder} has {free / 1e6:.0f} MB free, but this run's checkpoints need {needed / 1e6:.0f} MB; "
                "free some space or choose another folder"
            )

    def config(self) -> dict[str, Any]:
        """The settings of the run saved last in this folder, without its arrays; empty if there is none."""
        try:
            return json.loads((self.folder / "settings.json").read_text())
        except (OSError, ValueError):
            return {}

    def rounds(self) -> list[int]:
        """The rounds of all finished checkpoints, oldest first."""
        names = [p.name for p in self.folder.glob("round-*")] if self.folder.is_dir() else []
        return sorted(int(n[6:]) for n in names if n[6:].isdigit())

    def save(
        self,
        round: int,
        arrays: Mapping[str, np.ndarray],
        config: Mapping[str, Any],
        paths: Sequence[str] | None = None,
    ) -> None:
        """Write to a temporary folder, then rename: a reader finds a whole checkpoint or none. Ctrl-C waits for it."""
        target = self._path(round)
        about = {"version": VERSION, "round": round, "config": config, "names": list(arrays), "sha256": _digest(arrays)}
        # The array store takes no empty arrays. Their shape and dtype are enough.
        empty = {n: [str(a.dtype), list(a.shape)] for n, a in arrays.items() if not a.size}
        about["empty"] = empty
        about["paths"] = None if paths is None else list(paths)
        tree = {f"{i:05d}": np.asarray(a) for i, (n, a) in enumerate(arrays.items()) if n not in empty}
        tree["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
        try:
            with _interrupts_wait(), _quiet():
                with _checkpointer() as writer:
                    writer.save(target, tree, force=True)
                with replacing(self.folder / "settings.json") as part:
                    part.write_text(json.dumps(config, indent=2))
        except KeyboardInterrupt:
            self._clear(f"{target.name}.orbax-checkpoint-tmp*")
            raise
        except Exception as error:
            kept = self.rounds()
            self._clear(f"{target.name}.orbax-checkpoint-tmp*")
            full = (
                getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
                or "no space left" in str(error).lower()
            )
            why = "the disk is full" if full else (str(error) or type(error).__name__).splitlines()[0]
            last = f"the checkpoint of round {kept[-1]} is intact" if kept else "no earlier checkpoint exists"
            raise CheckpointError(
                f"could not write the checkpoint of round {round} to {self.folder}: {why}; {last}: make room and "
                f"resume ({self.resume})"
            ) from error
        for old in self.rounds()[:-KEEP]:
            shutil.rmtree(self._path(old), ignore_errors=True)

    def load(self) -> Saved | None:
        """The newest good checkpoint. A damaged one is skipped, with a warning. None if there is none."""
        rounds, damaged = self.rounds(), {}
        for round in reversed(rounds):
            try:
                saved = self._read(round)
            except Exception as error:
                log.warning(
                    "checkpoint of round %d in %s is damaged (%s); trying the one before", round, self.folder, error
                )
                damaged[round] = error
                continue
            for bad in damaged:  # a damaged one is not kept to fall back on
                aside = self.folder / f"damaged-{bad:09d}"
                shutil.rmtree(aside, ignore_errors=True)
                with contextlib.suppress(OSError):  # the folder may be read-only
                    self._path(bad).rename(aside)
            if round != rounds[-1]:
                log.warning("resuming from round %d instead of round %d", round, rounds[-1])
            return saved
        if rounds:
            newest = f"round {rounds[-1]}: {damaged[rounds[-1]]}"
            raise CheckpointError(f"no checkpoint in {self.folder} can be read ({newest}); delete it to start again")
        return None

    def _read(self, round: int) -> Saved:
        with _checkpointer() as reader:
            tree = reader.restore(self._path(round))
        about = json.loads(bytes(np.asarray(tree.pop("about"), np.uint8)))
        if about["version"] != VERSION:
            raise ValueError(f"it has format {about['version']}, this program reads {VERSION}")
        none = {name: np.zeros(shape, dtype) for name, (dtype, shape) in about["empty"].items()}
        full = {n: np.asarray(tree[f"{i:05d}"]) for i, n in enumerate(about["names"]) if n not in none}
        arrays = {name: none[name] if name in none else full[name] for name in about["names"]}
        if _digest(arrays) != about["sha256"]:
            raise ValueError("its checksum is wrong")
        return Saved(about["round"], arrays, about["config"], about.get("paths"))

    def _clear(self, pattern: str) -> None:
        """Remove unfinished checkpoints. A failing writer may still add files meanwhile."""
        for _ in range(10):
            for part in self.folder.glob(pattern):
                shutil.rmtree(part, ignore_errors=True)
            if not any(self.folder.glob(pattern)):
                return
            time.sleep(0.05)

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:09d}"


def _checkpointer() -> Any:
    """A checkpointer without synchronisation: the first process writes, and every process reads by itself."""
    import jax
    import orbax.checkpoint as ocp

    if jax.process_count() == 1:
        return ocp.PyTreeCheckpointer()
    me = jax.process_index()
    alone: Any = ocp.options.MultiprocessingOptions(me, active_processes={me}, barrier_sync_key_prefix=f"process_{me}")
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(multiprocessing_options=alone), multiprocessing_options=alone)


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C takes effect after the block; a second one takes effect at once.

    An interrupt in the middle would leave threads and folders behind.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # not the main thread, or Ctrl-C is ignored
        return
    pressed: list[Any] = []

    def wait(number: int, frame: Any) -> None:
        pressed.append(frame)
        if len(pressed) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        before(signal.SIGINT, pressed[0])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the tracebacks that orbax logs in addition to raising the error."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    whole = hashlib.sha256()
    for name, array in arrays.items():
        whole.update(f"{name} {array.dtype} {array.shape};".encode())
        whole.update(np.ascontiguousarray(array).tobytes())
    return whole.hexdigest()
