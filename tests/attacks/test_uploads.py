"""A site begins to upload its replies at once, and never ends. Flower's own function waits for their parts."""

import json

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

import time

import flwr.supercore.inflatable.inflatable_utils as inflatable
from attacked_runs import BAD
from flwr.common.constant import ErrorCode
from grids import Failed, Grid, _reply, deployment

from fedstrata.deploy.flower import roster, server_app
from fedstrata.deploy.flower.pulling import Lost, Replies


class Stalling(Grid):
    """Replies of honest sites come after 0.3 s; those of the other one are there, and their parts never come."""

    def __init__(self):
        super().__init__()
        self.on, self.ready, self.bad, self.waits, self.stalls = False, {}, set(), [], set()

    def _push(self, message):
        number = super()._push(message)
        train = message.metadata.message_type.startswith("train")
        if message.metadata.dst_node_id in self.stalls:
            self.bad.add(number)
        if self.on and train and message.metadata.dst_node_id in self.nodes:
            if self.nodes[message.metadata.dst_node_id][1]["site"] == BAD:
                self.bad.add(number)
            else:
                self.ready[number] = time.monotonic() + 0.3
        return number

    def pull_messages(self, ids):
        found, ids = [], [i for i in ids if self.ready.get(i, 0) <= time.monotonic()]
        for i in [i for i in ids if i in self.bad]:
            self.bad.discard(i)
            self.replies.pop(i, None)
            began = time.monotonic()
            with pytest.raises(inflatable.ObjectPullError):
                inflatable.pull_objects(["0" * 64], self._never)
            self.waits.append(time.monotonic() - began)
            found.append(_reply(i, Failed(ErrorCode.MESSAGE_UNAVAILABLE, "Reply message objects are unavailable")))
        return [*found, *super().pull_messages(ids)]

    @staticmethod
    def _never(number):
        raise inflatable.ObjectUnavailableError(number)


@pytest.fixture
def stalling(hurry, tmp_path, monkeypatch):
    for function in (inflatable.pull_objects, inflatable.pull_and_inflate_object_from_tree):
        monkeypatch.setattr(function, "__kwdefaults__", dict(function.__kwdefaults__))
    found = Stalling()
    for number in range(3):
        found.join(tmp_path / f"site-{number}", number)
    yield found
    for worker in found.workers.values():
        worker.close()


@pytest.mark.parametrize("deadline", [2.0, 8.0])
def test_a_run_with_a_quorum_continues_beside_an_upload_that_never_ends(stalling, tmp_path, deadline):
    """With Flower's waits, the honest replies were there and never read: the deadline had passed."""
    server_app.serve(deployment(rounds=1, quorum=0.6), stalling, "first", tmp_path / "out")
    stalling.on = True
    server_app.serve(deployment(rounds=2, quorum=0.6, deadline=deadline), stalling, "first", tmp_path / "out")
    rows = [json.loads(line) for line in (tmp_path / "out" / "reports.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["stage"][:2] == [1, 0]]
    assert [set(row["received"]) for row in trained] == [{"site-0", "site-2"}]
    assert "objects are unavailable" in trained[0]["missing"][BAD]
    assert stalling.waits
    assert max(stalling.waits) < deadline / 4 + 1


def test_a_run_resumes_in_time_beside_strangers_whose_summaries_never_end(stalling, tmp_path, monkeypatch):
    """Each of them is waited for once, for a short time; after that, whoever has lost nothing yet comes first."""
    server_app.serve(deployment(rounds=1), stalling, "first", tmp_path / "out")
    for name, value in {"WAIT": 0.05, "LONGEST_WAIT": 2.0, "BUDGET": 0.1}.items():
        monkeypatch.setattr(roster, name, value)
    honest, stalling.nodes = stalling.nodes, {}
    for _ in range(15):
        stalling.enter("stranger", lambda request: {})
    stalling.nodes |= {10**6 + number: found for number, found in honest.items()}
    stalling.stalls = {node for node in stalling.nodes if node < 10**6}
    began, deadline = time.monotonic(), 8.0
    server_app.serve(deployment(rounds=2, quorum=1.0, deadline=deadline), stalling, "first", tmp_path / "out")
    assert time.monotonic() - began < deadline
    assert len(stalling.waits) >= 15


def test_strangers_whose_uploads_never_end_take_a_limited_time_of_every_poll(monkeypatch):
    clock, tried = [0.0], []

    class Slow:
        def pull_messages(self, ids):
            tried.extend(ids)
            clock[0] += 1.0
            return []

    monkeypatch.setattr("fedstrata.deploy.flower.pulling.time", type("time", (), {"monotonic": lambda: clock[0]}))
    replies = Replies(Slow(), one_by_one=True, seconds=roster.BUDGET)
    pending = {str(i): i for i in range(40)}
    for polls in range(1, 20):
        assert not any(isinstance(reply, Lost) for _, reply in replies.pulled(pending))
        assert clock[0] <= polls * (roster.BUDGET + 1)
    assert {*tried} == {*pending}  # each has its turn
