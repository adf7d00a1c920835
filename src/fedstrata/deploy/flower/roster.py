"""The roster of a run: the node of Flower's grid for each site. Site names are permanent, node numbers are not."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid

from fedstrata.base.text import one_line
from fedstrata.deploy.data_summary import LONGEST_NAME, DataSummary
from fedstrata.deploy.flower.client_app import CALL, new_token, opened, record
from fedstrata.deploy.flower.pulling import pulled

POLL = 0.2  # seconds between two polls for sites that are awaited
LOOK = 1.0  # seconds between two polls for new nodes
AGAIN = 15.0  # seconds until the summary of a node without a valid one is requested again
PROGRESS = 60.0  # seconds between two log lines about sites that are awaited

log = logging.getLogger("fedstrata")


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
    ):
        """A roster without nodes.

        Args:
            grid: Flower's grid.
            marks: by site name, the marks of a run that resumes.
            begun: the summaries of a run that resumes.
            check: raises an error for summaries that do not fit the run's problem, or one another.
        """
        self.grid, self.marks, self.check = grid, dict(marks or {}), check
        self.begun = {summary.site: summary for summary in begun}
        self.nodes: dict[str, int] = {}  # by site name
        self.summaries: dict[str, DataSummary] = {}  # by site name
        self.refused: dict[str, str] = {}  # by site name: why a node with this name is refused
        self.changed: set[str] = set()  # those of them that came back with other data, keys or versions
        self._sites: dict[int, str] = {}  # by node: its site; "" if it has not replied yet, or is refused
        self._pending: dict[str, tuple[int, str]] = {}  # by message: the node that was asked, and the call's token
        self._due: dict[int, float] = {}  # by node without a valid reply: when its summary is requested again
        self._left_out: dict[int, str] = {}  # by node without a valid summary: what was wrong
        self._looked = 0.0

    def look(self, needed: Iterable[str] | None = None) -> None:
        """Drop the nodes that have gone; if a site is missing, request the summaries of others. Does not wait.

        Args:
            needed: names of the sites that are needed now; None: more sites are needed, whatever their names.
        """
        if time.monotonic() - self._looked > LOOK:
            self._looked, present = time.monotonic(), set(self.grid.get_node_ids())
            self.nodes = {site: node for site, node in self.nodes.items() if node in present}
            self._sites = {node: site for node, site in self._sites.items() if node in present}
            self.nodes = {site: node for node, site in self._sites.items() if site} | self.nodes
            if needed is None or not set(needed) <= set(self.nodes):
                self._ask(present)
        for (node, token), reply in pulled(self.grid, self._pending):
            if isinstance(reply, str):
                self._quarantine(node, reply)
            else:
                self._read(node, token, reply)

    def _ask(self, present: set[int]) -> None:
        late = {node for node, due in self._due.items() if time.monotonic() > due}
        if new := [node for node in present if node not in self._sites or node in late]:
            asked = [(node, new_token()) for node in new]
            outgoing = [FlowerMessage(record({CALL: token}, b""), node, "query.survey") for node, token in asked]
            sent = zip(self.grid.push_messages(outgoing), asked, strict=True)
            self._pending |= {message: one for message, one in sent if message}
            self._sites |= dict.fromkeys(new, "")
            self._due |= dict.fromkeys(new, time.monotonic() + AGAIN)

    def _read(self, node: int, token: str, reply: FlowerMessage) -> None:
        """Enter the node of a valid summary. Whatever the reply holds, no error ends the run."""
        try:
            if not reply.has_content():
                raise ValueError(str(reply.error.reason))
            about = opened(reply.content)[0]
            if about.get(CALL) != token:
                raise ValueError("a reply to another call")
            if "error" in about:
                raise ValueError(str(about["error"]))
            survey, mark = about.get("survey"), about.get("mark")
            if not isinstance(survey, str) or not isinstance(mark, str) or not 0 < len(mark) <= LONGEST_NAME:
                raise ValueError("a reply without a data summary and a mark")
            summary = DataSummary.decode(survey)
            self.check(summary)
        except Exception as error:
            own = isinstance(error, ValueError)
            self._quarantine(node, str(error) if own else f"{type(error).__name__}: {error}")
            return
        self._enter(node, summary, mark)

    def _quarantine(self, node: int, why: str) -> None:
        """Leave a node out, until it sends a valid summary; it is asked again later, and only if a site is missing."""
        if self._left_out.get(node) != why:
            log.warning("node %d has not sent a valid data summary and is left out: %s", node, one_line(why))
        self._left_out[node] = why

    def _enter(self, node: int, summary: DataSummary, mark: str) -> None:
        name, begun = summary.site, self.begun.get(summary.site)
        if self.marks.setdefault(name, mark) != mark:
            self._refuse(
                name,
                f"another site has the name {name!r}, or {name} came back without its state folder; it is refused: "
                "give it a different name, or restore the folder",
            )
        elif begun is not None and (changed := begun.difference(summary)):
            self.changed.add(name)
            self._refuse(
                name,
                f"{name} has changed since the run began: {changed}; it is refused: restore it, or start a new run "
                "(another --name)",
            )
        else:
            self._due.pop(node, None)
            self.refused.pop(name, None)
            self.changed.discard(name)
            self._sites[node] = name
            self.nodes[name], self.summaries[name] = node, summary

    def _refuse(self, name: str, why: str) -> None:
        if self.refused.get(name) != why:
            log.error("%s", why)
        self.refused[name] = why

    def gather(self, sites: int | tuple[str, ...]) -> list[DataSummary]:
        """The summaries of a new run's sites, in the order of their names; waits for them.

        While two nodes have one name, the wrong number of sites is connected, or their columns differ, nobody can tell
        which of them is right: the run does not begin, and the log says what to do.

        Args:
            sites: how many, or their names.
        """
        logged, wanted = -math.inf, ""
        while wanted is not None:
            self.look(None if isinstance(sites, int) else sites)
            wanted = self._wanted(sites)
            if wanted and time.monotonic() - logged > PROGRESS:
                logged = time.monotonic()
                log.info("%s", wanted)
            if wanted is not None:
                time.sleep(POLL)
        names = sorted(self.nodes) if isinstance(sites, int) else sorted(sites)
        return [self.summaries[name] for name in names]

    def _wanted(self, sites: int | tuple[str, ...]) -> str | None:
        """What keeps a run from beginning, in words; None if nothing does."""
        here = sorted(self.nodes) if isinstance(sites, int) else [name for name in sorted(sites) if name in self.nodes]
        expected = sites if isinstance(sites, int) else len(sites)
        if refused := [why for name, why in self.refused.items() if isinstance(sites, int) or name in sites]:
            return "the run waits: " + "; ".join(refused)
        if len(here) > expected:
            return (
                f"the run waits: {len(here)} sites are connected, but {expected} were expected: {', '.join(here)}; "
                'unregister the others, or name the sites in the deployment: sites=("…", "…")'
            )
        if len(here) < expected:
            return f"{len(here)} of {expected} sites are connected: {', '.join(here) or 'none'}"
        try:
            self.check(*(self.summaries[name] for name in here))
        except Exception as error:
            self._due |= {
                self.nodes[name]: time.monotonic() + AGAIN for name in here if self.nodes[name] not in self._due
            }
            return f"the run waits: {one_line(error)}"
        return None

    def wait_for(self, names: list[str], seconds: float) -> None:
        """Wait until all these sites are connected or have changed, or until the time is over."""
        until = time.monotonic() + seconds
        while not set(names) <= {*self.nodes, *self.changed} and time.monotonic() < until:
            self.look(names)
            time.sleep(POLL)
