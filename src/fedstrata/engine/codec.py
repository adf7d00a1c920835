"""Messages: named arrays as bytes. A short JSON header, then the raw little-endian arrays. Nothing is unpickled."""

import json
import struct
from collections.abc import Mapping
from operator import index
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jaxtyping import PyTree

from fedstrata.core.memory import Pool

MAGIC = b"FSM1"
DTYPES = {
    np.dtype(t).name: np.dtype(t) for t in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")
}
DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)


def named_arrays(tree: PyTree, prefix: str = "") -> dict[str, np.ndarray]:
    """The leaves of a pytree by their path: `x.tree['w']`.

    >>> named_arrays({"w": np.zeros(2), "b": np.ones(())}, "x")
    {"x['b']": array(1.), "x['w']": array([0., 0.])}
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {prefix + jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def from_named_arrays(like: PyTree, arrays: Mapping[str, np.ndarray], prefix: str = "") -> Any:
    """A pytree with the structure, shapes and dtypes of `like` from named arrays; refuses any difference."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    names = [prefix + jax.tree_util.keystr(path) for path, _ in leaves]
    if set(names) != set(arrays):
        raise ValueError(
            f"message: missing {sorted(set(names) - set(arrays))}, unexpected {sorted(set(arrays) - set(names))}"
        )
    for name, (_, leaf) in zip(names, leaves, strict=True):
        got, want = arrays[name], leaf
        if got.shape != want.shape or got.dtype != want.dtype:
            raise ValueError(f"message: {name} is {got.dtype}{got.shape}, expected {want.dtype}{want.shape}")
    return jax.tree.unflatten(structure, [arrays[name] for name in names])


def encode(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Named arrays as one message.

    >>> decode(encode({"x": np.arange(3.0)}))
    {'x': array([0., 1., 2.])}
    """
    header, payload = [], []
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES:
            raise TypeError(
                f"message: {name} has dtype {array.dtype}, not supported in messages; supported: {', '.join(DTYPES)}"
            )
        header.append([name, array.dtype.name, list(array.shape)])
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        payload.append(np.ascontiguousarray(little).tobytes())
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join([MAGIC, struct.pack("<I", len(text)), text, *payload])


def payload_bytes(message: bytes) -> int:
    """The bytes of a message's arrays, without its header. The ledger counts these."""
    return len(message) - 8 - struct.unpack_from("<I", message, 4)[0]


def decode(message: bytes) -> dict[str, np.ndarray]:
    """The named arrays of a message. Malformed messages are refused."""
    if len(message) < 8 or message[:4] != MAGIC:
        raise ValueError("message: not a FedStrata message (wrong first bytes)")
    length = struct.unpack_from("<I", message, 4)[0]
    try:
        header = [
            (str(n), DTYPES[d], tuple(index(k) for k in shape)) for n, d, shape in json.loads(message[8 : 8 + length])
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"message: unreadable header ({error!r})") from None
    if any(k < 0 for _, _, shape in header for k in shape) or len({n for n, _, _ in header}) != len(header):
        raise ValueError("message: negative shape or repeated name in the header")
    sizes = [dtype.itemsize * int(np.prod(shape, dtype=object)) for _, dtype, shape in header]
    if 8 + length + sum(sizes) != len(message):
        raise ValueError(f"message: {len(message)} bytes, but its header announces {8 + length + sum(sizes)}")
    out, at = {}, 8 + length
    for (name, dtype, shape), size in zip(header, sizes, strict=True):
        out[name] = np.frombuffer(message, dtype, count=size // dtype.itemsize, offset=at).reshape(shape)
        at += size
    return out


def message(fields: Mapping[str, Any]) -> bytes:
    """The fields of a state as a message; of a pool, its rows (their order identifies who wrote them)."""
    values = {name: value.rows if isinstance(value, Pool) else value for name, value in fields.items()}
    return encode({path: array for name, value in values.items() for path, array in named_arrays(value, name).items()})
