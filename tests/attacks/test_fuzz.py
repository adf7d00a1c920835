"""Mutated messages to the server, to a site and to a site's store: a short error or a valid message, at once.

Every message takes at most 50 ms of the processor, and at most 64 MB beside its own bytes: no more is resident at its
peak, and no more can be reserved. Of one message in twenty, and of every long one, Python's own count is compared, too.
"""

import contextlib
import functools
import gc
import json
import os
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import process_memory
import pytest
from cases import CASES, START, task_of
from fuzz import FLOODS, MANY, Parts, joined, mutated

from fedstrata.deploy.data_summary import DataSummary
from fedstrata.deploy.evaluation.request import Request
from fedstrata.deploy.in_process import in_process_run
from fedstrata.deploy.messages import EVALUATE, Message, unpack
from fedstrata.deploy.messages import START as SECOND_START
from fedstrata.deploy.secure_sum import MaskedSum
from fedstrata.deploy.site_store import MOST
from fedstrata.deploy.terms import Terms
from fedstrata.engine import initialise
from fedstrata.engine.codec import decode

FULL = os.environ.get("FEDSTRATA_TEST_DEPLOY", "") == "full"
MESSAGES = 500_000 if FULL else 20_000
PARTS = 4  # of the messages, one test each
SECONDS, MEMORY = 0.05, 64_000_000
LONG = 100_000  # bytes of a message for which Python's count of memory is always compared
BATCH = 2500  # messages between two returns of free memory to the system
# Local fields; pools with the writers of their rows; several exchanges in a round; and a masked sum.
RUNS = {"SCAFFOLD": {}, "FedX2": {}, "FedNest": {}, "FedAvg": {"secure": MaskedSum.dealt(4)}}
MEASURED = process_memory.can_be_measured()  # on Linux


class Target(NamedTuple):
    """A valid message, and what its receiver does with the bytes before any computation."""

    name: str
    data: bytes
    read: Callable[[bytes], Any]


@functools.cache
def targets() -> tuple[Target, ...]:
    """Calls, replies and stored stages of the first rounds of several runs, evaluations, and data summaries."""
    found: list[Target] = []
    for name, more in RUNS.items():
        task = task_of(CASES[name].algorithm)
        server, sites, _ = in_process_run(
            task.problem, CASES[name].algorithm, task.federation, params=START, batch_size=3, **more
        )
        heard: dict[tuple, tuple[Message, Message]] = {}

        def spy(calls, link=server.caller.link, heard=heard):
            replies = link(calls)
            for i in calls:
                stage = calls[i].stage
                special = stage.exchange if min(stage.round, stage.exchange) < 0 else None  # a start, or an evaluation
                heard.setdefault((special, stage.phase), (calls[i], replies[i]))  # repetitions of a phase are alike
            return replies

        server.caller.link = spy
        now = server.round(server.begin())
        if "secure" not in more:
            server.evaluate(now)
        for call, reply in heard.values():
            exchange, phase = call.stage[1:3]
            kind = f"{name} {call.stage[:2]}"
            if exchange == EVALUATE:
                request = Request.of(server.agreement)
                found.append(Target(f"{kind} reply", reply.encode(), _evaluation(server.agreement, request)))
                continue
            if call.stage.round >= 0:
                receives, sends = server.context.exchanges[phase].receives, server.context.exchanges[phase].sends
                found.append(Target(f"{kind} call", call.encode(), _call(server.context.template, receives)))
            else:
                second = exchange == SECOND_START
                sends = (initialise.pools if second else initialise.sent_at_start)(server.context)
            found.append(Target(f"{kind} reply", reply.encode(), _reply(server, sends)))
        stored = list(sites[0].store.stored.values())[-1]
        found.append(Target(f"{name} stored", stored, lambda data: decode(data, MOST)))
        summary = DataSummary.of("Ulm", task.federation.select([0]), secret=b"1", key="2")
        found.append(Target(f"{name} summary", json.dumps(summary).encode(), _text(DataSummary.decode)))
        terms = Terms("first", (summary, summary._replace(site="Bonn", key="3")), "4", 20, 5)
        found.append(Target(f"{name} terms", terms.encode().encode(), _text(Terms.decode)))
    for target in found:
        target.read(target.data)  # valid as it is
    return tuple(found)


def _reply(server, sends):
    return lambda data: server._fields(Message.decode(data), sends)


def _call(template, receives):
    def read(data):
        call = Message.decode(data)
        return unpack(call.arrays, template, receives, call.pools or {})

    return read


def _evaluation(agreement, request):
    return lambda data: request.read(agreement, 0, Message.decode(data).arrays)


def _text(decode):
    return lambda data: decode(data.decode("utf-8", "replace"))


class Worst(NamedTuple):
    """The largest values so far, each with what took it."""

    seconds: tuple[float, str] = (0.0, "")
    memory: tuple[int, str] = (0, "")
    error: tuple[int, str] = (0, "")


def outcome(target: Target, data: bytes) -> str:
    """The text of the error; empty if the message was accepted. Any other exception fails the test."""
    try:
        target.read(data)
    except ValueError as error:
        return str(error)
    return ""


def seconds(target: Target, data: bytes) -> tuple[float, str]:
    """The time of the processor in this thread, with Python's garbage collector as outside of tests; and the error."""
    of_tests = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    start = time.thread_time()
    try:
        error = outcome(target, data)
        return time.thread_time() - start, error
    finally:
        gc.set_threshold(*of_tests)


def counted(target: Target, data: bytes) -> int:
    """The most bytes that Python holds at once while a message is read."""
    tracemalloc.start()
    try:
        outcome(target, data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Memory:
    """The resident memory of this process beyond what it was when this was made, before any of some messages."""

    def __init__(self):
        if MEASURED:
            gc.collect()  # garbage, and free memory that is resident, would hide what a message takes
            process_memory.release()
            self.before = process_memory.reserved_and_resident()[1]

    @contextlib.contextmanager
    def limited(self, what: str) -> Iterator[None]:
        """Fail if more than `MEMORY` is resident at once here; a MemoryError if more than that is reserved."""
        if not MEASURED:
            yield
            return
        process_memory.reset_peak()
        with process_memory.reserving_at_most(MEMORY):
            yield
        assert (most := process_memory.peak() - self.before) <= MEMORY, f"{most} bytes: {what}"


def attack(target: Target, data: bytes, worst: Worst, room: Memory, compare: bool) -> Worst:
    """Read a message and check its limits; the worst values with this one."""
    what = f"{target.name}: {len(data)} bytes {data[:200]!r}"
    try:
        with room.limited(what):
            taken, error = seconds(target, data)
    except (
        AssertionError
    ):  # earlier messages, and other threads, have left something: what this one takes, it takes again
        with Memory().limited(what):
            taken, error = seconds(target, data)
    if taken > SECONDS / 2:  # others use this machine, too
        taken = min(taken, *(seconds(target, data)[0] for _ in range(5)))
    what = f"{what}: {error[:200]}"
    assert taken <= SECONDS, what
    assert error.isprintable(), what
    assert len(error) <= 1000, what
    held = counted(target, data) if compare or len(data) > LONG else 0
    assert held <= MEMORY, what
    return Worst(
        max(worst.seconds, (taken, what)), max(worst.memory, (held, what)), max(worst.error, (len(error), what))
    )


@pytest.mark.parametrize("part", range(PARTS))
def test_mutated_messages_are_refused_or_read_within_time_and_memory(part, capsys):
    draw, worst = random.Random(part), Worst()
    everything = [target.data for target in targets()]
    room = Memory()
    for number in range(MESSAGES // PARTS):
        room = room if number % BATCH else Memory()
        target = draw.choice(targets())
        data = mutated(draw, target.data, everything)
        worst = attack(target, data, worst, room, compare=number % 20 == 0)
    if FULL:
        with capsys.disabled():
            print(f"\n{MESSAGES // PARTS} messages, the worst:", *worst, sep="\n  ")


@pytest.mark.slow
@pytest.mark.parametrize("flood", range(len(FLOODS)), ids=lambda i: FLOODS[i][:12])
def test_floods_in_every_part_of_a_header(flood):
    """Each flood as the inner header, as the outer one, and in the place of every value of a call with pools.

    Also in the outer header beside an inner one that is as large as allowed: limits of each add up in a message.
    """
    target = next(t for t in targets() if t.name.startswith("FedX2") and "call" in t.name)
    parts, worst = Parts.of(target.data), Worst()
    (outer, about), (inner, fields) = parts.headers
    text, piece = lambda value: json.dumps(value).encode(), FLOODS[flood].encode()
    forged = [joined([(outer, piece), (inner, text(fields))], parts.rest)]
    forged.append(joined([(outer, text(about)), (inner, piece)], parts.rest))
    for key in about:
        changed = text({**about, key: "@"}).replace(b'"@"', piece)
        forged += [joined([(outer, changed), (inner, other)], parts.rest) for other in (text(fields), MANY.encode())]
    for place in range(3):
        changed = text([[*fields[0][:place], "@", *fields[0][place + 1 :]], *fields[1:]]).replace(b'"@"', piece)
        forged.append(joined([(outer, text(about)), (inner, changed)], parts.rest))
    room = Memory()
    for data in forged:
        worst = attack(target, data, worst, room, compare=True)


@pytest.mark.skipif(not MEASURED, reason="this machine does not tell the peak of memory")
@pytest.mark.parametrize(("make", "count"), [(bytes, 1), (b"x".__mul__, 1), (b"x".__mul__, 1000)])
def test_a_message_that_takes_memory_is_found(make, count):
    """One block that is only reserved, one that is used, and many small ones where others were freed before."""
    freed = [bytes(100_000) for _ in range(2_000)]
    del freed
    reader = lambda size: lambda data: [make(size // count) for _ in range(count)]
    with pytest.raises((AssertionError, MemoryError)):
        attack(Target("greedy", b"", reader(160_000_000)), b"", Worst(), Memory(), compare=False)
    attack(Target("modest", b"", reader(20_000_000)), b"", Worst(), Memory(), compare=False)


def test_valid_messages_are_accepted_and_mutations_reach_every_reader():
    """The fuzzer is worth something only if its messages pass the first checks now and then."""
    draw, errors = random.Random(0), set()
    everything = [target.data for target in targets()]
    assert len({target.name.split()[0] for target in targets()}) == len(RUNS)
    for _ in range(2_000):
        target = draw.choice(targets())
        errors.add(outcome(target, mutated(draw, target.data, everything))[:40])
    assert "" in errors
    for words in ("message: not a FedStrata", "message: unreadable header", "message: missing"):
        assert any(error.startswith(words) for error in errors)
    assert any(" is " in error or "announces" in error for error in errors)
