"""A site whose clock is wrong signs with the server's time. Flower's own check of a signature is the reference."""

import importlib
import logging
import re
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace

import httpx
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

import flwr.app.message.message as times
from flwr.app import Message, RecordDict
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.server.utils.validator import validate_message
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.routers.fleet import node_auth

from fedstrata.deploy.flower import patches
from fedstrata.deploy.server_clock import LARGEST, ServerClock, why_rejected

OFFSETS = [-7200, -600, -310, -60, 60, 600, 7200]


@pytest.fixture
def signer(monkeypatch):
    """Flower's module that signs, with what the patch replaces restored afterwards."""
    module = importlib.import_module("flwr.supernode.node_auth_http_interceptor")
    monkeypatch.setattr(module, "now", module.now)
    monkeypatch.setattr(module.NodeAuthHttpInterceptor, "intercept", module.NodeAuthHttpInterceptor.intercept)
    return module


class Server:
    """Answers as Flower's does, with its own check of the signature; `tells` its time or not."""

    def __init__(self, tells=True):
        self.statuses, self.tells = [], tells

    def __call__(self, context):
        try:
            state = SimpleNamespace(protobuf_request=context.message)
            node_auth.authenticate_node(SimpleNamespace(headers=context.request.headers, state=state))
            status = 200
        except node_auth.HTTPException as error:
            status = error.status_code
        self.statuses.append(status)
        headers = {"date": format_datetime(datetime.now(UTC), usegmt=True)} if self.tells else {}
        return httpx.Response(status, headers=headers, request=context.request)


def request(signer, server, keys):
    message = ActivateNodeRequest(public_key=public_key_to_bytes(keys[1]))
    context = SimpleNamespace(message=message, request=httpx.Request("POST", "https://server/v1/fleet/activate-node"))
    return signer.NodeAuthHttpInterceptor(*keys).intercept(context, server).status_code


@pytest.fixture(scope="module")
def keys():
    return generate_key_pairs()


def shifted(seconds):
    return ServerClock(lambda: time.time() + seconds)


def test_without_the_patch_a_clock_that_is_ahead_is_refused(signer, keys, monkeypatch):
    monkeypatch.setattr(signer, "now", shifted(60).now)
    assert request(signer, Server(), keys) == 401


@pytest.mark.parametrize("seconds", OFFSETS)
def test_a_wrong_clock_is_corrected_at_once_and_stays_corrected(signer, keys, seconds):
    patches.sign_with_the_servers_time(shifted(seconds))
    server = Server()
    assert request(signer, server, keys) == 200
    assert request(signer, server, keys) == 200
    refused = seconds > 5 or seconds < -305
    assert server.statuses == ([401, 200, 200] if refused else [200, 200])


@pytest.mark.parametrize("seconds", [-LARGEST, -600, 0, 600, LARGEST])
def test_flower_accepts_the_replies_of_a_clock_that_is_corrected(monkeypatch, seconds):
    """A reply has the site's time and what is left of its call's time to live; at twelve hours nothing is left."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    call = Message(RecordDict(), 5, "query")
    call.metadata.__dict__["_message_id"] = "1"
    real = times.now
    monkeypatch.setattr(times, "now", lambda: real() + timedelta(seconds=seconds))
    reply = Message(RecordDict(), reply_to=call)
    monkeypatch.setattr(times, "now", real)
    reply.metadata.__dict__ |= {"_message_id": "2", "_dst_node_id": 1}
    assert validate_message(reply, is_reply_message=True) == []


def test_a_clock_that_jumps_during_a_run_is_followed(signer, keys):
    jump = [0.0]
    patches.sign_with_the_servers_time(ServerClock(lambda: time.time() + jump[0]))
    server = Server()
    for jump[0] in (0.0, 300.0, -900.0, 0.0):
        assert request(signer, server, keys) == 200


def test_a_right_clock_is_used_as_it_is(signer, keys):
    clock = shifted(0)
    patches.sign_with_the_servers_time(clock)
    assert request(signer, Server(), keys) == 200
    assert clock.offset == 0
    assert abs((clock.now() - datetime.now(UTC)).total_seconds()) < 0.1


def test_the_time_to_sign_is_never_ahead_of_the_servers(signer, keys):
    clock = shifted(60)
    patches.sign_with_the_servers_time(clock)
    for _ in range(5):
        request(signer, Server(), keys)
        assert -2.5 < (clock.now() - datetime.now(UTC)).total_seconds() <= 0.01
        time.sleep(0.2)


def test_the_offset_is_reported_once_with_its_remedy(signer, keys, caplog):
    patches.sign_with_the_servers_time(shifted(60))
    with caplog.at_level(logging.WARNING, "fedstrata"):
        for _ in range(3):
            request(signer, Server(), keys)
    assert len(caplog.records) == 1
    assert "s ahead of the server's" in caplog.text
    assert "Set it" in caplog.text


def test_a_slow_response_does_not_blame_the_clock(caplog):
    clock, ago = ServerClock(), format_datetime(datetime.fromtimestamp(time.time() - 20, UTC), usegmt=True)
    with caplog.at_level(logging.WARNING, "fedstrata"):
        assert not clock.learn(ago, waited=20.0)
    assert clock.offset == 0
    assert not caplog.records
    assert clock.learn(ago, waited=5.0)  # the clock is ahead, whatever the delay was


def test_a_clock_that_is_ahead_is_corrected_although_responses_are_slow(signer, keys, monkeypatch):
    """The server has refused the time: then it is wrong for certain."""
    ticks = iter(range(0, 10_000, 100))
    monkeypatch.setattr(patches, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    patches.sign_with_the_servers_time(shifted(60))
    server = Server()
    assert request(signer, server, keys) == 200
    assert server.statuses == [401, 200]


def test_a_server_cannot_make_a_site_sign_a_time_far_away(signer, keys):
    """A signature holds for its time at any server that knows the key."""
    clock = ServerClock()
    assert not clock.learn(format_datetime(datetime.fromtimestamp(time.time() + 3e6, UTC), usegmt=True))
    assert clock.offset == 0
    assert "set it" in why_rejected(401, clock)


@pytest.mark.parametrize("date", [None, "", "yesterday", "Thu, 99 Foo 2026 00:00:00 GMT"])
def test_a_date_that_cannot_be_read_changes_nothing(date):
    clock = ServerClock()
    assert not clock.learn(date)
    assert not clock.received


def test_a_rejection_tells_clock_and_key_apart(signer, keys):
    far, right, unknown = ServerClock(lambda: time.time() + 3e6), ServerClock(), ServerClock()
    for clock in (far, right):
        clock.learn(format_datetime(datetime.now(UTC), usegmt=True))
    assert re.search(r"clock is 300000\d s ahead of the server's", why_rejected(401, far))
    assert "register" not in why_rejected(401, far)
    assert "clock is not the reason" in why_rejected(401, right)
    assert "the clock may be wrong" in why_rejected(401, unknown)
    assert "deploy register" in why_rejected(412, right)
