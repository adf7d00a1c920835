"""Noise keys for the merges of a deployed run, and a count of the releases of every site's changes."""

import json
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from fedstrata.base.files import replacing
from fedstrata.deploy.messages import Stage
from fedstrata.engine.privacy import Privacy, Spent, noise_key


class PrivacyAccountant:
    """Gives out noise keys, and counts every release before its key is used.

    A round that is repeated after a crash releases other noise, and so counts again. Releases before `keep_in` are
    counted in memory only.
    """

    def __init__(self, privacy: Privacy | None, key: PRNGKeyArray | None = None):
        """An accountant that has counted nothing.

        Args:
            privacy: the noise; None: the run is not private.
            key: of the noise, for tests that compare with a simulation. None: a fresh key of the operating system for
                every merge. The run's seed would not do: all sites have it, and could subtract the noise.
        """
        self.privacy, self.key = privacy, key
        self.counts: dict[str, int] = {}  # by site: the released means that it is part of
        self.file: Path | None = None

    def keep_in(self, folder: Path, counts: Mapping[str, int] | None = None) -> None:
        """Keep the counts in a file from now on; the largest count of a site is the one that continues.

        Args:
            folder: of the file.
            counts: from a checkpoint.
        """
        if self.privacy is None:
            return
        self.file = folder / "privacy.json"
        written = json.loads(self.file.read_text())["exchanges"] if self.file.exists() else {}
        sources = (self.counts, written, counts or {})
        names = dict.fromkeys(name for source in sources for name in source)
        self.counts = {name: max(source.get(name, 0) for source in sources) for name in names}

    def key_for(self, stage: Stage, sites: Iterable[str], released: bool) -> PRNGKeyArray | None:
        """The noise key of a merge; None if the run is not private.

        Args:
            stage: of the merge.
            sites: the names of those whose fields are merged.
            released: whether a mean is among these fields.
        """
        if self.privacy is None:
            return None
        if released:
            self.counts |= {name: self.counts.get(name, 0) + 1 for name in sites}
            self._write(self.privacy)
        if self.key is not None:
            return noise_key(self.key, stage.round, stage.phase, stage.repetition)
        words = np.frombuffer(secrets.token_bytes(8), np.uint32)
        return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")

    def _write(self, privacy: Privacy) -> None:
        if self.file is not None:
            content = {"exchanges": self.counts, "noise": privacy.noise, "delta": privacy.delta}
            with replacing(self.file) as part:
                part.write_text(json.dumps(content, indent=2))

    def spent(self) -> Spent | None:
        """The privacy spent by the site that took part in the most releases; None if the run is not private."""
        if self.privacy is None:
            return None
        return Spent(self.privacy.noise, self.privacy.delta, max(self.counts.values(), default=0))
