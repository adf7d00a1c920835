"""Papers are folders outside the package, found by name or by path."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fedstrata
from fedstrata import experiments
from fedstrata.base.plugins import PluginWarning
from fedstrata.experiments.reproduction import papers

ROOT = Path(__file__).parents[2]
NAMES = {"fednmap", "fed-dr-scgd", "mfcgd", "fedbio", "fedx"}
RUN = {"fairness", "fedx", "fednmap", "hospitals", "hyperclean", "maml", "portfolio", "robust"}

PAPER = """
from fedstrata.experiments.reproduction import Claim, Outcome, Reproduction
from .figures import figure_1

REPRODUCTION = Reproduction("{name}", "Nobody (2020): A paper", "nobody2020", {{1: figure_1}}, {{"small": "nothing"}})
"""
FIGURES = """
from fedstrata.experiments.reproduction import Claim, Outcome


def figure_1(desk):
    return Outcome([Claim(1, "it is fast", "it is", "holds")], [])
"""


def write_paper(folder, name):
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(PAPER.format(name=name))
    (folder / "figures.py").write_text(FIGURES)
    return folder


def test_papers_of_the_checkout_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDSTRATA_PAPERS", raising=False)
    assert {*experiments.reproductions()} == NAMES
    assert {*experiments.available()} >= RUN
    assert papers.load("fedx.rates").__name__ == "fedstrata_papers.fedx.rates"


def test_papers_are_found_in_the_variable_and_above_the_current_folder(tmp_path, monkeypatch):
    write_paper(tmp_path / "named" / "first", "first-paper")
    write_paper(tmp_path / "project" / "papers" / "second", "second-paper")
    (tmp_path / "project" / "deep" / "er").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project" / "deep" / "er")
    monkeypatch.setenv("FEDSTRATA_PAPERS", str(tmp_path / "named"))
    assert {*experiments.reproductions()} == NAMES | {"first-paper", "second-paper"}
    assert papers.find("second-paper").title == "Nobody (2020): A paper"


def test_a_paper_in_the_variable_comes_before_one_of_the_checkout(tmp_path, monkeypatch):
    write_paper(tmp_path / "fedx", "fedx")
    assert papers.find("fedx").reference == "guo2022"
    monkeypatch.setenv("FEDSTRATA_PAPERS", str(tmp_path))
    assert papers.find("fedx").reference == "nobody2020"


def test_a_paper_by_path(tmp_path):
    folder = write_paper(tmp_path / "anywhere", "by-path")
    found = papers.find(str(folder)).reproduce(out=tmp_path / "out")
    assert [claim["verdict"] for claim in found["claims"]] == ["holds"]
    assert papers.find(str(ROOT / "papers" / "fedx")) is papers.find("fedx")
    with pytest.raises(ValueError, match="does not define REPRODUCTION"):
        papers.find(str(ROOT / "papers" / "hospitals"))
    with pytest.raises(ValueError, match="there is no folder"):
        papers.find(str(tmp_path / "nowhere"))


def test_an_experiment_without_figures_is_explained():
    with pytest.raises(ValueError, match="fedstrata run hospitals"):
        papers.find("hospitals")


def test_a_folder_that_is_no_paper_is_not_run(tmp_path, monkeypatch):
    """Many people have a folder called papers, with anything in it."""
    other = tmp_path / "papers" / "other"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise SystemExit('this must not run')\n")
    (tmp_path / "papers" / "bad").mkdir()
    (tmp_path / "papers" / "bad" / "__init__.py").write_text("REPRODUCTION = = 3\n")
    monkeypatch.chdir(tmp_path)
    assert {*experiments.reproductions()} == NAMES


def test_a_broken_paper_warns_and_the_others_are_found(tmp_path, monkeypatch):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text("REPRODUCTION = 1 / 0\n")
    monkeypatch.setenv("FEDSTRATA_PAPERS", str(tmp_path))
    with pytest.warns(PluginWarning, match=r"broken is left out: ZeroDivisionError"):
        assert {*experiments.reproductions()} == NAMES


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The package without its checkout, as a wheel leaves it; `installed(*words)` runs a command."""
    site = tmp_path_factory.mktemp("site")
    package = Path(fedstrata.__file__).parent
    shutil.copytree(package, site / "fedstrata", ignore=shutil.ignore_patterns("__pycache__"))
    given = {k: v for k, v in os.environ.items() if k != "FEDSTRATA_PAPERS"} | {"PYTHONPATH": str(site)}

    def call(*words):
        command = [sys.executable, "-m", "fedstrata.cli.main", *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=site, env=given)

    return call


def test_without_papers_the_command_names_the_folders(installed):
    done = installed("reproduce")
    assert done.returncode == 0, done.stderr
    assert "no papers were found" in done.stdout
    assert "FEDSTRATA_PAPERS" in done.stdout
    done = installed("reproduce", "fedx")
    assert done.returncode == 2
    assert "source repository" in done.stderr
    done = installed("reproduce", "--json")
    assert done.stdout.split() == ["{", '"papers":', "[]", "}"]


def test_without_papers_the_examples_are_still_listed(installed):
    done = installed("list", "experiments")
    assert done.returncode == 0, done.stderr
    assert "clinics" in done.stdout
    assert "hyperclean" not in done.stdout
