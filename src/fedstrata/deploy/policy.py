"""A site's policy: which runs it takes part in, and how much may leave it. Only its owner writes it."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedstrata.base.errors import unknown
from fedstrata.deploy import state_files

MEANS = "means"  # in `fields`: all fields that are merged by a mean
ANY = "*"  # in `fields`: all that the method sends, rows included
FILE = "policy.json"  # in a site's state folder, written when the site starts
CALLS = "as many different calls as it needs, a quarter more, and ten,"
REMEDY = "start the site again (`fedstrata deploy site`), which writes it from the site's own file"


class Refused(ValueError):
    """A call that the site's policy, its data or an earlier call forbid. Nothing was computed for it."""


class Policy(NamedTuple):
    """The table [policy] of a site's file. All limits but `runs_at_most` hold for each run."""

    runs: tuple[str, ...] = ("*",)  # names of runs; * stands for any text
    runs_at_most: int = 20  # that may begin here
    sites_at_least: int = 3  # in a run, counted by their keys
    rows_at_least: int = 5  # of every split that this site has: a mean over fewer reveals them
    rows_at_most: int = 10_000_000  # that another site may report: memory is reserved here for as many
    rounds: int = 1000
    evaluations: int = 100
    parameters: int = 0  # different calls that are answered; 0: as many as the run needs, a quarter more, and ten
    fields: tuple[str, ...] = (MEANS,)  # that may leave: those merged by a mean, and others by name
    bytes: int = 1_000_000_000  # that may leave
    call_bytes: int = 256_000_000  # of one call, for which memory is reserved here
    noise_at_least: float = 0.0  # that this site adds to its replies, in clips (`Privacy(where="sites")`); 0: none

    @classmethod
    def of(cls, table: Any, where: str) -> "Policy":
        """The policy in a table of a .toml or .json file.

        Args:
            table: by name, the entries that differ from the defaults.
            where: the file, for error messages.

        Raises:
            ValueError: an entry is unknown, or has a wrong value.
        """
        if not isinstance(table, Mapping):
            raise ValueError(f"{where}: [policy] must be a table of entries")
        found: dict[str, Any] = {}
        for name, value in table.items():
            if name not in cls._fields:
                raise unknown(f"entry of [policy] in {where}:", name, cls._fields)
            if name in ("runs", "fields"):
                if not isinstance(value, list | tuple) or not all(isinstance(v, str) and v for v in value):
                    raise ValueError(f"{where}: {name} in [policy] must be a list of names, not {value!r}")
                found[name] = tuple(value)
                continue
            if name == "noise_at_least":
                if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
                    raise ValueError(f"{where}: {name} in [policy] must be a number ≥ 0, not {value!r}")
                found[name] = float(value)
                continue
            least = 0 if name in ("parameters", "evaluations", "runs_at_most") else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{where}: {name} in [policy] must be a whole number ≥ {least}, not {value!r}")
            found[name] = value
        return cls(**found)

    @classmethod
    def kept_in(cls, folder: Path) -> "Policy | None":
        """The policy in a site's state folder; None if there is none.

        Raises:
            DamagedFile: it cannot be read.
        """
        found = state_files.read_json(folder / FILE, REMEDY)
        try:
            return None if found is None else cls.of(found, str(folder / FILE))
        except ValueError as error:
            raise state_files.DamagedFile(f"{error}; {REMEDY}") from None

    def keep_in(self, folder: Path) -> None:
        """Write the policy into a site's state folder, for the process that answers."""
        state_files.write_json(folder / FILE, self._asdict())

    def allows_field(self, field: str, merge: str | None) -> bool:
        """Whether a field may leave.

        Args:
            field: its name.
            merge: how the server merges it, e.g. "mean".
        """
        return field in self.fields or ANY in self.fields or (MEANS in self.fields and merge == "mean")

    def allows_run(self, run: str) -> bool:
        """Whether a run of this name is one of `runs`."""
        pattern = lambda name: ".*".join(map(re.escape, name.split("*")))
        return any(re.fullmatch(pattern(name), run, re.DOTALL) for name in self.runs)

    def words(self) -> list[str]:
        """The policy in plain words, a line each."""
        named = "any name" if "*" in self.runs else f"the names {', '.join(self.runs) or '(none)'}"
        means = ["fields that are merged by a mean"] if MEANS in self.fields else []
        leaves = [*means, *(name for name in self.fields if name not in (MEANS, ANY))]
        leaves = ["every field that the method sends"] if ANY in self.fields else leaves
        calls = f"at most {self.parameters:,} different calls" if self.parameters else CALLS
        noise = (
            f"at least {self.noise_at_least:g} × the clip" if self.noise_at_least else "none, unless the app sets it"
        )
        return [
            f"takes part in runs of {named}, in at most {self.runs_at_most}",
            f"of at least {self.sites_at_least} sites with different keys, each of at most {self.rows_at_most:,} rows",
            f"if this site has at least {self.rows_at_least} rows of every split, or none",
            f"for at most {self.rounds:,} rounds and {self.evaluations:,} evaluations in a run",
            f"answers {calls} in a run",
            f"may leave this site: {' and '.join(leaves) or 'nothing'}, {self.bytes / 1e6:,g} MB in a run",
            f"receives calls of at most {self.call_bytes / 1e6:,g} MB",
            f"noise that this site adds to its replies: {noise}",
        ]


def check_tells(tells: Any, policy: Policy, where: str) -> None:
    """Refuse a site that demands noise and lets measures or scores leave, to which no noise is added.

    Args:
        tells: in the site's settings.
        policy: of the site.
        where: the file or the site, for the error.
    """
    if policy.noise_at_least > 0 and tells not in (None, "nothing"):
        raise Refused(
            f"{where}: tells = {tells!r} lets evaluations leave without noise, and noise_at_least in [policy] wants "
            'noise in all that leaves; set tells = "nothing", or noise_at_least = 0'
        )
