"""Flower's client app, behind a check: a site runs an app only if its owner has approved that very version.

Flower lets whoever reaches the SuperLink's port start a run, and hands the run's code to every site. This program
stands in the place of Flower's `flwr-clientapp` at a site, and compares the app's hash with a list before it is run.
"""

import hashlib
import importlib
import os
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedstrata.runtime.flower.haste import short_pulls


def bundle(app: Path) -> bytes:
    """What Flower sends to the sites of the app in this folder."""
    from flwr.cli.build import build_fab_from_disk

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Flower's own, about how it reads patterns
        return build_fab_from_disk(app)


def fingerprint(app: Path) -> str:
    """What tells this version of the app from any other."""
    return hashlib.sha256(bundle(app)).hexdigest()


def approve(app: Path, known: Path) -> str:
    """Put this version of the app on the list; returns its fingerprint."""
    found = fingerprint(app)
    if found not in approved(known):
        with known.open("a") as file:
            file.write(f"{found}  {app.name}\n")
    return found


def approved(known: Path) -> set[str]:
    lines = known.read_text().splitlines() if known.exists() else []
    return {line.split()[0] for line in lines if line.strip() and not line.startswith("#")}


def guarded(install: Callable[..., Any], known: Callable[[], Path]) -> Callable[..., Any]:
    """Flower's function that unpacks an app, for approved ones only. known: where the list of them is."""

    def check(fab_file: Any, *rest: Any, **options: Any) -> Any:
        data = fab_file if isinstance(fab_file, bytes) else Path(fab_file).read_bytes()
        found = hashlib.sha256(data).hexdigest()
        if found not in approved(known()):
            raise PermissionError(
                f"this site has not approved version {found[:16]} of the app; its owner reads the code, then runs "
                "`fedstrata deploy approve` in the app's folder"
            )
        return install(fab_file, *rest, **options)

    return check


def prepared() -> Callable[[], None]:
    """Flower's client app with everything imported and the check in place."""
    # Flower's package imports the whole SuperNode with its database beside the client app: half the time of it all.
    unused: Any = types.ModuleType("flwr.supernode.cli.flower_supernode")
    unused.flower_supernode = None
    sys.modules[unused.__name__] = unused
    from flwr.supernode.cli import flwr_clientapp

    module: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    known = lambda: Path(os.environ["FEDSTRATA_APPROVED"])
    module.install_from_fab = guarded(module.install_from_fab, known)
    short_pulls()
    for later in ("fedstrata.runtime.flower.client", "httpcore"):  # what it will import
        importlib.import_module(later)
    return flwr_clientapp


if __name__ == "__main__":
    sys.argv[0] = "flwr-clientapp"
    prepared()()
