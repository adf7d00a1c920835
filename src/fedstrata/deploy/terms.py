"""The terms of a run: what the server and all sites agree on before it begins, and what must not change later."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedstrata.base import strict_json
from fedstrata.base.text import LONGEST_NAME, one_line
from fedstrata.deploy.data_summary import MOST_SPLITS, DataSummary

MOST_SITES = 10_000  # the limits of `strict_json` are reached before, with some hundred sites


class Terms(NamedTuple):
    """What all parties of a run know. The server proposes it; every site compares it with its own data and policy."""

    run: str  # its name
    sites: tuple[DataSummary, ...]  # in the order of their numbers
    program: str  # a hash of the app's code
    rounds: int  # a later server may extend the run: sites accept more, within their policy
    evaluations: int  # likewise
    origin: str = ""  # a random text of the folder in which the server keeps the run: another folder is another run

    def encode(self) -> str:
        """The terms as JSON, with all entries in their order; a ValueError if sites would refuse them as too long.

        The order of splits is part of the terms: an evaluation names splits by their places.
        """
        text = json.dumps(self._asdict(), separators=(",", ":"))
        try:
            return strict_json.check(text)
        except ValueError as error:
            raise ValueError(f"the terms of run {self.run!r} with its {len(self.sites)} sites: {error}") from None

    def digest(self) -> str:
        """A hash of what may not change in a run: its name, its sites, its code and the server's folder of it."""
        fixed = self._replace(rounds=0, evaluations=0)
        return hashlib.sha256(fixed.encode().encode()).hexdigest()

    @classmethod
    def decode(cls, text: Any) -> "Terms":
        """The terms in a text that another party sent.

        Raises:
            ValueError: it is malformed.
        """
        if not isinstance(text, str):
            raise ValueError("the terms of a run must be a text")
        try:
            found = strict_json.loads(text, objects=1 + MOST_SITES * (MOST_SPLITS + 3))
        except ValueError as error:
            raise ValueError(f"the terms of a run are not readable JSON: {one_line(error)}") from None
        if not isinstance(found, dict) or found.keys() != set(cls._fields):
            raise ValueError("the terms of a run have another form: do the site and the server have the same release?")
        for name in ("rounds", "evaluations"):
            if not isinstance(found[name], int) or isinstance(found[name], bool) or not 0 <= found[name] < 2**31:
                raise ValueError(f"the terms of a run: {name} must be a whole number ≥ 0")
        check_name(found["run"])
        for name in ("program", "origin"):
            text = found[name]
            if not isinstance(text, str) or len(text) > LONGEST_NAME or not text.isprintable():
                raise ValueError(f"the terms of a run: {name} must be a short printable text")
        if not isinstance(found["sites"], list) or not 1 <= len(found["sites"]) <= MOST_SITES:
            raise ValueError(f"the terms of a run must list 1 to {MOST_SITES} sites")
        return cls(**{**found, "sites": tuple(DataSummary.checked(row) for row in found["sites"])})

    def number(self, site: str) -> int:
        """The number of a site; a ValueError if it is not one of them, or twice."""
        places = [i for i, summary in enumerate(self.sites) if summary.site == site]
        if len(places) != 1:
            raise ValueError(f"run {self.run!r} lists {site} {len(places)} times among its sites")
        return places[0]


def check_name(run: Any) -> None:
    """Refuse a run's name that is no short printable text, or that would be a path."""
    if not isinstance(run, str) or not 0 < len(run) <= LONGEST_NAME or not run.isprintable():
        raise ValueError(f"the name of a run must be a text of 1 to {LONGEST_NAME} printable characters")
    if run.startswith(".") or {"/", "\\"} & set(run):
        raise ValueError(f"the name of a run must not start with a dot or have slashes, as in {run!r}")


def count_keys(sites: Sequence[DataSummary]) -> int:
    """How many different keys the sites of a run have. A site without one counts as none."""
    return len({summary.key for summary in sites if summary.key})
