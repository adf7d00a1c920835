"""Old names and places still work for one release, and warn with the new one."""

import importlib
import inspect
import subprocess
import sys

import pytest

import fedstrata as fs
from fedstrata import moved


@pytest.mark.parametrize("name", sorted(moved.NAMES))
def test_old_public_names_warn_and_work(name):
    inside = moved.NAMES[name][1]
    with pytest.warns(DeprecationWarning, match=rf"fs\.{name} is now fs\.{inside}"):
        old = getattr(fs, name)
    assert old is getattr(fs, inside)


# What README and docs imported before.
SHOWN = {
    "fedstrata.vector": ["Vector"],
    "fedstrata.algorithm": ["Algorithm", "Cohort"],
    "fedstrata.placement": ["placements", "Broadcast", "Reported", "Server"],
    "fedstrata.runtime.run": ["run"],
    "fedstrata.runtime.flower": ["Deployment"],
    "fedstrata.runtime.processes": ["join"],
    "fedstrata.transport.cohort": ["Given"],
    "fedstrata.transport.secure_sum": ["MaskedSum"],
    "fedstrata.fairness": ["equal_opportunity"],
    "fedstrata.problems.pair_losses": ["SquaredHinge"],
}


@pytest.mark.parametrize("module", SHOWN)
def test_old_places_warn_and_work(module):
    for name in SHOWN[module]:
        new = moved.MODULES[module]
        with pytest.warns(DeprecationWarning, match=rf"{module}\.{name} is now {new}\.{name}"):
            old = getattr(importlib.import_module(module), name)
        assert old is getattr(importlib.import_module(new), name)


@pytest.mark.parametrize("name", ["fairness", "hypergradients"])
def test_importing_an_old_module_does_not_replace_a_public_name(name, monkeypatch):
    monkeypatch.delitem(sys.modules, f"fedstrata.{name}", raising=False)
    before = getattr(fs, name)
    old = importlib.import_module(f"fedstrata.{name}")
    assert old is not before
    assert getattr(fs, name) is before is importlib.import_module(moved.MODULES[f"fedstrata.{name}"])


def test_an_old_module_is_an_attribute_of_the_package():
    import fedstrata.vector  # pyright: ignore[reportMissingImports]

    with pytest.warns(DeprecationWarning, match=r"is now fedstrata\.core\.vector\.Vector"):
        assert fedstrata.vector.Vector is fs.Vector


def test_hyperparameters_moved_out_of_the_interface():
    with pytest.warns(DeprecationWarning, match=r"fedstrata\.algorithm\.real is now fedstrata\.core\.hyperparameters"):
        from fedstrata.algorithm import real  # pyright: ignore[reportMissingImports]
    assert real is fs.real


@pytest.mark.parametrize("module", sorted(moved.MODULES))
def test_every_new_place_exists(module):
    if "flower" in module:
        pytest.importorskip("flwr", reason="the extra fedstrata[flower] is not installed")
    assert importlib.import_module(moved.MODULES[module])


def test_importing_the_library_gives_no_warning():
    code = "import fedstrata as fs; fs.FedAvg; fs.run; fs.participation; import fedstrata.cli.main"
    subprocess.run([sys.executable, "-W", "error::DeprecationWarning:fedstrata", "-c", code], check=True)


def test_a_name_that_never_was_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'FedAvgg'; did you mean FedAvg"):
        fs.FedAvgg  # noqa: B018
    with pytest.raises(ImportError):
        importlib.import_module("fedstrata.runtime.nothing")


def test_theory_of_an_algorithm_moved_beside_it():
    with pytest.warns(
        DeprecationWarning, match=r"FedNMap.theory is now fedstrata.algorithms.regularized.theory.fednmap"
    ):
        old = fs.FedNMap.theory
    assert inspect.isfunction(old)
    with pytest.raises(AttributeError, match="'FedAvg' has no attribute 'theory'"):
        fs.FedAvg.theory  # noqa: B018
