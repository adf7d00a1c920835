"""The store of a site's fields: on disk, one file with a checksum per stage, readable by its owner only."""

import contextlib
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from fedstrata.base.errors import StateError
from fedstrata.base.files import replacing
from fedstrata.deploy.messages import Stage
from fedstrata.deploy.state_files import DamagedFile, read_bytes
from fedstrata.engine.codec import decode, encode

REMEDY = "restore it from a copy, or start a new run"
LATER = 4  # stages that stay after the one that was answered; the run continues from up to three of them
MOST = 2**40  # bytes of a stage: 1 TiB. A site's memory of its rows never travels, and may be larger than a message


class SiteStore(Protocol):
    """A site's fields by stage. The server may never accept a stage: then the site resumes from an earlier one."""

    def read(self, stage: Stage) -> Mapping[str, np.ndarray]:
        """The arrays of a stage."""
        ...

    def write(self, stage: Stage, arrays: Mapping[str, np.ndarray]) -> None:
        """Keep the arrays of a stage; a second write replaces the first."""
        ...

    def keep(self, stages: set[tuple[int, int]]) -> None:
        """Delete all other stages before the last of these, given as (round, exchange). Without any, delete all.

        The last few later ones stay: they are there if an old call was received again. A server that makes up calls for
        late rounds cannot fill the store.
        """
        ...


class SiteStoreError(StateError):
    """A stage is missing or damaged, or cannot be written."""


class DiskStore:
    """The stages of one site in one run, as files. A crash leaves no incomplete file."""

    def __init__(self, folder: str | Path, site: str):
        """A store in this folder, which is created if needed.

        Args:
            folder: where the files are.
            site: the site's name, for error messages.
        """
        self.folder, self.site = Path(folder), site
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.folder.chmod(0o700)
        except OSError as error:
            raise SiteStoreError(f"{site}: cannot keep its state in {self.folder}: {error.strerror}") from error

    def stages(self) -> list[tuple[int, int]]:
        """The stages that are stored, in order, as (round, exchange)."""
        names = (re.fullmatch(r"(-?\d{1,10})_(\d{1,10})\.state", path.name) for path in self.folder.glob("*.state"))
        return sorted((int(name[1]), int(name[2])) for name in names if name)  # a crash may leave other files behind

    def read(self, stage: Stage) -> Mapping[str, np.ndarray]:
        """The arrays of a stage; a SiteStoreError if they are missing or damaged."""
        path = self._path(*stage[:2])
        try:
            data = read_bytes(path, REMEDY)
        except DamagedFile as error:
            raise SiteStoreError(f"{self.site}: {error}") from None
        if data is None:
            stored = ", ".join(map(str, self.stages())) or "none"
            raise SiteStoreError(
                f"{self.site}: the server resumes from stage {stage[:2]} of (round, exchange), which is not in "
                f"{self.folder} (stored: {stored}); restore the folder, or start a new run"
            )
        if hashlib.sha256(memoryview(data)[32:]).digest() != data[:32]:
            raise SiteStoreError(f"{self.site}: {path} is damaged; {REMEDY}")
        return decode(memoryview(data)[32:], MOST)

    def write(self, stage: Stage, arrays: Mapping[str, np.ndarray]) -> None:
        """Write the file of a stage; a SiteStoreError if the disk refuses it."""
        data, target = encode(arrays, MOST), self._path(*stage[:2])
        try:
            with replacing(target) as path:
                path.write_bytes(hashlib.sha256(data).digest() + data)
        except OSError as error:
            raise SiteStoreError(
                f"{self.site}: cannot write {len(data) / 1e6:.1f} MB to {target}: {error.strerror}; its state has not "
                "changed: make room, or move away what is there, and the next call is answered"
            ) from error

    def keep(self, stages: set[tuple[int, int]]) -> None:
        """Delete the files of all other stages, but for the last few later ones."""
        for stage in _superfluous(self.stages(), stages):
            with contextlib.suppress(OSError):  # what is no file is reported when it is read
                self._path(*stage).unlink()

    def _path(self, round: int, exchange: int) -> Path:
        return self.folder / f"{round}_{exchange}.state"


class MemoryStore:
    """A store that lasts as long as the process."""

    def __init__(self) -> None:
        self.stored: dict[tuple[int, int], bytes] = {}

    def read(self, stage: Stage) -> Mapping[str, np.ndarray]:
        """The arrays of a stage."""
        return decode(self.stored[stage[:2]], MOST)

    def write(self, stage: Stage, arrays: Mapping[str, np.ndarray]) -> None:
        """Keep the arrays of a stage."""
        self.stored[stage[:2]] = encode(arrays, MOST)

    def keep(self, stages: set[tuple[int, int]]) -> None:
        """Delete all other stages, but for the last few later ones."""
        for stage in _superfluous(sorted(self.stored), stages):
            del self.stored[stage]


def _superfluous(stored: list[tuple[int, int]], kept: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """The stages to delete, of those that are stored, in their order."""
    later = [stage for stage in stored if kept and stage > max(kept)]
    return set(stored) - kept - set(later[-LATER:])


def run_folder(run: str) -> str:
    """The name of a run's folder: different for every run, and valid on every file system.

    Short names of lower-case letters, digits, "-" and "_" stay as they are. All others get a suffix from their hash:
    some file systems do not distinguish upper and lower case, or forms of one letter in Unicode. The suffix starts with
    "+", which no short name has.

    Args:
        run: the name of the run, any text.

    >>> run_folder("run_1"), run_folder("Run.1")
    ('run_1', 'Run_1+...')
    """
    reserved = re.fullmatch(r"con|prn|aux|nul|com\d|lpt\d", run)  # devices on Windows
    if re.fullmatch(r"[a-z0-9_-]{1,64}", run) and not reserved:
        return run
    readable = re.sub(r"[^A-Za-z0-9_-]", "_", run[:32])
    return f"{readable}+{hashlib.sha256(run.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"
