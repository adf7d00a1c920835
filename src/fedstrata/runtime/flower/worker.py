"""A site's worker: a process that stays, so that JAX is imported and programs are compiled once and not per message."""

import contextlib
import fcntl
import json
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstrata.files import replacing
from fedstrata.runtime.flower import wire
from fedstrata.runtime.flower.deployment import Deployment, resolve
from fedstrata.runtime.shelf import Folder
from fedstrata.runtime.site import Site
from fedstrata.runtime.survey import Survey, start_point, terms_of, with_data
from fedstrata.transport.letters import Letter

IDLE = 3600.0  # seconds without a message after which a worker leaves


class Worker:
    """Answers for one site, whose state is in one folder."""

    def __init__(self, deployment: Deployment, folder: Path, code: str):
        self.deployment, self.folder, self.code = deployment, folder, code
        self.data: Any = None
        self.sites: dict[str, Site] = {}  # by run
        self.last: tuple[bytes, bytes] = b"", b""  # the last call, and what was answered

    def answer(self, request: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        settings, kind = request["settings"], request["kind"]
        if self.data is None:
            self.data = self.deployment.load(settings)
        name = str(settings["site"])
        if kind == "query.survey":
            survey = Survey.of(name, self.data)
            problem, options = self.deployment.problem, self.deployment.options
            problem.check(start_point(problem, options.get("params"), options.get("seed", 0)), self.data)
            return {"survey": json.dumps(survey), "mark": mark_of(self.folder)}, b""
        if self.last[0] != body:  # a call that was sent twice is answered twice, and done once
            call = Letter.decode(body)
            answer = self._site(call.run, settings, request["about"].get("surveys")).answer(call)
            self.last = body, answer.encode()
        return {}, self.last[1]

    def _site(self, run: str, settings: Mapping[str, Any], surveys: str | None) -> Site:
        """The site of this run; what it agreed to is kept beside its state."""
        name = str(settings["site"])
        home = self.folder / "runs" / "".join(c if c.isalnum() or c in "-_" else "_" for c in run)
        agreed = home / "surveys.json"
        if surveys is not None and run not in self.sites:
            with replacing(agreed) as path:
                path.write_text(surveys)
        if run not in self.sites:
            if not agreed.exists():
                raise ValueError(f"{name} has not begun run {run!r}; its state was lost, or it joined too late")
            known = [Survey(*row) for row in json.loads(agreed.read_text())]
            number = [survey.site for survey in known].index(name)
            d = self.deployment
            terms = terms_of(run, d.problem, d.algorithm, known, **d.options)
            tells = settings.get("tells")  # the site's own decision: never from a message
            here = with_data(terms, self.data)
            self.sites[run] = Site(here, name, number, Folder(home, name), data=self.data, tells=tells)
        return self.sites[run]


def mark_of(folder: Path) -> str:
    """What tells this state folder from any other, for as long as it lasts."""
    path = folder / "mark"
    if not path.exists():
        with replacing(path) as part:
            part.write_text(secrets.token_hex(16))
    return path.read_text()


def serve(worker: Worker, listener: socket.socket) -> None:
    """One request after the other, until nobody asks any more."""
    listener.settimeout(IDLE)
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            return
        with connection, contextlib.suppress(ConnectionError):  # who hung up asks again, or never
            request, body = wire.receive(connection)
            if request["code"] != worker.code:
                wire.send(connection, {"stale": f"it is {worker.code}, and {request['code']} was asked for"})
                return
            try:
                about, found = worker.answer(request, body)
            except Exception as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                about, found = {"error": f"{type(error).__name__}: {error}"}, b""
            wire.send(connection, about, found)


def main(where: str, folder: str, code: str) -> None:
    home = Path(folder)
    lock = os.open(home / "worker.lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # another one is there, or just starting
    os.truncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())
    path = wire.address(home)
    path.unlink(missing_ok=True)
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
