"""The file of a run's sites in the server's folder, with the settings, versions and code with which the run began."""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedstrata.core.fingerprint import differences
from fedstrata.deploy.data_summary import DataSummary
from fedstrata.deploy.state_files import DamagedFile, read_json, write_json
from fedstrata.engine.checkpoint import CheckpointError

FILE, ORIGIN = "sites.json", "origin.json"  # in a run's folder
REMEDY = "restore it from a backup, or start a new run (another --name)"


class Program(NamedTuple):
    """What determines the numbers of a run, besides its data."""

    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    program: str  # a hash of the app's code

    def check(self, now: "Program", folder: Path, new_code: bool) -> None:
        """Refuse to continue a run with anything else.

        Args:
            now: what the server that continues it has.
            folder: of the run, for the error.
            new_code: whether the code may differ.

        Raises:
            CheckpointError: with all differences.
        """
        changed = differences(self.settings, now.settings) + differences(self.versions, now.versions)
        if not new_code and self.program != now.program:
            hint = "" if changed else " (if it computes the same, resume with --new-code)"
            changed.append(f"the app's code: saved {self.program!r}, now {now.program!r}{hint}")
        if changed:
            raise CheckpointError(
                f"the run in {folder} cannot be resumed with other settings:\n  " + "\n  ".join(changed) + "\n"
                "resume it as it was, or start a new run with another --name"
            )


class Begun(NamedTuple):
    """A run that has begun."""

    summaries: Sequence[DataSummary]  # of its sites, in the order of their numbers
    marks: Mapping[str, str]  # by site name
    program: Program
    origin: str  # a random text, in the terms of the run: sites tell by it that another folder is another run

    @classmethod
    def read(cls, file: Path) -> "Begun | None":
        """The content of the file; None if there is none.

        Raises:
            CheckpointError: it is damaged, or of another release.
        """
        try:
            found = read_json(file, REMEDY)
        except DamagedFile as error:
            raise CheckpointError(str(error)) from None
        if found is None:
            return None
        if lacking := [name for name in ("surveys", "marks", "origin", *Program._fields) if name not in found]:
            raise CheckpointError(
                f"{file} has no {', '.join(lacking)}: an earlier release began this run; let that release finish it, "
                "or start a new run (another --name)"
            )
        try:
            summaries = [DataSummary.checked(row) for row in _typed(found, "surveys", list)]
            marks, settings, about = (_typed(found, name, dict) for name in ("marks", "settings", "versions"))
            if not summaries or sorted(marks) != sorted(summary.site for summary in summaries):
                raise ValueError("marks must be those of the sites")
            if not all(isinstance(mark, str) for mark in marks.values()):
                raise ValueError("marks must be texts")
            program, origin = (_typed(found, name, str) for name in ("program", "origin"))
            return cls(summaries, marks, Program(settings, about, program), origin)
        except ValueError as error:
            raise CheckpointError(f"{file} is damaged ({error}); {REMEDY}") from None

    def write(self, file: Path) -> None:
        """Write the file.

        Raises:
            CheckpointError: it cannot be written.
        """
        try:
            about = {"surveys": list(self.summaries), "marks": dict(self.marks), "origin": self.origin}
            write_json(file, {**about, **self.program._asdict()})
        except DamagedFile as error:
            raise CheckpointError(str(error)) from None


def origin_of(folder: Path) -> str:
    """The random text of a run's folder. It is made once, and stays if the run could not begin.

    Sites that have sent numbers at the beginning take no other one.

    Args:
        folder: of the run.

    Raises:
        CheckpointError: its file is damaged, or cannot be written.
    """
    try:
        if (found := read_json(folder / ORIGIN, REMEDY)) is None:
            found = {"origin": secrets.token_hex(16)}
            write_json(folder / ORIGIN, found)
        return _typed(found, "origin", str)
    except DamagedFile as error:
        raise CheckpointError(str(error)) from None
    except (KeyError, ValueError):
        raise CheckpointError(f"{folder / ORIGIN} is damaged; {REMEDY}") from None


def _typed(found: Mapping[str, Any], name: str, kind: type) -> Any:
    if not isinstance(found[name], kind):
        raise ValueError(f"{name} has another form")
    return found[name]
