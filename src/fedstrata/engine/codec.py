"""Messages: named arrays as bytes. A short JSON header, then the raw little-endian arrays. Nothing is unpickled.

Both sides check the limits below: the sender before anything leaves, and the receiver before any work on the content.
The header is JSON within the limits of `strict_json`: 1 MiB, 100,000 values, 19 digits in a number.
"""

import json
import struct
from collections.abc import Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jaxtyping import PyTree

from fedstrata.base import strict_json
from fedstrata.base.text import one_line
from fedstrata.core.memory import Pool

MAGIC = b"FSM1"
FIELDS = 5_000  # arrays in a message
DIMENSIONS = 32  # of an array; numpy allows 64
NAME = 512  # characters in the name of an array
BYTES = 2**31  # of a message: 2 GiB, which is also the limit of Flower's transport
DTYPES = {
    np.dtype(t).name: np.dtype(t) for t in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")
}
DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)
_DTYPES = ", ".join(DTYPES)


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
        missing, unexpected = sorted(set(names) - set(arrays)), sorted(set(arrays) - set(names))
        raise ValueError(f"message: missing {some_names(missing)}, unexpected {some_names(unexpected)}")
    for name, (_, leaf) in zip(names, leaves, strict=True):
        got, want = arrays[name], leaf
        if got.shape != want.shape or got.dtype != want.dtype:
            raise ValueError(f"message: {name} is {got.dtype}{got.shape}, expected {want.dtype}{want.shape}")
    return jax.tree.unflatten(structure, [arrays[name] for name in names])


def some_names(names: list[str]) -> str:
    r"""The first names of a list from a peer, as one line.

    Args:
        names: any names.

    >>> some_names(["x", "y\n"])
    "['x', 'y\\n']"
    """
    return one_line(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def encode(arrays: Mapping[str, np.ndarray], most: int = BYTES) -> bytes:
    """Named arrays as one message.

    Args:
        arrays: by name.
        most: the limit on the bytes of the message.

    Raises:
        TypeError: an array has a dtype that is not supported.
        ValueError: a limit is exceeded.

    >>> decode(encode({"x": np.arange(3.0)}))
    {'x': array([0., 1., 2.])}
    """
    header = [[name, array.dtype.name, list(array.shape)] for name, array in arrays.items()]
    for name, dtype, _ in header:
        if dtype not in DTYPES:
            raise TypeError(f"message: {name} has dtype {dtype}, not supported in messages; supported: {_DTYPES}")
    text = header_bytes(MAGIC, header)
    _check_fields(header, most, len(text))
    little = (array.astype(array.dtype.newbyteorder("<"), copy=False) for array in arrays.values())
    return b"".join([text, *(np.ascontiguousarray(array).tobytes() for array in little)])


def header_bytes(magic: bytes, header: Any, **limits: int) -> bytes:
    """The first bytes of a message: four letters, the header's length, the header as JSON.

    Args:
        magic: the letters.
        header: of the message.
        limits: those of `strict_json.check`.

    Raises:
        ValueError: a receiver would refuse the header.
    """
    text = json.dumps(header, separators=(",", ":")).encode()
    try:
        strict_json.check(text, **limits)
    except ValueError as error:
        raise ValueError(
            f"message: its header would be refused: {error}; send fewer arrays, or shorter names"
        ) from None
    return b"".join([magic, struct.pack("<I", len(text)), text])


def read_header(message: bytes | memoryview, magic: bytes, **limits: int) -> tuple[Any, int]:
    """The header of a message, and the position of the first byte after it.

    Args:
        message: in bytes.
        magic: its first four letters.
        limits: those of `strict_json.loads`.

    Raises:
        ValueError: the header is malformed, or beyond a limit.
    """
    if len(message) < 8 or message[:4] != magic:
        raise ValueError("message: not a FedStrata message (wrong first bytes)")
    length = struct.unpack_from("<I", message, 4)[0]
    if length > min(len(message) - 8, strict_json.LONGEST):
        raise ValueError(
            f"message: unreadable header ({length:,} bytes announced, {len(message) - 8:,} found, and at most "
            f"{strict_json.LONGEST:,} are allowed)"
        )
    try:
        return strict_json.loads(bytes(message[8 : 8 + length]), **limits), 8 + length
    except ValueError as error:
        raise ValueError(f"message: unreadable header ({one_line(error)})") from None


def payload_bytes(message: bytes) -> int:
    """The bytes of a message's arrays, without its header. The ledger counts these."""
    return len(message) - 8 - struct.unpack_from("<I", message, 4)[0]


def decode(message: bytes | memoryview, most: int = BYTES) -> dict[str, np.ndarray]:
    """The named arrays of a message, as views of its bytes.

    Args:
        message: in bytes.
        most: the limit on its bytes.

    Raises:
        ValueError: the message is malformed, or beyond a limit.
    """
    if len(message) > most:
        raise ValueError(f"message: {len(message):,} bytes, and at most {most:,} are allowed")
    header, at = read_header(message, MAGIC)
    few = isinstance(header, list) and len(header) <= FIELDS
    if not few or not all(isinstance(row, list) and len(row) == 3 for row in header):
        raise ValueError(
            f"message: unreadable header (it must list name, dtype and shape of at most {FIELDS:,} arrays)"
        )
    sizes = _check_fields(header, most)
    if at + sum(sizes) != len(message):
        raise ValueError(f"message: {len(message):,} bytes, but its header announces {at + sum(sizes):,}")
    out: dict[str, np.ndarray] = {}
    for (name, dtype, shape), size in zip(header, sizes, strict=True):
        kind = DTYPES[dtype]
        out[name] = np.frombuffer(message, kind, size // kind.itemsize, at).reshape(shape)
        if kind == np.bool_ and out[name].view(np.uint8).max(initial=0) > 1:  # numpy would add them up as they are
            raise ValueError(f"message: {one_line(name, 60)} has truth values other than 0 and 1")
        at += size
    return out


def _check_fields(header: list[list[Any]], most: int, before: int = 0) -> list[int]:
    """The bytes of every array of a header; a ValueError if one is malformed, or a limit is exceeded."""
    if len(header) > FIELDS:
        raise ValueError(f"message: {len(header):,} arrays, and at most {FIELDS:,} are allowed")
    names = [name for name, _, _ in header]
    if not all(isinstance(name, str) and len(name) <= NAME for name in names):
        raise ValueError(f"message: unreadable header (every array needs a name of at most {NAME} characters)")
    if len(set(names)) != len(names):
        raise ValueError("message: repeated name in the header")
    sizes = [_bytes_of(name, dtype, shape, most) for name, dtype, shape in header]
    if before + sum(sizes) > most:
        raise ValueError(f"message: {before + sum(sizes):,} bytes, and at most {most:,} are allowed")
    return sizes


def _bytes_of(name: str, dtype: Any, shape: Any, most: int) -> int:
    """The bytes of an array. Zeros in its shape count as ones against the limit: numpy multiplies the others."""
    kind = DTYPES.get(dtype) if isinstance(dtype, str) else None
    if kind is None:
        shown = one_line(dtype, 40) if isinstance(dtype, str) else "that is no text"
        raise ValueError(f"message: unreadable header ({one_line(name, 60)} has a dtype {shown})")
    if not isinstance(shape, list) or len(shape) > DIMENSIONS:
        raise ValueError(
            f"message: unreadable header ({one_line(name, 60)} needs a shape of at most {DIMENSIONS} dimensions)"
        )
    size = kind.itemsize
    for side in shape:
        if type(side) is not int or side < 0:
            raise ValueError(f"message: {one_line(name, 60)} has a negative shape, or one that is not whole numbers")
        size *= side or 1
        if size > most:
            raise ValueError(f"message: {one_line(name, 60)} announces more than {most:,} bytes")
    return 0 if 0 in shape else size


def message(fields: Mapping[str, Any]) -> bytes:
    """The fields of a state as a message; of a pool, its rows (their order identifies who wrote them)."""
    values = {name: value.rows if isinstance(value, Pool) else value for name, value in fields.items()}
    return encode({path: array for name, value in values.items() for path, array in named_arrays(value, name).items()})
