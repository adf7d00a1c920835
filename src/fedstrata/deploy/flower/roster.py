"""The roster of a run: the node of Flower's grid for each site. Site names are permanent, node numbers are not."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid

from fedstrata.base.few_lines import FewLines
from fedstrata.base.text import LONGEST_NAME, listed, one_line
from fedstrata.deploy.data_summary import DataSummary
from fedstrata.deploy.flower.client_app import CALL, new_token, record
from fedstrata.deploy.flower.patches import limited_pulls
from fedstrata.deploy.flower.pulling import Lost, Replies, Unreadable, content_of
from fedstrata.deploy.link import described

POLL = 0.2  # seconds between two polls for sites that are awaited
LOOK = 1.0  # seconds between two polls for new nodes
AGAIN = 15.0  # seconds until the summary of a node without a valid one is requested again; doubled each time,
LONGEST = 8  # times as long at most
AT_ONCE = 100  # nodes that are asked in one go
BUDGET = 2.0  # seconds of a poll for summaries, and at most one more upload: strangers may never end theirs
WAIT = 1.0  # seconds for which a summary may be uploaded while it is read; doubled each time that it was lost,
LONGEST_WAIT = 15.0  # up to this
SUMMARY = 2**16  # bytes of a summary's arrays: it has none
PROGRESS = 60.0  # seconds between two equal log lines about sites that are awaited,
NEWS = 5.0  # and between two different ones
LONGEST_LINE = 500  # characters
LAST = 3  # messages to a node whose replies are still read

log = logging.getLogger("fedstrata")


@dataclass
class _Node:
    """What is known of a node."""

    site: str = ""  # the site that it belongs to, if its summary is valid
    why: str = ""  # it is left out, or refused
    claims: str = ""  # the site whose name it has, if it is refused
    changed: bool = False  # it is refused because its data, key or versions have changed
    asked: list[str] = field(default_factory=list)  # the last messages to it
    lost: int = 0  # how many of its replies were lost
    gap: float = 0.0  # seconds after which it is asked again,
    due: float = 0.0  # and when; never, if it belongs to a site


class Roster:
    """The nodes of a run's sites.

    A site is identified by its name and by a mark in its state folder. A restarted node has the same mark. A node with
    the same name and another mark is another site, or one that has lost its folder: it is refused. So is a site whose
    data, key or versions have changed since the run began. Nodes are asked who they are only while a site is missing.
    """

    def __init__(
        self,
        grid: Grid,
        marks: Mapping[str, str] | None = None,
        begun: Iterable[DataSummary] = (),
        check: Callable[..., Any] = lambda *summaries: None,
        on_wait: Callable[[str], None] = lambda why: None,
    ):
        """A roster without nodes.

        Args:
            grid: Flower's grid.
            marks: by site name, the marks of a run that resumes.
            begun: the summaries of a run that resumes.
            check: raises an error for summaries that do not fit the run's problem, or one another.
            on_wait: called from time to time with what keeps a run from beginning or from being resumed.
        """
        self.on_wait = on_wait
        self.grid, self.replies, self.marks, self.check = grid, Replies(grid), dict(marks or {}), check
        self.summaries_of_nodes = Replies(grid, one_by_one=True, seconds=BUDGET, limit=self._limit)
        self.begun = {summary.site: summary for summary in begun}  # empty: the run has not begun
        self.names = frozenset(self.begun) or None  # of the run's sites; None: any
        self.nodes: dict[str, int] = {}  # by site name
        self.summaries: dict[str, DataSummary] = {}  # by site name
        self._known: dict[int, _Node] = {}
        self._pending: dict[str, tuple[int, str]] = {}  # by message: the node that was asked, and the call's token
        self._looked, self._lines = -math.inf, FewLines(log)

    @property
    def refused(self) -> dict[str, str]:
        """By site name: why a node with this name is refused."""
        return {node.claims: node.why for node in self._known.values() if node.claims}

    @property
    def changed(self) -> set[str]:
        """Sites that came back with other data, keys or versions."""
        # A site may be back as it was while its old node is still listed.
        return {node.claims for node in self._known.values() if node.changed} - {*self.nodes}

    def look(self, needed: Iterable[str] | None = None) -> None:
        """Drop the nodes that have gone; if a site is missing, request the summaries of others. Does not wait.

        Args:
            needed: names of the sites that are needed now; None: more sites are needed, whatever their names.
        """
        names = None if needed is None else set(needed)
        missing = lambda: names is None or not names <= set(self.nodes)
        if time.monotonic() - self._looked > LOOK:
            self._looked, present = time.monotonic(), set(self.grid.get_node_ids())
            self._forget(present)
            if missing():
                self._ask(present)
        if missing():
            # Those first that have lost the fewest: whoever never ends an upload keeps the others waiting only once.
            lost = lambda item: self._known[item[1][0]].lost
            self._pending = dict(sorted(self._pending.items(), key=lost))
            for (number, token), reply in self.summaries_of_nodes.pulled(self._pending):
                self._read(number, token, reply)

    def _limit(self, asked: tuple[int, str]) -> None:
        limited_pulls(SUMMARY, min(WAIT * 2 ** min(self._known[asked[0]].lost, 10), LONGEST_WAIT))

    def _forget(self, present: set[int]) -> None:
        """Forget the nodes that have gone. A name that only they had is free again, until the run has begun."""
        self._known = {number: node for number, node in self._known.items() if number in present}
        self._pending = {message: one for message, one in self._pending.items() if one[0] in present}
        here = {node.site: number for number, node in self._known.items() if node.site}
        self.nodes = here | {site: number for site, number in self.nodes.items() if number in present}
        if not self.begun:
            self.marks = {site: mark for site, mark in self.marks.items() if site in self.nodes}
            for node in self._known.values():
                if node.claims and node.claims not in self.marks:
                    node.due = 0.0

    def _ask(self, present: set[int]) -> None:
        now, known = time.monotonic(), {number: self._known.setdefault(number, _Node()) for number in present}
        due = sorted((node.due, number) for number, node in known.items() if node.due <= now)[:AT_ONCE]
        asked = [(number, new_token()) for _, number in due]
        outgoing = [FlowerMessage(record({CALL: token}, b""), number, "query.survey") for number, token in asked]
        for message, (number, token) in zip(self.grid.push_messages(outgoing) if due else (), asked, strict=True):
            node = known[number]
            node.gap = min(2 * node.gap or AGAIN, LONGEST * AGAIN)
            node.due = now + node.gap
            if message:
                self._pending[message] = number, token
                node.asked.append(message)
            for old in node.asked[:-LAST]:
                self._pending.pop(old, None)
            del node.asked[:-LAST]

    def _read(self, number: int, token: str, reply: FlowerMessage | Lost | Unreadable) -> None:
        """Enter the node of a valid summary. Whatever the reply holds, no error ends the run."""
        node = self._known[number]
        try:
            found = content_of(reply, token)
            if isinstance(found, Lost):
                node.lost += 1
                node.due = min(node.due, time.monotonic() + LOOK * 2 ** min(node.lost, 10))
                return
            if isinstance(found, str):
                raise ValueError(found)
            survey, mark = found[0].get("survey"), found[0].get("mark")
            if not isinstance(survey, str) or not isinstance(mark, str) or not 0 < len(mark) <= LONGEST_NAME:
                raise ValueError("a reply without a data summary and a mark")
            summary = DataSummary.decode(survey)
            if not summary.key:  # no site has none, and all without one would count as one
                raise ValueError("a data summary without a key")
            if self.names is not None and summary.site not in self.names:
                raise ValueError(f"{summary.site!r} is not one of the run's sites")
            if not self._refuse(number, summary, mark):
                self.check(summary)
                self._enter(number, summary, mark)
        except Exception as error:
            self._leave_out(number, f"node {number} has no valid data summary and is left out: {described(error)}")

    def _leave_out(self, number: int, why: str, claims: str = "", changed: bool = False) -> None:
        """Leave a node out until it sends a valid summary; it is asked again later, and only if a site is missing."""
        node, line = self._known[number], one_line(why, LONGEST_LINE)
        if node.site and self.nodes.get(node.site) == number:
            del self.nodes[node.site]
        if node.why != line:
            self._lines.write(logging.ERROR if claims else logging.WARNING, line)
        node.site, node.why, node.claims, node.changed = "", line, claims, changed

    def _refuse(self, number: int, summary: DataSummary, mark: str) -> bool:
        """Leave out a node that is not the site whose name it has, or not as it was; returns whether that is so."""
        name, begun = summary.site, self.begun.get(summary.site)
        if self.marks.get(name, mark) != mark:
            self._leave_out(
                number,
                f"another site has the name {name!r}, or {name} came back without its state folder; node {number} is "
                "refused: give it a different name, restore the folder, or unregister the node",
                name,
            )
            return True
        if begun is not None and (changed := begun.difference(summary)):
            self._leave_out(
                number,
                f"{name} has changed since the run began: {changed}; it is refused: restore it and start the site "
                "again, or start a new run (another --name)",
                name,
                changed=True,
            )
            return True
        return False

    def _enter(self, number: int, summary: DataSummary, mark: str) -> None:
        for message in self._known[number].asked:
            self._pending.pop(message, None)
        self._known[number] = _Node(summary.site, due=math.inf)
        self.nodes = {site: other for site, other in self.nodes.items() if other != number}  # one node, one name
        self.marks[summary.site], self.nodes[summary.site] = mark, number
        self.summaries[summary.site] = summary

    def gather(self, sites: int | tuple[str, ...]) -> list[DataSummary]:
        """The summaries of a new run's sites, in the order of their names; waits for them.

        While two nodes have one name, the wrong number of sites is connected, or their columns differ, nobody can tell
        which of them is right: the run does not begin, and the log says what to do.

        Args:
            sites: how many, or their names.
        """
        self.names = None if isinstance(sites, int) else frozenset(sites)
        notice, wanted = _Notice(self.on_wait, -math.inf), ""
        while wanted is not None:
            self.look(None if isinstance(sites, int) else sites)
            wanted = self._wanted(sites)
            if wanted:
                notice.write(wanted)
            if wanted is not None:
                time.sleep(POLL)
        self.begun = {name: self.summaries[name] for name in sorted(self.nodes)}
        self.names = frozenset(self.begun)
        for number in self.nodes.values():
            self._known[number].due = math.inf
        return list(self.begun.values())

    def _wanted(self, sites: int | tuple[str, ...]) -> str | None:
        """What keeps a run from beginning, in words; None if nothing does."""
        here, expected = sorted(self.nodes), sites if isinstance(sites, int) else len(sites)
        if refused := list(self.refused.values()):
            return f"the run waits: {listed(refused, 3)}"
        if len(here) > expected:
            return (
                f"the run waits: {len(here)} sites are connected, but {expected} were expected: {listed(here)}; "
                'unregister the others, or name the sites in the deployment: sites=("…", "…")'
            )
        if len(here) < expected:
            return f"{len(here)} of {expected} sites are connected: {listed(here) or 'none'}{self._left_out()}"
        try:
            self._check_identities(here)
            self.check(*(self.summaries[name] for name in here))
        except Exception as error:
            for name in here:  # ask all of them again: their owners may correct the data
                node = self._known[self.nodes[name]]
                node.due = min(node.due, time.monotonic() + AGAIN)
            return f"the run waits: {one_line(described(error), LONGEST_LINE)}"
        return None

    def _check_identities(self, names: list[str]) -> None:
        """Refuse two sites with one key or one mark: they are one site under two names."""
        for what, of in (("key", lambda name: self.summaries[name].key), ("mark", self.marks.get)):
            for i, name in enumerate(names):
                if same := [other for other in names[:i] if of(name) and of(other) == of(name)]:
                    raise ValueError(f"{same[0]} and {name} have the same {what}: unregister one of them")

    def wait_for(self, names: list[str], seconds: float) -> None:
        """Wait until all these sites are connected or have changed, or until the time is over."""
        notice, until = _Notice(self.on_wait, time.monotonic()), time.monotonic() + seconds
        while (missing := set(names) - {*self.nodes, *self.changed}) and time.monotonic() < until:
            self.look(names)
            notice.write(f"the run waits for {listed(sorted(missing))}{self._left_out()}")
            time.sleep(POLL)

    def _left_out(self) -> str:
        """Why nodes are left out or refused, in words."""
        out = [node.why for node in self._known.values() if node.why]
        return f"; {listed(out, 3)}" if out else ""


class _Notice:
    """Writes what a run waits for: a new text after a few seconds, the same text after a minute."""

    def __init__(self, on_wait: Callable[[str], None], since: float):
        self.on_wait, self.text, self.since = on_wait, "", since

    def write(self, text: str) -> None:
        """Write a text to the log and to the run's status, if it is time.

        Args:
            text: what the run waits for.
        """
        if time.monotonic() - self.since > (PROGRESS if text == self.text else NEWS):
            self.text, self.since = text, time.monotonic()
            log.info("%s", text)
            self.on_wait(text)
