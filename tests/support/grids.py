"""A grid of Flower in this process, whose nodes are workers of sites. Tests lose, change and forge its messages."""

import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from cases import CASES, task_of
from deployments import OPTIONS
from flwr.common.constant import ErrorCode
from flwr.supercore.task_identity import TaskIdentity

from fedstrata.deploy.flower import grid_link, roster
from fedstrata.deploy.flower.client_app import opened, record
from fedstrata.deploy.flower.deployment import Deployment
from fedstrata.deploy.flower.worker import Worker

NAME, ROUNDS, SITES = "SCAFFOLD", 3, 3
PATIENCE = 120.0  # seconds after which a grid ends a server that waits for ever
TASK = task_of(CASES[NAME].algorithm)


def load(settings):
    return TASK.federation.select([settings["number"]])


def deployment(**changes):
    options = {**OPTIONS, "seed": 5}
    found = Deployment(TASK.problem, CASES[NAME].algorithm, load, ROUNDS, SITES, options, deadline=20.0)
    return found._replace(**changes)


class Failed(NamedTuple):
    """In place of a reply's content: an error of Flower's."""

    code: object
    reason: object = None


class Many(NamedTuple):
    """In place of a reply's content: the same reply many times."""

    content: object
    times: int


class Grid:
    """Nodes by number; each is a worker with its settings. `on_message` may lose a message or change its reply.

    `forge` may replace the content of a reply: Flower's record, or anything else that a site may send in its place; an
    exception is raised when the reply is fetched, and all that is fetched with it is lost, as in Flower.
    """

    def __init__(self):
        self.nodes, self.workers, self.numbers = {}, {}, itertools.count(100)
        self.replies, self.ids, self.fetched = {}, itertools.count(), set()
        self.asked = []  # the kind of every message, and the site or stranger that it went to
        self.until = time.monotonic() + PATIENCE
        self.on_message = lambda kind, site, answer: answer()
        self.forge = lambda kind, site, content: content

    def join(self, folder, number, name=None, made=None):
        settings = {"site": name or f"site-{number}", "state": str(folder), "number": number}
        Path(folder).mkdir(parents=True, exist_ok=True)
        node = next(self.numbers)
        if worker := self.workers.get(str(folder)):
            worker.close()  # as if its process had ended
        self.workers[str(folder)] = Worker(made or deployment(), Path(folder), "1")
        self.nodes[node] = self.workers[str(folder)], settings
        return node

    def enter(self, name, answer):
        """A stranger: a node without a worker. Its replies come from `answer(request)`: a header, or a whole reply."""
        node, plain = next(self.numbers), lambda found: (found, b"") if isinstance(found, dict) else found
        stranger = SimpleNamespace(answer=lambda request, body: plain(answer(request)))
        self.nodes[node] = stranger, {"site": name}
        return node

    def leave(self, name):
        """The nodes of a site are gone."""
        self.nodes = {node: found for node, found in self.nodes.items() if found[1]["site"] != name}

    def get_node_ids(self):
        assert time.monotonic() < self.until, "the server waits for ever"
        return list(self.nodes)

    def push_messages(self, messages):
        return [self._push(message) for message in messages]

    def _push(self, message):
        number, kind = str(next(self.ids)), message.metadata.message_type
        if message.metadata.dst_node_id in self.nodes:
            worker, settings = self.nodes[message.metadata.dst_node_id]
            self.asked.append((kind, settings["site"]))
            about, body = opened(message.content)
            token = {"call": about.pop("call")}  # the client app returns it
            request = {"kind": kind, "code": "1", "settings": settings, "about": about}
            found = self.on_message(kind, settings["site"], lambda: _answer(worker, request, body))
            if found is not None:
                content = self.forge(kind, settings["site"], record({**token, **found[0]}, found[1]))
                times, content = (content.times, content.content) if isinstance(content, Many) else (1, content)
                self.replies[number] = [_reply(number, content)] * times
        return number

    def pull_messages(self, ids):
        lost = [_reply(i, Failed(ErrorCode.MESSAGE_UNAVAILABLE, "unknown")) for i in ids if i in self.fetched]
        found = [reply for i in ids for reply in self.replies.pop(i, ())]
        self.fetched |= {reply.metadata.reply_to_message_id for reply in found}
        for reply in found:
            if isinstance(reply.content, Exception):
                raise reply.content
        return [*lost, *found]


def _reply(number, content):
    failed = content if isinstance(content, Failed) else None
    meta = SimpleNamespace(reply_to_message_id=number)
    return SimpleNamespace(metadata=meta, has_content=lambda: failed is None, content=content, error=failed)


def _answer(worker, request, body):
    try:
        return worker.answer(request, body)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}, b""


def in_a_hurry(patch):
    """No waits between polls; and the identity that Flower gives to a server app."""
    for name in ("run_id", "node_id", "task_id"):
        patch.setattr(TaskIdentity, f"_{name}", 1)
    for name, value in {"POLL": 0.001, "LOOK": 0.002, "AGAIN": 0.05}.items():
        patch.setattr(roster, name, value)
        patch.setattr(grid_link, name, value)


@pytest.fixture
def hurry(monkeypatch):
    """`in_a_hurry`, for one test."""
    in_a_hurry(monkeypatch)


@pytest.fixture
def grid(tmp_path, hurry):
    """Three sites, with their state in folders of this test."""
    found = Grid()
    for number in range(SITES):
        found.join(tmp_path / f"site-{number}", number)
    yield found
    for worker in found.workers.values():
        worker.close()


def solution(folder):
    """The parameters that a run has written."""
    return np.load(folder / "solution.npz")["params"]


def missing(folder):
    """Why sites did not reply, by round and name."""
    rows = [json.loads(line) for line in (folder / "reports.jsonl").read_text().splitlines()]
    return {(row["stage"][0], site): why for row in rows for site, why in row["missing"].items()}
