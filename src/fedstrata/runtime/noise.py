"""The noise of a deployed run's server: a key for every merge, and how often each site's changes were released."""

import json
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from fedstrata.files import replacing
from fedstrata.transport.letters import Stage
from fedstrata.transport.privacy import Privacy, Spent, noise_key


class Noise:
    """Gives keys and counts them before they are used, in a file once it has a folder.

    key: None asks the operating system anew for every merge, because whoever knows the key can take the noise away; the
    run's own seed is known to all sites. A key that is given is for rehearsals: it gives the simulation's noise.

    A round that is run again after a crash releases other noise, and so counts again. What `begin` releases before a
    folder is known counts only as long as this process lives.
    """

    def __init__(self, privacy: Privacy | None, key: PRNGKeyArray | None = None):
        self.privacy, self.key = privacy, key
        self.counts: dict[str, int] = {}  # by site: the exchanges whose mean it is in
        self.file: Path | None = None

    def keep_in(self, folder: Path, counts: Mapping[str, int] | None = None) -> None:
        """Count in a file of this folder from now on, and go on from what stands there or is given."""
        if self.privacy is None:
            return
        self.file = folder / "privacy.json"
        found = json.loads(self.file.read_text())["exchanges"] if self.file.exists() else {}
        known = (self.counts, found, counts or {})
        self.counts = {name: max(c.get(name, 0) for c in known) for name in {k: 0 for c in known for k in c}}

    def at(self, stage: Stage, sites: Iterable[str], released: bool) -> PRNGKeyArray | None:
        """The key for a merge of what these sites sent; released: whether there is a mean in it."""
        if self.privacy is None:
            return None
        if released:
            self.counts |= {name: self.counts.get(name, 0) + 1 for name in sites}
            self._write()
        if self.key is not None:
            return noise_key(self.key, stage.round, stage.phase, stage.repetition)
        words = np.frombuffer(secrets.token_bytes(8), np.uint32)
        return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")

    def _write(self) -> None:
        if self.file is not None:
            about = {"exchanges": self.counts, "noise": self.privacy.noise, "delta": self.privacy.delta}  # pyright: ignore[reportOptionalMemberAccess]
            with replacing(self.file) as part:
                part.write_text(json.dumps(about, indent=2))

    def spent(self) -> Spent | None:
        """What the run has cost the site that took part in the most exchanges."""
        if self.privacy is None:
            return None
        return Spent(self.privacy.noise, self.privacy.delta, max(self.counts.values(), default=0))
