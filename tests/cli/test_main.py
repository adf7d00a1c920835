"""The entry point: help, mistakes, exit codes, and a start without heavy imports."""

import os
import subprocess
import sys

import pytest

from fedstrata.cli.main import COMMANDS, main

HEAVY = ("jax", "equinox", "optax", "matplotlib", "pandas", "orbax", "sklearn", "rich")


def in_new_process(*words: str, **variables: str) -> subprocess.CompletedProcess:
    """The command in a fresh interpreter, which prints the heavy modules it has loaded at the end."""
    script = (
        "import sys; from fedstrata.cli.main import main; code = main(sys.argv[1:]); "
        f"print('loaded:', [m for m in {HEAVY} if m in sys.modules]); sys.exit(code)"
    )
    given = {**os.environ, **variables}
    return subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, env=given)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["run", "--help"], 0),
        (["run", "digits", "--rounds", "none"], 2),
        (["run", "digitz"], 2),
        (["frobnicate"], 2),
        (["data", "fetch", "nothing"], 2),
    ],
)
def test_help_and_argument_errors_load_nothing_heavy(words, code):
    done = in_new_process(*words)
    assert done.returncode == code, done.stderr
    assert done.stdout.endswith("loaded: []\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_teaches(name, capsys):
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert "examples:" in out
    assert f"fedstrata {name}" in out
    assert "--json" in out


def test_without_arguments_help_is_shown(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


def test_version(capsys):
    from fedstrata import __version__

    assert main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["rn"], "did you mean run?"),
        (["run", "digits", "--round", "3"], "did you mean --rounds"),
        (["run", "digits", "extra"], "does not expect 'extra'"),
        (["run"], "EXPERIMENT"),
        (["list", "algoritms"], "did you mean algorithms?"),
        (["explain", "scafold"], "did you mean SCAFFOLD"),
        (["explain", "FedAvg", "--parameters", "-3"], "whole number >= 1"),
        (["data", "chek"], "did you mean check?"),
        (["data", "fetch"], "needs the name of a data set"),
        (["reproduce", "fednmab"], "did you mean fednmap"),
        (["reproduce", "fednmap", "--figure", "9"], "figure of fednmap"),
        (["reproduce", "fednmap", "--scale", "ful"], "did you mean full?"),
    ],
)
def test_mistakes_are_answered_in_one_line(words, expected, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert expected in captured.err


def test_debug_shows_the_traceback(capsys, monkeypatch):
    monkeypatch.setenv("FEDSTRATA_DEBUG", "1")
    assert main(["run", "digitz"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error: unknown experiment 'digitz'")


def test_a_bug_is_not_called_the_users_mistake(capsys, monkeypatch):
    from fedstrata import experiments

    def broken(name):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(experiments, "get", broken)
    assert main(["run", "digits"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: unexpected ZeroDivisionError: oops")
    assert "FEDSTRATA_DEBUG" in err


def test_an_interruption_reports_how_to_resume(capsys, monkeypatch):
    from fedstrata import experiments

    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(experiments, "get", interrupted)
    assert main(["run", "digits"]) == 130
    assert "--resume" in capsys.readouterr().err
