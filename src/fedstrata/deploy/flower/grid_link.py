"""Calls of the server as messages over Flower's grid."""

import logging
import time
from collections.abc import Mapping

from flwr.app import Message as FlowerMessage
from flwr.common.constant import ErrorCode

from fedstrata.deploy.flower.client_app import opened, record
from fedstrata.deploy.flower.roster import Roster
from fedstrata.deploy.link import Link
from fedstrata.deploy.messages import EVALUATE, Message

POLL = 0.2  # seconds between two polls for replies
LOOK = 1.0  # seconds until a call that Flower reports as lost is sent again
AGAIN = 15.0  # seconds until a call without a reply is sent again; doubled each time
# Flower's errors after which the site may still reply: a message, a reply, a node or a client app was lost.
LOST = {
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.CLIENT_APP_CRASHED,
}

log = logging.getLogger("fedstrata")


def grid_link(roster: Roster, names: tuple[str, ...], deadline: float, summaries: str) -> Link:
    """A link over Flower's grid, with one message type per phase.

    Flower drops messages silently when a node dies. A call is therefore sent again to a node that came back, and in
    any case from time to time. A site gives the same reply to the same call without repeating the work.

    Args:
        roster: finds the node of every site.
        names: of the sites, in the order of their numbers.
        deadline: seconds that an exchange may take.
        summaries: the data summaries of all sites, as JSON, which sites receive before round 0.
    """

    def link(calls: Mapping[int, Message]) -> dict[int, Message | str]:
        replies: dict[int, Message | str] = {}
        until = time.monotonic() + deadline
        pending: dict[str, int] = {}  # by message: the site that may still reply
        called: dict[int, int] = {}  # by site: the node that was last called
        due, gap = dict.fromkeys(calls, 0.0), dict.fromkeys(calls, AGAIN)
        while len(replies) < len(calls) and time.monotonic() < until:
            roster.look()
            now = time.monotonic()
            nodes = {i: roster.nodes[names[i]] for i in calls if i not in replies and names[i] in roster.nodes}
            to_call = [i for i, node in nodes.items() if called.get(i) != node or now >= due[i]]
            if to_call:
                outgoing = [_outgoing(calls[i], nodes[i], summaries) for i in to_call]
                pending |= dict(zip(roster.grid.push_messages(outgoing), to_call, strict=True))
            for i in to_call:
                called[i], due[i], gap[i] = nodes[i], now + gap[i], 2 * gap[i]
            for incoming in roster.grid.pull_messages(list(pending)) if pending else ():
                i = pending.pop(incoming.metadata.reply_to_message_id)
                reply = _reply(incoming)
                if i in replies:  # to a call that was sent twice
                    log.info("%s replied twice; the second reply is ignored", names[i])
                elif reply is not None:
                    replies[i] = reply
                else:
                    due[i] = min(due[i], now + LOOK)
            time.sleep(POLL)
        return {i: why for i, name in enumerate(names) if (why := roster.refused.get(name))} | replies

    return link


def _outgoing(call: Message, node: int, summaries: str) -> FlowerMessage:
    round, exchange, phase, _ = call.stage
    kind = f"train.phase{phase}" if round >= 0 else f"query.begin{exchange}"
    kind = "evaluate" if exchange == EVALUATE else kind
    about = {"surveys": summaries} if round < 0 else {}
    return FlowerMessage(record(about, call.encode()), node, kind, group_id=str(round))


def _reply(incoming: FlowerMessage) -> Message | str | None:
    """The reply, or the reason why there is none; None if the site may still reply."""
    if not incoming.has_content():
        return None if incoming.error.code in LOST else str(incoming.error.reason)
    try:
        about, body = opened(incoming.content)
        return str(about["error"]) if "error" in about else Message.decode(body)
    except (ValueError, KeyError) as error:
        return str(error)
