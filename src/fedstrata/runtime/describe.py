"""A run in words that survive a restart: what two runs must share for one to go on where the other stopped."""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np


def describe(value: Any) -> Any:
    """Plain JSON for a hyper-parameter, function, module or array; equal things give equal words.

    >>> describe({"step_size": 0.1, "optimizer": max})
    {'step_size': 0.1, 'optimizer': 'max'}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, eqx.Module):
        fields = {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__qualname__, **fields}
    if isinstance(value, Mapping):
        return {str(k): describe(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [describe(v) for v in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        return array.item() if array.shape == () else f"{array.dtype}{array.shape} {_short(array.tobytes())}"
    return _function(value)


def _function(value: Any) -> str:
    """A function by its name and the fingerprint of its code and of what it closes over."""
    name = getattr(value, "__qualname__", type(value).__qualname__)
    code = getattr(value, "__code__", None)
    if code is None:
        return name
    constants = [c for c in code.co_consts if not hasattr(c, "co_code")]
    cells = [describe(c.cell_contents) for c in (getattr(value, "__closure__", None) or ())]
    return f"{name} {_short(code.co_code + repr((constants, cells, code.co_names)).encode())}"


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
