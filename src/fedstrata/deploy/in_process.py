"""A deployed run in one process: every message is encoded and decoded, and nothing else is shared."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from fedstrata.core.algorithm import Algorithm
from fedstrata.data.federation import Federation
from fedstrata.deploy.agreement import Agreement, agree, with_data
from fedstrata.deploy.data_summary import DataSummary
from fedstrata.deploy.link import Link
from fedstrata.deploy.messages import Message
from fedstrata.deploy.secure_sum import SecureSum
from fedstrata.deploy.server import Server, ServerState
from fedstrata.deploy.site import Site
from fedstrata.deploy.site_store import MemoryStore
from fedstrata.engine.codec import encode, payload_bytes
from fedstrata.engine.layout import FlatSplit
from fedstrata.problems.base import Problem


class Traffic:
    """Bytes of arrays that a link has carried in rounds, as in the ledger: without starts and evaluations."""

    up = down = 0


def in_process_run(
    problem: Problem,
    algorithm: Algorithm,
    federation: Federation,
    *,
    run: str = "in process",
    noise_key: PRNGKeyArray | None = None,
    secure: tuple[SecureSum, Sequence[SecureSum]] | None = None,
    **options: Any,
) -> tuple[Server, list[Site], Traffic]:
    """A server and one site per client of a federation, linked in this process.

    The data of small sites are padded to the largest, so that all sites share compiled programs.

    Args:
        problem: what is minimised.
        algorithm: the method.
        federation: the data of all sites.
        run: the run's name.
        noise_key: of the noise in a private run, as in `Server` and `Site`.
        secure: the server's object of a secure sum, and those of the sites.
        options: those of `agree`.
    """
    data = [federation.select([i]) for i in range(federation.clients)]
    summaries = [DataSummary.of(str(name), own) for name, own in zip(federation.names, data, strict=True)]
    names = tuple(summary.site for summary in summaries)
    agreement = agree(run, problem, algorithm, summaries, **options)
    at_server, at_sites = secure or (None, [None] * len(data))
    sites = [
        Site(
            _padded(with_data(agreement, own)),
            name,
            i,
            MemoryStore(),
            data=own,
            secure=at_sites[i],
            noise_key=noise_key,
        )
        for i, (name, own) in enumerate(zip(names, data, strict=True))
    ]
    traffic = Traffic()
    link = in_process_link(sites, traffic)
    return Server(agreement, names, link, noise_key=noise_key, secure=at_server), sites, traffic


def in_process_link(sites: Sequence[Site], traffic: Traffic) -> Link:
    """A link to sites of this process.

    Args:
        sites: in the order of their numbers.
        traffic: counts the bytes.
    """

    def link(calls: Mapping[int, Message]) -> dict[int, Message]:
        replies: dict[int, Message] = {}
        for i, call in calls.items():
            reply = sites[i].answer(Message.decode(call.encode()))
            if min(call.stage.round, call.stage.exchange) >= 0:
                traffic.down += payload_bytes(encode(call.arrays))
                traffic.up += payload_bytes(encode(reply.arrays))
            replies[i] = Message.decode(reply.encode())
        return replies

    return link


def _padded(agreement: Agreement) -> Agreement:
    def one(split: FlatSplit) -> FlatSplit:
        pad = lambda a: jnp.pad(a, ((0, split.capacity - len(a)), *[(0, 0)] * (a.ndim - 1)))
        return FlatSplit(jax.tree.map(pad, split.examples), split.start, split.count, split.capacity)

    data = {name: one(split) for name, split in agreement.context.data.items()}
    return agreement._replace(context=agreement.context.with_data(data))


def advance(server: Server, rounds: int, now: ServerState | None = None) -> ServerState:
    """The state after `rounds` rounds.

    Args:
        server: runs them.
        rounds: counted from the beginning of the run.
        now: the state to continue from; None: the beginning.
    """
    now = server.begin() if now is None else now
    while now.round < rounds:
        now = server.round(now)
    return now
