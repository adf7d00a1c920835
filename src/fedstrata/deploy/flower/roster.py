"""The roster of a run: the node of Flower's grid for each site. Site names are permanent, node numbers are not."""

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid

from fedstrata.deploy.agreement import DataSummary
from fedstrata.deploy.flower.client_app import opened, record

POLL = 0.2  # seconds between two polls for sites that are awaited
LOOK = 1.0  # seconds between two polls for new nodes
AGAIN = 15.0  # seconds until the summary of a node without a reply is requested again
PROGRESS = 60.0  # seconds between two log lines about sites that are awaited

log = logging.getLogger("fedstrata")


class Roster:
    """The nodes of a run's sites.

    A site is identified by its name and by a mark in its state folder. A restarted node has the same mark. A node with
    the same name and another mark is another site, or one that has lost its folder: it is refused.
    """

    def __init__(self, grid: Grid, marks: Mapping[str, str] | None = None):
        """A roster without nodes.

        Args:
            grid: Flower's grid.
            marks: by site name, the marks of a run that resumes.
        """
        self.grid, self.marks = grid, dict(marks or {})
        self.nodes: dict[str, int] = {}  # by site name
        self.summaries: dict[str, DataSummary] = {}  # by site name
        self.refused: dict[str, str] = {}  # by site name: why a node with this name is refused
        self._sites: dict[int, str] = {}  # by node: its site; "" if it has not replied yet, or is refused
        self._pending: dict[str, int] = {}  # by message: the node whose summary was requested
        self._due: dict[int, float] = {}  # by node without a reply: when its summary is requested again
        self._looked = 0.0

    def look(self) -> None:
        """Request the summaries of new nodes, and drop the nodes that have gone. Does not wait for replies."""
        if time.monotonic() - self._looked > LOOK:
            self._looked, present = time.monotonic(), set(self.grid.get_node_ids())
            self.nodes = {site: node for site, node in self.nodes.items() if node in present}
            self._sites = {node: site for node, site in self._sites.items() if node in present}
            self.nodes = {site: node for node, site in self._sites.items() if site} | self.nodes
            late = {node for node, due in self._due.items() if time.monotonic() > due}
            if new := [node for node in present if node not in self._sites or node in late]:
                outgoing = [FlowerMessage(record({}, b""), node, "query.survey") for node in new]
                self._pending |= dict(zip(self.grid.push_messages(outgoing), new, strict=True))
                self._sites |= dict.fromkeys(new, "")
                self._due |= dict.fromkeys(new, time.monotonic() + AGAIN)
        for reply in self.grid.pull_messages(list(self._pending)) if self._pending else ():
            node = self._pending.pop(reply.metadata.reply_to_message_id)
            about = _about(reply)
            if "survey" in about:
                self._due.pop(node, None)
                self._enter(node, DataSummary(*json.loads(str(about["survey"]))), str(about["mark"]))
            else:  # requested again when due
                log.warning("a node has not sent its data summary: %s", about["error"])

    def _enter(self, node: int, summary: DataSummary, mark: str) -> None:
        name = summary.site
        if self.marks.setdefault(name, mark) != mark:
            self.refused[name] = (
                f"another site has the name {name!r}, or {name} came back without its state folder; it is refused: "
                "give it a different name, or restore the folder"
            )
            log.error("%s", self.refused[name])
            return
        self._sites[node] = name
        self.nodes[name], self.summaries[name] = node, summary

    def gather(self, sites: int) -> list[DataSummary]:
        """The summaries of `sites` sites, in the order of their names; waits for them."""
        logged = time.monotonic()
        while len(self.nodes) < sites:
            self.look()
            if self.refused:  # either of the two sites could be the right one
                raise RuntimeError("the run has not begun: " + "; ".join(self.refused.values()))
            if time.monotonic() - logged > PROGRESS:
                logged, names = time.monotonic(), ", ".join(sorted(self.nodes))
                log.info("%d of %d sites are connected: %s", len(self.nodes), sites, names or "none")
            time.sleep(POLL)
        if len(self.nodes) > sites:
            raise RuntimeError(f"{len(self.nodes)} sites connected, but {sites} were expected: {', '.join(self.nodes)}")
        return [self.summaries[name] for name in sorted(self.nodes)]

    def wait_for(self, names: list[str], seconds: float) -> None:
        """Wait until all these sites are connected, or until the time is over."""
        until = time.monotonic() + seconds
        while not set(names) <= set(self.nodes) and time.monotonic() < until:
            self.look()
            time.sleep(POLL)


def _about(reply: FlowerMessage) -> dict[str, Any]:
    """A reply's summary and mark, or its error."""
    if not reply.has_content():
        return {"error": str(reply.error.reason)}
    try:
        about = opened(reply.content)[0]
    except (ValueError, KeyError) as error:
        return {"error": str(error)}
    return about if {"survey", "mark"} <= about.keys() else {"error": str(about.get("error", "an empty reply"))}
