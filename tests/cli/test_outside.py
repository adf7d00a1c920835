"""Methods, experiments, data and papers of users: real files, and entry points of a really installed package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedstrata

METHOD = '''
import fedstrata as fs
from fedstrata.core.hyperparameters import real


class Halving(fs.FedAvg):
    """FedAvg whose clients take half of their steps' length.

    $$ x = x - \\\\eta / 2 $$

    Args:
        shrink: $\\\\beta$, what the step is multiplied by.
    """

    shrink: float = real(0.5, above=0)

    def local_step(self, oracle, start, state):
        return self.State(x=state.x - self.shrink * self.step_size * oracle.grad(state.x))
'''
EXPERIMENT = """
from fedstrata.experiments import Experiment
from fedstrata.experiments.least_squares import build

EXPERIMENT = Experiment(
    name="mine",
    summary="least squares of three clients",
    build=build,
    rounds=3,
    methods={"FedAvg": {"step_size": 0.05, "local_steps": 2}, "SCAFFOLD": {"step_size": 0.05, "local_steps": 2}},
    common={"step_size": 0.05, "local_steps": 2},
    batch_size="all",
    seeds=1,
    panels=("objective",),
)
"""
SMALL = ("--data", "clients=3", "--data", "features=2", "--data", "rows=5", "--quiet", "--no-cache")


def ends(found):
    return {row["label"]: row["values"]["objective"]["mean"] for row in found["table"]["rows"]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder of a command, with somebody's package, a file with a method and one with an experiment."""
    (tmp_path / "outside_package").mkdir()
    (tmp_path / "outside_package" / "__init__.py").touch()
    (tmp_path / "outside_package" / "methods.py").write_text(METHOD)
    (tmp_path / "methods.py").write_text(METHOD)
    (tmp_path / "mine.py").write_text(EXPERIMENT)
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["outside_package.methods", "methods.py"])
def test_a_method_from_outside_runs_beside_those_of_the_library(place, folder, answer):
    words = ("least_squares", *SMALL, "--algorithm", f"{place}:Halving", "--algorithm", "FedAvg", "--rounds", "3")
    values = ("--set", "Halving.step_size=0.1", "--set", "FedAvg.step_size=0.05")
    found = answer("run", *words, *values, "--out", "o")
    assert ends(found)["Halving"] == ends(found)["FedAvg"]  # half of 0.1
    assert found["settings"]["methods"]["Halving"]["shrink"] == 0.5
    whole = answer("run", *words, *values, "--set", "shrink=1.0")
    assert ends(whole)["Halving"] != ends(whole)["FedAvg"]


def test_a_method_from_outside_is_explained(folder, answer):
    about = answer("explain", "outside_package.methods:Halving")
    assert about["name"] == "Halving"
    meanings = {entry["name"]: entry["meaning"] for entry in about["hyperparameters"]}
    assert meanings["shrink"] == "β, what the step is multiplied by"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("outside_package.nothing:Halving", "no module 'outside_package.nothing'"),
        ("outside_package.methods:Doubling", "has no 'Doubling'"),
        ("outside_package.methods:fs", "is not an algorithm"),
        ("nowhere.py:Halving", "no such Python file"),
    ],
)
def test_a_method_that_cannot_be_used_is_refused(word, expected, folder, mistake):
    assert expected in mistake("run", "least_squares", *SMALL, "--algorithm", word)


def test_an_experiment_in_a_file_runs(folder, answer):
    found = answer("run", "mine.py", *SMALL)
    assert found["experiment"] == "mine"
    assert {*ends(found)} == {"FedAvg", "SCAFFOLD"}
    same = answer(
        "run",
        "least_squares",
        *SMALL,
        "--rounds",
        "3",
        "--seeds",
        "1",
        "--algorithm",
        "FedAvg",
        "--set",
        "local_steps=2",
    )
    assert ends(same)["FedAvg"] == ends(found)["FedAvg"]


def test_a_file_without_an_experiment_is_refused(folder, mistake):
    assert "must define one experiment" in mistake("run", "methods.py")
    assert "no such file" in mistake("run", "nowhere.py")


def test_help_shows_how(command):
    out = command("run", "--help")[1]
    assert "package.module:Class" in out
    assert "my_experiment.py" in out
    assert "package.module:Class" in command("explain", "--help")[1]
    assert "FEDSTRATA_PAPERS" in command("reproduce", "--help")[1]


DATA = """
import numpy as np
from fedstrata.data.sources import Dataset, Source


def load():
    return Dataset({"x": np.zeros((2, 1)), "y": np.zeros(2, int)})


SOURCES = (Source("outside_data", "two rows", "nowhere", "none", load),)
"""
PAPER = """
from fedstrata.experiments.reproduction import Reproduction

REPRODUCTION = Reproduction("outside-paper", "Nobody (2020)", "nobody2020", {1: print}, {"small": "nothing"})
"""
POINTS = """
[fedstrata.algorithms]
Halving = outside_method:Halving
Broken = outside_broken:Broken

[fedstrata.experiments]
mine = outside_experiment

[fedstrata.data]
data = outside_data

[fedstrata.papers]
paper = outside_paper
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A package with entry points, installed as pip does it; `installed(*words)` runs a command where it is."""
    site = tmp_path_factory.mktemp("site")
    files = {"method": METHOD, "experiment": EXPERIMENT, "data": DATA, "paper": PAPER, "broken": "1 / 0\n"}
    for name, text in files.items():
        (site / f"outside_{name}.py").write_text(text)
    info = site / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    path = os.pathsep.join([str(site), str(Path(fedstrata.__file__).parents[1])])

    def call(*words):
        command = [sys.executable, "-m", "fedstrata.cli.main", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, cwd=site, env={**os.environ, "PYTHONPATH": path})

    return call


def test_an_installed_package_adds_to_every_list(installed):
    done = installed("list", "--json")
    assert done.returncode == 0, done.stderr
    names = {kind: [entry["name"] for entry in entries] for kind, entries in json.loads(done.stdout).items()}
    assert "Halving" in names["algorithms"]
    assert "mine" in names["experiments"]
    assert "outside_data" in names["data"]
    assert {"FedAvg", "digits"} <= {*names["algorithms"], *names["experiments"]}
    papers = json.loads(installed("reproduce", "--json").stdout)["papers"]
    assert {"outside-paper", "fedx"} <= {paper["name"] for paper in papers}


def test_a_broken_plugin_warns_in_one_line_and_breaks_no_command(installed):
    done = installed("list", "algorithms")
    assert done.returncode == 0
    assert "Broken" not in done.stdout
    (line,) = [line for line in done.stderr.splitlines() if line]
    assert line.startswith("warning: entry point Broken = outside_broken:Broken of fedstrata.algorithms is left out")


@pytest.mark.slow
def test_what_is_installed_runs_by_name(installed):
    done = installed("run", "mine", *SMALL, "--algorithm", "Halving", "--json")
    assert done.returncode == 0, done.stderr
    assert [*ends(json.loads(done.stdout))] == ["Halving"]
