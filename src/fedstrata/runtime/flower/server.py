"""The server app: it finds the sites, runs the rounds of a deployment over Flower's grid, and keeps what they give."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp

from fedstrata.files import replacing
from fedstrata.runtime.checkpoint import Checkpoints
from fedstrata.runtime.conductor import Conductor, Progress, Report
from fedstrata.runtime.flower.client import opened, record
from fedstrata.runtime.flower.deployment import Deployment, resolve
from fedstrata.runtime.survey import Survey, terms_of
from fedstrata.transport.codec import named_arrays
from fedstrata.transport.letters import Letter

POLL = 0.1  # seconds between looks for answers
# Errors of Flower's own after which the site may yet answer: a message, a reply, a node or a client app was lost.
LOST = {
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.CLIENT_APP_CRASHED,
}
LOOK = 3.0  # seconds between looks for sites that came back under another node id

log = logging.getLogger("fedstrata")


def server_app(where: str) -> ServerApp:
    """The server app of the deployment at "package.module:name"."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        settings = context.run_config
        serve(resolve(where), grid, str(settings["run"]), Path(str(settings["folder"])) / str(settings["run"]))

    return app


def serve(deployment: Deployment, grid: Grid, run: str, folder: Path) -> Progress:
    """All rounds of a run, from its last checkpoint on. Its state, reports and solution are in the folder."""
    store = Checkpoints(folder / "checkpoints")
    store.prepare(0)
    roster = Roster(grid, deployment.deadline)
    kept = folder / "surveys.json"
    if kept.exists():  # the sites of a run and their numbers stay
        surveys = [Survey(*row) for row in json.loads(kept.read_text())]
        roster.wait_for([s.site for s in surveys])
    else:
        surveys = roster.wait(deployment.sites)
        with replacing(kept) as path:
            path.write_text(json.dumps(surveys))
    terms = terms_of(run, deployment.problem, deployment.algorithm, surveys, **deployment.options)
    names = tuple(s.site for s in surveys)
    link = over_grid(roster, names, deployment.deadline, json.dumps(surveys))
    with (folder / "reports.jsonl").open("a") as reports:
        conductor = Conductor(terms, names, link, deployment.quorum, _writer(reports))
        now = conductor.load(store)
        if now is None:
            now = conductor.begin()
            conductor.save(store, now)
        while now.round < deployment.rounds:
            now = conductor.round(now)
            conductor.save(store, now)
    keep_solution(conductor, now, folder)
    return now


def keep_solution(conductor: Conductor, now: Progress, folder: Path) -> None:
    arrays = named_arrays(conductor.solution(now).tree, "params")
    with replacing(folder / "solution.npz") as path, path.open("wb") as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]


def _writer(file: Any) -> Callable[[Report], None]:
    def write(report: Report) -> None:
        log.info("%s", report)
        row = {"stage": list(report.stage), "received": list(report.received), "missing": report.missing}
        print(json.dumps(row), file=file, flush=True)

    return write


class Roster:
    """Which node is which site now. Nodes get new ids when they are started anew; a site's name stays."""

    def __init__(self, grid: Grid, deadline: float):
        self.grid, self.deadline = grid, deadline
        self.nodes: dict[str, int] = {}  # by the site's name
        self.surveys: dict[str, Survey] = {}
        self.asked: dict[int, str] = {}  # by node: its site, or "" where it gave no answer

    def look(self) -> None:
        """Ask the nodes that are new who they are, and forget those that have gone."""
        there = set(self.grid.get_node_ids())
        self.nodes = {site: node for site, node in self.nodes.items() if node in there}
        new = [node for node in there if node not in self.asked]
        messages = [Message(record({}, b""), node, "query.survey") for node in new]
        for reply in collect(self.grid, messages, self.deadline).values():
            node = reply.metadata.src_node_id
            about = opened(reply.content)[0] if reply.has_content() else {"error": str(reply.error.reason)}
            if "survey" not in about:
                log.warning("a node cannot say who it is: %s", about.get("error"))
                self.asked[node] = ""
                continue
            survey = Survey(*json.loads(str(about["survey"])))
            if self.nodes.get(survey.site, node) != node:
                # A node that was started anew, while Flower has not yet noticed that it had gone.
                log.warning("another node calls itself %s; the one that came last is asked from now on", survey.site)
            self.asked[node] = survey.site
            self.nodes[survey.site], self.surveys[survey.site] = node, survey

    def wait(self, sites: int) -> list[Survey]:
        """The surveys of so many sites, in the order of their names."""
        while len(self.nodes) < sites:
            self.look()
            time.sleep(POLL)
        if len(self.nodes) > sites:
            raise RuntimeError(f"{len(self.nodes)} sites came, and {sites} were expected: {', '.join(self.nodes)}")
        return [self.surveys[name] for name in sorted(self.nodes)]

    def wait_for(self, names: list[str]) -> None:
        """Until all of them are there, or the deadline has passed."""
        until = time.monotonic() + self.deadline
        while not set(names) <= set(self.nodes) and time.monotonic() < until:
            self.look()
            time.sleep(POLL)


def over_grid(roster: Roster, names: tuple[str, ...], deadline: float, surveys: str) -> Callable[..., Any]:
    """A link of the conductor: letters as messages, one action per phase."""

    def link(calls: Mapping[int, Letter]) -> dict[int, Letter | str]:
        answers: dict[int, Letter | str] = {}
        until, waiting = time.monotonic() + deadline, dict(calls)
        while waiting and time.monotonic() < until:
            roster.look()
            at = {i: roster.nodes[names[i]] for i in waiting if names[i] in roster.nodes}
            messages = {i: _message(waiting[i], node, surveys) for i, node in at.items()}
            left = min(until - time.monotonic(), LOOK if len(at) < len(waiting) else deadline)
            found = collect(roster.grid, list(messages.values()), left, roster)
            of_node = {node: i for i, node in at.items()}
            for node, reply in found.items():
                i = of_node[node]
                answer = _letter(reply)
                if answer is not None:
                    answers[i] = answer
                    del waiting[i]
        return answers

    return link


def _message(call: Letter, node: int, surveys: str) -> Message:
    round, exchange, phase, _ = call.stage
    kind = f"train.phase{phase}" if round >= 0 else f"query.begin{exchange}"
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


def collect(grid: Grid, messages: list[Message], seconds: float, roster: Roster | None = None) -> dict[int, Message]:
    """The replies that come in time, by node; ends early where every node that has not answered has gone."""
    if not messages:
        time.sleep(POLL)
        return {}
    node_of = dict(zip(grid.push_messages(messages), (m.metadata.dst_node_id for m in messages), strict=True))
    found: dict[int, Message] = {}
    until, looked = time.monotonic() + seconds, time.monotonic()
    while len(found) < len(node_of) and time.monotonic() < until:
        for reply in grid.pull_messages([m for m, node in node_of.items() if node not in found]):
            found[node_of[reply.metadata.reply_to_message_id]] = reply
        if roster is not None and time.monotonic() - looked > LOOK:
            looked, there = time.monotonic(), set(grid.get_node_ids())
            if all(node not in there for node in node_of.values() if node not in found):
                break
        time.sleep(POLL)
    return found
