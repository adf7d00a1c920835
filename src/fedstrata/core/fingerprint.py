"""Fingerprints: the settings of a run as plain text, and the differences between two runs."""

import dataclasses
import functools
import hashlib
import types
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

ROWS = 1024  # of a split that enter a fingerprint
LIBRARY = "library"  # marks a function of this library
# Classes and functions that had other names in checkpoints of earlier versions.
RENAMED = {
    "Scaffold": "SCAFFOLD",
    "ScaffoldServerProx": "SCAFFOLDServerProx",
    "Lazy": "Partners",
    "Weighted": "GroupWeightedLoss",
    "per_round.<locals>.<lambda>": "per_round",
}
# Removed hyper-parameters, which had no effect.
GONE = ("FedAdam.optimizer", "FedYogi.optimizer", "PairSGD.memory_weight", "PairSGD.u_start", "PairSGD.updated_u")


def describe(value: Any, seen: tuple[int, ...] = (), by_name: bool = False) -> Any:
    """Plain JSON for a hyper-parameter, function, module or array. Equal values give equal JSON.

    by_name: identify a function of the library by its name; otherwise by its code.

    >>> describe({"step_size": 0.1, "optimizer": max})
    {'step_size': 0.1, 'optimizer': 'max'}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if id(value) in seen:  # a function that refers to itself
        return "itself"
    inside = functools.partial(describe, seen=(*seen, id(value)), by_name=by_name)
    if isinstance(value, eqx.Module):
        fields = {f.name: inside(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__qualname__, **fields}
    if isinstance(value, Mapping):
        return {str(k): inside(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [inside(v) for v in value]
    if isinstance(value, set | frozenset):
        return ["set", *sorted(str(inside(v)) for v in value)]
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        return array.item() if array.shape == () else f"{array.dtype}{array.shape} {_short(array.tobytes())}"
    if isinstance(value, functools.partial):
        return ["partial", inside(value.func), inside(value.args), inside(value.keywords)]
    if by_name and isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, types.MethodType):
        return [inside(value.__func__), inside(value.__self__)]
    if isinstance(value, types.CodeType):
        return _short(value.co_code + repr((inside(value.co_consts), value.co_names)).encode())
    return _other(value, inside, by_name)


def fingerprint(problem: Any, federation: Any, weights: Any) -> str:
    """The problem of a run as its class and a digest: equal texts for equal objectives on equal data.

    Metrics do not count, nor do splits that are only evaluated. Of a large split, evenly spaced rows count.
    """
    some = lambda array: array[np.linspace(0, len(array) - 1, min(len(array), ROWS)).astype(np.int64)]
    try:
        fields = {name: words for name, words in describe(problem).items() if name != "metrics"}
        splits = {name: federation[name] for name in sorted({*problem.streams.values()})}
        data = {
            name: [[split.size, some(np.asarray(split.offsets))], *map(some, jax.tree.leaves(split.examples))]
            for name, split in splits.items()
        }
        words = repr([fields, describe(data), None if problem.weighs_clients else weights])
    except Exception:  # a problem may contain anything, and a run must not fail because of its fingerprint
        return ""
    return f"{type(problem).__name__} {_short(words.encode())}"


def _other(value: Any, inside: Any, by_name: bool) -> Any:
    """A function by its name, code, defaults and closure; an object by its type and fields."""
    code = getattr(value, "__code__", None)
    if code is not None:
        library = by_name and str(value.__module__).partition(".")[0] == "fedstrata"
        inside = inside if library else functools.partial(inside, by_name=False)
        cells = [inside(_contents(cell)) for cell in (value.__closure__ or ())]
        defaults = inside((value.__defaults__, value.__kwdefaults__))
        if library:
            return [LIBRARY, value.__qualname__, cells, defaults]
        return f"{value.__qualname__} {_short(repr((inside(code), cells, defaults)).encode())}"
    if hasattr(value, "__wrapped__"):
        return [type(value).__qualname__, inside(value.__wrapped__)]
    name = getattr(value, "__qualname__", None)
    if name is not None:
        return name
    fields = getattr(value, "__dict__", None)
    return [type(value).__qualname__, inside(fields) if fields else repr(value).split(" at 0x")[0]]


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet set
        return None


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between the settings of a saved run and of the run that resumes it.

    Old names in settings of earlier versions are translated. Their functions of the library are compared by name alone,
    because these versions stored a hash of the code.
    """
    saved = {_new_name(name): value for name, value in saved.items() if name not in GONE}
    names = [n for n in {**saved, **now} if not _same(saved.get(n), now.get(n))]
    return [f"{n}: saved {saved.get(n, 'nothing')!r}, now {now.get(n, 'nothing')!r}" for n in names]


def _new_name(name: str) -> str:
    """The present name of, for example, `Scaffold.step_size`."""
    head, dot, field = name.partition(".")
    return RENAMED.get(head, head) + dot + field


def _same(saved: Any, now: Any) -> bool:
    if isinstance(now, list) and now[:1] == [LIBRARY] and isinstance(saved, str):
        name = saved.rpartition(" ")[0]
        return RENAMED.get(name, name) == now[1]
    if isinstance(now, Mapping) and isinstance(saved, Mapping):
        return now.keys() == saved.keys() and all(_same(saved[k], v) for k, v in now.items())
    if isinstance(now, list) and isinstance(saved, list):
        return len(now) == len(saved) and all(map(_same, saved, now))
    if isinstance(saved, str) and isinstance(now, str):
        return saved == now or RENAMED.get(saved) == now
    if isinstance(saved, str) and isinstance(now, Mapping):  # in earlier versions a schedule per round was a function
        return RENAMED.get(saved.rpartition(" ")[0]) == "per_round" and now.get("type") == "_PerRound"
    return saved == now
