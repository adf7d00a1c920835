"""server.toml and a site's .toml file, and the commands of Flower that follow from them.

Programs use TLS and registered nodes. They send no telemetry and install nothing at run time.
"""

import contextlib
import ipaddress
import json
import os
import shlex
import stat
import sys
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from fedstrata.base.errors import unknown
from fedstrata.base.files import replacing
from fedstrata.base.text import check_plain_name
from fedstrata.deploy.flower import fork_server, socket_frames
from fedstrata.deploy.flower.keys import AUTHORITY, CERTIFICATE, KEY, key_fingerprint
from fedstrata.deploy.flower.run_lock import is_held, private
from fedstrata.deploy.flower.supernode import APPROVED, LOCK, SECRET, SETTINGS, STATE
from fedstrata.deploy.policy import Policy, check_tells
from fedstrata.deploy.state_files import write_text

OUT = "out"  # what the server's programs write, in the app's folder
HOME = ".flwr"  # Flower's files, in the app's folder and not in the user's home
LAST_PORT = 2**16 - 1
WORDS = {str: "a text in quotes", bool: "true or false", int: "a whole number"}
CONNECTION = "server"  # the name of the SuperLink in the configuration of Flower's command line


class ServerConfig(NamedTuple):
    """server.toml: where the SuperLink listens, and its keys."""

    folder: Path  # of the file
    address: str  # host:port, for sites and the command line
    listen: str = "0.0.0.0"
    keys: str = "keys"
    database: str = "out/superlink.db"
    insecure: bool = False
    behind: str = ""  # host:port on loopback of a SuperLink behind a proxy, which listens at `listen` for the sites
    largest_message: int = 64  # MB of one request that the proxy accepts; Flower sends arrays in parts of 5 MB

    @classmethod
    def read(cls, path: Path) -> "ServerConfig":
        """The server in this file; a ValueError if the file has mistakes."""
        found = cls(path.parent.absolute(), **_checked(path, cls, {"address"}))
        _only_on_loopback(found.insecure, [found.address, found.listen], path)
        if found.behind:
            if not _is_loopback(split_address(found.behind)[0]):
                raise ValueError(f"{path}: behind = {found.behind!r} must be on loopback, e.g. 127.0.0.1:9192")
            if found.insecure:
                raise ValueError(f"{path}: a SuperLink behind a proxy needs TLS, and insecure switches it off")
        if not isinstance(found.largest_message, int) or found.largest_message < 8:
            raise ValueError(f"{path}: largest_message = {found.largest_message!r} must be a whole number of MB >= 8")
        return found

    @property
    def own_address(self) -> str:
        """Where the SuperLink itself listens, for programs on this machine."""
        return self.behind or self.address

    @property
    def exposed(self) -> bool:
        """Whether the SuperLink, with its control interface, listens for other machines."""
        return _is_reachable(split_address(self.behind)[0] if self.behind else self.listen)

    def command(self) -> list[str]:
        """The command that starts the SuperLink. Its files are for their owner alone."""
        port, keys = split_address(self.own_address)[1], self.folder / self.keys
        database = self.folder / self.database
        _protect(database, self.folder / OUT)
        pairs = ("ca-certfile", AUTHORITY), ("certfile", CERTIFICATE), ("keyfile", KEY)
        tls = [word for option, name in pairs for word in (f"--ssl-{option}", str(keys / name))]
        trust = ["--insecure"] if self.insecure else [*tls, "--enable-supernode-auth"]
        host = split_address(self.behind)[0] if self.behind else self.listen
        where = ["--host", host, "--port", str(port), "--database", str(database)]
        program = [sys.executable, "-P", "-m", "fedstrata.deploy.flower.superlink"]
        return [*program, *where, *trust, "--disable-runtime-dependency-installation"]

    def connect(self) -> Path:
        """Write this server into the configuration of Flower's command line; returns its folder."""
        home = self.folder / HOME
        private(home)
        make_private(home)
        trust = "insecure = true" if self.insecure else f'root-certificates = "{self.folder / self.keys / AUTHORITY}"'
        default = f'[superlink]\ndefault = "{CONNECTION}"\n[superlink.{CONNECTION}]\n'
        (home / "config.toml").write_text(f'{default}address = "{self.own_address}"\n{trust}\n')
        (home / "config.toml").chmod(0o600)
        return home

    def proxy(self, folder: Path) -> str:
        """The configuration of nginx between the sites and the SuperLink.

        Args:
            folder: where it will be, beside a folder `nginx` for its logs.
        """
        keys, host = self.folder / self.keys, split_address(self.address)
        words: dict[str, Any] = {"folder": folder, "behind": self.behind, "largest": self.largest_message}
        words |= {"listen": f"[{self.listen}]" if ":" in self.listen else self.listen, "port": host[1]}
        words |= {"authority": keys / AUTHORITY, "certificate": keys / CERTIFICATE, "key": keys / KEY}
        if bad := [str(word) for word in words.values() if set(str(word)) & set(" \t\n;{}\"'$#\\")]:
            raise ValueError(f"nginx's configuration cannot hold {bad[0]!r}; choose a folder without such characters")
        text = (files("fedstrata.deploy.flower") / "template" / "nginx.conf.txt").read_text()
        return _At(text).substitute(words)

    def write_proxy(self) -> Path:
        """Write the configuration of nginx beside the database; returns the file."""
        database = self.folder / self.database
        _protect(database, self.folder / OUT)
        folder = database.parent
        private(folder / "nginx")
        with replacing(folder / "nginx.conf") as path:
            path.write_text(self.proxy(folder))
        return folder / "nginx.conf"


class _At(Template):
    """A template with words such as @folder, because nginx has variables such as $uri."""

    delimiter = "@"


class SiteConfig(NamedTuple):
    """A site's .toml file: its name, the server's address, its key, its policy, and the settings for `load`."""

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
    policy: Policy = Policy()

    @classmethod
    def read(cls, path: Path) -> "SiteConfig":
        """The site in this file; a ValueError if the file has mistakes."""
        entries = _checked(path, cls, {"site", "server"})
        entries["policy"] = Policy.of(entries.get("policy", {}), str(path))
        _check_site(path, entries["site"], entries.get("settings", {}), entries["policy"])
        found = cls(path.parent.absolute(), **entries)
        _only_on_loopback(found.insecure, [found.server], path)
        return found

    @property
    def node_config(self) -> dict[str, Any]:
        """The settings for `load`, with the site's name, its state folder and the hash of its key."""
        own = {"site": self.site, "state": str(self.folder / self.state)}
        if not self.insecure and self.private_key.exists():
            own["key_fingerprint"] = key_fingerprint(self.private_key)
        return {**self.settings, **own}

    @property
    def private_key(self) -> Path:
        """The file of the site's private key."""
        return self.folder / (self.key or f"keys/{self.site}.key")

    def command(self) -> list[str]:
        """The command that starts the SuperNode."""
        keys = ["--root-certificates", str(self.folder / self.authority)]
        keys += ["--auth-supernode-private-key", str(self.private_key)]
        where = ["--superlink", self.server, "--host", "127.0.0.1", "--port", str(self.port)]
        trust, state = ["--insecure"] if self.insecure else keys, self.folder / self.state
        given = ["--isolation", "process", "--superexec-auth-secret-file", str(state / SECRET)]
        program = [sys.executable, "-P", "-m", "fedstrata.deploy.flower.supernode"]
        return [*program, *trust, *where, *given, "--node-config", str(state / SETTINGS)]

    def keep(self) -> None:
        """Write the policy and the settings into the state folder, where other users cannot read them.

        A command, and so a setting in it, can be read by all users of a machine.
        """
        state = self.folder / self.state
        private(state)
        self.policy.keep_in(state)
        lines = [f"{json.dumps(name)} = {_toml(name, value)}\n" for name, value in self.node_config.items()]
        write_text(state / SETTINGS, "".join(lines))

    def environment(self) -> dict[str, str]:
        """The SuperNode's environment. Its `flwr-clientapp` is a program that refuses apps that were not approved."""
        state = self.folder / self.state
        private(state)
        home, programs = state / "flower", state / "bin"
        programs.mkdir(exist_ok=True)
        address = socket_frames.address(state, "clientapp.sock")
        if not is_held(state / LOCK):
            address.unlink(missing_ok=True)  # a process of an earlier start may have another version of the library
        guard = programs / "flwr-clientapp"
        words = shlex.join([sys.executable, "-I", "-S", str(fork_server.__file__), "hand-over", str(address)])
        guard.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        guard.chmod(0o700)
        found = environment(home)
        path = os.pathsep.join([str(programs), found["PATH"]])
        added = {"PATH": path, APPROVED: str(self.folder / self.approved), STATE: str(state)}
        return {**found, **added, "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05"}  # Flower: 1 s, before every message


def environment(home: Path) -> dict[str, str]:
    """The environment of all of Flower's programs: without telemetry and update checks.

    Args:
        home: the folder of Flower's files.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_HOME": str(home)}
    return {**os.environ, **quiet, "PATH": path}


def owner_only(path: Path) -> None:
    """Refuse a site's file that others can read or change: it decides what may leave the site.

    Args:
        path: the file.
    """
    found = path.stat()
    if found.st_uid not in (os.getuid(), 0):
        raise PermissionError(f"{path} belongs to another user; it must belong to the one who runs the site")
    if found.st_mode & 0o077:
        raise PermissionError(f"others can read or change {path}: chmod 600 {path}")


def make_private(folder: Path) -> None:
    """Take all rights on a folder's files from everybody but their owner. Links are not followed."""
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            _take_from_others(Path(parent, name))


def _protect(database: Path, out: Path) -> None:
    """Keep others away from a server's database, and from the folder `out` with its runs; all else stays as it is.

    The database may lie in a folder with other things, such as the app's, whose rights are not ours to change.

    Args:
        database: the file, which may not exist yet.
        out: the folder of the app's runs.
    """
    folder = database.parent
    if out == folder or out in folder.parents or out.exists():
        private(out)
        make_private(out)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if found.st_uid not in (os.getuid(), 0):
        raise ValueError(
            f"{folder}, which holds the server's database, belongs to user {found.st_uid}, and this is user "
            f"{os.getuid()}: run the server as its owner, or choose another database in server.toml"
        )
    if found.st_mode & 0o022:
        raise ValueError(
            f"others can put files into {folder}, which holds the server's database: choose another database in "
            f'server.toml, e.g. "{ServerConfig._field_defaults["database"]}"; or, if the folder is yours, chmod go-w it'
        )
    for path in (Path(f"{database}{end}") for end in ("", "-wal", "-shm", "-journal")):
        with contextlib.suppress(FileNotFoundError):
            _take_from_others(path)


def _take_from_others(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISLNK(found.st_mode) and found.st_mode & 0o077 and found.st_uid == os.getuid():
        path.chmod(stat.S_IMODE(found.st_mode) & ~0o077)


def split_address(address: str) -> tuple[str, int]:
    """Host and port.

    >>> split_address("[::1]:9092")
    ('::1', 9092)
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= LAST_PORT):
        raise ValueError(f"address {address!r} must be host:port, e.g. federation.example.org:9092")
    return host.strip("[]"), int(port)


def _checked(path: Path, kind: Any, needed: set[str]) -> dict[str, Any]:
    """The entries of a file; each has the type of its field."""
    allowed, found = kind._fields[1:], read_toml(path)
    for name in found:
        if name not in allowed:
            raise unknown(f"entry of {path}:", name, allowed)
    if lacking := sorted(needed - found.keys()):
        raise ValueError(f"{path} lacks {', '.join(lacking)}")
    for name, value in found.items():
        wanted = kind.__annotations__[name]
        if wanted in WORDS and type(value) is not wanted:
            raise ValueError(f"{path}: {name} = {value!r} must be {WORDS[wanted]}")
    for name in found.keys() & {"address", "server", "behind"} - ({"behind"} if not found.get("behind") else set()):
        try:
            split_address(found[name])
        except ValueError as error:
            raise ValueError(f"{path}: {name}: {error}") from None
    if not 1 <= found.get("port", 1) <= LAST_PORT:
        raise ValueError(f"{path}: port = {found['port']} must be a number from 1 to {LAST_PORT}")
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file; a ValueError with its name if it has mistakes."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None


def _check_site(path: Path, site: Any, settings: Any, policy: Policy) -> None:
    if not isinstance(site, str):
        raise ValueError(f"{path}: site must be a name, not {site!r}")
    if not isinstance(settings, Mapping):
        raise ValueError(f"{path}: [settings] must be a table of entries")
    check_plain_name("site", site)
    check_tells(settings.get("tells"), policy, str(path))


def _only_on_loopback(insecure: bool, hosts: list[str], path: Path) -> None:
    if not insecure:
        return
    for address in hosts:
        host = address.rpartition(":")[0] or address
        if _is_reachable(host):
            raise ValueError(f"{path}: insecure is for loopback only, and {address!r} is reachable from other machines")


def _is_reachable(host: str) -> bool:
    """Whether other machines can reach a program that listens on this host."""
    return host != "localhost" and not _is_loopback(host.strip("[]"))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _toml(name: str, value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # a text of JSON is one of TOML
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, int | float):
        raise TypeError(f"setting {name} must be a string, a number, true or false, not {type(value).__name__}")
    return repr(value)
