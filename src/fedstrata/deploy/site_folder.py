"""What a site keeps besides its fields: who it is, and what it agreed to. Its log tells whether a file has changed."""

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstrata.core.fingerprint import differences
from fedstrata.deploy import state_files
from fedstrata.deploy.journal import Journal
from fedstrata.deploy.messages import BEGIN
from fedstrata.deploy.policy import Refused
from fedstrata.deploy.site_store import DiskStore, run_folder
from fedstrata.deploy.state_files import DamagedFile, content_hash, read_text, write_text
from fedstrata.deploy.terms import Terms

TERMS, SETTINGS = "terms.json", "settings.json"  # of a run, in its folder
MARK, SECRET = "mark", "secret"  # of the site
SIZES = {MARK: 16, SECRET: 32}  # bytes, written as hexadecimal digits
MOST_ATTEMPTS = 100  # to begin a run: each is a line of the log
LOST = "restore it from a copy, or let the site begin anew with an empty state folder"


class Identity:
    """The random texts of a state folder: a mark that tells it from others, and a secret that never leaves it.

    They are created on first use. The log has their hashes, so that a change does not look like other data.
    """

    def __init__(self, folder: Path, site: str, journal: Journal):
        """The identity in a state folder.

        Args:
            folder: the site's state.
            site: its name.
            journal: of the site.

        Raises:
            DamagedFile: a file is missing or damaged.
        """
        self.mark, secret = (_identifier(folder / name, site, journal.files.get(name)) for name in (MARK, SECRET))
        self.secret = bytes.fromhex(secret)
        self.files = {MARK: _short_hash(self.mark), SECRET: _short_hash(secret)}


def _identifier(path: Path, site: str, known: str | None) -> str:
    text, size = read_text(path, LOST), SIZES[path.name]
    if text is None and known is None:
        text = secrets.token_hex(size)
        write_text(path, text)
    elif text is None:
        raise DamagedFile(f"{site}: {path} is missing; {LOST}")
    if not re.fullmatch(rf"[0-9a-f]{{{2 * size}}}", text) or (known is not None and _short_hash(text) != known):
        raise DamagedFile(f"{site}: {path} is damaged; {LOST}")
    return text


def _short_hash(text: str) -> str:
    return hashlib.sha256(f"fedstrata {text}".encode()).hexdigest()[:32]


class RunRecord:
    """What a site has agreed to in one run: its terms, and the settings of the app."""

    def __init__(self, folder: Path, run: str, site: str, journal: Journal):
        """The record of a run, which may not have begun.

        Args:
            folder: the site's state.
            run: the run's name.
            site: the site's name.
            journal: of the site.
        """
        self.home, self.run, self.site, self.journal = folder / "runs" / run_folder(run), run, site, journal
        self.logged: Mapping[str, Any] | None = journal.agreed.get(run)

    def terms(self, proposed: Terms | None) -> Terms | None:
        """The terms under which the run began here; None if it has not, or if they are lost and nothing has left.

        Terms that were lost are taken from the server again if they have the hash that is in the log.

        Args:
            proposed: as the server sent them, if it did.

        Raises:
            DamagedFile: they are lost.
        """
        path, kept, damage = self.home / TERMS, None, ""
        remedy = "restore it from a copy, or resume the run at the server, which then sends its terms again"
        try:
            if (text := read_text(path, remedy)) is not None:
                kept = Terms.decode(text)
        except DamagedFile as error:
            damage = str(error)
        except ValueError as error:
            damage = f"{path} is damaged ({error}); {remedy}"
        if self.logged is None and not damage:
            return kept
        for found in (kept, proposed):
            if self.logged is not None and found is not None and found.digest() == self.logged["message"]:
                rounds, evaluations = self.logged["wanted"]
                return found._replace(rounds=rounds, evaluations=evaluations)
        if proposed is not None and not self.has_answered():
            return None
        what = "is missing" if kept is None else "does not have the terms that this site agreed to"
        raise DamagedFile(f"{self.site}: {damage or f'{path} {what}; {remedy}'}")

    def agreed(self, kept: Terms | None, proposed: Terms | None, digest: Any, program: str) -> Terms:
        """The terms that hold from now on.

        Args:
            kept: those under which the run began here, if it has.
            proposed: as the server sent them, if it did.
            digest: the hash of the server's terms, if it sent no more.
            program: a hash of the code of this site's app.

        Raises:
            Refused: something else has changed than a longer run, or new code that the site has, too.
        """
        site, run = self.site, self.run
        if proposed is None:
            if kept is None:
                raise Refused(f"{site} has not begun run {run!r}; its state was lost, or it joined too late")
            if digest != kept.digest():
                raise Refused(
                    f"{site}: the server works under other terms of run {run!r} than this site agreed to; resume the "
                    "run at the server, which then sends its terms"
                )
            if kept.program != program:
                raise Refused(
                    f"{site} runs version {program} of the app, and run {run!r} has version {kept.program}; resume "
                    "the run with the new version, or give the site the old one"
                )
            return kept
        if proposed.run != run:
            raise Refused(f"{site}: a call of run {run!r} came with the terms of run {proposed.run!r}")
        if proposed.program != program:
            raise Refused(
                f"{site} runs version {program} of the app, and the server {proposed.program}; give both the same one"
            )
        if kept is None or not self.has_answered():  # a server whose first attempt failed may begin again
            if proposed != kept and self.journal.counts.get(("begun", run), 0) >= MOST_ATTEMPTS:
                raise Refused(f"{site}: run {run!r} has begun {MOST_ATTEMPTS} times, without a round; start a new run")
            return proposed
        same = proposed._replace(program=kept.program).digest() == kept.digest()
        if changed := _changed(kept, proposed) or ("" if same else "they are written in another way"):
            raise Refused(
                f"{site}: the terms of run {run!r} have changed since it began here: {changed}; start a new run"
            )
        most = {name: max(getattr(kept, name), getattr(proposed, name)) for name in ("rounds", "evaluations")}
        return proposed._replace(**most)

    def has_answered(self) -> bool:
        """Whether anything but empty replies has left in this run, or anything has been computed for its rounds."""
        later = (stage > (-1, BEGIN) for stage in DiskStore(self.home, self.site).stages())
        return self.journal.answered(self.run).has_numbers() or any(later)

    def check_settings(self, now: Mapping[str, Any]) -> None:
        """Refuse to continue a run with other settings: new code may change no problem, algorithm or option.

        Args:
            now: the settings of the app.

        Raises:
            Refused: they have changed, with the differences.
            DamagedFile: they have changed, and the file that tells how is lost.
        """
        known = None if self.logged is None else self.logged.get("settings")
        if known == content_hash(now) or not self.has_answered():
            return
        path, remedy = self.home / SETTINGS, "restore it from a copy, or start a new run"
        saved = state_files.read_json(path, remedy)
        if saved is None or known not in (None, content_hash(saved)):
            what = "is missing" if saved is None else "is damaged"
            raise DamagedFile(f"{self.site}: {path} {what}, and the settings of the run may have changed; {remedy}")
        if changed := differences(saved, now):
            raise Refused(
                f"{self.site}: the settings of run {self.run!r} have changed since it began: {'; '.join(changed)}; "
                "resume with the app as it was, or start a new run"
            )

    def write(self, terms: Terms, now: Mapping[str, Any], begun: bool) -> None:
        """Keep what the site has agreed to, and write it down.

        Args:
            terms: of the run.
            now: the settings of the app.
            begun: whether the run has begun.
        """
        settings, wanted = content_hash(now), [terms.rounds, terms.evaluations]
        new = (terms.digest(), wanted, settings)
        if self.logged is None or new != tuple(self.logged.get(name) for name in ("message", "wanted", "settings")):
            self.journal.write_terms(terms, settings, new=self.logged is not None or not begun)
        write_text(self.home / SETTINGS, json.dumps(now))
        write_text(self.home / TERMS, terms.encode())


def _changed(kept: Terms, proposed: Terms) -> str:
    if kept.origin != proposed.origin:
        return "the server's folder of the run is another one: two servers have runs of this name, or it was lost"
    if len(kept.sites) != len(proposed.sites):
        return f"{len(kept.sites)} sites then, {len(proposed.sites)} now"
    for then, now in zip(kept.sites, proposed.sites, strict=True):
        if what := then.difference(now):
            return f"of {then.site}, {what}"
    return ""
