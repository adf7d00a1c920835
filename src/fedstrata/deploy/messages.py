"""The messages of a deployed run: calls from the server to a site, and replies. A JSON header, then named arrays.

The limits of `engine.codec` hold for both. Both sides check them: the sender before a message leaves, and the receiver
before any work on the content. Whatever the bytes, decoding returns a message or raises a ValueError of one line.
"""

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.base.text import LONGEST_NAME, has_controls, one_line
from fedstrata.core.memory import Pool
from fedstrata.core.placement import part
from fedstrata.engine.codec import (
    BYTES,
    NAME,
    decode,
    encode,
    from_named_arrays,
    header_bytes,
    named_arrays,
    read_header,
    some_names,
)

MAGIC = b"FSL1"
PROOF = "proof"  # the entry of a call's header with its proof
KEYS = 1000  # of the header, in which few pools have the writers of many rows
WHOLE = 2**31  # above the size of every number in a header
BEGIN, START = 0, 1  # the exchanges of round −1, which prepares round 0
EVALUATE = -2  # an exchange that changes no state; its round is the number of finished rounds


class NotFinite(ValueError):
    """Numbers of a well-formed reply that cannot be used. An honest site may send them, if the run diverges."""


def proof(mark: str, about: Mapping[str, Any], body: bytes) -> str:
    """Tells a site that a call is from a server to which it has reported its mark, and as that server sent it.

    Args:
        mark: of the site; other sites never learn it.
        about: the header of the call.
        body: the call in bytes.
    """
    header = json.dumps({name: value for name, value in about.items() if name != PROOF}, sort_keys=True, default=repr)
    made = hmac.new(mark.encode(), f"fedstrata call 1 {len(header)} {header}".encode(), hashlib.sha256)
    made.update(body)
    return made.hexdigest()


class Stage(NamedTuple):
    """One exchange of a run. Stages are ordered by (round, exchange); round −1 comes before round 0."""

    round: int
    exchange: int  # its number in the round
    phase: int = 0
    repetition: int = 0


class Message(NamedTuple):
    """A call to one site, or its reply."""

    run: str
    stage: Stage
    site: str
    arrays: dict[str, np.ndarray]
    after: Stage | None = None  # in a call: this site's last stage that is part of the server's state
    pools: dict[str, list[int]] | None = None  # in a call: by pool, the writers of its rows; −1: an empty slot

    def encode(self) -> bytes:
        """The message as bytes.

        Raises:
            ValueError: a limit is exceeded, so that the receiver would refuse the message.
        """
        header = {"run": self.run, "site": self.site, "stage": self.stage, "after": self.after, "pools": self.pools}
        _checked(header)
        start = header_bytes(MAGIC, header, keys=KEYS)
        return start + encode(self.arrays, BYTES - len(start))

    @classmethod
    def decode(cls, data: bytes) -> "Message":
        """The message in these bytes. Its arrays are views of them.

        Args:
            data: what was received.

        Raises:
            ValueError: the bytes are malformed, or a limit is exceeded.
        """
        header, end = read_header(data, MAGIC, objects=2, keys=KEYS)
        run, site, stage, after, pools = _checked(header)
        return cls(run, stage, site, decode(memoryview(data)[end:], BYTES - end), after, pools)


def _checked(header: Any) -> tuple[str, str, Stage, Stage | None, dict[str, list[int]] | None]:
    """The parts of a header; a ValueError if one is missing or malformed."""
    if not isinstance(header, dict) or not {"run", "site", "stage", "after", "pools"} <= header.keys():
        raise ValueError("message: unreadable header (run, site, stage, after and pools are needed)")
    for which in ("run", "site"):
        name = header[which]
        if not isinstance(name, str) or len(name) > LONGEST_NAME or has_controls(name):
            raise ValueError(
                f"message: unreadable header (the name of the {which} must be a text of at most {LONGEST_NAME} "
                "characters without control characters, not "
                f"{one_line(name, 60) if isinstance(name, str) else type(name)})"
            )
    stage, after, pools = header["stage"], header["after"], header["pools"]
    stage, after = _stage("stage", stage), None if after is None else _stage("after", after)
    if pools is None:
        return header["run"], header["site"], stage, after, None
    if not isinstance(pools, dict) or not all(len(name) <= NAME and _whole(ids) for name, ids in pools.items()):
        raise ValueError(
            f"message: unreadable header (pools must be lists of whole numbers by names of at most {NAME} characters)"
        )
    return header["run"], header["site"], stage, after, pools or None


def _stage(name: str, values: Any) -> Stage:
    if not _whole(values) or not 2 <= len(values) <= 4:
        raise ValueError(f"message: unreadable header ({name} must be 2 to 4 whole numbers below 2^31 in size)")
    return Stage(*values)


def _whole(values: Any) -> bool:
    """Whether this is a list of whole numbers that fit 32 bits."""
    return isinstance(values, list | tuple) and all(type(v) is int and -WHOLE < v < WHOLE for v in values)


def pack(fields: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, list[int]]]:
    """Fields, by path, as named arrays; and by pool the writers of its rows."""
    arrays: dict[str, np.ndarray] = {}
    writers: dict[str, list[int]] = {}
    for path, value in fields.items():
        rows = value
        if isinstance(value, Pool):
            rows = value.rows
            clients = np.where(np.asarray(value.valid), np.asarray(value.client), -1)
            writers[path] = [int(i) for i in clients[:: value.capacity]]
        arrays |= named_arrays(rows, path)
    return arrays, writers


def unpack(
    arrays: Mapping[str, np.ndarray], like: Any, paths: tuple[str, ...], pools: Mapping[str, list[int]] | None = None
) -> dict[str, Any]:
    """The fields at these paths.

    Args:
        arrays: the arrays of a message.
        like: a state with the shapes and dtypes of the fields.
        paths: of the fields.
        pools: by pool, the writers of its rows, in a call; None in a reply, which has the rows of one site.

    Raises:
        ValueError: the arrays differ from `like`, or there are others.
    """
    out: dict[str, Any] = {}
    left = dict(arrays)
    for path in paths:
        value = part(like, path)
        shape = value.rows if isinstance(value, Pool) else value
        if isinstance(value, Pool) and pools is not None:
            count = len(pools.get(path, ())) * value.capacity
            shape = jax.tree.map(lambda a, n=count: jax.ShapeDtypeStruct((n, *a.shape[1:]), a.dtype), shape)
        names = {path + jax.tree_util.keystr(at) for at, _ in jax.tree_util.tree_flatten_with_path(shape)[0]}
        found = from_named_arrays(shape, {n: left.pop(n) for n in names if n in left}, path)
        out[path] = _pool(value, found, pools.get(path, []) if pools else None) if isinstance(value, Pool) else found
    if left:
        raise ValueError(f"message: unexpected {some_names(sorted(left))}")
    return out


def _pool(like: Pool, rows: Any, writers: list[int] | None) -> Pool:
    if writers is None:
        return Pool(rows, like.client, like.valid, like.capacity, like.history)
    client = jnp.repeat(jnp.asarray(writers, jnp.int32), like.capacity)
    return Pool(rows, client, client >= 0, like.capacity, like.history)
