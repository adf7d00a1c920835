"""A whole federation on this machine, for local runs and tests: a SuperLink, SuperNodes, and their keys."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedstrata.deploy.flower import socket_frames
from fedstrata.deploy.flower.approval import approve
from fedstrata.deploy.flower.config import CONNECTION, ServerConfig, SiteConfig, environment, split_address
from fedstrata.deploy.flower.keys import server_keys, site_keys
from fedstrata.deploy.flower.run_lock import private
from fedstrata.deploy.flower.supernode import WORKER, end_worker
from fedstrata.deploy.policy import Policy

PATIENCE = 120.0  # seconds until the SuperLink must listen


class LocalFederation:
    """A SuperLink and SuperNodes in separate processes, with all their files in one folder. A context manager."""

    def __init__(
        self,
        app: Path,
        home: Path,
        sites: dict[str, dict[str, Any]],
        *,
        secure: bool = True,
        extra: dict[str, str] | None = None,
        folder: Path | None = None,
        prefix: tuple[str, ...] = (),
        policy: Policy | Mapping[str, Policy] | None = None,
    ):
        """A federation that has not been started.

        Args:
            app: the folder of the Flower app.
            home: the folder of all files.
            sites: by name, the settings of each site.
            secure: with TLS and node keys.
            extra: variables for the environment of all processes.
            folder: where relative paths in the sites' settings start; None: `home`.
            prefix: the first words of every command, e.g. those that run it in a network namespace.
            policy: of all sites, or by their names; None: the defaults, with as many sites as there are if fewer.
        """
        self.app, self.home, self.extra = app.absolute(), home.absolute(), extra or {}
        self.folder, self.prefix = (folder or home).absolute(), prefix
        private(self.home)
        usual = Policy(sites_at_least=min(Policy().sites_at_least, len(sites)))
        policies = policy if isinstance(policy, Mapping) else dict.fromkeys(sites, policy or usual)
        port, *ports = free_ports(1 + len(sites))
        self.server = ServerConfig(
            self.home, f"127.0.0.1:{port}", listen="127.0.0.1", database="superlink.db", insecure=not secure
        )
        self.sites = {
            name: SiteConfig(
                self.home,
                name,
                self.server.address,
                state=name,
                port=port,
                insecure=not secure,
                settings=given,
                policy=policies[name],
            )
            for (name, given), port in zip(sites.items(), ports, strict=True)
        }
        self.processes: dict[str, subprocess.Popen] = {}
        self.runs: list[subprocess.Popen] = []

    def start(self) -> None:
        """Create keys, and start everything; returns when the SuperLink listens and all sites have been started."""
        approve(self.app, self.home / "approved.txt")
        if not self.server.insecure:
            shutil.rmtree(self.home / "keys", ignore_errors=True)
            server_keys(self.home / "keys", ["127.0.0.1", "localhost"], days=2)
        self.start_link()
        for name in self.sites:
            if not self.server.insecure:
                self.register(site_keys(self.home / "keys", name)[1])
            self.start_site(name)

    def start_link(self) -> None:
        """Start the SuperLink, and wait until it listens."""
        self._start("superlink", self.server.command(), environment(self.server.connect()))
        self._wait_for_link()

    def start_site(self, name: str) -> None:
        """Start a site's SuperNode."""
        site = self.sites[name]
        site.keep()
        self._start(name, site.command(), site.environment())

    def register(self, public_key: Path) -> None:
        """Register a site's public key with the SuperLink, before the site starts."""
        self._flwr("supernode", "register", str(public_key), CONNECTION)

    def run(self, output: Any = subprocess.PIPE, **config: Any) -> subprocess.Popen:
        """Start a run of the app.

        Args:
            output: where its log is written.
            config: entries of the app's run config.
        """
        self.runs.append(subprocess.Popen(
            [*self.prefix, *run_command(self.app, config)], env={**environment(self.server.connect()), **self.extra},
            stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, start_new_session=True,
            umask=0o077,
        ))  # fmt: skip
        return self.runs[-1]

    def kill(self, name: str) -> None:
        """Kill a process and its children, as a crash would. A worker is not a child, and survives."""
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def worker(self, name: str) -> int:
        """The process id of a site's worker."""
        return int((self.home / name / WORKER).read_text())

    def stop(self) -> None:
        """Kill all processes. A second Ctrl-C does not stop this."""
        with _without_signals():
            for run in self.runs:
                run.kill()  # it only shows the log
            for name in reversed(list(self.processes)):
                self.kill(name)
            for name in self.sites:
                socket_frames.address(self.home / name, "clientapp.sock").unlink(missing_ok=True)  # its process ends
                end_worker(self.home / name)

    def log(self, name: str, lines: int = 20) -> str:
        """The last lines of a process's log."""
        return "\n".join((self.home / f"{name}.log").read_text(errors="replace").splitlines()[-lines:])

    def _flwr(self, *words: str) -> None:
        home = environment(self.server.connect())
        done = subprocess.run([*self.prefix, "flwr", *words], env=home, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"flwr {' '.join(words)}: {(done.stderr or done.stdout).strip()}")

    def _start(self, name: str, command: list[str], given: dict[str, str]) -> None:
        (self.home / f"{name}.log").touch(0o600)
        with (self.home / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*self.prefix, *command], env={**given, **self.extra}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, cwd=self.folder, umask=0o077,
            )  # fmt: skip

    def _wait_for_link(self) -> None:
        until = time.monotonic() + PATIENCE
        host, port = split_address(self.server.own_address)
        look = [sys.executable, "-c", f"import socket; socket.create_connection(({host!r}, {port}), 1)"]
        while subprocess.run([*self.prefix, *look], stderr=subprocess.DEVNULL).returncode:
            if self.processes["superlink"].poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the SuperLink does not listen at {self.server.address}: {self.log('superlink')}")
            time.sleep(0.1)

    def __enter__(self) -> "LocalFederation":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextlib.contextmanager
def _without_signals() -> Iterator[None]:
    """Ignore Ctrl-C and the signals that end a process; they can be changed in a program's main thread only."""
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers} if main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_command(app: Path, config: dict[str, Any]) -> list[str]:
    """The command that starts a run of an app.

    Args:
        app: its folder.
        config: entries of its run config.
    """
    given = " ".join(
        f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in config.items()
    )  # TOML writes these alike
    return ["flwr", "run", str(app), CONNECTION, "--stream", *(["--run-config", given] if given else [])]


def free_ports(count: int) -> list[int]:
    """Ports of this machine that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
