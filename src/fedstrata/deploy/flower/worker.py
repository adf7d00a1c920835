"""A site's worker: a process that outlives messages, so that JAX is imported and programs are compiled only once."""

import contextlib
import hmac
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedstrata.base.few_lines import FewLines
from fedstrata.base.text import one_line
from fedstrata.data.federation import Federation
from fedstrata.deploy import site_log
from fedstrata.deploy.agreement import start_point, with_data
from fedstrata.deploy.data_summary import DataSummary
from fedstrata.deploy.flower import socket_frames
from fedstrata.deploy.flower.deployment import Deployment, agree_on, resolve, settings_of
from fedstrata.deploy.flower.run_lock import held
from fedstrata.deploy.flower.supernode import GRACE, WORKER, SiteWatch
from fedstrata.deploy.guard import Guard
from fedstrata.deploy.journal import LONGEST_REASON
from fedstrata.deploy.messages import BEGIN, PROOF, Message, Stage, proof
from fedstrata.deploy.policy import Policy, Refused, check_tells
from fedstrata.deploy.site import Site
from fedstrata.deploy.site_folder import MARK, Identity, RunRecord
from fedstrata.deploy.site_log import SiteLog, SiteLogError
from fedstrata.deploy.site_store import DiskStore
from fedstrata.deploy.state_files import DamagedFile
from fedstrata.deploy.terms import Terms

IDLE = 3600.0  # seconds without a message after which a worker ends
MOST_RUNS = 2  # that are held in memory, each with the data as arrays of JAX
LONGEST = 10_000  # characters of an error of `load` in worker.log
LOOK = 2.0  # seconds between two checks whether the site's SuperNode lives

log = logging.getLogger("fedstrata")


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
        self.last: tuple[bytes, Message, bytes] | None = None  # the last call, its reply, and that in bytes
        self.guard: Guard | None = None
        self.identity: Identity | None = None
        self.lines = FewLines(log)  # of worker.log, which nobody can fill

    def answer(self, request: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """The header and the bytes of the reply to a message.

        Args:
            request: its kind, its header (`about`), and the site's settings.
            body: a call of the server, in bytes.
        """
        settings, call = request["settings"], None
        guard = self._guard(str(settings["site"]))
        try:
            data, own = self._loaded(settings, guard)
            if request["kind"] == "query.survey":
                assert self.identity is not None
                guard.journal.write_summary(own, self.identity.files)
                return {"survey": json.dumps(own), "mark": self.identity.mark}, b""
            self._check_proof(request["about"], body, own.site)
            call = Message.decode(body)
            terms, site = self._site(call, settings, data, own, request["about"], guard)
            kept = self.last if self.last is not None and self.last[0] == body else None
            guard.check(terms, site.context, call, kept is not None)
            if kept is None:  # a call that is received twice is worked on once
                answer = site.answer(call)
                self.last = kept = body, answer, answer.encode()
            else:
                site.count_again(call.stage)
            _, reply, sent = kept
            guard.check_reply(terms, site.context, call, sent)
        except SiteLogError:
            raise  # there is nowhere to write it
        except Exception as error:
            run, stage = ("", None) if call is None else (call.run, list(call.stage))
            guard.journal.write_refusal(run, stage, str(error))
            raise
        guard.journal.write_answer(call, reply, sent)
        return {}, sent

    def close(self) -> None:
        """Release the site's log."""
        if self.guard is not None:
            self.guard.log.close()
            self.guard = None

    def _guard(self, site: str) -> Guard:
        """The guard, with the policy as it is now: the site's owner may have changed it since the last call."""
        if self.guard is None:
            self.guard = Guard(Policy(), SiteLog(self.folder / site_log.FILE, site))
        try:
            changed = self.guard.set_policy(Policy.kept_in(self.folder), self.folder)
        except DamagedFile as error:
            self.guard.journal.write_refusal("", None, str(error))
            raise
        if changed:
            self.sites.clear()  # runs are compared with it again
        return self.guard

    def _loaded(self, settings: Mapping[str, Any], guard: Guard) -> tuple[Federation, DataSummary]:
        """The site's data and their summary. Errors of `load`, and about labels, may quote rows: they do not leave."""
        if self.data is None or self.own is None:
            site = str(settings["site"])
            self.identity = Identity(self.folder, site, guard.journal)
            try:
                self.data = _in_memory(self.deployment.load(settings))
            except Exception as error:
                self.lines.write(logging.ERROR, f"load: {type(error).__name__}: {error}"[:LONGEST])
                raise RuntimeError(
                    f"{site} cannot load its data ({type(error).__name__}); see its worker.log"
                ) from error
            key = str(settings.get("key_fingerprint") or f"mark {self.identity.files[MARK]}")  # all sites see it
            try:
                self.own = checked_summary(self.deployment, site, self.data, secret=self.identity.secret, key=key)
            except Exception as error:
                self.lines.write(logging.ERROR, f"data: {type(error).__name__}: {error}"[:LONGEST])
                raise RuntimeError(
                    f"the data of {site} do not fit the problem ({type(error).__name__}); see its worker.log"
                ) from error
        return self.data, self.own

    def _site(
        self,
        call: Message,
        settings: Mapping[str, Any],
        data: Federation,
        own: DataSummary,
        about: Mapping[str, Any],
        guard: Guard,
    ) -> tuple[Terms, Site]:
        """The terms of a call's run and its site; both are kept, and later calls must fit them."""
        run = call.run
        record = RunRecord(self.folder, run, own.site, guard.journal)
        proposed = Terms.decode(about["terms"]) if "terms" in about else None
        kept = self.sites[run][0] if run in self.sites else record.terms(proposed)
        terms = record.agreed(kept, proposed, about.get("digest"), self.program)
        if terms == kept and run in self.sites:
            return self.sites[run]
        guard.check_terms(terms, own)
        self._check_sites(terms, own.site)
        agreement = agree_on(self.deployment, run, terms.sites)
        guard.check_agreement(terms, agreement, own.site)
        guard.check_parts(agreement.context.problem, data, own.site)
        now = settings_of(self.deployment)
        record.check_settings(now)
        store = DiskStore(record.home, own.site)
        last = None if kept is None else kept.digest()  # the log may have others, or may have been moved away
        last = last if record.logged is None else record.logged["message"]
        prepared = last is not None and not record.has_answered()  # and nothing more
        if prepared and last != terms.digest():
            store.keep(set())  # the start that was prepared under other terms
            self.last = None
        tells = settings.get("tells")  # decided at the site, never by a message
        check_tells(tells, guard.policy, own.site)
        answered = guard.journal.answered(run)
        site = Site(
            with_data(agreement, data),
            own.site,
            terms.number(own.site),
            store,
            data=data,
            tells=tells,
            scores=self.deployment.scores,
            answered=answered,
        )
        record.write(terms, now, begun=kept is not None)
        if prepared and not store.stages() and call.stage[:2] != (-1, BEGIN):
            # A server that resumes does not ask for it.
            site.answer(Message(run, Stage(-1, BEGIN), own.site, {}))
        self.sites.pop(run, None)
        while len(self.sites) >= MOST_RUNS:
            del self.sites[next(iter(self.sites))]  # it is made again when it is called
        self.sites[run] = terms, site
        return terms, site

    def _check_proof(self, about: Mapping[str, Any], body: bytes, site: str) -> None:
        """Refuse a call of another node: Flower delivers whatever a registered node sends to another one."""
        assert self.identity is not None
        if not hmac.compare_digest(proof(self.identity.mark, about, body).encode(), str(about.get(PROOF)).encode()):
            raise Refused(
                f"{site}: this call does not have the proof that it is from a server to which this site has reported "
                "its mark; if the server is older than this site, give both the same release"
            )

    def _check_sites(self, terms: Terms, site: str) -> None:
        """Refuse other sites than those that the approved app names."""
        named, listed = self.deployment.sites, [summary.site for summary in terms.sites]
        if not isinstance(named, int) and sorted(named) != sorted(listed):
            raise Refused(
                f"{site}: the app names the sites {', '.join(sorted(named))}, and run {terms.run!r} has "
                f"{', '.join(sorted(listed))}; give the run the sites that the app names"
            )

    @property
    def program(self) -> str:
        """A hash of the app's code; the same at the server and at every site."""
        return self.code.split()[-1]


def _in_memory(data: Federation) -> Federation:
    """The same data, copied where they are a view of something else: a file that is mapped may change later."""
    return jax.tree.map(lambda a: np.array(a) if isinstance(a, np.ndarray) and not a.flags.owndata else a, data)


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
                why = one_line(f"{type(error).__name__}: {error}", LONGEST_REASON)  # no more than the log has
                worker.lines.write(logging.WARNING, why)
                about, found = {"error": why}, b""
            socket_frames.send(connection, about, found)


def end_with_site(folder: Path) -> None:
    """End this process when the site's SuperNode is gone, also in the middle of a call or of loading the data.

    Calls are repeatable, and files are written as a whole. A worker that waits for a request ends by itself, earlier.

    Args:
        folder: the site's state.
    """
    watch = SiteWatch(folder, GRACE + 2 * LOOK)
    while not watch.gone():
        time.sleep(LOOK)
    log.warning("the SuperNode of this site is gone, and so is its worker")
    os._exit(1)


def main(where: str, folder: str, code: str) -> None:
    """Run the worker of a state folder, unless another one runs already.

    Args:
        where: the deployment, "package.module:name".
        folder: the site's state.
        code: the version of the app.
    """
    home = Path(folder)
    with held(home / WORKER, str(os.getpid()), patience=0) as mine:
        if not mine:
            return  # another worker runs, or is starting
        threading.Thread(target=end_with_site, args=(home,), daemon=True).start()
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
