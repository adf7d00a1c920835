"""Flower's SuperNode, with less waiting.

Flower's own sleeps three seconds whenever there is no message. It is also turned away after a crash, and ends, until
the server has missed its heartbeat for a minute. This one looks for messages twice a second, has a heartbeat that is
missed after twenty seconds, and waits for them to pass.
"""

import importlib
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from fedstrata.runtime.flower.haste import short_pulls, short_sleeps

HEARTBEAT = 10.0  # seconds; Flower counts a node as gone after two of them
TURNED_AWAY = 30.0  # seconds for which a node that the server turns away tries again

log = logging.getLogger("fedstrata")


def insistent(activate: Callable[..., Any]) -> Callable[..., Any]:
    """Flower's call that makes a node known, again and again where the server turns it away."""
    import httpx

    def wrapped(*arguments: Any) -> Any:
        until = time.monotonic() + TURNED_AWAY
        while True:
            try:
                return activate(*arguments)
            except httpx.HTTPStatusError as error:
                if time.monotonic() > until:
                    log.error("the server turns this site away: is its key registered (`fedstrata deploy register`)?")
                    raise
                log.warning("the server does not take this site yet (%s); trying again", error.response.status_code)
            time.sleep(2)

    return wrapped


def main() -> None:
    from flwr.supernode.cli import flower_supernode

    short_sleeps("flwr.supernode.start_client_internal")
    short_pulls()
    for name in ("flwr.supercore.heartbeat", "flwr.supernode.fleet_http_connection"):
        importlib.import_module(name).__dict__["HEARTBEAT_DEFAULT_INTERVAL"] = HEARTBEAT
    client: Any = importlib.import_module("flwr.supernode.fleet_http_client").FleetHttpClient
    client.ActivateNode = insistent(client.ActivateNode)
    sys.argv[0] = "flower-supernode"
    flower_supernode()


if __name__ == "__main__":
    main()
