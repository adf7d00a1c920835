"""Code that a site has not approved, offered in every way that Flower's client app takes code."""

import importlib
import os
import shutil
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from flwr.cli.install import install_from_fab
from flwr.common.config import get_project_dir

from fedstrata.deploy.flower import app_template
from fedstrata.deploy.flower.approval import Gate, approve, approved, bundle, differences
from fedstrata.deploy.flower.client_app import code_of

ID, VERSION = "hospitals/hospitals", "1.0.0"


@pytest.fixture
def app(tmp_path, monkeypatch):
    """An app that the site has approved."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)
    app_template.write(tmp_path / "hospitals", 1)
    approve(tmp_path / "hospitals", tmp_path / "approved.txt")
    return tmp_path / "hospitals"


@pytest.fixture
def gate(tmp_path):
    return Gate(lambda: tmp_path / "approved.txt")


def install(gate, data):
    return gate.installing(install_from_fab)(data, skip_prompt=True)


def locate(gate, *named):
    return gate.locating(get_project_dir)(*named)


def evil(folder):
    """An app in a folder that was not unpacked from an approved bundle."""
    shutil.rmtree(folder, ignore_errors=True)
    app_template.write(folder, 1)
    return folder


def test_only_what_was_approved_is_installed(app, gate, tmp_path):
    sent = bundle(app)
    folder = install(gate, sent)
    assert (folder / "hospitals" / "task.py").exists()
    task = app / "hospitals" / "task.py"
    task.write_text(task.read_text() + "# one more line\n")
    with pytest.raises(PermissionError, match="has not approved"):
        install(gate, bundle(app))
    assert approve(app, tmp_path / "approved.txt") in approved(tmp_path / "approved.txt")
    assert install(gate, bundle(app)) != folder


def test_an_approved_app_is_loaded_from_where_it_was_unpacked(app, gate):
    sent = bundle(app)
    folder = install(gate, sent)
    assert locate(gate, *gate.named) == folder
    assert gate.named[:2] == (ID, VERSION)


@pytest.mark.parametrize(
    "change",
    [
        {"version": "1.0.0/../../../evil/x"},  # the folder's name ends with the hash, which a link can have
        {"version": "../../evil"},
        {"version": "2.0.0"},
        {"version": ""},
        {"id": "other/hospitals"},
        {"id": "../evil"},
        {"hash": "f" * 64},
    ],
)
def test_a_run_that_names_another_folder_than_its_bundle_is_refused(app, gate, change):
    """The server sends the bundle and, separately, the id, the version and the hash by which the app is found."""
    install(gate, bundle(app))
    fab_id, version, found = gate.named
    named = change.get("id", fab_id), change.get("version", version), change.get("hash", found)
    with pytest.raises(PermissionError, match="nothing is loaded"):
        locate(gate, *named)


def test_nothing_is_loaded_before_something_was_unpacked(app, gate, tmp_path):
    evil(tmp_path / "flower" / "apps" / f"hospitals.hospitals.1.0.0.{'a' * 8}")
    with pytest.raises(PermissionError, match="nothing is loaded"):
        locate(gate, ID, VERSION, "a" * 64)


def test_flowers_client_app_refuses_a_crafted_version(app, tmp_path, monkeypatch):
    """The whole of Flower's function, with a server that sends an approved bundle and a path to other code."""
    from flwr.app.error import Error

    from fedstrata.deploy.flower import patches

    runner = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    loader = importlib.import_module("flwr.clientapp.utils")
    for module, name in ((runner, "install_from_fab"), (runner, "get_project_dir"), (loader, "get_project_dir")):
        monkeypatch.setattr(module, name, getattr(module, name))  # restores them afterwards
    gate = Gate(lambda: tmp_path / "approved.txt")
    patches.guard_installation(gate.installing, gate.locating)
    sent = bundle(app)
    found = __import__("hashlib").sha256(sent).hexdigest()
    (tmp_path / "flower" / "apps" / "hospitals.hospitals.1.0.0").mkdir(parents=True)
    stolen = tmp_path / "flower" / "apps" / "hospitals.hospitals.1.0.0" / f"stolen.{found[:8]}"
    (stolen / "stolen").mkdir(parents=True)
    (stolen / "pyproject.toml").write_text((app / "pyproject.toml").read_text().replace("hospitals.", "stolen."))
    (stolen / "stolen" / "client_app.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit\n")
    replies = []

    class Reply(SimpleNamespace):
        def __init__(self, content, reply_to):
            super().__init__(content=content)
            replies.append(content)

    run = SimpleNamespace(fab_id=ID, fab_version="1.0.0/stolen", run_id=1)
    fab = SimpleNamespace(content=sent, hash_str=found)
    pulled = lambda client: (SimpleNamespace(), SimpleNamespace(), run, fab)
    nothing = lambda *_, **__: None
    heart = SimpleNamespace(start=nothing, stop=nothing, is_running=False)
    for name, value in {
        "pull_task_input": pulled, "Message": Reply, "push_message": nothing, "push_task_output": nothing,
        "HeartbeatSender": lambda _: heart, "register_signal_handlers": nothing, "flwr_exit": nothing,
        "event": nothing,
    }.items():  # fmt: skip
        monkeypatch.setattr(runner, name, value)
    runner.run_clientapp("127.0.0.1:1", "token", insecure=True)
    assert not (tmp_path / "ran").exists()
    assert isinstance(replies[0], Error)
    assert "PermissionError" in replies[0].reason


@pytest.mark.parametrize("how", ["changed", "added", "removed", "compiled", "link", "folder is a link"])
def test_a_folder_that_was_tampered_with_is_unpacked_again(app, gate, tmp_path, how):
    sent = bundle(app)
    folder = install(gate, sent)
    task = folder / "hospitals" / "task.py"
    honest = task.read_text()
    if how == "changed":
        task.write_text("raise SystemExit('stolen')")
    elif how == "added":
        (folder / "numpy.py").write_text("raise SystemExit('stolen')")
    elif how == "removed":
        task.unlink()
    elif how == "compiled":
        (folder / "hospitals" / "__pycache__").mkdir()
        (folder / "hospitals" / "__pycache__" / "task.cpython-311.pyc").write_bytes(b"stolen")
    elif how == "link":
        (tmp_path / "elsewhere.py").write_text(honest)
        task.unlink()
        task.symlink_to(tmp_path / "elsewhere.py")
    else:
        shutil.move(folder, tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    assert install(gate, sent) == folder
    assert differences(sent, folder) == []
    assert task.read_text() == honest
    assert not folder.is_symlink()
    assert not task.is_symlink()
    assert not (folder / "numpy.py").exists()
    assert list(folder.rglob("*.pyc")) == []


@pytest.mark.parametrize("change", ["settings.json", "more/settings.toml", "moved"])
def test_the_version_of_an_app_covers_every_file_that_is_shipped_and_its_place(tmp_path, monkeypatch, change):
    package = tmp_path / "app_with_settings"
    (package / "more").mkdir(parents=True)
    for name in ("__init__.py", "more/part.py", "settings.json", "more/settings.toml"):
        (package / name).write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    before = code_of("app_with_settings.task:deployment")
    if change == "moved":
        (package / "more" / "part.py").rename(package / "part.py")
    else:
        (package / change).write_text("1")
    assert code_of("app_with_settings.task:deployment") != before


@pytest.mark.parametrize("shipped", [True, False])
def test_the_version_of_an_app_covers_modules_beside_its_package(tmp_path, monkeypatch, shipped):
    """Flower ships the whole folder of an app: the package may import from all of it. Elsewhere, other things lie."""
    package = tmp_path / "app_with_a_neighbour"
    package.mkdir()
    (package / "__init__.py").write_text("")
    if shipped:
        (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    before = code_of("app_with_a_neighbour.task:deployment")
    (tmp_path / "losses.py").write_text("")
    assert (code_of("app_with_a_neighbour.task:deployment") != before) == shipped


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_list_that_others_can_change_approves_nothing(app, gate, tmp_path, mode):
    (tmp_path / "approved.txt").chmod(mode)
    with pytest.raises(PermissionError, match="chmod 600"):
        gate.installing(lambda *_: pytest.fail("it was unpacked"))(bundle(app))


def test_a_list_that_belongs_to_another_user_approves_nothing(app, gate, tmp_path, monkeypatch):
    file, sent = tmp_path / "approved.txt", bundle(app)
    if os.getuid() == 0:
        os.chown(file, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: file.stat().st_uid + 1)
    assert file.stat().st_mode & 0o077 == 0  # it is only the owner that is wrong
    with pytest.raises(PermissionError, match="chmod 600"):
        approved(file)
    with pytest.raises(PermissionError, match="chmod 600"):
        gate.installing(lambda *_: pytest.fail("it was unpacked"))(sent)


def test_the_list_is_written_for_its_owner(app, tmp_path):
    mask = os.umask(0o002)  # usual where every user has a group of their own
    try:
        approve(app, tmp_path / "new.txt")
    finally:
        os.umask(mask)
    assert (tmp_path / "new.txt").stat().st_mode & 0o777 == 0o600
