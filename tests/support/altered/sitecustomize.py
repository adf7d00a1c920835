"""Python imports this file first in every process of a test federation, and so it changes one site's machine.

The site's state folder may hold altered.json: {"clock": seconds by which the clock is ahead, "versions": {"jax": …}}.
"""

import ctypes
import gc
import importlib.metadata
import json
import os
import time
from datetime import datetime
from pathlib import Path


def shift_clock(seconds: float) -> None:
    """Put the wall clock of this process ahead. What measures durations stays."""
    real, exact = time.time, time.time_ns
    time.time, time.time_ns = lambda: real() + seconds, lambda: exact() + int(seconds * 1e9)
    own = gc.get_referents(datetime.__dict__)[0]  # a built-in class forbids changes, but not in its dictionary
    own["now"] = classmethod(lambda cls, tz=None: cls.fromtimestamp(time.time(), tz))
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime))


def alter_versions(versions: dict) -> None:
    """Let packages have other versions than are installed."""
    installed = importlib.metadata.version
    importlib.metadata.version = lambda name: versions.get(name) or installed(name)


_FILE = Path(os.environ.get("FEDSTRATA_STATE", ""), "altered.json")
if __name__ == "sitecustomize" and _FILE.exists():
    _ALTERED = json.loads(_FILE.read_text())
    if "clock" in _ALTERED:
        shift_clock(_ALTERED["clock"])
    alter_versions(_ALTERED.get("versions", {}))
