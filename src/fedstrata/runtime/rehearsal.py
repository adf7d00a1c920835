"""A deployed run in one process: every letter is encoded and decoded, and nothing else is shared."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.runtime.conductor import Conductor, Link
from fedstrata.runtime.job import Job
from fedstrata.runtime.layout import FlatSplit
from fedstrata.runtime.site import Site, Terms
from fedstrata.transport.codec import decode, encode, payload_bytes
from fedstrata.transport.letters import Letter, Stage


class Memory:
    """A shelf that lasts as long as the process."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], bytes] = {}

    def read(self, stage: Stage) -> Mapping[str, np.ndarray]:
        return decode(self.held[stage[:2]])

    def write(self, stage: Stage, arrays: Mapping[str, np.ndarray]) -> None:
        self.held[stage[:2]] = encode(arrays)

    def keep(self, stages: set[tuple[int, int]]) -> None:
        self.held = {stage: data for stage, data in self.held.items() if stage in stages}


class Traffic:
    """Bytes of numbers that passed over a link."""

    up = down = 0


def rehearsal(job: Job, run: str = "rehearsal") -> tuple[Conductor, list[Site], Traffic]:
    """The server and the sites of a job's first run, joined in this process."""
    world = job.world
    algorithm = eqx.combine(jax.tree.map(lambda a: a[0], job.values), job.rest)
    x0 = jax.tree.map(lambda a: a[0], job.x0)
    names = tuple(f"site {i}" for i in range(world.clients))
    bare = {n: FlatSplit(None, None, None, split.capacity) for n, split in world.flat.items()}
    at = lambda flat: Terms(run, eqx.tree_at(lambda w: (w.flat, w.full), world, (flat, {})), algorithm, x0, job.keys[0])
    sites = [Site(at(_alone(world.flat, i)), name, i, Memory()) for i, name in enumerate(names)]
    traffic = Traffic()
    return Conductor(at(bare), names, in_process(sites, traffic)), sites, traffic


def in_process(sites: list[Site], traffic: Traffic) -> Link:
    def link(calls: Mapping[int, Letter]) -> dict[int, Letter]:
        replies: dict[int, Letter] = {}
        for i, call in calls.items():
            reply = sites[i].answer(Letter.decode(call.encode()))
            traffic.down += payload_bytes(encode(call.arrays)) * (call.stage.round >= 0)
            traffic.up += payload_bytes(encode(reply.arrays)) * (call.stage.round >= 0)
            replies[i] = Letter.decode(reply.encode())
        return replies

    return link


def _alone(flat: Mapping[str, FlatSplit], client: int) -> dict[str, FlatSplit]:
    """One client's data, filled up to the largest client's: sites then share compiled programs."""

    def of(split: FlatSplit) -> FlatSplit:
        first, count = int(split.start[client]), int(split.count[client])
        pad = lambda a: jnp.pad(a[first : first + count], ((0, split.capacity - count), *[(0, 0)] * (a.ndim - 1)))
        zero = jnp.zeros((1,), jnp.int32)
        return FlatSplit(jax.tree.map(pad, split.examples), zero, jnp.full((1,), count, jnp.int32), split.capacity)

    return {name: of(split) for name, split in flat.items()}


def advance(conductor: Conductor, rounds: int, now: Any = None) -> Any:
    now = conductor.begin() if now is None else now
    while now.round < rounds:
        now = conductor.round(now)
    return now
