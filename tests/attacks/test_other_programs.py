"""Flower's other programs run any bundle without a check, and other users of a machine could take a site's messages."""

import importlib
import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from flwr.app import Message, RecordDict
from flwr.supercore.constant import TASK_TYPE_TO_COMMAND, TaskType
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec
from flwr.supercore.superexec.plugin import AutoExecPlugin
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.nodestate import NodeStateFactory

from fedstrata.deploy.flower import fork_server, patches, socket_frames


@pytest.fixture
def node(monkeypatch):
    """What a SuperNode does with a message of a run; the bundles that it fetched, and its state."""
    module = importlib.import_module(patches.SUPERNODE)
    monkeypatch.setattr(module, "_pull_and_store_message", module._pull_and_store_message)
    patches.only_runs_of_server_apps()
    for name, number in (("_run_id", 17), ("_node_id", 1), ("_task_id", 1)):
        monkeypatch.setattr(TaskIdentity, name, number)
    state, fetched = NodeStateFactory(ObjectStoreFactory()).state(), []

    def receives(primary):
        message = Message(RecordDict(), 5, "query")
        message.metadata.__dict__.update(_message_id="1", _run_id=17)
        fetch = lambda *about: fetched.append(about) or SimpleNamespace(content=b"", hash_str="", verifications={})
        return module._pull_and_store_message(
            state=state, object_store=SimpleNamespace(), node_config={}, receive=lambda: (message, None),
            get_run=lambda number: SimpleNamespace(primary_task_type=primary, fab_hash="f", run_id=number),
            get_fab=fetch, pull_object=None, confirm_message_received=None, trusted_entities=None,
        )  # fmt: skip

    return receives, fetched, state


@pytest.mark.parametrize("primary", sorted({*TaskType, "", "flwr-newapp"} - {TaskType.SERVER_APP}))
def test_a_run_that_no_server_app_leads_is_dropped_before_its_bundle_is_fetched(node, primary):
    receives, fetched, state = node
    assert receives(primary) is None
    assert (fetched, state.get_run(17)) == ([], None)


def test_the_bundle_of_a_run_that_a_server_app_leads_is_fetched(node):
    receives, fetched, _ = node
    with pytest.raises(Exception, match="zip"):  # the bundle of this test is none
        receives(TaskType.SERVER_APP)
    assert fetched == [("f", 17)]


@pytest.fixture
def superexec(monkeypatch):
    """Flower's SuperExec as a site runs it, and what it has started."""
    monkeypatch.setattr(AutoExecPlugin, "supported_task_types", AutoExecPlugin.supported_task_types)
    monkeypatch.setattr(SubprocessExecutor, "launch", SubprocessExecutor.launch)
    patches.only_client_apps()
    patches.hidden_tokens(fork_server.TOKEN)
    return AutoExecPlugin("127.0.0.1:1", True, None, executor=SubprocessExecutor())


def test_only_client_apps_are_started(superexec, monkeypatch):
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda words, **_: started.append(words[0]))
    for number, kind in enumerate(TaskType, 1):
        superexec.launch_task("token", SimpleNamespace(type=kind, task_id=number, fab_hash=""))
    assert started == ["flwr-clientapp"]
    asked, _ = superexec.executor.get_eligible_capacity(set(superexec.supported_task_types))
    assert [TASK_TYPE_TO_COMMAND[kind] for kind in asked] == ["flwr-clientapp"]  # the SuperNode is asked for no others


def test_the_token_of_a_message_stands_in_no_command(superexec, tmp_path, monkeypatch):
    """All users of a machine can read commands; only its owner can read the environment of a process."""
    program = tmp_path / "flwr-clientapp"
    program.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/words\nprintf %s "${fork_server.TOKEN}" > {tmp_path}/token\n'
    )
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    spec = ExecutionSpec(TaskType.CLIENT_APP, "127.0.0.1:1", "5ecret", True, None, False, 1, False, 1)
    assert superexec.executor.launch(spec).status == "accepted"
    assert started[0].wait() == 0
    words = (tmp_path / "words").read_text().split()
    assert "5ecret" not in " ".join([*words, *started[0].args])
    assert fork_server.TOKEN not in os.environ
    monkeypatch.setenv(fork_server.TOKEN, (tmp_path / "token").read_text())
    found = fork_server.with_token(words)
    assert found[found.index("--token") + 1] == "5ecret"
    assert fork_server.TOKEN not in os.environ  # the app does not inherit it


def test_a_link_in_the_temporary_folder_is_not_followed(tmp_path, monkeypatch):
    """Another user may put it there, and let it lead to a folder of the site's owner, and elsewhere later."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / f"fedstrata-{os.getuid()}").symlink_to(tmp_path / "own")
    with pytest.raises(PermissionError, match="belongs to this user alone"):
        socket_frames.address(Path("/", *["long"] * 40))
