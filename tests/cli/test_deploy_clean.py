"""`fedstrata deploy clean` removes what is old, and only that."""

import json
import os
import time
from datetime import UTC, datetime, timedelta

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from superlinks import app, flwr, link

from fedstrata.cli.main import main
from fedstrata.deploy.flower.control import FlowerNode, public_key
from fedstrata.deploy.flower.keys import server_keys
from fedstrata.deploy.flower.run_lock import only_server, read_status, write_status
from fedstrata.deploy.flower.supernode import only_supernode

__all__ = ["app", "flwr", "link"]  # fixtures


def old_run(app, name, state, days):
    folder = app / "out" / name
    (folder / "checkpoints" / "round-3").mkdir(parents=True)
    (folder / "checkpoints" / "round-3" / "data").write_bytes(b"x" * 1000)
    for kept in ("model.npz", "evaluations.jsonl", "reports.jsonl", "solution.npz"):
        (folder / kept).write_bytes(b"x")
    write_status(folder, run=name, state=state)
    found = read_status(folder) | {"updated": (datetime.now(UTC) - timedelta(days=days)).isoformat()}
    (folder / "status.json").write_text(json.dumps(found))
    return folder


def cleaned(capsys, *words):
    assert main(["deploy", "clean", *words, "--json"]) == 0
    return [row["path"] for row in json.loads(capsys.readouterr().out)["files"]]


def test_clean_shows_and_removes_only_old_checkpoints(app, link, flwr, capsys):
    flwr("not to be called")
    states = {"bad": "failed", "died": "running", "old": "finished", "stopped": "stopped"}
    old = [old_run(app, name, state, 31) for name, state in states.items()][2]
    young = old_run(app, "young", "finished", 10)
    found = cleaned(capsys)
    assert found == [str(app / "out" / name / "checkpoints") for name in states]
    assert (old / "checkpoints").exists()
    assert cleaned(capsys, "--yes") == found
    assert not (old / "checkpoints").exists()
    assert (young / "checkpoints").exists()
    assert {p.name for p in old.iterdir()} >= {"model.npz", "evaluations.jsonl", "reports.jsonl", "status.json"}
    assert cleaned(capsys) == []
    assert str(young / "checkpoints") in cleaned(capsys, "--days", "5")
    capsys.readouterr()
    assert main(["deploy", "run", "--name", "old"]) == 2  # it would begin again, and spend privacy again
    assert "choose another --name" in capsys.readouterr().err


def test_a_removal_that_was_interrupted_is_finished_by_the_next_one(app, link, capsys):
    folder = old_run(app, "old", "finished", 40)
    write_status(folder, cleaned=True)  # which comes before the removal, and makes the status new
    assert cleaned(capsys, "--yes") == [str(folder / "checkpoints")]
    assert not (folder / "checkpoints").exists()


def test_clean_spares_a_run_that_has_a_server(app, link, capsys):
    folder = old_run(app, "old", "finished", 40)
    with only_server(folder, {}):
        assert cleaned(capsys, "--yes") == []
    assert (folder / "checkpoints").exists()


def test_clean_removes_expired_certificates_and_unknown_keys_only_if_asked(app, link, capsys):
    for name in ("authority.crt", "server.crt", "server.key"):
        (app / "keys" / name).unlink()
    server_keys(app / "keys", ["127.0.0.1"], days=0)
    time.sleep(1.1)
    link.nodes_found = [FlowerNode(5, "online", public_key(app / "keys/site-1.pub"))]
    names = lambda paths: sorted(path.rpartition("/")[2] for path in paths)
    assert names(cleaned(capsys)) == ["authority.crt", "server.crt", "server.key"]
    assert names(cleaned(capsys, "--keys")) == ["authority.crt", "server.crt", "server.key"]  # it is new
    os.utime(app / "keys/site-2.pub", (0, 0))
    assert names(cleaned(capsys, "--keys")) == ["authority.crt", "server.crt", "server.key", "site-2.pub"]
    (app / "keys/z copy.pub").write_bytes((app / "keys/site-1.pub").read_bytes())  # the same key in a second file
    (app / "keys/note.pub").write_text("this is no key")
    for name in ("site-1.pub", "z copy.pub", "note.pub"):
        os.utime(app / "keys" / name, (0, 0))
    assert names(cleaned(capsys, "--keys")) == ["authority.crt", "server.crt", "server.key", "site-2.pub"]
    link.silent = True
    assert main(["deploy", "clean", "--keys"]) == 2
    assert (app / "keys/site-2.pub").exists()


def test_clean_at_a_site_keeps_its_log_and_what_is_in_use(app, capsys):
    state = app / "sites" / "site-1"
    for name, days in (("old", 40), ("young", 3), ("now", 0)):
        home = state / "runs" / name
        home.mkdir(parents=True)
        for file in ("1_0.state", "privacy.json"):
            (home / file).write_bytes(b"x")
        for path in (home / "1_0.state", home / "privacy.json", home):
            os.utime(path, (time.time() - days * 86400,) * 2)
    (state / "log.jsonl").write_text("{}\n")
    assert cleaned(capsys, "sites/site-1.toml") == [str(state / "runs" / "old")]
    with only_supernode(state):
        assert len(cleaned(capsys, "sites/site-1.toml", "--days", "0")) == 2  # not that of today
    assert cleaned(capsys, "sites/site-1.toml", "--yes") == [str(state / "runs" / "old")]
    assert [path.name for path in (state / "runs" / "old").iterdir()] == ["privacy.json"]  # what was spent stays spent
    assert cleaned(capsys, "sites/site-1.toml") == []
    assert (state / "runs" / "young").exists()
    assert (state / "log.jsonl").exists()
