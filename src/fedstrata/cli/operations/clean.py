"""What is old at a server or at a site, and how to remove it: `fedstrata deploy clean`."""

import argparse
import shutil
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedstrata.cli.operations.files import app_of, file_at, server_file
from fedstrata.cli.operations.status import last_used, public_keys, registered, run_folders, run_status, size
from fedstrata.cli.output import print_json, print_table
from fedstrata.cli.parsing import Mistake

if TYPE_CHECKING:
    from fedstrata.deploy.flower.config import ServerConfig, SiteConfig

DAYS = 30  # the age of what is old, by default
DAY = 86400.0  # seconds


class _Old(NamedTuple):
    """Something that may be removed."""

    path: Path
    why: str
    run: Path | None = None  # the server's run whose checkpoints these are


def clean(options: argparse.Namespace) -> int:
    """Show what is old, or remove it.

    Args:
        options: of the command line.
    """
    days = DAYS if options.days is None else options.days
    if options.what is not None:
        from fedstrata.deploy.flower.config import SiteConfig

        old = list(_old_at_site(SiteConfig.read(file_at(options.what)), days))
    else:
        old = list(_old_at_server(*_app_and_server(options), days, options.keys))
    found = [{"path": str(o.path), "bytes": size(o.path), "why": o.why} for o in old]
    for one in old if options.yes else ():
        _remove(one)
    if options.json:
        print_json({"removed": options.yes, "files": found})
        return 0
    if not found:
        print(f"nothing to remove is at least {days} days old")
        return 0
    rows = [[f"{f['bytes'] / 1e6:.1f}", f["path"], f["why"]] for f in found]
    print_table("removed" if options.yes else "to be removed with --yes", [">MB", "what", "why"], rows)
    return 0


def _app_and_server(options: argparse.Namespace) -> tuple[Path, "ServerConfig"]:
    return app_of(options)[0], server_file(options)


def _old_at_server(app: Path, server: "ServerConfig", days: int, keys: bool) -> Iterator[_Old]:
    from fedstrata.deploy.flower.keys import CERTIFICATE, KEY

    for folder in run_folders(app):
        found = run_status(folder)
        age = (time.time() - _updated(found, folder)) / DAY
        old = age >= days or found.get("cleaned")  # an interrupted removal is finished
        if found["server"] is None and old and (folder / "checkpoints").is_dir():
            why = f"{found['state']} {age:.0f} days ago; without them the run cannot be resumed"
            yield _Old(folder / "checkpoints", why, folder)
    home = app / server.keys
    yield from _expired(home)
    if _is_expired(home / CERTIFICATE) and (home / KEY).exists():
        yield _Old(home / KEY, "its certificate has expired")
    if keys:
        nodes, why = registered(app, server)
        if nodes is None:
            raise Mistake(f"--keys must ask the SuperLink which keys are registered: {why}")
        found = list(public_keys(home))  # a key may have several files
        names = {node["key"] for node in nodes}
        known = {key for path, key in found if path.name in names}
        for path, key in found:
            age = (time.time() - path.stat().st_mtime) / DAY
            if key not in known and age >= days:  # a new key is not registered yet
                yield _Old(path, f"not registered, {age:.0f} days old")


def _old_at_site(site: "SiteConfig", days: int) -> Iterator[_Old]:
    """A site is not told that a run has ended; a run that was used within a day stays while the site is connected."""
    from fedstrata.deploy.flower.run_lock import is_held
    from fedstrata.deploy.flower.supernode import LOCK, WORKER
    from fedstrata.deploy.privacy_accountant import FILE

    folder = site.folder / site.state
    running = bool(is_held(folder / LOCK)) or bool(is_held(folder / WORKER))
    for home in sorted(path for path in (folder / "runs").glob("*") if path.is_dir() and not path.is_symlink()):
        if all(path.name == FILE for path in home.iterdir()):
            continue
        age = (time.time() - last_used(home)) / DAY
        if age >= max(days, 1 if running else 0):
            yield _Old(home, f"last used {age:.0f} days ago; the site cannot take part in this run any more then")
    authority = site.folder / site.authority
    if _is_expired(authority):
        yield _Old(authority, "expired")


def _expired(home: Path) -> Iterator[_Old]:
    yield from (_Old(path, "expired") for path in sorted(home.glob("*.crt")) if _is_expired(path))


def _is_expired(path: Path) -> bool:
    from fedstrata.deploy.flower.keys import days_left

    try:
        return days_left(path) < 0
    except (OSError, ValueError):
        return False


def _remove(old: _Old) -> None:
    from fedstrata.deploy.flower.run_lock import only_server, write_status
    from fedstrata.deploy.privacy_accountant import FILE

    if old.run is None:
        for path in list(old.path.iterdir()) if old.path.is_dir() else [old.path]:
            if path.name != FILE:  # what was spent stays spent
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if old.path.is_dir() and not any(old.path.iterdir()):
            old.path.rmdir()
        return
    with only_server(old.run, {}):  # no server can start meanwhile
        write_status(old.run, cleaned=True)
        shutil.rmtree(old.path)


def _updated(found: dict[str, Any], folder: Path) -> float:
    try:
        return datetime.fromisoformat(found["updated"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return last_used(folder)
