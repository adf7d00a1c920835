"""A deployed run in one process: every letter is encoded and decoded, and nothing else is shared."""

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from fedstrata.algorithm import Algorithm
from fedstrata.data.federation import Federation
from fedstrata.problems.base import Problem
from fedstrata.runtime.conductor import Conductor, Link
from fedstrata.runtime.layout import FlatSplit
from fedstrata.runtime.site import Site, Terms
from fedstrata.runtime.survey import Survey, terms_of, with_data
from fedstrata.transport.codec import decode, encode, payload_bytes
from fedstrata.transport.letters import Letter, Stage
from fedstrata.transport.secure_sum import SecureSum


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


def rehearsal(
    problem: Problem,
    algorithm: Algorithm,
    federation: Federation,
    run: str = "rehearsal",
    noise_key: PRNGKeyArray | None = None,
    secure: tuple[SecureSum, Sequence[SecureSum]] | None = None,
    **options: Any,
) -> tuple[Conductor, list[Site], Traffic]:
    """Every client of a federation as a site of its own, and a server, joined in this process.

    Options are those of `terms_of`. Sites with less data are filled up, so that all share their compiled programs.
    secure: a secure sum's object at the server, and those at the sites.
    """
    data = [federation.select([i]) for i in range(federation.clients)]
    surveys = [Survey.of(str(name), own) for name, own in zip(federation.names, data, strict=True)]
    terms = terms_of(run, problem, algorithm, surveys, **options)
    each = [(survey.site, _filled(with_data(terms, own))) for survey, own in zip(surveys, data, strict=True)]
    summing, hiding = secure or (None, [None] * len(each))
    sites = [Site(own, name, i, Memory(), data[i], secure=hiding[i]) for i, (name, own) in enumerate(each)]
    traffic, names = Traffic(), tuple(s.site for s in surveys)
    link = in_process(sites, traffic)
    return Conductor(terms, names, link, noise_key=noise_key, secure=summing), sites, traffic


def in_process(sites: list[Site], traffic: Traffic) -> Link:
    def link(calls: Mapping[int, Letter]) -> dict[int, Letter]:
        replies: dict[int, Letter] = {}
        for i, call in calls.items():
            reply = sites[i].answer(Letter.decode(call.encode()))
            counts = min(call.stage.round, call.stage.exchange) >= 0  # what a ledger counts: no starts or evaluations
            traffic.down += payload_bytes(encode(call.arrays)) * counts
            traffic.up += payload_bytes(encode(reply.arrays)) * counts
            replies[i] = Letter.decode(reply.encode())
        return replies

    return link


def _filled(terms: Terms) -> Terms:
    def fill(split: FlatSplit) -> FlatSplit:
        pad = lambda a: jnp.pad(a, ((0, split.capacity - len(a)), *[(0, 0)] * (a.ndim - 1)))
        return FlatSplit(jax.tree.map(pad, split.examples), split.start, split.count, split.capacity)

    flat = {name: fill(split) for name, split in terms.world.flat.items()}
    return terms._replace(world=eqx.tree_at(lambda w: w.flat, terms.world, flat))


def advance(conductor: Conductor, rounds: int, now: Any = None) -> Any:
    now = conductor.begin() if now is None else now
    while now.round < rounds:
        now = conductor.round(now)
    return now
