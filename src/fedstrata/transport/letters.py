"""The letters of a deployed run: calls from the server to a site, and replies. JSON about them, then named arrays."""

import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.memory import Pool
from fedstrata.placement import part
from fedstrata.transport.codec import decode, encode, from_named_arrays, named_arrays

MAGIC = b"FSL1"
BEGIN, START = 0, 1  # the two exchanges that may come before round 0, which are those of round −1
EVALUATE = -2  # an exchange that changes nobody's state; its round is the number of those that are done


class Stage(NamedTuple):
    """Which exchange of a run. Stages are in order: (round, exchange), before round 0 in round −1."""

    round: int
    exchange: int  # its place among those that the round has had
    phase: int = 0
    repetition: int = 0


class Letter(NamedTuple):
    """What is said in one direction in one exchange."""

    run: str
    stage: Stage
    site: str
    arrays: dict[str, np.ndarray]
    after: Stage | None = None  # of a call: the last stage of this site that the server has made part of its state
    pools: dict[str, list[int]] | None = None  # of a call: by field, who wrote the rows; −1 where nobody did

    def encode(self) -> bytes:
        about = {"run": self.run, "site": self.site, "stage": self.stage, "after": self.after, "pools": self.pools}
        text = json.dumps(about, separators=(",", ":")).encode()
        return b"".join([MAGIC, struct.pack("<I", len(text)), text, encode(self.arrays)])

    @classmethod
    def decode(cls, data: bytes) -> "Letter":
        """The letter in these bytes; anything malformed is refused with a ValueError."""
        if len(data) < 8 or data[:4] != MAGIC:
            raise ValueError("letter: not a FedStrata letter (wrong first bytes)")
        length = struct.unpack_from("<I", data, 4)[0]
        try:
            about = json.loads(data[8 : 8 + length])
            stage, after = Stage(*_whole(about["stage"])), about["after"]
            pools = {str(f): _whole(ids) for f, ids in (about["pools"] or {}).items()}
            run, site = str(about["run"]), str(about["site"])
            after = None if after is None else Stage(*_whole(after))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"letter: unreadable header ({error!r})") from None
        return cls(run, stage, site, decode(data[8 + length :]), after, pools or None)


def _whole(values: Any) -> list[int]:
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise ValueError(f"{values!r} are not whole numbers")
    return list(values)


def pack(fields: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, list[int]]]:
    """Fields by their paths as named arrays; of pools, their rows, and who wrote them."""
    arrays: dict[str, np.ndarray] = {}
    writers: dict[str, list[int]] = {}
    for path, value in fields.items():
        rows = value
        if isinstance(value, Pool):
            rows = value.rows
            wrote = np.where(np.asarray(value.valid), np.asarray(value.client), -1)
            writers[path] = [int(i) for i in wrote[:: value.capacity]]
        arrays |= named_arrays(rows, path)
    return arrays, writers


def unpack(
    arrays: Mapping[str, np.ndarray], like: Any, paths: tuple[str, ...], pools: Mapping[str, list[int]] | None = None
) -> dict[str, Any]:
    """The fields at these paths, shaped as in the state `like`; any difference is refused with a ValueError.

    pools: who wrote the rows of each, where a union comes; without it, a client's own rows.
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
