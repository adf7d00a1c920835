"""Calls over a link to sites, with every reply checked, and a report of who replied."""

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from fedstrata.base.text import one_line
from fedstrata.deploy.messages import EVALUATE, Message, NotFinite, Stage

T = TypeVar("T")

MOST_MALFORMED = 3  # malformed replies of a site, after which it is not called any more

log = logging.getLogger("fedstrata")


def described(error: Exception) -> str:
    """What was wrong with a reply: our own words, or the kind of an error that came from elsewhere."""
    words = str(error)
    return words if words and isinstance(error, ValueError) else f"{type(error).__name__}: {words}"


class Malformed(NamedTuple):
    """In place of a reply: the site sent something that is none."""

    why: str


# Calls by site number → replies that came in time; in place of a missing one the reason, or nothing.
Link = Callable[[Mapping[int, Message]], Mapping[int, Message | Malformed | str]]


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


class Caller:
    """Calls sites over a link. Whatever a reply holds, it is a valid one or its site is missing, with the reason.

    A site that sends malformed replies is quarantined: after three of them it is not called any more. Numbers that are
    not finite are no offence: they may be the result of what others sent.
    """

    def __init__(self, link: Link):
        """A caller that has had no reply yet.

        Args:
            link: carries the calls.
        """
        self.link = link
        self.offences: dict[str, int] = {}  # by site name: malformed replies
        self._out: dict[str, str] = {}  # by name of a site that is not called any more: the reason

    def collect(
        self, stage: Stage, calls: Mapping[int, Message], read: Callable[[Message], T]
    ) -> tuple[dict[int, T], Report]:
        """The replies to these calls, read, in the order of the sites' numbers.

        Args:
            stage: of the calls.
            calls: by site number.
            read: what is wanted of a reply; any error means that the reply is malformed.
        """
        out = {i: self.quarantined(call.site) for i, call in calls.items()}
        replies = self.link({i: call for i, call in calls.items() if not out[i]})
        received: dict[int, T] = {}
        missing: dict[str, str] = {}
        for i, call in sorted(calls.items()):
            reply = out[i] or replies.get(i, "no answer")
            if isinstance(reply, Message):
                try:
                    received[i] = read(_matching(call, reply))
                    continue
                except NotFinite as error:
                    reply = str(error)
                except Exception as error:  # of any kind: what a site sends must not end the run
                    reply = Malformed(described(error))
            missing[call.site] = self._offence(call.site, reply) if isinstance(reply, Malformed) else one_line(reply)
        report = Report(stage, tuple(calls[i].site for i in received), missing)
        if missing:
            log.warning("%s", report)
        return received, report

    def quarantined(self, site: str) -> str:
        """Why a site is not called any more; empty if it is."""
        return self._out.get(site, "")

    def quarantine(self, site: str, why: str) -> None:
        """Call a site no more.

        Args:
            site: its name.
            why: what it has done.
        """
        self._out[site] = f"quarantined {one_line(why)}"
        log.error("%s is %s", site, self._out[site])

    def _offence(self, site: str, reply: Malformed) -> str:
        why = one_line(reply.why)
        self.offences[site] = self.offences.get(site, 0) + 1
        if self.offences[site] == MOST_MALFORMED:
            self.quarantine(site, f"after {MOST_MALFORMED} malformed replies, the last: {why}")
        return f"malformed reply: {why}"


def _matching(call: Message, reply: Message) -> Message:
    """The reply, if it is one to this call; a ValueError otherwise."""
    expected, found = (call.run, call.site, call.stage), (reply.run, reply.site, reply.stage)
    if expected != found:
        raise ValueError(f"the reply is for {found}, but the call was for {expected}")
    return reply
