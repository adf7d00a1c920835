"""Flower's fixed waits, shortened: they were made for rounds of minutes, and a phase of ours may take milliseconds."""

import importlib
import time
import types
from typing import Any

POLL = 0.5  # seconds between a site's looks for messages at the server; Flower: 3
NEARBY = 0.05  # seconds between looks for what programs on the same machine have done; Flower: 0.5 to 1


def short_sleeps(module: str) -> None:
    """Of a module that runs at a site: Flower's long sleeps wait for the server, its short ones for this machine."""
    found: Any = types.ModuleType("time")
    found.__dict__.update({name: value for name, value in vars(time).items() if not name.startswith("__")})
    found.sleep = lambda seconds: time.sleep(POLL if seconds > 1 else NEARBY)
    importlib.import_module(module).__dict__["time"] = found


def short_pulls(longest: float | None = None) -> None:
    """Parts of a message that are not there yet are looked for again soon; after the longest time they count as lost.

    Flower gives them two hours, for which the server would wait for a site that died while it was sending.
    """
    module: Any = importlib.import_module("flwr.supercore.inflatable.inflatable_utils")
    for function in (module.pull_objects, module.pull_and_inflate_object_from_tree):
        function.__kwdefaults__["initial_backoff"] = NEARBY
        if longest is not None:
            function.__kwdefaults__["max_time"] = longest
            function.__kwdefaults__["backoff_cap"] = min(longest / 4, function.__kwdefaults__["backoff_cap"])
