"""`fedstrata deploy run`, `status`, `stop` and `unregister`, with Flower's programs replaced by small ones."""

import contextlib
import json
import os
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

import httpx
from flwr.proto.control_pb2 import ListRunsResponse
from flwr.supercore.error import ApiErrorCode
from superlinks import app, flwr, link

from fedstrata.base.accounting import epsilon
from fedstrata.cli.main import main
from fedstrata.cli.operations import runs, status
from fedstrata.deploy.flower import run_lock
from fedstrata.deploy.flower.control import AlreadyEnded, Control, FlowerNode, FlowerRun, UnknownRun, public_key
from fedstrata.deploy.flower.run_lock import only_server, read_status, write_status
from fedstrata.deploy.flower.supernode import only_supernode
from fedstrata.deploy.messages import EVALUATE
from fedstrata.deploy.site_log import SiteLog
from fedstrata.deploy.state_files import DamagedFile, write_json

__all__ = ["app", "flwr", "link"]  # fixtures

STARTED = "Successfully started run 17"


def test_a_finished_run_says_where_its_model_is(app, flwr, capsys):
    flwr(STARTED, "round 1")
    (app / "out/first/model.npz").write_bytes(b"")
    assert main(["deploy", "run"]) == 0
    said = capsys.readouterr().out
    assert "round 1" in said
    assert f'fs.load_model("{app}/out/first/model.npz")' in said
    assert "evaluations.jsonl" in said
    assert "round 1" in (app / "out/first/run.log").read_text()
    assert stat.S_IMODE((app / "out/first/run.log").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"state": "failed", "why": "QuorumError: only 1 of 3", "flower": ("finished", "failed", "x")}, "only 1 of 3"),
        ({"state": "finished", "flower": ("finished", "failed", "it broke")}, "did not finish: it broke"),
        (
            {"state": "finished", "why": f"{run_lock.NOT_RESUMED}seed: 5", "flower": ("finished", "failed", "")},
            "run 'first' was not resumed: seed: 5. Logs",
        ),
        ({"state": "running", "flower": ("finished", "stopped", "")}, "stopped; `fedstrata deploy run --name first`"),
        ({"state": "waiting", "flower": ("finished", "completed", "")}, "finished:completed"),
    ],
)
def test_a_run_that_did_not_finish_is_an_error_with_its_reason(app, flwr, capsys, given, said):
    flwr(STARTED, **given)
    assert main(["deploy", "run"]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert str(app / "out/first/run.log") in error
    assert len(error.splitlines()) == 1


def test_a_run_that_flower_does_not_accept_is_an_error(app, flwr, capsys):
    flwr("Connection refused")
    assert main(["deploy", "run"]) == 1
    assert "Flower did not start it: Connection refused" in capsys.readouterr().err


BOX = ("Loading project ...", "╭─ Error ─────────────╮", "│ Connection refused: │", "│ is it started?      │")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ((*BOX, "╰─────────────────────╯"), "Error: Connection refused: is it started?"),
        ((*BOX, "╰─────────────────────╯", "", "---"), "Error: Connection refused: is it started?"),
        ((*BOX, "╰─────────────────────╯", "and so it ended"), "and so it ended"),
        (("│ a line of no box │",), "a line of no box"),
        ((), "no output"),
    ],
)
def test_a_message_in_a_box_is_told_in_words(app, flwr, capsys, lines, said):
    flwr(*lines)
    assert main(["deploy", "run", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["why"] == f"Flower did not start it: {said}"


def test_the_status_of_an_earlier_run_is_not_taken_for_this_one(app, flwr, link, capsys):
    """A server app that cannot be loaded writes no status."""
    flwr("Successfully started run 18")
    link.runs_found = {18: FlowerRun(18, "finished", "failed", "No module named hospitals")}
    assert main(["deploy", "run", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["finished"], found["why"]) == (False, "No module named hospitals")


REPORTS = [
    {"stage": [0, 0, 0, 0], "of": 2, "received": ["Bonn"], "missing": {"Ulm": "long ago"}},
    {"stage": [1, 0, 0, 0], "of": 2, "received": ["Bonn"], "missing": {"Ulm": "its values"}},
    {"stage": [1, 0, 0, 0], "of": 2, "received": ["Bonn"], "missing": {"Ulm": "no answer"}},
    {"stage": [2, -2, 0, 0], "of": 2, "received": ["Bonn", "Ulm"], "missing": {}},
]


def reported(app, before, after):
    """The run has reported some exchanges before it is started again, and reports others then."""
    lines = lambda rows: "".join(json.dumps(row) + "\n" for row in rows)
    (app / "out/first/reports.jsonl").write_text(lines(before))
    return f"$(printf %s {shlex.quote(lines(after))} >> {app}/out/first/reports.jsonl)"


def test_a_run_that_finished_names_the_sites_that_missed_exchanges(app, flwr, capsys):
    flwr(STARTED)
    write_program(app, reported(app, REPORTS[:1], REPORTS[1:]))
    assert main(["deploy", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["missing"] == {"Ulm": 2}
    write_program(app, reported(app, REPORTS[:1], REPORTS[1:]))
    assert main(["deploy", "run"]) == 0
    assert "Ulm, in 2 of 3 exchanges" in capsys.readouterr().out


def test_a_torn_line_of_the_reports_does_not_hide_how_the_run_ended(app, flwr, capsys):
    """A server that died while it wrote; the next one ends the line."""
    flwr(STARTED)
    write_program(app, reported(app, REPORTS[:1], REPORTS[2:]))
    with (app / "out/first/reports.jsonl").open("a") as file:
        file.write('{"stage": [1, 0, 0')
    write_program(app, f"$(printf '\\n%s\\n' {shlex.quote(json.dumps(REPORTS[2]))} >> {app}/out/first/reports.jsonl)")
    assert main(["deploy", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["missing"] == {"Ulm": 1}


def test_a_run_that_had_finished_before_says_so(app, flwr, capsys):
    flwr(STARTED)
    write_program(app, reported(app, REPORTS[:3], REPORTS[3:]))
    assert main(["deploy", "run"]) == 0
    said = capsys.readouterr().out
    assert "had finished before, and was only evaluated again" in said
    assert "--rounds extends it" in said


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize(("state", "code"), [("failed", 1), ("finished", 0)])
def test_the_exit_code_is_right_although_nobody_reads_the_log(app, flwr, tmp_path, options, state, code):
    flwr(STARTED, state=state, flower=("finished", "completed" if state == "finished" else "failed", "it broke"))
    (tmp_path / "bin/flwr").write_text(f"#!/bin/sh\necho {STARTED}\nfor i in 1 2 3 4 5; do echo $i; sleep 0.1; done\n")
    script = "import os, sys; from fedstrata.cli.operations import runs; from fedstrata.cli.main import main; "
    script += "runs.at = lambda server: dict(os.environ); from fedstrata.deploy.flower.control import FlowerRun; "
    found = f"FlowerRun(17, 'finished', '{'completed' if code == 0 else 'failed'}', 'it broke')"
    script += f"runs._settled = lambda server, number: {found}; sys.exit(main({['deploy', 'run', *options]!r}))"
    given = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=given
    )
    process.stdout.close()
    with process.stderr as stderr:
        error = stderr.read()
    assert process.wait(30) == code, error
    assert ("did not finish" in error) == bool(code)
    assert "Exception ignored" not in error
    assert (app / "out/first/run.log").read_text().endswith("5\n")


def write_program(app, command):
    """The `flwr` command also runs this."""
    path = app.parent / "bin" / "flwr"
    path.write_text(f"#!/bin/sh\necho {STARTED}\n: {command}\n")


def test_a_silent_superlink_at_the_end_is_an_error(app, flwr, link, capsys):
    flwr(STARTED)
    link.silent = True
    assert main(["deploy", "run"]) == 1
    assert "deploy status" in capsys.readouterr().err


def test_ctrl_c_says_that_the_run_continues(app, flwr, tmp_path):
    flwr(STARTED, "$(sleep 60)")
    script = "import os, signal, sys; from fedstrata.cli.operations import runs; from fedstrata.cli.main import main; "
    script += "signal.signal(signal.SIGINT, signal.default_int_handler); "  # a job in the background ignores it
    script += "runs.at = lambda server: dict(os.environ); sys.exit(main(['deploy', 'run']))"
    (tmp_path / "bin/flwr").write_text(f"#!/bin/sh\necho {STARTED}\nexec sleep 60\n")
    given = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=given
    )
    assert STARTED in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "The run continues at the server" in error
    assert "deploy stop --name first" in error


def test_a_run_with_a_server_is_not_submitted_again(app, flwr, capsys):
    flwr("must not be called")
    with only_server(app / "out/first", {"flower_run": "17"}):
        assert main(["deploy", "run"]) == 2
        said = capsys.readouterr()
    assert "must not be called" not in said.out
    assert f"process {os.getpid()}" in said.err
    assert "deploy status" in said.err
    assert "deploy stop --name first" in said.err


def test_a_name_that_leads_out_of_the_folder_is_refused(app, capsys):
    for name in ("../first", "a/b", ".", ".."):
        assert main(["deploy", "run", "--name", name]) == 2
        assert "names a folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["local", "nginx", "superlink.db"])
def test_a_name_that_another_command_uses_is_refused(app, capsys, name):
    """`deploy local` empties out/local, with the model of a run of that name."""
    assert main(["deploy", "run", "--name", name]) == 2
    assert "choose another name" in capsys.readouterr().err


def test_programs_of_flower_write_for_their_owner():
    """`deploy server`, `site` and `register` become a program of Flower, which creates the database and other files."""
    code = "import argparse, os, sys; from fedstrata.cli.operations import files; os.umask(0o022); "
    code += "files.become(argparse.Namespace(print=False), ['sh', '-c', 'umask'], dict(os.environ))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.strip() == "0077", found.stderr


HOLD = """
import sys, time
from pathlib import Path
from fedstrata.deploy.flower.run_lock import only_server, write_status
with only_server(Path(sys.argv[1]), {"flower_run": "17"}):
    write_status(Path(sys.argv[1]), state="running", round=3, rounds=20)
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def served(app, link):
    process = subprocess.Popen([sys.executable, "-c", HOLD, "out/first"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    link.server = process.pid
    yield process
    process.kill()
    process.communicate()


def test_stop_ends_the_server_and_says_so(served, app, link, capsys):
    assert main(["deploy", "stop"]) == 0
    assert link.stopped == [17]
    assert "deploy run --name first` resumes it" in capsys.readouterr().out
    assert read_status(app / "out/first")["state"] == "stopped"
    assert main(["deploy", "stop", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"run": "first", "stopped": False, "state": "stopped"}
    assert main(["deploy", "stop", "--name", "other"]) == 2


def test_stop_ends_a_run_that_has_no_server_yet(app, link, capsys):
    """Ctrl-C and `deploy stop` within the seconds that Flower needs to start the server app."""
    (app / "out/first").mkdir(parents=True)
    link.starting = [17, 18]
    assert main(["deploy", "stop"]) == 0
    assert link.stopped == [17, 18]
    assert "run 'first' is stopped" in capsys.readouterr().out
    assert read_status(app / "out/first")["state"] == "stopped"


@pytest.mark.parametrize("error", [AlreadyEnded, UnknownRun])
def test_a_run_that_has_finished_before_it_was_stopped_stays_finished(app, link, capsys, monkeypatch, error):
    """Flower refuses to stop a run that has ended, or that is not in its database any more."""
    write_status(app / "out/first", state="running", flower_run="17")
    link.starting = [17]

    def ends(self, number):
        write_status(app / "out/first", state="finished")
        raise error

    monkeypatch.setattr(link, "stop", ends)
    assert main(["deploy", "stop"]) == 0
    assert "has finished: it was not stopped in time" in capsys.readouterr().out
    assert read_status(app / "out/first")["state"] == "finished"
    write_status(app / "out/first", state="finished", flower_run="16")  # an earlier run, which is extended
    monkeypatch.setattr(link, "stop", lambda self, number: None)
    assert main(["deploy", "stop", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"run": "first", "stopped": True, "state": "stopped"}


@pytest.mark.parametrize("about", [{}, {"flower_run": "seventeen"}])
def test_a_lock_that_tells_little_ends_no_command(app, link, capsys, monkeypatch, about):
    """While `deploy clean` holds it, or if its file is damaged."""
    monkeypatch.setattr(runs, "STOP", 0.1)
    with only_server(app / "out/first", about):
        assert main(["deploy", "stop"]) == 2
        assert f"has not ended within 0 s: process {os.getpid()} on" in capsys.readouterr().err
        (app / "out/first/server.lock").write_text("[")
        assert main(["deploy", "stop"]) == 2
        assert "process unknown on unknown" in capsys.readouterr().err


def test_a_run_that_ends_while_its_status_is_read_has_not_died(app, monkeypatch):
    usual = run_lock.read_status
    with contextlib.ExitStack() as server:
        server.enter_context(only_server(app / "out/first", {"flower_run": "17"}))
        write_status(app / "out/first", state="running", round=19)

        def read(folder):
            found = usual(folder)
            server.close()  # it ends now
            return found

        monkeypatch.setattr(run_lock, "read_status", read)
        assert status.run_status(app / "out/first")["state"] == "running"
        assert status.run_status(app / "out/first")["state"] == "died"


def test_options_of_other_actions_are_refused(app, capsys):
    """`clean --name a --yes` would remove the checkpoints of all runs."""
    for words in (["clean", "--name", "a", "--yes"], ["status", "--yes"], ["run", "--days", "0"], ["stop", "--print"]):
        assert main(["deploy", *words]) == 2
        assert f"`fedstrata deploy {words[0]}` takes no {words[1]}, which is for" in capsys.readouterr().err


def test_a_full_disk_is_an_error_in_one_line(app, link, capsys, monkeypatch):
    def full(*_, **__):
        raise DamagedFile("cannot write status.json: no space; make room for it")

    monkeypatch.setattr(run_lock, "write_status", full)
    link.starting = [17]
    (app / "out/first").mkdir(parents=True)
    assert main(["deploy", "stop"]) == 2
    assert capsys.readouterr().err == "error: cannot write status.json: no space; make room for it\n"


def listing(*runs, unknown=False):
    """What Flower's client returns, for runs given as number, status and name."""

    def answer(request):
        if unknown:
            text = json.dumps({"code": ApiErrorCode.RUN_ID_NOT_FOUND, "detail": "not found"})
            response = httpx.Response(404, text=text, request=httpx.Request("POST", "https://server"))
            response.raise_for_status()
        found = ListRunsResponse()
        newest = sorted(runs, reverse=True)[: request.limit or 20]
        for number, state, name in runs if request.HasField("run_id") else newest:
            if request.HasField("run_id") and number != request.run_id:
                continue
            found.run_dict[number].status.status = state
            found.run_dict[number].override_config["run"].string = name
            found.run_dict[number].override_config["folder"].string = "/out"
        return found

    return SimpleNamespace(ListRuns=answer)


def test_a_run_is_found_among_many_later_ones():
    """Flower lists the newest 20 runs."""
    link = Control.__new__(Control)
    link.address = "127.0.0.1:9092"
    link.client = listing((1, "running", "long"), *((n, "finished", "short") for n in range(2, 60)))
    assert link.run(1).status == "running"
    assert link.unfinished("long", Path("/out")) == [1]
    assert link.unfinished("short", Path("/out")) == link.unfinished("long", Path("/elsewhere")) == []
    link.client = listing(unknown=True)
    assert link.run(1) is None


def test_status_shows_rounds_sites_and_privacy(served, app, link, capsys):
    key = public_key(app / "keys/site-2.pub")
    link.nodes_found = [FlowerNode(5, "online", key), FlowerNode(6, "offline", b"another")]
    sites = {"site-1": {"last": [3, EVALUATE, 0, 0], "why_missing": None, "quarantined": None}}
    sites["site-2"] = {"last": [2, 1, 0, 1], "why_missing": "no reply", "quarantined": None}
    write_status(app / "out/first", sites=sites, epsilon=1.25)
    assert main(["deploy", "status"]) == 0
    said = capsys.readouterr().out
    for text in ("running", "3 of 20", "1.25", "round 2, exchange 1", "no reply", "site-2.pub", "online", "unknown"):
        assert text in said
    assert "evaluation after round 3" in said
    assert main(["deploy", "status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"][0]["server"]["pid"] == served.pid
    assert found["nodes"][0] == {"key": "site-2.pub", "status": "online", "node": 5}


def test_the_epsilon_of_a_run_is_that_of_its_counts(app, link, capsys):
    """A server that dies in the middle of a round has counted more than it has told."""
    write_status(app / "out/first", state="running", round=0, rounds=20, epsilon=0.0)
    counts = {"exchanges": {"site-1": 8, "site-2": 7}, "noise": 5.0, "delta": 1e-5, "where": "server"}
    write_json(app / "out/first/privacy.json", counts)
    assert main(["deploy", "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["epsilon"] == epsilon(5.0, 8, 1e-5) > 2


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"exchanges": {"a": 3}, "noise": 0.0, "delta": 1e-5}, "no guarantee"),
        ({"exchanges": {"a": 3}, "noise": 5.0, "delta": 1e-5, "unprotected": ["H"]}, "no guarantee"),
        ({"exchanges": 3}, "privacy.json is damaged"),
    ],
)
def test_status_tells_why_a_run_has_no_epsilon(app, link, capsys, counts, words):
    write_status(app / "out/first", state="running", round=1, rounds=20)
    write_json(app / "out/first/privacy.json", counts)
    assert main(["deploy", "status"]) == 0
    assert words in capsys.readouterr().out


def test_status_without_the_accounting_package_names_it(app, link, capsys, monkeypatch):
    write_status(app / "out/first", state="running", round=1, rounds=20)
    write_json(app / "out/first/privacy.json", {"exchanges": {"a": 3}, "noise": 5.0, "delta": 1.5e-5})
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    assert main(["deploy", "status"]) == 0
    assert "needs fedstrata[privacy]" in capsys.readouterr().out


@pytest.mark.parametrize("damaged", ['{"sites": 5}', '{"sites": {"a": 3}}', '{"sites": {"a": {"last": 3}}}', "[]", "{"])
def test_a_damaged_status_of_one_run_does_not_hide_the_others(app, link, capsys, damaged):
    write_status(app / "out/first", state="finished", round=20, rounds=20)
    write_status(app / "out/second", state="finished", round=7, rounds=9)
    (app / "out/first/status.json").write_text(damaged)
    assert main(["deploy", "status"]) == 0
    assert "7 of 9" in capsys.readouterr().out


def test_status_tells_a_dead_server_from_a_running_one(served, app, link, capsys):
    served.kill()
    served.wait()
    link.silent = True  # and status does not fail because of it
    assert main(["deploy", "status"]) == 0
    said = capsys.readouterr().out
    assert "died; `fedstrata deploy run --name first` resumes it" in said
    assert "no response from the SuperLink" in said


def test_status_of_a_site_shows_what_it_holds_and_who_lives(app, capsys):
    state = app / "sites" / "site-1"
    (state / "runs" / "first").mkdir(parents=True)
    (state / "runs" / "first" / "4_1.state").write_bytes(b"x" * 2_000_000)
    counts = {"exchanges": {"site-1": 3}, "noise": 2.0, "delta": 1e-5, "where": "sites"}
    write_json(state / "runs" / "first" / "privacy.json", counts)
    log = SiteLog(state / "log.jsonl", "site-1")
    about = {"run": "first", "stage": [4, 1]}
    log.add("answer", **about, way="out", bytes=1_500_000, verdict="sent")
    log.add("refused", **about, way="in", verdict="refused", why="no budget")
    log.close()
    assert main(["deploy", "status", "sites/site-1.toml"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for text in ("supernode does not run", "worker does not run", "2.0", "round 4, exchange 1", "1 sent, 1 refused"):
        assert text in said
    for text in ("1.5 MB sent", "no budget", f"{epsilon(2.0, 3, 1e-5):.3g}", "The chain of its log is whole"):
        assert text in said
    with only_supernode(state):
        assert main(["deploy", "status", "sites/site-1.toml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["supernode"], found["worker"], found["log"]) == (True, False, "whole")
    assert found["runs"][0]["log"]["bytes"]["out"] == 1_500_000
    text = (state / "log.jsonl").read_text()
    (state / "log.jsonl").unlink()
    assert main(["deploy", "status", "sites/site-1.toml"]) == 1
    assert "log.jsonl is missing" in " ".join(capsys.readouterr().out.split())
    (state / "log.jsonl").write_text(text.replace("no budget", "one budge"))
    assert main(["deploy", "status", "sites/site-1.toml"]) == 1
    assert "was changed, moved or left out" in " ".join(capsys.readouterr().out.split())


def test_a_site_that_was_never_called_has_no_log(app, capsys):
    assert main(["deploy", "status", "sites/site-1.toml"]) == 0
    assert "It has no log yet." in capsys.readouterr().out


def test_files_that_vanish_while_they_are_counted_are_left_out(tmp_path, monkeypatch):
    (tmp_path / "4_1.state").write_bytes(b"x" * 5)
    monkeypatch.setattr(os, "walk", lambda path: [(path, [], ["4_0.state", "4_1.state"])])
    assert status.size(tmp_path) == 5
    assert status.last_used(tmp_path) == max(p.stat().st_mtime for p in (tmp_path, tmp_path / "4_1.state"))


@pytest.mark.parametrize(
    "end", ["[" * 100_000, '{"run": "first", "bytes": [1]}', '{"run": "first", "bytes": "x"}', "\xff"]
)
def test_status_of_a_site_with_a_damaged_log_names_the_line(app, capsys, end):
    state = app / "sites" / "site-1"
    state.mkdir()
    log = SiteLog(state / "log.jsonl", "site-1")
    log.add("answer", run="first", stage=[0, 0], way="out", bytes=5, verdict="sent")
    log.close()
    with (state / "log.jsonl").open("a") as file:
        file.write(end + "\n")
    assert main(["deploy", "status", "sites/site-1.toml"]) == 1
    said = capsys.readouterr()
    assert "line 2 of" in said.out
    assert said.err == ""


def test_unregister_finds_the_node_by_its_key(app, link, capsys):
    link.nodes_found = [FlowerNode(5, "online", public_key(app / "keys/site-2.pub"))]
    assert main(["deploy", "unregister", "keys/site-2.pub"]) == 0
    assert link.removed == [5]
    assert main(["deploy", "unregister", "keys/site-1.pub"]) == 2
    assert "is not registered" in capsys.readouterr().err
    assert main(["deploy", "unregister", "server.toml"]) == 2
    assert main(["deploy", "unregister", "keys/nobody.pub"]) == 2


def test_help_names_every_action():
    from fedstrata.cli import deploy

    assert all(f"fedstrata deploy {action}" in deploy.__doc__ for action in deploy._ACTIONS)
