"""The messages of a deployed run: calls from the server to a site, and replies. A JSON header, then named arrays."""

import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.memory import Pool
from fedstrata.core.placement import part
from fedstrata.engine.codec import decode, encode, from_named_arrays, named_arrays

MAGIC = b"FSL1"
BEGIN, START = 0, 1  # the exchanges of round −1, which prepares round 0
EVALUATE = -2  # an exchange that changes no state; its round is the number of finished rounds


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
        """The message as bytes."""
        header = {"run": self.run, "site": self.site, "stage": self.stage, "after": self.after, "pools": self.pools}
        text = json.dumps(header, separators=(",", ":")).encode()
        return b"".join([MAGIC, struct.pack("<I", len(text)), text, encode(self.arrays)])

    @classmethod
    def decode(cls, data: bytes) -> "Message":
        """The message in these bytes.

        Raises:
            ValueError: the bytes are malformed.
        """
        if len(data) < 8 or data[:4] != MAGIC:
            raise ValueError("message: not a FedStrata message (wrong first bytes)")
        length = struct.unpack_from("<I", data, 4)[0]
        try:
            header = json.loads(data[8 : 8 + length])
            stage, after = Stage(*_whole(header["stage"])), header["after"]
            pools = {str(f): _whole(ids) for f, ids in (header["pools"] or {}).items()}
            run, site = str(header["run"]), str(header["site"])
            after = None if after is None else Stage(*_whole(after))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"message: unreadable header ({error!r})") from None
        return cls(run, stage, site, decode(data[8 + length :]), after, pools or None)


def _whole(values: Any) -> list[int]:
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise ValueError(f"{values!r} must be whole numbers")
    return list(values)


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
        raise ValueError(f"message: unexpected {sorted(left)}")
    return out


def _pool(like: Pool, rows: Any, writers: list[int] | None) -> Pool:
    if writers is None:
        return Pool(rows, like.client, like.valid, like.capacity, like.history)
    client = jnp.repeat(jnp.asarray(writers, jnp.int32), like.capacity)
    return Pool(rows, client, client >= 0, like.capacity, like.history)
