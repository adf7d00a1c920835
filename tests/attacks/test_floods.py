"""Floods: of nodes, of replies, of junk, and of calls at a site. Time, messages, memory and logs stay bounded."""

import itertools
import json
import logging
import time
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from attacked_runs import BAD, calls, check_lines, check_log, forging, gathered, honest, joined, reasons, served
from deployments import simulated
from forgeries import NASTY
from grids import NAME, SITES, Many, deployment
from strangers import after_polls, kept_away, summary_of

from fedstrata.base import few_lines
from fedstrata.deploy import journal
from fedstrata.deploy.data_summary import DataSummary
from fedstrata.deploy.flower import grid_link, roster, server_app
from fedstrata.deploy.flower.client_app import record
from fedstrata.deploy.flower.pulling import Lost
from fedstrata.deploy.flower.roster import Roster
from fedstrata.deploy.messages import PROOF, Message, Stage, proof
from fedstrata.deploy.terms import Terms

NODES, JUNK = 1000, 64_000_000
NAMED = tuple(f"site-{number}" for number in range(SITES))


@pytest.fixture(scope="module")
def expected():
    return simulated(NAME, 1).solution()


def crowd(grid, answer, nodes=NODES):
    """Strangers, which are asked before the sites. `answer` takes a stranger's number."""
    grid.nodes = {10**6 + number: site for number, site in grid.nodes.items()}
    for number in range(nodes):
        grid.enter("crowd", answer(number))


WHAT = {
    "a different error each time": lambda number: lambda request, n=itertools.count(): {"error": f"{NASTY} {next(n)}"},
    "no summary": lambda number: lambda request: {},
    "names that the run does not have": lambda number: summary_of(f"stranger-{number}"),
    "the name of a site": lambda number: summary_of(BAD, number=1, mark=str(number)),
}


@pytest.mark.parametrize("what", WHAT)
def test_a_crowd_of_strangers_does_not_keep_named_sites_from_beginning(what, grid, caplog):
    crowd(grid, WHAT[what])
    if what == "the name of a site":  # this stops the beginning, until they are unregistered
        after_polls(grid, 40, lambda: grid.leave("crowd"))
    start = time.process_time()
    assert gathered(grid, NAMED) == honest()
    assert time.process_time() - start < 20
    assert calls(grid, "crowd", "") <= 3 * NODES
    assert len(caplog.messages) <= few_lines.MOST + 2
    check_log(caplog)


def test_a_crowd_beyond_the_number_of_sites_is_told_in_one_line(grid, caplog):
    """Every one of them sends a valid summary. The run begins once they are unregistered."""
    caplog.set_level(logging.INFO, "fedstrata")
    crowd(grid, WHAT["names that the run does not have"], nodes=200)
    after_polls(grid, 60, lambda: grid.leave("crowd"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roster, "PROGRESS", 0.0)
        patch.setattr(roster, "NEWS", 0.0)
        assert gathered(grid) == honest()
    told = [line for line in caplog.messages if "203 sites are connected, but 3 were expected" in line]
    assert "and 193 more" in told[0]
    check_log(caplog)


def test_nodes_are_asked_in_turns_so_that_no_message_is_too_large(grid):
    sizes, real = [], grid.push_messages
    grid.push_messages = lambda messages: sizes.append(len(messages)) or real(messages)
    crowd(grid, WHAT["no summary"], nodes=350)
    assert gathered(grid, NAMED) == honest()
    assert max(sizes) <= roster.AT_ONCE
    assert sum(sizes) >= 350


def test_silent_nodes_are_asked_ever_more_rarely_and_forgotten_when_they_leave(grid, monkeypatch):
    """For half an hour by the roster's clock, in which each poll finds twenty other nodes."""
    clock, numbers = [1000.0], itertools.count(10_000)
    moved = lambda seconds: clock.append(clock.pop() + seconds)
    monkeypatch.setattr(roster, "time", type("time", (), {"monotonic": lambda: clock[0], "sleep": moved}))
    for name, value in {"LOOK": 1.0, "AGAIN": 15.0, "POLL": 1.0}.items():
        monkeypatch.setattr(roster, name, value)
    grid.on_message = lambda kind, site, answer: None
    constant = list(grid.nodes)
    grid.get_node_ids = lambda: [*constant, *itertools.islice(numbers, 20)]
    found = Roster(grid)
    found.wait_for(["site-0"], 1800)
    assert SITES * 5 < len(grid.asked) <= SITES * (1800 / (15 * roster.LONGEST) + 5)
    assert len(found._pending) <= roster.LAST * SITES + 20
    assert len(found._known) <= SITES + 20


@pytest.mark.parametrize("kind", ["query.survey", "query.begin", "train", "evaluate"])
def test_a_site_that_replies_a_thousand_times_is_heard_once(kind, grid, tmp_path, expected, caplog):
    forging(grid, lambda about, body: Many(record(about, body), 1000), kind)
    np.testing.assert_allclose(served(grid, tmp_path / "out", rounds=1), expected, rtol=1e-12)
    assert reasons(tmp_path / "out") == []
    assert len(caplog.messages) <= 2
    check_lines(tmp_path / "out", caplog)


JUNKS = {
    "bytes": lambda about, body: record(about, bytes(JUNK)),
    "bytes after a reply": lambda about, body: record(about, body + bytes(JUNK)),
    "an error": lambda about, body: record({**about, "error": "x" * JUNK}, body),
    "a mark": lambda about, body: record({**about, "mark": "x" * JUNK}, body),
    "a summary": lambda about, body: record({**about, "survey": "[" * JUNK}, b""),
    "a list": lambda about, body: record({**about, "survey": [1] * (JUNK // 8)}, b"junk"),
}


@pytest.mark.parametrize("name", JUNKS)
def test_junk_of_64_mb_takes_little_time_and_leaves_small_files(name, grid, tmp_path, expected, caplog):
    done = forging(grid, JUNKS[name], ("query.survey", "train"), times=1)
    start = time.process_time()
    np.testing.assert_allclose(served(grid, tmp_path / "out", rounds=1), expected, rtol=1e-12)
    assert time.process_time() - start < 10
    assert dict(done) == {"query.survey": 1, "train.phase0": 1}
    check_lines(tmp_path / "out", caplog)
    assert all(path.stat().st_size < 100_000 for path in (tmp_path / "out").glob("*.*"))


def test_an_upload_that_never_ends_stops_no_server_not_even_before_the_run(grid, tmp_path, monkeypatch):
    """Flower would wait two hours for the missing part of a reply, also for that of a data summary."""
    events, pull = [], grid.pull_messages
    for module in (roster, server_app):
        monkeypatch.setattr(module, "limited_pulls", lambda *limits: events.append(limits))
    grid.pull_messages = lambda ids: events.append("pull") or pull(ids)
    served(grid, tmp_path / "out", rounds=1)
    before = {events[i - 1] for i, event in enumerate(events) if event == "pull"}
    summaries, (replies,) = {b for b in before if b[0] == roster.SUMMARY}, [b for b in before if b[0] != roster.SUMMARY]
    assert {seconds for _, seconds in summaries} == {roster.WAIT}
    assert replies[0] < 10_000_000  # bytes of a reply of this run, with the longest headers
    assert replies[1] <= deployment().deadline / 4


def test_what_a_roster_keeps_of_junk_is_small(grid):
    forging(grid, JUNKS["an error"], "query.survey")
    found = Roster(grid)
    tracemalloc.start()
    try:
        while calls(grid, BAD, "query") < 3:
            found.look()
        for _ in range(20):
            found.look()
        grid.replies.clear()
        assert tracemalloc.get_traced_memory()[0] < JUNK / 10
    finally:
        tracemalloc.stop()


def test_lines_that_others_cause_are_counted_beyond_a_number_in_a_minute(monkeypatch, caplog):
    clock = [0.0]
    monkeypatch.setattr(few_lines, "time", type("time", (), {"monotonic": lambda: clock[0]}))
    found = few_lines.FewLines(logging.getLogger("fedstrata"))
    for number in range(500):
        found.write(logging.WARNING, f"line {number}")
    assert len(caplog.messages) == few_lines.MOST + 1
    clock[0] += few_lines.SECONDS + 1
    found.write(logging.WARNING, "the next one")
    assert caplog.messages[few_lines.MOST + 1 :] == [f"{500 - few_lines.MOST} more lines of this kind", "the next one"]


def test_a_flood_of_calls_at_a_site_does_not_fill_its_log(hurry, tmp_path, monkeypatch):
    """Summaries, malformed calls, and calls of runs that the site does not know, each of another name."""
    monkeypatch.setattr(journal, "MOST_LINES", 20)
    grid = joined(tmp_path)
    worker, settings = next(iter(grid.nodes.values()))
    request = lambda kind, about: {"kind": kind, "code": "1", "settings": settings, "about": about}
    for number in range(300):
        mark = worker.answer(request("query.survey", {}), b"")[0]["mark"]
        call = Message(f"run {number}", Stage(0, 0), settings["site"], {})
        for body in (b"noise", call.encode()):
            for about, why in (({}, "proof"), ({PROOF: proof(mark, {}, body)}, r"message|not begun")):
                with pytest.raises(ValueError, match=why):
                    worker.answer(request("train.phase0", about), body)
    lines = (tmp_path / settings["site"] / "log.jsonl").read_text().splitlines()
    assert 40 <= len(lines) <= 2 * 20 + 20
    assert max(map(len, lines)) < 2000
    assert json.loads(lines[-1])["kind"] in ("refused", "summary")
    for other, _ in grid.nodes.values():
        other.close()


def test_a_run_with_a_flood_in_every_exchange_ends(grid, tmp_path, expected):
    """Strangers without a summary, a site whose node is lost again and again, and another that replies many times."""
    crowd(grid, WHAT["a different error each time"], nodes=100)
    lost = itertools.count()
    back = []

    def lose(kind, site, answer):
        if kind == "train.phase0" and site == BAD and next(lost) < 3:
            back.append(kept_away(grid, BAD))
            after_polls(grid, 5, back[-1])
            return None
        return answer()

    grid.on_message = lose
    grid.forge = lambda kind, site, content: Many(content, 10) if site == "site-0" else content
    np.testing.assert_allclose(served(grid, tmp_path / "out", rounds=1, sites=NAMED), expected, rtol=1e-12)
    assert len(back) == 3


def test_a_thousand_lost_replies_in_one_exchange_end_no_run(grid, monkeypatch):
    clock, calls_made = [0.0], []
    later = lambda seconds: clock.__setitem__(0, clock[0] + seconds)
    monkeypatch.setattr(grid_link, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=later))
    for name, value in {"POLL": 0.2, "LOOK": 1.0, "AGAIN": 15.0}.items():
        monkeypatch.setattr(grid_link, name, value)

    def pulled(pending):
        calls_made.extend(pending)
        found = [(pending.pop(message), Lost("a reply without the token of its call")) for message in list(pending)]
        return found

    fake = SimpleNamespace(push_messages=lambda messages: [str(len(calls_made) + n) for n, _ in enumerate(messages)])
    about = {"nodes": {BAD: 7}, "marks": {BAD: "12"}, "changed": set(), "refused": {}, "look": lambda needed: None}
    nodes = SimpleNamespace(grid=fake, replies=SimpleNamespace(pulled=pulled), **about)
    summary = DataSummary(BAD, {"train": 3}, {"train": {"x": ("float64", [3])}})
    link = grid_link.grid_link(nodes, (BAD,), 86_400.0, Terms("first", (summary,), "1", 1, 1))
    found = link({0: Message("first", Stage(0, 0), BAD, {})})
    assert len(calls_made) > 5000
    assert found[0].startswith("no answer in time; lost ")
