"""A SuperNode tries again when the network was silent, and sends replies when they are ready."""

import importlib
import socket
import ssl
import threading

import httpx
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from flwr.app import Message as FlowerMessage
from flwr.app import RecordDict
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.nodestate import NodeStateFactory

from fedstrata.deploy.flower import patches
from fedstrata.deploy.flower.keys import server_keys

MODULE = "flwr.supernode.fleet_http_connection"


@pytest.fixture
def ends(monkeypatch):
    """Whether Flower, with the patch or without it, gives up after an error."""
    module = importlib.import_module(MODULE)
    monkeypatch.setattr(module, "make_simple_http_retry_invoker", module.make_simple_http_retry_invoker)
    alone = module.make_simple_http_retry_invoker().should_giveup
    patches.persistent_connections()
    return alone, module.make_simple_http_retry_invoker().should_giveup


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


def failure(listener, authority):
    """The error of a request to this listener."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority)
    with httpx.Client(verify=context, timeout=0.3) as client, pytest.raises(httpx.TransportError) as found:
        client.get(f"https://127.0.0.1:{listener.getsockname()[1]}")
    return found.value


def answering(listener, answer):
    """A thread that answers one connection."""
    thread = threading.Thread(target=lambda: answer(listener.accept()[0]))
    thread.start()
    return thread


def test_a_silent_network_is_outlasted(ends, listener, tmp_path):
    error = failure(listener, server_keys(tmp_path, ["127.0.0.1"])[0])
    alone, patched = ends
    assert alone(error)  # without the patch: the handshake's error has "ssl" in its text
    assert not patched(error)


def test_a_server_that_closes_in_the_middle_of_a_handshake_is_called_again(ends, listener, tmp_path):
    def close(connection):
        connection.recv(100)
        connection.close()

    thread = answering(listener, close)
    error = failure(listener, server_keys(tmp_path, ["127.0.0.1"])[0])
    thread.join()
    assert not ends[1](error), error


def test_a_server_with_another_certificate_is_left(ends, listener, tmp_path):
    def shake_hands(connection):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*others[1:])
        with connection, pytest.raises(OSError):
            context.wrap_socket(connection, server_side=True)

    own, others = server_keys(tmp_path / "own", ["127.0.0.1"]), server_keys(tmp_path / "others", ["127.0.0.1"])
    thread = answering(listener, shake_hands)
    error = failure(listener, own[0])
    thread.join()
    assert "CERTIFICATE_VERIFY_FAILED" in str(error)
    assert ends[1](error)


@pytest.fixture
def pulled(monkeypatch):
    """Flower's function that returns the run of a new message, with the patch; `arrives` stands for what it does."""
    module = importlib.import_module("flwr.supernode.start_client_internal")

    def pull(state, get_run, pull_object, confirm_message_received, arrives):
        return arrives(pull_object, confirm_message_received)

    monkeypatch.setattr(module, "_pull_and_store_message", pull)
    patches.only_runs_of_server_apps()
    return module._pull_and_store_message


@pytest.fixture
def state(monkeypatch):
    """A SuperNode's state with the message "1" of run 17."""
    for name, number in (("_run_id", 17), ("_node_id", 1), ("_task_id", 1)):
        monkeypatch.setattr(TaskIdentity, name, number)
    found = NodeStateFactory(ObjectStoreFactory()).state()
    question = FlowerMessage(RecordDict(), 5, "query")
    question.metadata.__dict__["_message_id"] = "1"
    found.store_message(question)
    return found, question


def test_a_reply_that_is_ready_is_sent_without_a_new_message(pulled, state):
    kept, question = state
    run = lambda new: pulled(
        state=kept, get_run=None, pull_object=None, confirm_message_received=None, arrives=lambda *_: new
    )
    assert run(None) is None
    assert run(3) == 3
    reply = FlowerMessage(RecordDict(), reply_to=question)
    reply.metadata.__dict__["_message_id"] = "2"
    kept.store_message(reply)
    assert run(None) == 17
    assert len(kept.get_messages_legacy(is_reply=True)) == 1  # Flower takes it to send it
    assert run(None) is None


def test_a_message_whose_run_stops_while_it_arrives_fails_as_any_other(pulled, state):
    def stopped(*_):
        raise RunNotRunningException

    for part in (0, 1):
        with pytest.raises(RuntimeError, match="its run was stopped"):
            pulled(
                state=state[0],
                get_run=None,
                pull_object=stopped,
                confirm_message_received=stopped,
                arrives=lambda *parts, part=part: parts[part](17, "1"),
            )
    pulled(
        state=state[0], get_run=None, pull_object=len, confirm_message_received=len, arrives=lambda get, _: get("12")
    )
