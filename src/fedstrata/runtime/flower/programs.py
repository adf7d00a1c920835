"""Flower's programs as this library starts them: TLS, known nodes, no telemetry, nothing installed at run time."""

import ipaddress
import os
import shlex
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedstrata.errors import unknown
from fedstrata.runtime.flower import quick, wire
from fedstrata.runtime.flower.keys import AUTHORITY, CERTIFICATE, KEY

HOME = ".flwr"  # Flower's own files, in the app's folder and not in the user's home
CONNECTION = "server"  # what Flower's command line calls the connection to our SuperLink


class Server(NamedTuple):
    """server.toml: where the SuperLink listens, and its keys."""

    folder: Path
    address: str  # as sites and the command line reach it, host:port
    listen: str = "0.0.0.0"
    keys: str = "keys"
    database: str = "out/superlink.db"
    insecure: bool = False

    @classmethod
    def read(cls, path: Path) -> "Server":
        return cls(path.parent.absolute(), **_checked(path, cls._fields[1:], {"address"})).sure(path)

    def sure(self, path: Path) -> "Server":
        _only_on_loopback(self.insecure, [self.address, self.listen], path)
        return self

    def command(self) -> list[str]:
        port, keys = split_address(self.address)[1], self.folder / self.keys
        database = self.folder / self.database
        database.parent.mkdir(parents=True, exist_ok=True)
        pairs = ("ca-certfile", AUTHORITY), ("certfile", CERTIFICATE), ("keyfile", KEY)
        tls = [word for option, name in pairs for word in (f"--ssl-{option}", str(keys / name))]
        trust = ["--insecure"] if self.insecure else [*tls, "--enable-supernode-auth"]
        where = ["--host", self.listen, "--port", str(port), "--database", str(database)]
        return ["flower-superlink", *where, *trust, "--disable-runtime-dependency-installation"]

    def connect(self) -> Path:
        """Tell Flower's command line of this server; returns its home."""
        home = self.folder / HOME
        home.mkdir(exist_ok=True)
        trust = "insecure = true" if self.insecure else f'root-certificates = "{self.folder / self.keys / AUTHORITY}"'
        text = f'[superlink]\ndefault = "{CONNECTION}"\n[superlink.{CONNECTION}]\naddress = "{self.address}"\n{trust}\n'
        (home / "config.toml").write_text(text)
        return home


class Site(NamedTuple):
    """A site's own file: its name, where the server is, its key, where its state is kept, and what `load` is given."""

    folder: Path
    site: str
    server: str  # host:port
    state: str = "state"
    authority: str = f"keys/{AUTHORITY}"
    key: str = ""  # keys/NAME.key
    approved: str = "approved.txt"  # the versions of the app that may run here
    port: int = 9094  # of the SuperNode's own interface, for this machine only
    insecure: bool = False
    settings: Mapping[str, Any] = {}

    @classmethod
    def read(cls, path: Path) -> "Site":
        found = cls(path.parent.absolute(), **_checked(path, cls._fields[1:], {"site", "server"}))
        _only_on_loopback(found.insecure, [found.server], path)
        return found

    @property
    def node_config(self) -> dict[str, Any]:
        """What `load` is given."""
        return {**self.settings, "site": self.site, "state": str(self.folder / self.state)}

    @property
    def private_key(self) -> Path:
        return self.folder / (self.key or f"keys/{self.site}.key")

    def command(self) -> list[str]:
        keys = ["--root-certificates", str(self.folder / self.authority)]
        keys += ["--auth-supernode-private-key", str(self.private_key)]
        where = ["--superlink", self.server, "--host", "127.0.0.1", "--port", str(self.port)]
        given = " ".join(f"{name}={_quoted(name, value)}" for name, value in self.node_config.items())
        trust = ["--insecure"] if self.insecure else keys
        program = [sys.executable, "-m", "fedstrata.runtime.flower.node"]
        return [*program, *trust, *where, "--node-config", given]

    def environment(self) -> dict[str, str]:
        """With our own program in the place of Flower's client app, which refuses apps that were not approved."""
        state = self.folder / self.state
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        home, programs = state / "flower", state / "bin"
        programs.mkdir(exist_ok=True)
        address = wire.address(state, "clientapp.sock")
        address.unlink(missing_ok=True)  # a process of an earlier start may have another version of the library
        guard = programs / "flwr-clientapp"
        words = shlex.join([sys.executable, "-I", "-S", str(quick.__file__), "ask", str(address)])
        guard.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        guard.chmod(0o700)
        found = environment(home)
        path = os.pathsep.join([str(programs), found["PATH"]])
        own = {"PATH": path, "FEDSTRATA_APPROVED": str(self.folder / self.approved)}
        return {**found, **own, "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05"}  # Flower: 1 s, before every message


def environment(home: Path) -> dict[str, str]:
    """For every program of Flower: nothing leaves but what a run sends."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_HOME": str(home)}
    return {**os.environ, **quiet, "PATH": path}


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"address {address!r} must be host:port, e.g. federation.example.org:9092")
    return host.strip("[]"), int(port)


def _checked(path: Path, known: tuple[str, ...], needed: set[str]) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    for name in found:
        if name not in known:
            raise unknown(f"entry of {path}:", name, known)
    if lacking := sorted(needed - found.keys()):
        raise ValueError(f"{path} lacks {', '.join(lacking)}")
    return found


def _only_on_loopback(insecure: bool, hosts: list[str], path: Path) -> None:
    if not insecure:
        return
    for address in hosts:
        host = address.rpartition(":")[0] or address
        if host != "localhost" and not _is_loopback(host.strip("[]")):
            raise ValueError(f"{path}: insecure is for loopback only, and {address!r} can be reached from outside")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _quoted(name: str, value: Any) -> str:
    if isinstance(value, str):
        if '"' in value or "\n" in value:
            raise ValueError(f"setting {name}={value!r}: Flower takes no quotation marks or line breaks in a setting")
        return f'"{value}"'
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, int | float):
        raise TypeError(f"setting {name} must be a word, a number, true or false, not {type(value).__name__}")
    return repr(value)
