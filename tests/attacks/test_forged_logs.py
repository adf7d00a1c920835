"""Texts of a peer with line ends and escape codes, in the logs of Flower's programs."""

import importlib
import io
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from flwr.app import Message, RecordDict
from flwr.supercore.logger import FLOWER_LOGGER
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.nodestate import NodeStateFactory

from fedstrata.deploy.flower import approval, patches, superlink, supernode
from fedstrata.deploy.flower.config import ServerConfig

FORGED = "1]\nINFO :      all sites have replied\x1b[2K\x1b]0;owned\x07\u202e"


@pytest.fixture
def logged():
    """What Flower's logger writes, without the filters of an earlier test."""
    for name in patches.LOGS:
        for found in list(logging.getLogger(name).filters):
            logging.getLogger(name).removeFilter(found)
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    FLOWER_LOGGER.addHandler(handler)
    yield lambda: text.getvalue()
    FLOWER_LOGGER.removeHandler(handler)


def is_plain(text):
    return all(line.isprintable() for line in text.split("\n"))


def test_a_record_is_one_line_of_printable_characters(logged):
    patches.plain_logs()
    patches.plain_logs()  # no record passes twice
    FLOWER_LOGGER.info("a reply to %s", FORGED)
    FLOWER_LOGGER.error("a reply to " + FORGED)
    FLOWER_LOGGER.info("%d of %d", 1)  # a mistake in Flower's own code ends nobody
    FLOWER_LOGGER.info("x" * 10**6)
    lines = logged().splitlines()
    assert len(lines) == 4
    assert is_plain(logged())
    assert len(lines[3]) == patches.LONGEST
    assert r"1]\nINFO" in lines[0]


def test_the_lines_of_an_error_do_not_look_like_lines_of_the_log(logged):
    patches.plain_logs()
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        FLOWER_LOGGER.error("failed", exc_info=error)
    first, *others = logged().rstrip("\n").split("\n")
    assert first == "failed"
    assert len(others) > 3
    assert all(line.startswith("| ") for line in others)
    assert is_plain(logged())


def test_the_web_server_in_flowers_programs_writes_plain_lines_too(logged):
    patches.plain_logs()
    record = logging.getLogger("uvicorn.error").makeRecord("uvicorn.error", 40, "", 1, "%s", (FORGED,), None)
    assert logging.getLogger("uvicorn.error").filter(record)
    assert record.getMessage().isprintable()


def test_the_superlink_writes_plain_lines(logged, monkeypatch):
    """Flower's SuperLink logs the message that a reply names, as the site has named it."""
    monkeypatch.setattr(sys, "argv", ["superlink"])
    monkeypatch.setattr("flwr.superlink.cli.flower_superlink", lambda: FLOWER_LOGGER.error("reply to %s", FORGED))
    monkeypatch.setattr(superlink.os, "umask", lambda mask: None)
    superlink.main()
    assert logged().count("\n") == 1
    assert is_plain(logged())


def test_the_server_starts_this_superlink(tmp_path):
    words = ServerConfig(tmp_path, "127.0.0.1:9", insecure=True).command()
    found = subprocess.run([*words, "--help"], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("usage: flower-superlink")


def test_the_supernode_and_the_client_app_write_plain_lines(logged, monkeypatch):
    asked = []
    monkeypatch.setattr(patches, "plain_logs", lambda: asked.append(True))
    monkeypatch.setattr(patches, "client_app_alone", lambda: None)
    monkeypatch.setattr(patches, "guard_installation", lambda *_: None)
    monkeypatch.setattr(patches, "short_pulls", lambda: None)
    approval.prepared()
    assert asked == [True]
    monkeypatch.delenv(supernode.STATE, raising=False)
    monkeypatch.setattr(sys, "argv", ["supernode"])
    monkeypatch.setattr(supernode.os, "umask", lambda mask: None)

    def stop(module):
        raise SystemExit

    monkeypatch.setattr(patches, "short_sleeps", stop)  # the first of the changes that follow
    with pytest.raises(SystemExit):
        supernode.main()
    assert asked == [True, True]


def test_a_server_forges_no_line_in_the_log_of_a_site(logged, monkeypatch, caplog):
    module = importlib.import_module(patches.SUPERNODE)
    monkeypatch.setattr(module, "_pull_and_store_message", module._pull_and_store_message)
    patches.plain_logs()
    patches.only_runs_of_server_apps()
    for name, number in (("_run_id", 17), ("_node_id", 1), ("_task_id", 1)):
        monkeypatch.setattr(TaskIdentity, name, number)
    message = Message(RecordDict(), 5, "query", group_id=FORGED)
    message.metadata.__dict__.update(_message_id=FORGED, _run_id=17, _message_type=FORGED)
    run = SimpleNamespace(primary_task_type=f"flwr-agentapp{FORGED}", fab_hash="f", run_id=17)
    found = module._pull_and_store_message(
        state=NodeStateFactory(ObjectStoreFactory()).state(), object_store=SimpleNamespace(), node_config={},
        receive=lambda: (message, None), get_run=lambda number: run, get_fab=None, pull_object=None,
        confirm_message_received=None, trusted_entities=None,
    )  # fmt: skip
    assert found is None
    [own] = [record.getMessage() for record in caplog.records if record.name == "fedstrata"]
    assert "which a flwr-agentapp1]" in own
    assert own.isprintable()
    assert "ROUND 1]" in logged()
    assert is_plain(logged())
