"""A site's fields on its own disk: one whole, checked file per stage, in a folder that only its owner can read."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedstrata.files import replacing
from fedstrata.transport.codec import decode, encode
from fedstrata.transport.letters import Stage


class ShelfError(RuntimeError):
    """What a site should remember is not there, or not whole."""


class Folder:
    """Stages of one site in one run. A crash leaves the files of finished stages, whole."""

    def __init__(self, folder: str | Path, site: str):
        self.folder, self.site = Path(folder), site
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.folder.chmod(0o700)
        except OSError as error:
            raise ShelfError(f"{site}: cannot keep its state in {self.folder}: {error.strerror}") from error

    def stages(self) -> list[tuple[int, int]]:
        """Those that are there, in order."""
        names = (path.stem.split("_") for path in self.folder.glob("*_*.state"))
        return sorted((int(round), int(exchange)) for round, exchange in names)

    def read(self, stage: Stage) -> Mapping[str, np.ndarray]:
        path = self._path(*stage[:2])
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            there = ", ".join(map(str, self.stages())) or "none"
            raise ShelfError(
                f"{self.site}: the server goes on from its stage {stage[:2]} of (round, exchange), which is not in "
                f"{self.folder} (there: {there}); bring the folder back, or start a new run"
            ) from None
        if hashlib.sha256(data[32:]).digest() != data[:32]:
            raise ShelfError(f"{self.site}: {path} is damaged; bring it back from a copy, or start a new run")
        return decode(data[32:])

    def write(self, stage: Stage, arrays: Mapping[str, np.ndarray]) -> None:
        data = encode(arrays)
        try:
            with replacing(self._path(*stage[:2])) as path:
                path.write_bytes(hashlib.sha256(data).digest() + data)
        except OSError as error:
            raise ShelfError(
                f"{self.site}: cannot write {len(data) / 1e6:.1f} MB to {self.folder}: {error.strerror}; its state is "
                "as it was before this call"
            ) from error

    def keep(self, stages: set[tuple[int, int]]) -> None:
        for stage in set(self.stages()) - stages:
            self._path(*stage).unlink(missing_ok=True)

    def _path(self, round: int, exchange: int) -> Path:
        return self.folder / f"{round}_{exchange}.state"
