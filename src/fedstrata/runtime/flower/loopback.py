"""A whole federation on this machine, for rehearsals and tests: a SuperLink, SuperNodes, and their keys."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fedstrata.runtime.flower import wire
from fedstrata.runtime.flower.approved import approve
from fedstrata.runtime.flower.keys import server_keys, site_keys
from fedstrata.runtime.flower.programs import CONNECTION, Server, Site, environment, split_address

PATIENCE = 120.0  # seconds for a program to listen


class Loopback:
    """SuperLink and SuperNodes in processes of their own, whose files are all in one folder.

    sites: what each of them is given, by its name. secure: with TLS and node keys. extra: for their environment.
    folder: where relative paths of the sites' settings begin. prefix: what every command begins with, where they all
    run somewhere else, such as in a network namespace of their own.
    """

    def __init__(
        self,
        app: Path,
        home: Path,
        sites: dict[str, dict[str, Any]],
        secure: bool = True,
        extra: dict[str, str] | None = None,
        folder: Path | None = None,
        prefix: tuple[str, ...] = (),
    ):
        self.app, self.home, self.extra = app.absolute(), home.absolute(), extra or {}
        self.folder, self.prefix = (folder or home).absolute(), prefix
        self.home.mkdir(parents=True, exist_ok=True)
        port, *ports = free_ports(1 + len(sites))
        self.server = Server(self.home, f"127.0.0.1:{port}", "127.0.0.1", "keys", "superlink.db", not secure)
        self.sites = {
            name: Site(self.home, name, self.server.address, state=name, port=own, insecure=not secure, settings=given)
            for (name, given), own in zip(sites.items(), ports, strict=True)
        }
        self.processes: dict[str, subprocess.Popen] = {}

    def start(self) -> None:
        """Everything, from keys that are made anew; returns when the SuperLink listens and sites have been started."""
        approve(self.app, self.home / "approved.txt")
        if not self.server.insecure:
            shutil.rmtree(self.home / "keys", ignore_errors=True)
            server_keys(self.home / "keys", ["127.0.0.1"], days=2)
        self.start_link()
        for name in self.sites:
            if not self.server.insecure:
                self.register(site_keys(self.home / "keys", name)[1])
            self.start_site(name)

    def start_link(self) -> None:
        self._start("superlink", self.server.command(), environment(self.server.connect()))
        self._wait_for_link()

    def start_site(self, name: str) -> None:
        self._start(name, self.sites[name].command(), self.sites[name].environment())

    def register(self, public_key: Path) -> None:
        """Let the SuperLink know a site, before it starts."""
        self._flwr("supernode", "register", str(public_key), CONNECTION)

    def run(self, output: Any = subprocess.PIPE, **config: Any) -> subprocess.Popen:
        """Start a run of the app; config: the keys of its run config."""
        return subprocess.Popen(
            [*self.prefix, *run_command(self.app, config)], env={**environment(self.server.connect()), **self.extra},
            stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip

    def kill(self, name: str) -> None:
        """As a crash would: with all that it has started, but for workers, which are nobody's children."""
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def worker(self, name: str) -> int:
        """The process number of a site's worker."""
        return int((self.home / name / "worker.lock").read_text())

    def stop(self) -> None:
        for name in reversed(list(self.processes)):
            self.kill(name)
        for name in self.sites:
            wire.address(self.home / name, "clientapp.sock").unlink(missing_ok=True)  # its process leaves
            with contextlib.suppress(OSError, ValueError):
                os.kill(self.worker(name), signal.SIGKILL)

    def log(self, name: str, lines: int = 20) -> str:
        return "\n".join((self.home / f"{name}.log").read_text(errors="replace").splitlines()[-lines:])

    def _flwr(self, *words: str) -> None:
        home = environment(self.server.connect())
        done = subprocess.run([*self.prefix, "flwr", *words], env=home, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"flwr {' '.join(words)}: {(done.stderr or done.stdout).strip()}")

    def _start(self, name: str, command: list[str], given: dict[str, str]) -> None:
        with (self.home / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*self.prefix, *command], env={**given, **self.extra}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, cwd=self.folder,
            )  # fmt: skip

    def _wait_for_link(self) -> None:
        until = time.monotonic() + PATIENCE
        host, port = split_address(self.server.address)
        look = [sys.executable, "-c", f"import socket; socket.create_connection(({host!r}, {port}), 1)"]
        while subprocess.run([*self.prefix, *look], stderr=subprocess.DEVNULL).returncode:
            if self.processes["superlink"].poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the SuperLink does not listen at {self.server.address}: {self.log('superlink')}")
            time.sleep(0.1)

    def __enter__(self) -> "Loopback":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def run_command(app: Path, config: dict[str, Any]) -> list[str]:
    given = " ".join(f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in config.items())
    return ["flwr", "run", str(app), CONNECTION, "--stream", *(["--run-config", given] if given else [])]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
