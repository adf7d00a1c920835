"""Flower's client app with a check: a site runs only versions of an app that its owner has approved.

With Flower, anyone who reaches the SuperLink's port can start a run, and its code is sent to every site. This program
replaces Flower's `flwr-clientapp` at a site. It compares the app's hash with a list before it runs the app.
"""

import hashlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedstrata.deploy.flower import patches


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
        with file.open("a") as lines:
            lines.write(f"{found}  {app.name}\n")
    return found


def approved(file: Path) -> set[str]:
    """The fingerprints in a list of approved versions."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {line.split()[0] for line in lines if line.strip() and not line.startswith("#")}


def guarded(install: Callable[..., Any], file: Callable[[], Path]) -> Callable[..., Any]:
    """A function that unpacks an app, if its version is approved.

    Args:
        install: Flower's function, which unpacks any app.
        file: returns the list of approved versions.
    """

    def check(fab_file: Any, *rest: Any, **options: Any) -> Any:
        data = fab_file if isinstance(fab_file, bytes) else Path(fab_file).read_bytes()
        found = hashlib.sha256(data).hexdigest()
        if found not in approved(file()):
            raise PermissionError(
                f"this site has not approved version {found[:16]} of the app; its owner reads the code, then runs "
                "`fedstrata deploy approve` in the app's folder"
            )
        return install(fab_file, *rest, **options)

    return check


def prepared() -> Callable[[], None]:
    """Flower's client app, with all its imports done and the check in place."""
    patches.client_app_alone()
    from flwr.supernode.cli import flwr_clientapp

    file = lambda: Path(os.environ["FEDSTRATA_APPROVED"])
    patches.guard_installation(lambda install: guarded(install, file))
    patches.short_pulls()
    for later in ("fedstrata.deploy.flower.client_app", "httpcore"):  # imported by the app and by Flower
        importlib.import_module(later)
    return flwr_clientapp


if __name__ == "__main__":
    sys.argv[0] = "flwr-clientapp"
    prepared()()
