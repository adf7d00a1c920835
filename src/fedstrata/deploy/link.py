"""Calls over a link to sites, with every reply checked, and a report of who replied."""

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from fedstrata.deploy.messages import EVALUATE, Message, Stage

T = TypeVar("T")

# Calls by site number → replies that came in time; in place of a missing one the reason, or nothing.
Link = Callable[[Mapping[int, Message]], Mapping[int, Message | str]]

log = logging.getLogger("fedstrata")


class Report(NamedTuple):
    """The outcome of one exchange."""

    stage: Stage
    received: tuple[str, ...]  # names of sites with a valid reply
    missing: dict[str, str]  # by name of the other sites: the reason

    def __str__(self) -> str:
        lost = "; ".join(f"{name}: {why}" for name, why in self.missing.items())
        part = "evaluation" if self.stage.exchange == EVALUATE else f"phase {self.stage.phase}"
        return f"round {self.stage.round}, {part}: {len(self.received)} replied" + (
            f", {len(self.missing)} did not ({lost})" if lost else ""
        )


def collect(
    link: Link, stage: Stage, calls: Mapping[int, Message], read: Callable[[Message], T]
) -> tuple[dict[int, T], Report]:
    """The replies to these calls, read, in the order of the sites' numbers. An invalid reply counts as missing.

    Args:
        link: carries the calls.
        stage: of the calls.
        calls: by site number.
        read: what is wanted of a reply; raises a ValueError if the reply is invalid.
    """
    replies = link(calls)
    received: dict[int, T] = {}
    missing: dict[str, str] = {}
    for i, call in sorted(calls.items()):
        try:
            received[i] = read(_matching(call, replies.get(i, "no answer")))
        except ValueError as error:
            missing[call.site] = str(error)
    report = Report(stage, tuple(calls[i].site for i in received), missing)
    if missing:
        log.warning("%s", report)
    return received, report


def _matching(call: Message, reply: Message | str) -> Message:
    """The reply, if it is one to this call; a ValueError otherwise."""
    if isinstance(reply, str):
        raise ValueError(reply)
    expected, found = (call.run, call.site, call.stage), (reply.run, reply.site, reply.stage)
    if expected != found:
        raise ValueError(f"the reply is for {found}, but the call was for {expected}")
    return reply
