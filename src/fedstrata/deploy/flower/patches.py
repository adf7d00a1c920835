"""Every change that is made to Flower's modules. No other file assigns to their attributes.

Flower's fixed waits suit rounds of minutes; an exchange here may take milliseconds. Its SuperNode ends if the server
rejects it after a crash. Its client app runs whatever app the server sends. Each function below changes one of these.
"""

import importlib
import logging
import sys
import time
import types
from collections.abc import Callable
from typing import Any

POLL = 0.5  # seconds between two polls of the server by a site; Flower: 3
NEARBY = 0.05  # seconds between two polls of a process on the same machine; Flower: 0.5 to 1
HEARTBEAT = 10.0  # seconds; Flower counts a node as gone after two missed heartbeats
REJECTED = 30.0  # seconds for which a site that the server rejects tries again
RETRY = 2.0  # seconds between two of these attempts

log = logging.getLogger("fedstrata")


def short_sleeps(module: str) -> None:
    """Shorten the sleeps of a module that runs at a site: long ones wait for the server, short ones for this machine.

    Args:
        module: the name of one of Flower's modules; it gets its own `time`.
    """
    replaced: Any = types.ModuleType("time")
    replaced.__dict__.update({name: value for name, value in vars(time).items() if not name.startswith("__")})
    replaced.sleep = lambda seconds: time.sleep(POLL if seconds > 1 else NEARBY)
    importlib.import_module(module).__dict__["time"] = replaced


def short_pulls(longest: float | None = None) -> None:
    """Poll soon for the missing parts of a message.

    Args:
        longest: seconds after which a message with missing parts counts as lost. None: Flower's two hours, for which
            the server would wait for a site that died while it was sending.
    """
    module: Any = importlib.import_module("flwr.supercore.inflatable.inflatable_utils")
    for function in (module.pull_objects, module.pull_and_inflate_object_from_tree):
        function.__kwdefaults__["initial_backoff"] = NEARBY
        if longest is not None:
            function.__kwdefaults__["max_time"] = longest
            function.__kwdefaults__["backoff_cap"] = min(longest / 4, function.__kwdefaults__["backoff_cap"])


def short_heartbeats() -> None:
    """Let the server notice a dead SuperNode, and accept its successor, after twenty seconds and not after a minute."""
    for name in ("flwr.supercore.heartbeat", "flwr.supernode.fleet_http_connection"):
        importlib.import_module(name).__dict__["HEARTBEAT_DEFAULT_INTERVAL"] = HEARTBEAT


def persistent_activation() -> None:
    """Let a SuperNode try again if the server rejects it: after a crash, until its last heartbeat has expired."""
    client: Any = importlib.import_module("flwr.supernode.fleet_http_client").FleetHttpClient
    client.ActivateNode = _repeated(client.ActivateNode)


def _repeated(activate: Callable[..., Any]) -> Callable[..., Any]:
    import httpx

    def repeated(*arguments: Any) -> Any:
        until = time.monotonic() + REJECTED
        while True:
            try:
                return activate(*arguments)
            except httpx.HTTPStatusError as error:
                if time.monotonic() > until:
                    log.error("the server rejects this site: is its key registered (`fedstrata deploy register`)?")
                    raise
                log.warning("the server does not accept this site yet (%s); trying again", error.response.status_code)
            time.sleep(RETRY)

    return repeated


def client_app_alone() -> None:
    """Import Flower's client app without its SuperNode, whose database takes half of the import time."""
    unused: Any = types.ModuleType("flwr.supernode.cli.flower_supernode")
    unused.flower_supernode = None
    sys.modules[unused.__name__] = unused


def guard_installation(guard: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put a check before the function with which Flower's client app unpacks an app.

    Args:
        guard: returns the function with the check.
    """
    module: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    module.install_from_fab = guard(module.install_from_fab)
