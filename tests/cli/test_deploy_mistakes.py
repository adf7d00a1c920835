"""Mistakes in the files and words that `fedstrata deploy` reads, and local runs that fail: one line, no traceback."""

import os
import re
import signal
import socket
import subprocess

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from superlinks import app, flwr, link

from fedstrata.cli.main import main
from fedstrata.deploy.flower import local_federation
from fedstrata.deploy.flower.config import ServerConfig, SiteConfig
from fedstrata.deploy.flower.run_lock import write_status
from fedstrata.deploy.flower.supernode import only_supernode

__all__ = ["app", "flwr", "link"]  # fixtures


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ('insecure = "false"', "insecure = 'false' must be true or false"),
        ("address = 9092", "address = 9092 must be a text in quotes"),
        ("behind = 9192", "behind = 9192 must be a text in quotes"),
        ("keys = 5", "keys = 5 must be a text in quotes"),
        ("database = true", "database = True must be a text in quotes"),
        ("listen = 5", "listen = 5 must be a text in quotes"),
        ('largest_message = "64"', "largest_message = '64' must be a whole number"),
        ('address = "example.org"', "address: address 'example.org' must be host:port"),
        ('address = "example.org:99999"', "address: address 'example.org:99999' must be host:port"),
        ('adress = "example.org:9092"', "address"),
    ],
)
def test_a_wrong_entry_of_the_servers_file_is_named_with_the_file(entry, said, app, capsys):
    lines = [line for line in (app / "server.toml").read_text().splitlines() if not line.startswith(entry.split()[0])]
    (app / "server.toml").write_text("\n".join([entry, *lines]))
    assert main(["deploy", "server", "--print"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "server.toml" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ('insecure = "no"', "insecure = 'no' must be true or false"),
        ("state = 5", "state = 5 must be a text in quotes"),
        ("key = 7", "key = 7 must be a text in quotes"),
        ('port = "x"', "port = 'x' must be a whole number"),
        ("port = 99999", "port = 99999 must be a number from 1 to 65535"),
        ("port = true", "port = True must be a whole number"),
        ('server = "localhost"', "server: address 'localhost' must be host:port"),
    ],
)
def test_a_wrong_entry_of_a_sites_file_is_named_with_the_file(entry, said, app, capsys):
    file = app / "sites" / "site-1.toml"
    lines = [line for line in file.read_text().splitlines() if not line.startswith(f"{entry.split()[0]} ")]
    file.write_text("\n".join([entry, *lines]))
    assert main(["deploy", "site", str(file), "--print"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "site-1.toml" in error
    assert len(error.splitlines()) == 1


def test_files_as_they_are_written_for_a_new_app_are_right(app):
    assert ServerConfig.read(app / "server.toml").address == "127.0.0.1:9092"
    assert SiteConfig.read(app / "sites" / "site-1.toml").site == "site-1"


@pytest.mark.parametrize("name", ["../evil", "a/b", "a\\b", ".hidden", "", "two\nlines", "a, b"])
def test_keys_are_made_for_names_of_sites_only(name, app, capsys):
    before = sorted(path for path in app.parent.rglob("*") if path.is_file())
    assert main(["deploy", "keys", name]) == 2
    assert "the name of a site" in capsys.readouterr().err
    assert sorted(path for path in app.parent.rglob("*") if path.is_file()) == before


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'[tool.flwr.app.components]\nserverapp = "a.b:app"\n', "has no Flower app"),
        (b"[tool.flwr]\napp = 5\n", "has no Flower app"),
        (b"[tool", "pyproject.toml: "),
        (b"\xff\xfe", "pyproject.toml: "),
    ],
)
@pytest.mark.parametrize("words", [["status"], ["run"], ["approve"]])
def test_a_broken_pyproject_is_named(words, content, said, app, capsys):
    (app / "pyproject.toml").write_bytes(content)
    assert main(["deploy", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


def test_an_app_can_be_made_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "clinics").mkdir()
    monkeypatch.chdir(tmp_path / "clinics")
    assert main(["deploy", "init", "."]) == 0
    assert (tmp_path / "clinics" / "clinics" / "task.py").exists()


class Local:
    """In place of a local federation: its run writes what a run has written that failed while it saved the model."""

    def __init__(self, app, home, *given, **more):
        self.home = home

    def __enter__(self):
        self.home.mkdir(parents=True)
        return self

    def __exit__(self, *_):
        pass

    def run(self, log, **config):
        folder = self.home / "first"
        folder.mkdir()
        (folder / "solution.npz").write_bytes(b"")
        (folder / "evaluations.jsonl").write_text("{}\n")
        write_status(folder, state="failed", why="TypeError: save_model: cannot store it")
        return subprocess.Popen(["true"])


def test_a_local_run_that_failed_at_its_end_is_an_error_with_its_reason(app, capsys, monkeypatch):
    monkeypatch.setattr(local_federation, "LocalFederation", Local)
    assert main(["deploy", "local"]) == 1
    assert "did not finish: TypeError: save_model: cannot store it. All logs are in" in capsys.readouterr().err


class Deaf(Local):
    """A site of it cannot load its data, so that its run waits."""

    def run(self, log, **config):
        (self.home / "site-2").mkdir()
        (self.home / "site-2" / "worker.log").write_text("started\nload: KeyError: no column y; is it yy?\n")
        self.process = subprocess.Popen(["sleep", "60"])
        return self.process

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def test_a_local_run_whose_site_cannot_load_its_data_ends_at_once_with_the_reason(app, capsys, monkeypatch):
    monkeypatch.setattr(local_federation, "LocalFederation", Deaf)
    assert main(["deploy", "local"]) == 1
    error = capsys.readouterr().err
    assert "the site site-2 cannot begin: load: KeyError: no column y; is it yy?. Its log is" in error


def test_a_site_without_its_files_or_its_port_is_not_started(app, capsys, monkeypatch):
    monkeypatch.setattr("fedstrata.cli.deploy.become", lambda *given: 0)
    monkeypatch.chdir(app)
    file = app / "sites" / "site-1.toml"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        file.write_text(re.sub(r"(?m)^port = \d+", f"port = {port}", file.read_text()))
        assert main(["deploy", "site", str(file)]) == 2
        assert f"port {port} of this machine cannot be used (Address already in use)" in capsys.readouterr().err
        with only_supernode(app / "sites" / "site-1"):  # the SuperNode itself then tells that it is the second
            assert main(["deploy", "site", str(file)]) == 0
    assert main(["deploy", "site", str(file)]) == 0
    for name, remedy in (
        ("authority.crt", "fedstrata deploy keys server"),
        ("site-1.key", "fedstrata deploy keys site-1"),
    ):
        (app / "keys" / name).unlink()
        assert main(["deploy", "site", str(file)]) == 2
        error = capsys.readouterr().err
        assert name in error
        assert remedy in error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_leaves_no_process_of_a_local_federation_behind(number, tmp_path, monkeypatch):
    federation = local_federation.LocalFederation(tmp_path / "app", tmp_path / "home", {"north": {}, "south": {}})
    sleep = lambda: subprocess.Popen(["sleep", "60"], start_new_session=True)
    federation.processes = {name: sleep() for name in ("superlink", "north", "south")}
    federation.runs = [sleep()]
    every = [*federation.processes.values(), *federation.runs]
    kill = federation.kill
    monkeypatch.setattr(federation, "kill", lambda name: (os.kill(os.getpid(), number), kill(name)))
    before = signal.getsignal(number)
    federation.stop()
    assert signal.getsignal(number) == before
    assert all(process.wait(10) for process in every)


@pytest.mark.parametrize(("words", "hint"), [(["deploy", "local"], False), (["run", "lasso"], True)])
def test_ctrl_c_names_a_command_that_resumes_only_where_there_is_one(words, hint, monkeypatch, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedstrata.cli.main.parse", interrupted)
    assert main(words) == 130
    assert ("--resume" in capsys.readouterr().err) == hint
