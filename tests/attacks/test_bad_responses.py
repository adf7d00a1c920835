"""A SuperLink that sends a site responses which would fill its memory, or lead it elsewhere. And calls that fail."""

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from flwr.app import Message
from flwr.common.constant import SubStatus
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.supercore.constant import TaskType
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from fedstrata.deploy.flower import patches
from fedstrata.deploy.flower.client_app import record

MOST = 1_000_000
RUN = 7


def found(size):
    return PullObjectResponse(object_found=True, object_available=True, object_content=bytes(size)).SerializeToString()


class SuperLink(BaseHTTPRequestHandler):
    """Answers with its server's `kind` of response, and notes who asked for what."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        kind, (host, port) = self.server.kind, self.server.server_address
        self.server.asked.append((self.path, self.headers.get("accept-encoding")))
        if kind.isdigit():
            self.send_response(int(kind))
            self.send_header("location", f"http://{host}:{port}/elsewhere")
            self.send_header("content-length", "0")
            return self.end_headers()
        body = found(100 if kind == "honest" else MOST * 20)
        if kind in ("gzip", "deflate"):
            body = gzip.compress(body)
        self.send_response(200)
        if kind in ("gzip", "deflate"):
            self.send_header("content-encoding", kind)
        if kind != "without a length":
            self.send_header("content-length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:
            self.server.cut = True

    def do_GET(self):
        self.server.asked.append((self.path, None))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words):
        pass


@pytest.fixture
def fetched(monkeypatch):
    """What a SuperNode gets from a SuperLink of some kind; and what it asked for."""
    client = patches.importlib.import_module("flwr.supercore.protobuf.client").ProtobufClient
    monkeypatch.setattr(client, "__init__", getattr(client.__init__, "__wrapped__", client.__init__))
    server = ThreadingHTTPServer(("127.0.0.1", 0), SuperLink)
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def fetch(kind, bounded=True):
        if bounded:
            patches.bounded_responses(MOST)
        server.kind = kind
        node = FleetHttpClient(f"http://127.0.0.1:{server.server_port}", timeout=20.0)
        return node.PullObject(PullObjectRequest(object_id="a")).object_content, server.asked

    yield fetch
    server.shutdown()
    server.server_close()


def test_an_honest_response_is_read_and_asked_for_without_compression(fetched):
    content, asked = fetched("honest")
    assert content == bytes(100)
    assert asked[-1][1] == "identity"


@pytest.mark.parametrize("kind", ["gzip", "deflate"])
def test_a_small_response_that_unpacks_to_a_large_one_is_not_unpacked(fetched, kind):
    with pytest.raises(ValueError, match=f"compressed, though it must not be \\({kind}\\)"):
        fetched(kind)


@pytest.mark.parametrize("kind", ["large", "without a length"])
def test_a_response_is_read_up_to_the_limit_and_no_further(fetched, kind):
    with pytest.raises(ValueError, match="a response of more than 1,000,000 bytes"):
        fetched(kind)


@pytest.mark.parametrize("status", ["301", "302", "303", "307", "308"])
def test_a_site_is_not_led_to_another_address(fetched, status):
    with pytest.raises(httpx.HTTPStatusError):
        fetched(status)
    assert "/elsewhere" not in [path for path, _ in fetched("honest")[1]]


def test_flower_itself_unpacks_responses_and_follows_redirections(fetched):
    """Otherwise the tests above show nothing."""
    assert len(fetched("gzip", bounded=False)[0]) == 20 * MOST
    assert "/elsewhere" in [path for path, _ in fetched("302", bounded=False)[1]]


@pytest.mark.parametrize("patched", [True, False])
def test_a_client_app_that_fails_at_once_leaves_its_message_with_an_answer(patched, monkeypatch):
    """Flower waits for an answer before it takes the next message of the run: without one, the site is deaf to it."""
    finish = InMemoryNodeState.finish_task
    monkeypatch.setattr(InMemoryNodeState, "finish_task", getattr(finish, "__wrapped__", finish))
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    if patched:
        patches.failures_are_answered()
    state = InMemoryNodeState(ObjectStoreFactory().store())
    call = Message(record({"call": "token"}, b""), 1, "query.survey")
    call.metadata.__dict__.update(_message_id=call.object_id, _run_id=RUN)
    state.store_message(call)
    [_] = state.get_messages_legacy(run_ids=[RUN], is_reply=False, limit=1)
    state.record_message_processing_start(call.metadata.message_id)
    task = state.create_task(TaskType.CLIENT_APP, RUN)
    assert state.claim_task(task)
    assert state.activate_task(task)
    assert state.finish_task(task, SubStatus.FAILED, "its call was too large")
    replies = state.get_messages_legacy(run_ids=[RUN], is_reply=True)
    assert [reply.metadata.reply_to_message_id for reply in replies] == [call.metadata.message_id] * patched
    assert all(reply.has_error() for reply in replies)
