"""Replies from Flower's grid, such that a reply which Flower itself cannot read loses no other one."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
from flwr.app import Message as FlowerMessage
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedstrata.base.text import one_line
from fedstrata.deploy.flower.client_app import CALL, opened

# Flower's errors after which the site may still reply: a message, a reply, a node or a client app was lost.
LOST = {
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.CLIENT_APP_CRASHED,
}

LONGEST = 250  # characters of a site's own words

log = logging.getLogger("fedstrata")


class Lost(NamedTuple):
    """In place of a reply: the call or its reply was lost, and the site may still reply."""

    why: str


class Unreadable(NamedTuple):
    """In place of a reply: something came that Flower cannot read."""

    why: str


class Replies:
    """Fetches replies in one go, until Flower cannot read one of them; from then on one by one.

    Flower forgets all replies that it fetches together, also those after an unreadable one. They count as lost, and
    their calls are sent again. Fetched one by one, the unreadable reply is known to be its site's.
    """

    def __init__(
        self,
        grid: Grid,
        one_by_one: bool = False,
        seconds: float = math.inf,
        limit: Callable[[Any], None] = lambda note: None,
    ):
        """Nothing is fetched yet.

        Args:
            grid: Flower's grid.
            one_by_one: whether replies are fetched one by one from the beginning.
            seconds: after which no further reply is fetched, one by one, until the next call.
            limit: called before replies are fetched, with the note about the call, or None if they are several.
        """
        self.grid, self.one_by_one, self.seconds, self.limit = grid, one_by_one, seconds, limit
        self.failed = 0  # how many fetches in one go have failed, one after the other

    def pulled(self, pending: dict[str, Any]) -> Iterator[tuple[Any, FlowerMessage | Lost | Unreadable]]:
        """The replies that are there, each with the note about its call.

        Args:
            pending: by message, a note about the call; calls with a reply are removed.
        """
        if not self.one_by_one and pending:
            self.limit(None)
            try:
                found = [(r.metadata.reply_to_message_id, r) for r in self.grid.pull_messages(list(pending))]
                self.failed = 0
            except Exception as error:
                found, self.failed = [], self.failed + 1
                if self.failed > 1 or not isinstance(error, httpx.HTTPError):  # once, the connection may be the reason
                    self._suspect(f"{type(error).__name__}: {error}")
            if any(message not in pending for message, _ in found):
                self._suspect("it names a call that nobody made")
            for message, reply in found:
                if message in pending:
                    yield pending.pop(message), reply
        if self.one_by_one:
            until = time.monotonic() + self.seconds
            for message in list(pending):
                if time.monotonic() > until:
                    return
                if message not in pending:  # a reply before it was all that was wanted
                    continue
                self.limit(pending[message])
                pending[message] = pending.pop(message)  # the next call begins with those that were not fetched now
                if (reply := self._one(message)) is not None and (note := pending.pop(message, None)) is not None:
                    yield note, reply
                if isinstance(reply, Lost):
                    return  # the others at the next poll: Flower's server may be gone

    def _suspect(self, why: str) -> None:
        self.one_by_one = True
        log.warning("Flower cannot read a reply (%s); from now on replies are fetched one by one", one_line(why))

    def _one(self, message: str) -> FlowerMessage | Lost | Unreadable | None:
        try:
            found = [(r.metadata.reply_to_message_id, r) for r in self.grid.pull_messages([message])]
        except httpx.HTTPError as error:  # of the connection to Flower's server, and no site's fault
            return Lost(f"Flower's server did not deliver a reply ({type(error).__name__}: {error})")
        except Exception as error:
            return Unreadable(f"Flower cannot read its reply ({type(error).__name__}: {error})")
        nothing = Unreadable("its reply names another call") if found else None
        return next((reply for of, reply in found if of == message), nothing)


def content_of(incoming: FlowerMessage | Lost | Unreadable, token: str) -> tuple[dict[str, Any], bytes] | Lost | str:
    """The header and the bytes of a reply; in their place the site's own words why it does not answer, if it says so.

    Args:
        incoming: what came.
        token: of the call.

    Raises:
        Exception: of any kind, if the reply is malformed.
    """
    if isinstance(incoming, Lost):
        return incoming
    if isinstance(incoming, Unreadable):
        raise ValueError(incoming.why)
    if not incoming.has_content():
        code, reason = incoming.error.code, incoming.error.reason
        words = f"error {code} of Flower: {reason or 'without a reason'}"
        return Lost(words) if code in LOST else words
    about, body = opened(incoming.content)
    if about.get(CALL) != token:  # only the site that was called knows it: somebody else has replied in its place
        return Lost("a reply without the token of its call")
    if "error" not in about:
        return about, body
    if not isinstance(about["error"], str):
        raise ValueError("a reply whose error is no text")
    words = one_line(about["error"], LONGEST).replace('"', "'")
    return f'reported "{words}"'  # quoted, so that it is not taken for the server's own words
