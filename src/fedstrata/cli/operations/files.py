"""The files of an app that the actions of `fedstrata deploy` read, and the programs of Flower that they become."""

import argparse
import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from fedstrata.base.text import LONGEST_NAME
from fedstrata.cli.parsing import Mistake

if TYPE_CHECKING:
    from fedstrata.deploy.flower.config import ServerConfig

RESERVED = {
    "local": "`fedstrata deploy local`, which empties it",
    "nginx": "the proxy",
    "local.lock": "`fedstrata deploy local`",
    "nginx.conf": "the proxy",
    **{f"superlink.db{end}": "the SuperLink" for end in ("", "-journal", "-shm", "-wal")},
}


def run_name(options: argparse.Namespace) -> str:
    """The run's name; a Mistake if it cannot name a folder."""
    name = options.name or "first"
    if not re.fullmatch(r"[\w-][\w.-]*", name) or len(name) > LONGEST_NAME:
        raise Mistake(
            f"--name {name!r} names a folder: it must have at most {LONGEST_NAME} letters, digits, '-', '_' and '.', "
            "and must not start with '.'"
        )
    if name in RESERVED:
        raise Mistake(f"--name {name!r}: out/{name} is used by {RESERVED[name]}; choose another name")
    return name


def become(options: argparse.Namespace, command: list[str], given: dict[str, str]) -> int:
    """Replace this process with a program of Flower, whose files are for their owner alone; or show its command.

    Args:
        options: of the command line.
        command: the program's.
        given: its environment.
    """
    if options.print:
        new = [f"{name}={value}" for name, value in given.items() if os.environ.get(name) != value]
        print(shlex.join(["env", *new, *command]))
        return 0
    os.umask(0o077)
    os.execvpe(command[0], command, given)


def at(server: "ServerConfig") -> dict[str, str]:
    """The environment of Flower's command line for this server."""
    from fedstrata.deploy.flower.config import environment

    return environment(server.connect())


def server_file(options: argparse.Namespace) -> "ServerConfig":
    """The server in the app's server.toml."""
    from fedstrata.deploy.flower.config import ServerConfig

    return ServerConfig.read(file_at(app_of(options)[0] / "server.toml"))


def file_at(path: str | Path) -> Path:
    """The path of a file that exists; a Mistake otherwise."""
    if not Path(path).is_file():
        raise Mistake(f"there is no {path}")
    return Path(path)


def app_of(options: argparse.Namespace) -> tuple[Path, str]:
    """The app's folder, and the import path of its `Deployment`."""
    from fedstrata.deploy.flower.config import read_toml

    app = Path(options.app).absolute()
    try:
        client_app = read_toml(app / "pyproject.toml")["tool"]["flwr"]["app"]["components"]["clientapp"]
        package = client_app.partition(".")[0]
    except (OSError, KeyError, TypeError, AttributeError):
        raise Mistake(
            f"{app} has no Flower app; create one with `fedstrata deploy init`, or set its folder with --app"
        ) from None
    return app, f"{package}.task:deployment"
