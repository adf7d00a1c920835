"""Flower's client app with a check: a site runs only versions of an app that its owner has approved.

With Flower, anyone who reaches the SuperLink's port can start a run, and its code is sent to every site. This program
replaces Flower's `flwr-clientapp` at a site. It compares the app's hash with a list before it runs the app.
"""

import fcntl
import hashlib
import importlib
import io
import logging
import os
import shutil
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedstrata.deploy.flower import patches
from fedstrata.deploy.flower.fork_server import with_token
from fedstrata.deploy.flower.supernode import APPROVED, longest_call

log = logging.getLogger("fedstrata")


def bundle(app: Path) -> bytes:
    """What Flower sends to the sites for the app in this folder."""
    from flwr.cli.build import build_fab_from_disk

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # raised inside Flower, about its patterns
        return build_fab_from_disk(app)


def fingerprint(app: Path) -> str:
    """The hash of this version of the app."""
    return hashlib.sha256(bundle(app)).hexdigest()


def approve(app: Path, file: Path) -> str:
    """Approve this version of an app; returns its fingerprint.

    Args:
        app: the app's folder.
        file: the list of approved versions.
    """
    found = fingerprint(app)
    if found not in approved(file):
        file.touch(0o600)
        ended = file.read_text().endswith("\n") or not file.stat().st_size  # an editor may leave out the last line end
        with file.open("a") as lines:
            lines.write(f"{'' if ended else chr(10)}{found}  {app.name}\n")
    return found


def approved(file: Path) -> set[str]:
    """The fingerprints in a list of approved versions.

    Raises:
        PermissionError: others can change the list, and so decide what code runs at this site.
    """
    if file.exists() and (file.stat().st_mode & 0o022 or file.stat().st_uid not in (os.getuid(), 0)):
        raise PermissionError(f"others can change {file}, which decides what code runs here: chmod 600 {file}")
    lines = file.read_text().splitlines() if file.exists() else []
    return {line.split()[0] for line in lines if line.strip() and not line.startswith("#")}


class Gate:
    """What may be unpacked and loaded in this process: one approved bundle, exactly as it was approved.

    Flower unpacks the bundle that the server sends, but then loads the folder that the run's id, version and hash name,
    which the server sends separately. And it takes a folder that exists as it is.
    """

    def __init__(self, file: Callable[[], Path]):
        """A gate through which nothing has come yet.

        Args:
            file: returns the list of approved versions.
        """
        self.file = file
        self.named: tuple[str, str, str] | None = None  # id, version and hash of the bundle that was unpacked
        self.folder: Path | None = None  # where

    def installing(self, install: Callable[..., Path]) -> Callable[..., Path]:
        """A function that unpacks a bundle, if its version is approved.

        Args:
            install: Flower's function, which unpacks any bundle.
        """

        def check(fab_file: Any, *rest: Any, **options: Any) -> Path:
            data = fab_file if isinstance(fab_file, bytes) else Path(fab_file).read_bytes()
            found = hashlib.sha256(data).hexdigest()
            if found not in approved(self.file()):
                raise PermissionError(
                    f"this site has not approved version {found[:16]} of the app; its owner reads the code, then runs "
                    "`fedstrata deploy approve` in the app's folder"
                )
            self.folder = unpacked(data, lambda: install(data, *rest, **options))
            self.named = (*_name_in(data), found)
            sys.dont_write_bytecode = True  # the folder must stay as it was approved
            return self.folder

        return check

    def locating(self, locate: Callable[[str, str, str], Path]) -> Callable[[str, str, str], Path]:
        """A function that returns an app's folder, if it is the one that was just unpacked.

        Args:
            locate: Flower's function, which returns the folder of any id, version and hash.
        """

        def check(fab_id: str, fab_version: str, fab_hash: str) -> Path:
            if self.folder is None or (fab_id, fab_version, fab_hash) != self.named:
                raise PermissionError(
                    f"the server wants app {fab_id!r}, version {fab_version!r}, hash {fab_hash[:16]!r} to be loaded, "
                    f"and the approved bundle that it sent is {self.named}; nothing is loaded"
                )
            folder = locate(fab_id, fab_version, fab_hash)
            if folder.absolute() != self.folder.absolute():
                raise PermissionError(f"the app would be loaded from {folder}, and was unpacked to {self.folder}")
            return folder

        return check


def unpacked(data: bytes, install: Callable[[], Path]) -> Path:
    """Unpack an approved bundle, again if its folder has other content; returns the folder.

    Args:
        data: the bundle.
        install: unpacks it, unless its folder exists; returns the folder.
    """
    from flwr.common.config import get_project_dir

    folder = get_project_dir(*_name_in(data), hashlib.sha256(data).hexdigest())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another message may be unpacking it
        if os.path.lexists(folder) and (wrong := differences(data, folder)):
            log.error("%s is not as it was approved (%s); it is unpacked again", folder, ", ".join(wrong[:3]))
            shutil.rmtree(folder) if folder.is_dir() and not folder.is_symlink() else folder.unlink()
        found = install()
        if found.absolute() != folder.absolute() or (wrong := differences(data, found)):
            raise PermissionError(f"{found} is not what was approved")
    return found


def differences(data: bytes, folder: Path) -> list[str]:
    """Names of files in a folder that are not as in a bundle. Compiled files are removed: they could differ, too.

    Args:
        data: the bundle.
        folder: where it was unpacked.
    """
    if folder.is_symlink() or not folder.is_dir():
        return [str(folder)]
    for cache in [path for path in folder.rglob("__pycache__") if path.is_dir() and not path.is_symlink()]:
        shutil.rmtree(cache, ignore_errors=True)
    with zipfile.ZipFile(io.BytesIO(data)) as bundle:
        names = {n for n in bundle.namelist() if not n.startswith(".info/") and not n.endswith("/")}
        there = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_symlink() or not p.is_dir()}
        return sorted(
            name
            for name in names | there.keys()
            if name not in names
            or name not in there
            or there[name].is_symlink()
            or not there[name].is_file()
            or there[name].read_bytes() != bundle.read(name)
        )


def _name_in(data: bytes) -> tuple[str, str]:
    """The id and the version that a bundle declares."""
    from flwr.common.config import get_fab_config, get_metadata_from_config

    return get_metadata_from_config(get_fab_config(data))


def prepared() -> Callable[[], None]:
    """Flower's client app, with all its imports done and the check in place."""
    patches.client_app_alone()
    from flwr.supernode.cli import flwr_clientapp

    gate = Gate(lambda: Path(os.environ[APPROVED]))
    patches.guard_installation(gate.installing, gate.locating)
    patches.plain_logs()
    patches.short_pulls()
    for later in ("fedstrata.deploy.flower.client_app", "httpcore"):  # imported by the app and by Flower
        importlib.import_module(later)

    def client_app() -> None:
        patches.bounded_messages(patches.CLIENT_APP, longest_call())
        flwr_clientapp()

    return client_app


if __name__ == "__main__":
    sys.argv = ["flwr-clientapp", *with_token(sys.argv[1:])]
    prepared()()
