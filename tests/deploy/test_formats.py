"""Formats of messages and files, written out by hand: a site and a server of different releases must work together."""

import hashlib
import json
import struct

import numpy as np

import fedstrata as fs
from fedstrata.deploy.agreement import agree, with_data
from fedstrata.deploy.data_summary import DataSummary
from fedstrata.deploy.in_process import advance
from fedstrata.deploy.messages import Message
from fedstrata.deploy.server import Server
from fedstrata.deploy.site import Site
from fedstrata.deploy.site_store import DiskStore, MemoryStore
from fedstrata.engine.checkpoint import Checkpoints

# Two sites with one example each: FedAvg with one full gradient step of size 1/2 halves a site's distance to it.
EXAMPLES = {"Bonn": [8.0, -4.0], "Ulm": [0.0, 12.0]}
START = [4.0, 2.0]
MOVED = {"Bonn": [6.0, -1.0], "Ulm": [2.0, 7.0]}
MEAN = [4.0, 3.0]


def arrays(**values):
    """Arrays of float64 as bytes: magic, length of a JSON header, header, numbers."""
    header = json.dumps([[name, "float64", [len(v)]] for name, v in values.items()], separators=(",", ":")).encode()
    numbers = b"".join(struct.pack("<d", number) for v in values.values() for number in v)
    return b"FSM1" + struct.pack("<I", len(header)) + header + numbers


def message(site, stage, after=None, **values):
    header = {"run": "first", "site": site, "stage": stage, "after": after, "pools": None}
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"FSL1" + struct.pack("<I", len(text)) + text + arrays(**{f"{n}.tree": v for n, v in values.items()})


def data(name):
    return fs.Federation.from_clients([{"x": np.array([EXAMPLES[name]])}], names=[name])


def agreement():
    problem = fs.Average(lambda w, example: 0.5 * (w - example["x"]) @ (w - example["x"]))
    summaries = [DataSummary.of(name, data(name)) for name in EXAMPLES]
    options = {"params": np.array(START), "batch_size": "all"}
    return agree("first", problem, fs.FedAvg(0.5, 1), summaries, **options)


def test_a_site_answers_the_bytes_of_a_call_with_the_bytes_of_a_reply(tmp_path):
    common = agreement()
    for number, name in enumerate(EXAMPLES):
        site = Site(with_data(common, data(name)), name, number, DiskStore(tmp_path / name, name))
        begun = site.answer(Message.decode(message(name, [-1, 0, 0, 0])))
        assert begun.encode() == message(name, [-1, 0, 0, 0])
        reply = site.answer(Message.decode(message(name, [0, 0, 0, 0], [-1, 0, 0, 0], x=START)))
        assert reply.encode() == message(name, [0, 0, 0, 0], x=MOVED[name])


def test_a_server_sends_the_bytes_of_calls_and_merges_the_bytes_of_replies():
    sent = []

    def link(calls):
        sent.extend(call.encode() for call in calls.values())
        values = lambda call: {"x": MOVED[call.site]} if call.stage.round == 0 else {}
        reply = lambda call: message(call.site, [call.stage.round, 0, 0, 0], **values(call))
        return {i: Message.decode(reply(call)) for i, call in calls.items()}

    server = Server(agreement(), tuple(EXAMPLES), link)
    now = advance(server, 1)
    begin = [message(name, [-1, 0, 0, 0]) for name in EXAMPLES]
    assert sent == begin + [message(name, [0, 0, 0, 0], [-1, 0, 0, 0], x=START) for name in EXAMPLES]
    np.testing.assert_array_equal(server.solution(now).tree, MEAN)


def test_a_site_resumes_from_a_stage_file_and_writes_the_next(tmp_path):
    """SCAFFOLD with one step of size 1/2: x - (gradient - c_i + c) / 2, and c_i becomes the gradient."""
    problem = fs.Average(lambda w, example: 0.5 * (w - example["x"]) @ (w - example["x"]))
    options = {"params": np.array(START), "batch_size": "all"}
    common = agree("first", problem, fs.SCAFFOLD(0.5, 1), [DataSummary.of("Ulm", data("Ulm"))], **options)
    site = Site(with_data(common, data("Ulm")), "Ulm", 0, DiskStore(tmp_path, "Ulm"))
    stage_file(tmp_path / "0_0.state", x=[0.0, 0.0], c=[0.0, 0.0], c_i=[2.0, 0.0])
    call = message("Ulm", [1, 0, 0, 0], [0, 0, 0, 0], x=START, c=[0.0, 0.0])
    reply = site.answer(Message.decode(call)).encode()
    assert reply == message("Ulm", [1, 0, 0, 0], dx=[-1.0, 5.0], dc=[2.0, -10.0])
    expected = stage_file(tmp_path / "expected", x=[3.0, 7.0], c=[0.0, 0.0], c_i=[4.0, -10.0])
    assert (tmp_path / "1_0.state").read_bytes() == expected


def stage_file(path, **values):
    """The file of a stage: a checksum, and the site's fields."""
    body = arrays(**{f"{name}.tree": value for name, value in values.items()})
    path.write_bytes(hashlib.sha256(body).digest() + body)
    return path.read_bytes()


def test_a_checkpoint_of_a_server_has_the_names_of_the_format(tmp_path):
    common, store = agreement(), Checkpoints(tmp_path)
    sites = [Site(with_data(common, data(n)), n, i, MemoryStore()) for i, n in enumerate(EXAMPLES)]
    server = Server(common, tuple(EXAMPLES), lambda calls: {i: sites[i].answer(call) for i, call in calls.items()})
    server.save(store, advance(server, 1))
    saved = store.load()
    after = {name: [0, 0, 0, 0] for name in EXAMPLES}
    assert saved.config == {"run": "first", "sites": list(EXAMPLES), "after": after, "mechanisms": {}}
    assert list(saved.arrays) == ["shared.x.tree"]
    np.testing.assert_array_equal(saved.arrays["shared.x.tree"], MEAN)
