"""Who is who on Flower's grid, and letters over it: sites have names that last, nodes have numbers that change."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedstrata.runtime.flower.client import opened, record
from fedstrata.runtime.survey import Survey
from fedstrata.transport.letters import EVALUATE, Letter

POLL = 0.2  # seconds between looks for answers
LOOK = 1.0  # seconds between looks for nodes that came or went
AGAIN = 15.0  # seconds after which a call is sent again, as it may be lost; then twice that, and so on
TELL = 60.0  # seconds between two lines about sites that are waited for
# Errors of Flower's own after which the site may yet answer: a message, a reply, a node or a client app was lost.
LOST = {
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.CLIENT_APP_CRASHED,
}

log = logging.getLogger("fedstrata")


class Roster:
    """Which node is which site now.

    A site is known by its name and by a mark in its state folder. A node that is started anew has the same mark; one
    that has the name and another mark is somebody else, or has lost its folder: it is not asked.
    """

    def __init__(self, grid: Grid, marks: Mapping[str, str] | None = None):
        self.grid, self.marks = grid, dict(marks or {})
        self.nodes: dict[str, int] = {}  # by the site's name
        self.surveys: dict[str, Survey] = {}
        self.refused: dict[str, str] = {}  # by the site's name: why a node that has it is not asked
        self._asked: dict[int, str] = {}  # by node: its site; "" where that is not known yet, or is not to be
        self._letters: dict[str, int] = {}  # surveys that were asked for, by message
        self._due: dict[int, float] = {}  # by node: when it is asked again who it is
        self._looked = 0.0

    def look(self) -> None:
        """Ask the nodes that are new who they are, and forget those that have gone. Waits for nobody."""
        if time.monotonic() - self._looked > LOOK:
            self._looked, there = time.monotonic(), set(self.grid.get_node_ids())
            self.nodes = {site: node for site, node in self.nodes.items() if node in there}
            self._asked = {node: site for node, site in self._asked.items() if node in there}
            self.nodes = {site: node for node, site in self._asked.items() if site} | self.nodes
            late = {node for node, due in self._due.items() if time.monotonic() > due}
            if new := [node for node in there if node not in self._asked or node in late]:
                messages = [Message(record({}, b""), node, "query.survey") for node in new]
                self._letters |= dict(zip(self.grid.push_messages(messages), new, strict=True))
                self._asked |= dict.fromkeys(new, "")
                self._due |= dict.fromkeys(new, time.monotonic() + AGAIN)
        for reply in self.grid.pull_messages(list(self._letters)) if self._letters else ():
            node = self._letters.pop(reply.metadata.reply_to_message_id)
            about = _about(reply)
            if "survey" in about:
                self._due.pop(node, None)
                self._enter(node, Survey(*json.loads(str(about["survey"]))), str(about["mark"]))
            else:  # it is asked again
                log.warning("a node cannot say who it is: %s", about["error"])

    def _enter(self, node: int, survey: Survey, mark: str) -> None:
        name = survey.site
        if self.marks.setdefault(name, mark) != mark:
            self.refused[name] = (
                f"another site calls itself {name!r}, or {name} came back without its state folder; it is not asked: "
                "give it a name of its own, or bring the folder back"
            )
            log.error("%s", self.refused[name])
            return
        self._asked[node] = name
        self.nodes[name], self.surveys[name] = node, survey

    def gather(self, sites: int) -> list[Survey]:
        """The surveys of so many sites, in the order of their names; waits for them."""
        told = time.monotonic()
        while len(self.nodes) < sites:
            self.look()
            if self.refused:  # nobody knows yet which of the two is meant
                raise RuntimeError("the run has not begun: " + "; ".join(self.refused.values()))
            if time.monotonic() - told > TELL:
                told = time.monotonic()
                log.info("%d of %d sites are here: %s", len(self.nodes), sites, ", ".join(sorted(self.nodes)) or "none")
            time.sleep(POLL)
        if len(self.nodes) > sites:
            raise RuntimeError(f"{len(self.nodes)} sites came, and {sites} were expected: {', '.join(self.nodes)}")
        return [self.surveys[name] for name in sorted(self.nodes)]

    def await_these(self, names: list[str], seconds: float) -> None:
        """Until all of them are there, or the time has passed."""
        until = time.monotonic() + seconds
        while not set(names) <= set(self.nodes) and time.monotonic() < until:
            self.look()
            time.sleep(POLL)


def over_grid(roster: Roster, names: tuple[str, ...], deadline: float, surveys: str) -> Callable[..., Any]:
    """A link of the conductor: letters as messages, one action per phase.

    Flower loses messages silently when a node dies. So a call is sent again to a node that came back, and from time to
    time in any case; a site gives the same answer to the same call, without doing the work again.
    """

    def link(calls: Mapping[int, Letter]) -> dict[int, Letter | str]:
        answers: dict[int, Letter | str] = {}
        until = time.monotonic() + deadline
        sent: dict[str, int] = {}  # messages that may be answered yet
        at: dict[int, int] = {}  # by site: the node that was last asked
        due, gap = dict.fromkeys(calls, 0.0), dict.fromkeys(calls, AGAIN)
        while len(answers) < len(calls) and time.monotonic() < until:
            roster.look()
            now = time.monotonic()
            here = {i: roster.nodes[names[i]] for i in calls if i not in answers and names[i] in roster.nodes}
            ask = [i for i, node in here.items() if at.get(i) != node or now >= due[i]]
            if ask:
                messages = [_message(calls[i], here[i], surveys) for i in ask]
                sent |= dict(zip(roster.grid.push_messages(messages), ask, strict=True))
            for i in ask:
                at[i], due[i], gap[i] = here[i], now + gap[i], 2 * gap[i]
            for reply in roster.grid.pull_messages(list(sent)) if sent else ():
                i = sent.pop(reply.metadata.reply_to_message_id)
                answer = _letter(reply)
                if i in answers:  # to a call that was sent twice
                    log.info("%s answered twice; its second answer is not used", names[i])
                elif answer is not None:
                    answers[i] = answer
                else:
                    due[i] = min(due[i], now + LOOK)
            time.sleep(POLL)
        return {i: why for i, name in enumerate(names) if (why := roster.refused.get(name))} | answers

    return link


def _message(call: Letter, node: int, surveys: str) -> Message:
    round, exchange, phase, _ = call.stage
    kind = f"train.phase{phase}" if round >= 0 else f"query.begin{exchange}"
    kind = "evaluate" if exchange == EVALUATE else kind
    about = {"surveys": surveys} if round < 0 else {}
    return Message(record(about, call.encode()), node, kind, group_id=str(round))


def _letter(reply: Message) -> Letter | str | None:
    """The answer, or why there is none; None where the site may yet come back and answer."""
    if not reply.has_content():
        return None if reply.error.code in LOST else str(reply.error.reason)
    try:
        about, body = opened(reply.content)
        return str(about["error"]) if "error" in about else Letter.decode(body)
    except (ValueError, KeyError) as error:
        return str(error)


def _about(reply: Message) -> dict[str, Any]:
    if not reply.has_content():
        return {"error": str(reply.error.reason)}
    try:
        about = opened(reply.content)[0]
    except (ValueError, KeyError) as error:
        return {"error": str(error)}
    return about if {"survey", "mark"} <= about.keys() else {"error": str(about.get("error", "an empty answer"))}
