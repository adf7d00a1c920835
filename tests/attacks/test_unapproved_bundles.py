"""Bundles that a site has not approved, sent to fill the memory of its SuperNode before the client app's check."""

import importlib
import io
import time
import zipfile
from hashlib import sha256
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from deployments import federation, finished, programs_or_skip, simulated, started, write_app
from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.nodestate import NodeStateFactory

from fedstrata.base import few_lines
from fedstrata.deploy.flower import patches, supernode

PROJECT = b'[project]\nname = "a"\nversion = "1.0.0"\n[tool.flwr.app]\npublisher = "b"\n'


def bundle(project=PROJECT):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("pyproject.toml", project)
    return data.getvalue()


def named(data):
    return sha256(data).hexdigest()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """What a SuperNode with a list of approved bundles does with messages; what it has fetched, parsed and answered."""
    module = importlib.import_module(patches.SUPERNODE)
    monkeypatch.setattr(module, "_pull_and_store_message", module._pull_and_store_message)
    monkeypatch.setenv(supernode.APPROVED, str(tmp_path / "approved.txt"))
    (tmp_path / "approved.txt").touch(0o600)
    patches.only_runs_of_server_apps(supernode.approved_apps())
    for name, number in (("_run_id", 17), ("_node_id", 1), ("_task_id", 1)):
        monkeypatch.setattr(TaskIdentity, name, number)
    fetched, parsed, numbers = [], [], iter(range(1, 1000))
    monkeypatch.setattr(module, "get_fused_config_from_fab", lambda data, run: parsed.append(data) or {})
    store = ObjectStoreFactory().store()
    state = NodeStateFactory(ObjectStoreFactory()).state()
    state.set_node_id(1)

    def gone(*_):
        raise RuntimeError("the test has no objects")

    def receives(data, said=None):
        message = Message(RecordDict(), 5, "query")
        message.metadata.__dict__.update(_message_id=str(next(numbers)), _run_id=17)
        run = SimpleNamespace(
            primary_task_type=TaskType.SERVER_APP, fab_hash=said or named(data), run_id=17, series_id=1
        )
        fab = SimpleNamespace(content=data, hash_str=said or named(data), verifications={})
        return module._pull_and_store_message(
            state=state, object_store=store, node_config={}, receive=lambda: (message, get_object_tree(message)),
            get_run=lambda number: run, get_fab=lambda *about: fetched.append(about) or fab, pull_object=gone,
            confirm_message_received=lambda *_: None, trusted_entities=None,
        )  # fmt: skip

    answers = lambda: [m.error for m in state.get_messages_legacy(is_reply=True)]
    return SimpleNamespace(receives=receives, fetched=fetched, parsed=parsed, answers=answers, state=state,
                           file=tmp_path / "approved.txt")  # fmt: skip


def test_an_unapproved_bundle_is_not_fetched_and_the_server_is_told_why(site, caplog):
    data = bundle(PROJECT + b"#" + b"a" * 10**7)  # 10 KB in the bundle, and 300 times as much in Flower's parser
    assert site.receives(data) == 17  # and so the reply is sent
    assert (site.fetched, site.parsed, site.state.get_run(17)) == ([], [], None)
    [error] = site.answers()
    assert error.code == ErrorCode.INVALID_FAB
    assert error.reason == f"this site has not approved version {named(data)[:16]} of the app"
    [line] = [record.getMessage() for record in caplog.records if record.name == "fedstrata"]
    assert line == f"refused run 17: {error.reason}"


def test_a_bundle_that_is_not_the_approved_one_that_its_run_names_is_not_parsed(site):
    approved, other = bundle(), bundle(PROJECT + b"# more")
    site.file.write_text(f"{named(approved)}  hospitals\n")
    assert site.receives(other, said=named(approved)) == 17
    assert len(site.fetched) == 1
    assert site.parsed == []
    assert named(other)[:16] in site.answers()[0].reason


def test_an_approved_bundle_is_taken_also_after_refused_ones_and_without_a_restart(site):
    data = bundle()
    assert site.receives(data) == 17
    site.file.write_text(f"{named(data)}  hospitals\n")
    site.receives(data)
    assert site.parsed == [data]
    assert site.state.get_run(17) is not None


def test_a_list_that_others_can_change_approves_nothing_here_too(site):
    data = bundle()
    site.file.write_text(f"{named(data)}  hospitals\n")
    site.file.chmod(0o666)
    site.receives(data)
    assert (site.fetched, site.parsed) == ([], [])
    [error] = site.answers()
    assert "not approved" in error.reason
    assert str(site.file) not in error.reason  # nor anything else of this machine


def test_nobody_fills_the_log_with_unapproved_bundles(site, caplog):
    for _ in range(10 * few_lines.MOST):
        site.receives(bundle())
    own = [record for record in caplog.records if record.name == "fedstrata"]
    assert len(own) == few_lines.MOST + 1


def test_a_supernode_that_was_started_without_a_list_takes_every_bundle(monkeypatch):
    """Its client app is Flower's own, which checks nothing either."""
    monkeypatch.delenv(supernode.APPROVED, raising=False)
    assert supernode.approved_apps() is None


@pytest.mark.slow
def test_a_server_learns_at_once_that_its_app_is_not_approved_and_a_run_of_the_approved_one_goes_on(tmp_path):
    programs_or_skip()
    app = write_app(tmp_path, "unapproved", "FedAvg", 2)
    task = app / "unapproved" / "task.py"
    with federation(tmp_path, app) as flower:
        approved = task.read_text()
        task.write_text(approved + "# a line that nobody has read\n")
        refused = started(flower, tmp_path / "changed", "changed")
        log, until = tmp_path / "changed" / "run.log", time.monotonic() + 120
        while log.read_text().count("this site has not approved version") < 3 and time.monotonic() < until:
            time.sleep(0.5)
        assert log.read_text().count("this site has not approved version") >= 3, log.read_text()[-3000:]
        assert "refused run" in flower.log("site-0", 200)
        refused.kill()
        refused.wait()
        task.write_text(approved)
        found = finished(started(flower, tmp_path / "out"), tmp_path / "out" / "first")
    np.testing.assert_allclose(found, simulated("FedAvg", 2).solution(), rtol=1e-12)
