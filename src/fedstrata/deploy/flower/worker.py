"""A site's worker: a process that outlives messages, so that JAX is imported and programs are compiled only once."""

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

from fedstrata.base.files import replacing
from fedstrata.data.federation import Federation
from fedstrata.deploy.agreement import DataSummary, agree, start_point, with_data
from fedstrata.deploy.flower import socket_frames
from fedstrata.deploy.flower.deployment import Deployment, resolve
from fedstrata.deploy.messages import Message
from fedstrata.deploy.site import Site
from fedstrata.deploy.site_store import DiskStore

IDLE = 3600.0  # seconds without a message after which a worker ends


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
        self.sites: dict[str, Site] = {}  # by run
        self.last: tuple[bytes, bytes] = b"", b""  # the last call, and its reply

    def answer(self, request: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """The header and the bytes of the reply to a message.

        Args:
            request: its kind, its header (`about`), and the site's settings.
            body: a call of the server, in bytes.
        """
        settings = request["settings"]
        if self.data is None:
            self.data = self.deployment.load(settings)
        if request["kind"] == "query.survey":
            return self._summary(str(settings["site"]), self.data), b""
        if self.last[0] != body:  # a call that is received twice is worked on once
            call = Message.decode(body)
            site = self._site(call.run, settings, self.data, request["about"].get("surveys"))
            self.last = body, site.answer(call).encode()
        return {}, self.last[1]

    def _summary(self, name: str, data: Federation) -> dict[str, Any]:
        summary = checked_summary(self.deployment, name, data)
        return {"survey": json.dumps(summary), "mark": mark_of(self.folder)}

    def _site(self, run: str, settings: Mapping[str, Any], data: Federation, summaries: str | None) -> Site:
        """The site of this run; the summaries of all sites are kept beside its state."""
        if run in self.sites:
            return self.sites[run]
        name = str(settings["site"])
        home = self.folder / "runs" / "".join(c if c.isalnum() or c in "-_" else "_" for c in run)
        file = home / "surveys.json"
        if summaries is not None:
            with replacing(file) as path:
                path.write_text(summaries)
        if not file.exists():
            raise ValueError(f"{name} has not begun run {run!r}; its state was lost, or it joined too late")
        of_all = [DataSummary(*row) for row in json.loads(file.read_text())]
        number = [summary.site for summary in of_all].index(name)
        deployment = self.deployment
        agreement = agree(run, deployment.problem, deployment.algorithm, of_all, **deployment.options)
        tells = settings.get("tells")  # decided at the site, never by a message
        store = DiskStore(home, name)
        self.sites[run] = Site(with_data(agreement, data), name, number, store, data=data, tells=tells)
        return self.sites[run]


def checked_summary(deployment: Deployment, site: str, data: Federation) -> DataSummary:
    """The summary of a site's data; a ValueError if they do not fit the problem.

    Args:
        deployment: of the app.
        site: its name.
        data: a federation of one client, the site.
    """
    summary = DataSummary.of(site, data)
    problem, options = deployment.problem, deployment.options
    problem.check(start_point(problem, options.get("params"), options.get("seed", 0)), data)
    return summary


def mark_of(folder: Path) -> str:
    """A random text that identifies this state folder; created on first use."""
    path = folder / "mark"
    if not path.exists():
        with replacing(path) as part:
            part.write_text(secrets.token_hex(16))
    return path.read_text()


def serve(worker: Worker, listener: socket.socket) -> None:
    """Answer one request after the other, until there is none for an hour or the app has another version.

    Args:
        worker: answers.
        listener: a socket that listens.
    """
    listener.settimeout(IDLE)
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            return
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
