"""A site's worker: a process that outlives messages, so that JAX is imported and programs are compiled only once."""

import contextlib
import fcntl
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstrata.base.files import replacing
from fedstrata.core.fingerprint import differences
from fedstrata.data.federation import Federation
from fedstrata.deploy import site_log
from fedstrata.deploy.agreement import start_point, with_data
from fedstrata.deploy.data_summary import DataSummary
from fedstrata.deploy.flower import socket_frames
from fedstrata.deploy.flower.deployment import Deployment, agree_on, resolve, settings_of
from fedstrata.deploy.flower.supernode import SiteWatch
from fedstrata.deploy.guard import Guard
from fedstrata.deploy.messages import Message
from fedstrata.deploy.policy import Policy, Refused
from fedstrata.deploy.site import Site
from fedstrata.deploy.site_log import SiteLog
from fedstrata.deploy.site_store import DiskStore, run_folder
from fedstrata.deploy.terms import Terms

TERMS, SETTINGS = "terms.json", "settings.json"  # of a run, in its folder
IDLE = 3600.0  # seconds without a message after which a worker ends
LOOK = 2.0  # seconds between two checks whether the site's SuperNode lives


class Worker:
    """Answers the messages to one site, whose state is in one folder."""

    def __init__(self, deployment: Deployment, folder: Path, code: str):
        """A worker that has not loaded the site's data yet.

        Args:
            deployment: of the app.
            folder: the site's state.
            code: the version of the app, from `code_of`.
        """
        self.deployment, self.folder, self.code = deployment, folder, code
        self.data: Federation | None = None
        self.own: DataSummary | None = None
        self.sites: dict[str, tuple[Terms, Site]] = {}  # by run
        self.last: tuple[bytes, Message | None, bytes] = b"", None, b""  # the last call, and its reply
        self.log: SiteLog | None = None

    def answer(self, request: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """The header and the bytes of the reply to a message.

        Args:
            request: its kind, its header (`about`), and the site's settings.
            body: a call of the server, in bytes.
        """
        settings = request["settings"]
        guard = self._guard(str(settings["site"]))
        data, own = self._loaded(settings)
        if request["kind"] == "query.survey":
            guard.write_summary(own)
            return {"survey": json.dumps(own), "mark": mark_of(self.folder)}, b""
        call = Message.decode(body)
        try:
            terms, site = self._site(call.run, settings, data, own, request["about"], guard)
            guard.check(terms, site.agreement, call)
            if self.last[0] != body:  # a call that is received twice is worked on once
                reply = site.answer(call)
                self.last = body, reply, reply.encode()
            guard.check_bytes(call.run, own.site, self.last[2])
        except ValueError as error:
            guard.write_refusal(call.run, list(call.stage), str(error))
            raise
        if self.last[1] is not None:
            guard.write_answer(call, self.last[1], self.last[2])
        return {}, self.last[2]

    def close(self) -> None:
        """Release the site's log."""
        if self.log is not None:
            self.log.close()
            self.log = None

    def _guard(self, site: str) -> Guard:
        """The guard, with the policy as it is now: the site's owner may have changed it since the last call."""
        policy = Policy.kept_in(self.folder)
        if self.log is None:
            self.log = SiteLog(self.folder / site_log.FILE, site)
            self.guard = Guard(policy, self.log)
        self.guard.policy = policy
        return self.guard

    def _loaded(self, settings: Mapping[str, Any]) -> tuple[Federation, DataSummary]:
        """The site's data and their summary. An error of `load` may quote rows: its text does not leave the site."""
        if self.data is None or self.own is None:
            try:
                self.data = self.deployment.load(settings)
            except Exception as error:
                print(f"load: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                raise RuntimeError(
                    f"{settings['site']} cannot load its data ({type(error).__name__}); its worker.log tells why"
                ) from error
            key = str(settings.get("key_fingerprint") or f"mark {mark_of(self.folder)}")
            secret = secret_of(self.folder)
            self.own = checked_summary(self.deployment, str(settings["site"]), self.data, secret=secret, key=key)
        return self.data, self.own

    def _site(
        self,
        run: str,
        settings: Mapping[str, Any],
        data: Federation,
        own: DataSummary,
        about: Mapping[str, Any],
        guard: Guard,
    ) -> tuple[Terms, Site]:
        """The terms of this run and its site; both are kept, and later calls must fit them."""
        home = self.folder / "runs" / run_folder(run)
        proposed = Terms.decode(about["terms"]) if "terms" in about else None
        kept = self._kept_terms(run, home)
        if kept is None and proposed is None:
            raise ValueError(f"{own.site} has not begun run {run!r}; its state was lost, or it joined too late")
        terms = self._agreed(own.site, run, kept, proposed)
        if proposed is None and kept is not None and about.get("digest") != kept.digest():
            raise Refused(f"{own.site}: the server works under other terms of run {run!r} than this site agreed to")
        if terms == kept and run in self.sites:
            return self.sites[run]
        guard.check_terms(terms, own)
        agreement = agree_on(self.deployment, run, terms.sites)
        guard.check_agreement(terms, agreement, own.site)
        self._check_settings(own.site, run, home, begun=kept is not None)
        store = DiskStore(home, own.site)
        tells = settings.get("tells")  # decided at the site, never by a message
        site = Site(with_data(agreement, data), own.site, terms.number(own.site), store, data=data, tells=tells)
        if terms != kept:
            guard.write_terms(terms)
            with replacing(home / TERMS) as path:
                path.write_text(terms.encode())
        self.sites[run] = terms, site
        return terms, site

    def _kept_terms(self, run: str, home: Path) -> Terms | None:
        if run in self.sites:
            return self.sites[run][0]
        return Terms.decode((home / TERMS).read_text()) if (home / TERMS).exists() else None

    def _agreed(self, site: str, run: str, kept: Terms | None, proposed: Terms | None) -> Terms:
        """The terms that hold from now on; refuses a change of anything but a longer run or approved new code."""
        if proposed is None:
            assert kept is not None
            return kept
        if proposed.run != run:
            raise Refused(f"{site}: a call of run {run!r} came with the terms of run {proposed.run!r}")
        if proposed.program != self.program:
            raise Refused(f"{site} runs version {self.program} of the app, and the server {proposed.program}")
        if kept is None:
            return proposed
        if changed := _changed(kept, proposed):
            raise Refused(f"{site}: the terms of run {run!r} have changed since it began here: {changed}")
        most = {name: max(getattr(kept, name), getattr(proposed, name)) for name in ("rounds", "evaluations")}
        return proposed._replace(**most)

    @property
    def program(self) -> str:
        """A hash of the app's code; the same at the server and at every site."""
        return self.code.split()[-1]

    def _check_settings(self, site: str, run: str, home: Path, begun: bool) -> None:
        """Refuse to continue a run with other settings: new code may change no problem, algorithm or option."""
        file, now = home / SETTINGS, settings_of(self.deployment)
        if begun and file.exists():
            if changed := differences(json.loads(file.read_text()), now):
                raise Refused(f"{site}: the settings of run {run!r} have changed since it began: {'; '.join(changed)}")
            return
        with replacing(file) as path:
            path.write_text(json.dumps(now))


def _changed(kept: Terms, proposed: Terms) -> str:
    if len(kept.sites) != len(proposed.sites):
        return f"{len(kept.sites)} sites then, {len(proposed.sites)} now"
    for then, now in zip(kept.sites, proposed.sites, strict=True):
        if what := then.difference(now):
            return f"of {then.site}, {what}"
    return ""


def checked_summary(
    deployment: Deployment, site: str, data: Federation, *, secret: bytes = b"", key: str = ""
) -> DataSummary:
    """The summary of a site's data; a ValueError if they do not fit the problem.

    Args:
        deployment: of the app.
        site: its name.
        data: a federation of one client, the site.
        secret: of the site, as in `DataSummary.of`.
        key: the hash of the site's public key.
    """
    summary = DataSummary.of(site, data, secret=secret, key=key)
    problem, options = deployment.problem, deployment.options
    problem.check(start_point(problem, options.get("params"), options.get("seed", 0)), data)
    return summary


def mark_of(folder: Path) -> str:
    """A random text that identifies this state folder; created on first use."""
    return _kept(folder / "mark", secrets.token_hex(16))


def secret_of(folder: Path) -> bytes:
    """A random secret of this state folder, which never leaves it; created on first use."""
    return bytes.fromhex(_kept(folder / "secret", secrets.token_hex(32)))


def _kept(path: Path, new: str) -> str:
    if not path.exists():
        with replacing(path) as part:
            part.write_text(new)
        path.chmod(0o600)
    return path.read_text()


def serve(worker: Worker, listener: socket.socket) -> None:
    """Answer one request after the other, until the app has another version or the site's SuperNode is gone.

    It also ends after an hour without a request.

    Args:
        worker: answers.
        listener: a socket that listens.
    """
    watch, last = SiteWatch(worker.folder), time.monotonic()
    listener.settimeout(min(LOOK, IDLE))
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if watch.gone() or time.monotonic() - last > IDLE:
                return
            continue
        connection.settimeout(None)
        last = time.monotonic()
        with connection, contextlib.suppress(ConnectionError):  # a client that disconnects may try again
            request, body = socket_frames.receive(connection)
            if request["code"] != worker.code:
                stale = f"it has version {worker.code}, and the app has {request['code']}"
                socket_frames.send(connection, {"stale": stale})
                return
            try:
                about, found = worker.answer(request, body)
            except Exception as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                about, found = {"error": f"{type(error).__name__}: {error}"}, b""
            socket_frames.send(connection, about, found)


def main(where: str, folder: str, code: str) -> None:
    """Run the worker of a state folder, unless another one runs already.

    Args:
        where: the deployment, "package.module:name".
        folder: the site's state.
        code: the version of the app.
    """
    home = Path(folder)
    lock = os.open(home / "worker.lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # another worker runs, or is starting
    os.truncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())
    path = socket_frames.address(home)
    path.unlink(missing_ok=True)
    sys.dont_write_bytecode = True  # the app's folder must stay as it was approved
    worker = Worker(resolve(where), home, code)
    with socket.socket(socket.AF_UNIX) as listener:
        mask = os.umask(0o177)
        listener.bind(str(path))
        os.umask(mask)
        listener.listen(8)
        try:
            serve(worker, listener)
        finally:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(*sys.argv[1:4])
