"""The noise of a deployed run, and a count of the releases of every site's changes."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from fedstrata.base.gaussian import floor_gaussian
from fedstrata.core.grid import Grid, Noise
from fedstrata.deploy import state_files
from fedstrata.deploy.messages import Stage
from fedstrata.engine.privacy import Privacy, Spent, noise_key

FILE = "privacy.json"
REMEDY = "without it the privacy spent is unknown: restore it from a copy, or start a new run"


class PrivacyAccountant:
    """Draws noise, and counts every release before its noise is used; one at the server, or one at every site.

    A round that is repeated after a crash releases other noise, and so counts again. Releases before `keep_in` are
    counted in memory only.
    """

    def __init__(self, privacy: Privacy | None, key: PRNGKeyArray | None = None):
        """An accountant that has counted nothing.

        Args:
            privacy: the noise; None: the run is not private.
            key: of the noise, for tests that compare with a simulation. None: noise from the operating system's
                generator. The run's seed would not do: all sites have it, and could subtract the noise.
        """
        self.privacy, self.key = privacy, key
        self.counts: dict[str, int] = {}  # by site: the released means that it is part of
        self.file: Path | None = None

    def keep_in(
        self,
        folder: Path,
        counts: Mapping[str, int] | None = None,
        begun: bool = False,
        least: Mapping[str, int] | None = None,
    ) -> None:
        """Keep the counts in a file from now on. What was counted in memory comes on top of what the file has.

        Args:
            folder: of the file; in a second call it does not matter: the first file stays.
            counts: from a checkpoint; they are part of what the file has.
            begun: whether the run has begun, so that there must be a file.
            least: by site, the releases that are known from elsewhere, so that the file must have as many.

        Raises:
            DamagedFile: it is missing, damaged, or older than what is known.
            ValueError: it is of a run with other noise.
        """
        if self.privacy is None:
            return
        if self.file is not None:
            self.counts |= {name: max(count, self.counts.get(name, 0)) for name, count in (counts or {}).items()}
            return
        file = folder / FILE
        written = self._written(file, self.privacy)
        if written is None and (begun or counts is not None):
            raise state_files.DamagedFile(f"{file} is missing; {REMEDY}")
        written, counts = written or {}, counts or {}
        for name, known in (least or {}).items():
            if (found := written.get(name, 0)) < known:
                raise state_files.DamagedFile(
                    f"{file} counts {found} releases of {name}, whose log has {known}; {REMEDY}"
                )
        names: list[str] = list(dict.fromkeys([*written, *counts, *self.counts]))
        before = {name: max(written.get(name, 0), counts.get(name, 0)) for name in names}
        self.counts = {name: before[name] + self.counts.get(name, 0) for name in names}
        self.file = file
        self._write(self.privacy)  # from now on its absence tells that something was lost

    def _written(self, file: Path, privacy: Privacy) -> Mapping[str, int] | None:
        if (found := state_files.read_json(file, REMEDY)) is None:
            return None
        counts = found.get("exchanges")
        if not isinstance(counts, dict) or not all(type(count) is int and count >= 0 for count in counts.values()):
            raise state_files.DamagedFile(f"{file} is damaged (it has no counts); {REMEDY}")
        for name in ("noise", "where") if any(counts.values()) else ():
            if name in found and found[name] != (now := getattr(privacy, name)):
                raise ValueError(
                    f"{file} counts releases with {name}={found[name]!r}, and this run has {now!r}; resume it as it "
                    "was, or start a new run"
                )
        return counts

    def noise_for(self, stage: Stage, sites: Iterable[str], released: bool, grid: Grid | None) -> Noise | None:
        """The noise of an exchange, which is counted; None without a grid, and if the run is not private.

        Args:
            stage: of the exchange.
            sites: the names of those whose fields are released.
            released: whether a mean is among these fields.
            grid: of the noise that is added here.
        """
        if self.privacy is None:
            return None
        if released:
            self.counts |= {name: self.counts.get(name, 0) + 1 for name in sites}
            self._write(self.privacy)
        if grid is None:
            return None
        if self.key is not None:
            return noise_key(self.key, stage.round, stage.phase, stage.repetition)
        return jnp.asarray(floor_gaussian(grid.bits, grid.size).astype(np.int32))

    def _write(self, privacy: Privacy) -> None:
        if self.file is not None:
            settings = {"noise": privacy.noise, "delta": privacy.delta, "where": privacy.where}
            settings |= {"unprotected": list(privacy.accept)}
            state_files.write_json(self.file, {"exchanges": self.counts, **settings})

    def spent(self) -> Spent | None:
        """The privacy spent by the site that took part in the most releases; None if the run is not private."""
        if self.privacy is None:
            return None
        most = max(self.counts.values(), default=0)
        return Spent(self.privacy.noise, self.privacy.delta, most, self.privacy.accept)
