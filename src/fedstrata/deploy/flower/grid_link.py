"""Calls of the server as messages over Flower's grid."""

import logging
import time
from collections.abc import Mapping

from flwr.app import Message as FlowerMessage

from fedstrata.deploy.flower.client_app import CALL, new_token, record
from fedstrata.deploy.flower.pulling import Lost, Unreadable, content_of
from fedstrata.deploy.flower.roster import Roster
from fedstrata.deploy.link import Link, Malformed, described
from fedstrata.deploy.messages import EVALUATE, PROOF, Message, proof
from fedstrata.deploy.terms import Terms

POLL = 0.2  # seconds between two polls for replies
LOOK = 1.0  # seconds until a call that Flower reports as lost is sent again; doubled each time
AGAIN = 15.0  # seconds until a call without a reply is sent again; doubled each time

log = logging.getLogger("fedstrata")


def grid_link(roster: Roster, names: tuple[str, ...], deadline: float, terms: Terms) -> Link:
    """A link over Flower's grid, with one message type per phase.

    Flower drops messages silently when a node dies. A call is therefore sent again to a node that came back, and in
    any case from time to time. A site gives the same reply to the same call without repeating the work.

    Args:
        roster: finds the node of every site.
        names: of the sites, in the order of their numbers.
        deadline: seconds that an exchange may take.
        terms: of the run, which a site receives with its first call of this link.
    """
    digest, whole = {"digest": terms.digest()}, {"terms": terms.encode()}
    told: set[int] = set()  # sites that have answered a call with the terms

    def link(calls: Mapping[int, Message]) -> dict[int, Message | Malformed | str]:
        replies: dict[int, Message | Malformed | str] = {}
        until = time.monotonic() + deadline
        pending: dict[str, tuple[int, str]] = {}  # by message: the site that may still reply, and the call's token
        called: dict[int, int] = {}  # by site: the node that was last called
        lost: dict[int, list[str]] = {}  # by site: why calls or replies were lost
        due, gap = dict.fromkeys(calls, 0.0), dict.fromkeys(calls, AGAIN)
        awaited = lambda: any(i not in replies and names[i] not in roster.changed for i in calls)

        def pull() -> None:
            for (i, token), incoming in roster.replies.pulled(pending):
                reply = _reply(incoming, token)
                if i in replies:  # to a call that was sent twice
                    log.info("%s replied twice; the second reply is ignored", names[i])
                elif isinstance(reply, Lost):
                    lost.setdefault(i, []).append(reply.why)
                    again = LOOK * 2 ** min(len(lost[i]) - 1, 10)
                    due[i] = min(due[i], time.monotonic() + min(again, AGAIN))
                else:
                    replies[i] = reply
                    if isinstance(reply, Message):
                        told.add(i)

        while awaited() and time.monotonic() < until:
            roster.look([names[i] for i in calls if i not in replies])
            now = time.monotonic()
            nodes = {i: roster.nodes[names[i]] for i in calls if i not in replies and names[i] in roster.nodes}
            to_call = [i for i, node in nodes.items() if called.get(i) != node or now >= due[i]]
            if to_call:
                tokens = {i: new_token() for i in to_call}
                about = {i: digest if i in told else whole for i in to_call}
                outgoing = [_outgoing(calls[i], nodes[i], about[i], tokens[i], roster.marks[names[i]]) for i in to_call]
                sent = roster.grid.push_messages(outgoing)
                pending |= {m: (i, tokens[i]) for m, i in zip(sent, to_call, strict=True) if m}
            for i in to_call:
                called[i], due[i], gap[i] = nodes[i], now + gap[i], 2 * gap[i]
            pull()
            time.sleep(POLL)
        if awaited():
            pull()  # an upload that never ended may have taken all the time in which the others' could be read
        silent = {i: f"no answer in time; lost {len(found)} times, the last: {found[-1]}" for i, found in lost.items()}
        refused = {i: why for i, name in enumerate(names) if (why := roster.refused.get(name))}
        return silent | refused | replies

    return link


def _outgoing(call: Message, node: int, about: Mapping[str, str], token: str, mark: str) -> FlowerMessage:
    (round, exchange, phase, _), body = call.stage, call.encode()
    kind = f"train.phase{phase}" if round >= 0 else f"query.begin{exchange}"
    kind = "evaluate" if exchange == EVALUATE else kind
    header = {**about, PROOF: proof(mark, about, body), CALL: token}
    return FlowerMessage(record(header, body), node, kind, group_id=str(round))


def _reply(incoming: FlowerMessage | Lost | Unreadable, token: str) -> Message | Malformed | str | Lost:
    """The reply, or the reason why there is none. Whatever it holds, no error."""
    try:
        found = content_of(incoming, token)
        return found if isinstance(found, Lost | str) else Message.decode(found[1])
    except Exception as error:
        return Malformed(described(error))
