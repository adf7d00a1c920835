"""server.toml and a site's .toml file, and the commands of Flower that follow from them.

Programs use TLS and registered nodes. They send no telemetry and install nothing at run time.
"""

import ipaddress
import os
import shlex
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedstrata.base.errors import unknown
from fedstrata.deploy.flower import fork_server, socket_frames
from fedstrata.deploy.flower.keys import AUTHORITY, CERTIFICATE, KEY

HOME = ".flwr"  # Flower's files, in the app's folder and not in the user's home
CONNECTION = "server"  # the name of the SuperLink in the configuration of Flower's command line


class ServerConfig(NamedTuple):
    """server.toml: where the SuperLink listens, and its keys."""

    folder: Path  # of the file
    address: str  # host:port, for sites and the command line
    listen: str = "0.0.0.0"
    keys: str = "keys"
    database: str = "out/superlink.db"
    insecure: bool = False

    @classmethod
    def read(cls, path: Path) -> "ServerConfig":
        """The server in this file; a ValueError if the file has mistakes."""
        found = cls(path.parent.absolute(), **_checked(path, cls._fields[1:], {"address"}))
        _only_on_loopback(found.insecure, [found.address, found.listen], path)
        return found

    def command(self) -> list[str]:
        """The command that starts the SuperLink."""
        port, keys = split_address(self.address)[1], self.folder / self.keys
        database = self.folder / self.database
        database.parent.mkdir(parents=True, exist_ok=True)
        pairs = ("ca-certfile", AUTHORITY), ("certfile", CERTIFICATE), ("keyfile", KEY)
        tls = [word for option, name in pairs for word in (f"--ssl-{option}", str(keys / name))]
        trust = ["--insecure"] if self.insecure else [*tls, "--enable-supernode-auth"]
        where = ["--host", self.listen, "--port", str(port), "--database", str(database)]
        return ["flower-superlink", *where, *trust, "--disable-runtime-dependency-installation"]

    def connect(self) -> Path:
        """Write this server into the configuration of Flower's command line; returns its folder."""
        home = self.folder / HOME
        home.mkdir(exist_ok=True)
        trust = "insecure = true" if self.insecure else f'root-certificates = "{self.folder / self.keys / AUTHORITY}"'
        text = f'[superlink]\ndefault = "{CONNECTION}"\n[superlink.{CONNECTION}]\naddress = "{self.address}"\n{trust}\n'
        (home / "config.toml").write_text(text)
        return home


class SiteConfig(NamedTuple):
    """A site's .toml file: its name, the server's address, its key, its state folder, and the settings for `load`."""

    folder: Path  # of the file
    site: str  # its name
    server: str  # host:port
    state: str = "state"
    authority: str = f"keys/{AUTHORITY}"
    key: str = ""  # default: keys/NAME.key
    approved: str = "approved.txt"  # versions of the app that may run here
    port: int = 9094  # of the SuperNode's interface on this machine
    insecure: bool = False
    settings: Mapping[str, Any] = {}

    @classmethod
    def read(cls, path: Path) -> "SiteConfig":
        """The site in this file; a ValueError if the file has mistakes."""
        found = cls(path.parent.absolute(), **_checked(path, cls._fields[1:], {"site", "server"}))
        _only_on_loopback(found.insecure, [found.server], path)
        return found

    @property
    def node_config(self) -> dict[str, Any]:
        """The settings for `load`, with the site's name and state folder."""
        return {**self.settings, "site": self.site, "state": str(self.folder / self.state)}

    @property
    def private_key(self) -> Path:
        """The file of the site's private key."""
        return self.folder / (self.key or f"keys/{self.site}.key")

    def command(self) -> list[str]:
        """The command that starts the SuperNode."""
        keys = ["--root-certificates", str(self.folder / self.authority)]
        keys += ["--auth-supernode-private-key", str(self.private_key)]
        where = ["--superlink", self.server, "--host", "127.0.0.1", "--port", str(self.port)]
        settings = " ".join(f"{name}={_quoted(name, value)}" for name, value in self.node_config.items())
        trust = ["--insecure"] if self.insecure else keys
        program = [sys.executable, "-m", "fedstrata.deploy.flower.supernode"]
        return [*program, *trust, *where, "--node-config", settings]

    def environment(self) -> dict[str, str]:
        """The SuperNode's environment: `flwr-clientapp` is a program that refuses apps that were not approved."""
        state = self.folder / self.state
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        home, programs = state / "flower", state / "bin"
        programs.mkdir(exist_ok=True)
        address = socket_frames.address(state, "clientapp.sock")
        address.unlink(missing_ok=True)  # a process of an earlier start may have another version of the library
        guard = programs / "flwr-clientapp"
        words = shlex.join([sys.executable, "-I", "-S", str(fork_server.__file__), "hand-over", str(address)])
        guard.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        guard.chmod(0o700)
        found = environment(home)
        path = os.pathsep.join([str(programs), found["PATH"]])
        added = {"PATH": path, "FEDSTRATA_APPROVED": str(self.folder / self.approved)}
        return {**found, **added, "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05"}  # Flower: 1 s, before every message


def environment(home: Path) -> dict[str, str]:
    """The environment of all of Flower's programs: without telemetry and update checks.

    Args:
        home: the folder of Flower's files.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_HOME": str(home)}
    return {**os.environ, **quiet, "PATH": path}


def split_address(address: str) -> tuple[str, int]:
    """Host and port.

    >>> split_address("[::1]:9092")
    ('::1', 9092)
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"address {address!r} must be host:port, e.g. federation.example.org:9092")
    return host.strip("[]"), int(port)


def _checked(path: Path, allowed: tuple[str, ...], needed: set[str]) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    for name in found:
        if name not in allowed:
            raise unknown(f"entry of {path}:", name, allowed)
    if lacking := sorted(needed - found.keys()):
        raise ValueError(f"{path} lacks {', '.join(lacking)}")
    return found


def _only_on_loopback(insecure: bool, hosts: list[str], path: Path) -> None:
    if not insecure:
        return
    for address in hosts:
        host = address.rpartition(":")[0] or address
        if host != "localhost" and not _is_loopback(host.strip("[]")):
            raise ValueError(f"{path}: insecure is for loopback only, and {address!r} is reachable from other machines")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _quoted(name: str, value: Any) -> str:
    if isinstance(value, str):
        if '"' in value or "\n" in value:
            raise ValueError(f"setting {name}={value!r}: Flower allows no quotation marks or line breaks in a setting")
        return f'"{value}"'
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, int | float):
        raise TypeError(f"setting {name} must be a string, a number, true or false, not {type(value).__name__}")
    return repr(value)
