"""A site that changes while a run goes on: its data, its versions, its app. It says so, and nothing is computed."""

import dataclasses
import re

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from attackers import VICTIM, Attacker, averaging, begin_call, call_of, log_of
from cases import CASES, START
from grids import NAME, deployment, load

import fedstrata as fs
from fedstrata.deploy import data_summary
from fedstrata.deploy.data_summary import versions


def changed_data(change):
    def found(settings):
        parts = {name: change(np.array(a)) for name, a in load(settings)["train"].examples.items()}
        return fs.Federation.from_clients([parts])

    return found


def moved(array):
    """One number goes to the next float."""
    array.flat[0] = np.nextafter(array.flat[0], np.inf)
    return array


def with_column(data):
    return fs.Federation.from_clients([{**data["train"].examples, "z": np.zeros(data["train"].size)}])


DATA = {
    "one number": (changed_data(moved), "its values"),
    "two rows swapped": (changed_data(lambda a: np.concatenate([a[1:2], a[:1], a[2:]])), "its values"),
    "one row more": (changed_data(lambda a: np.concatenate([a, a[:1]])), "its rows"),
    "one row less": (changed_data(lambda a: a[1:]), "its rows"),
    "one column more": (lambda settings: with_column(load(settings)), "its columns"),
    "another site's": (lambda settings: load({"number": 2}), "its rows|its values"),
}


@pytest.mark.parametrize("what", DATA)
def test_a_site_whose_data_change_in_mid_run_says_so_and_continues_with_the_old(
    attacker, begun, refuses, expected, what
):
    other, why = DATA[what]
    begun.start(made=deployment(load=other))
    for about in ({"terms": attacker.terms}, {"digest": attacker.terms.digest()}):
        refuses(lambda about=about: attacker.sends(call_of(), **about), f"contradict this site's data: ({why})")
    begun.start()
    assert begun.finishes(expected)


def test_a_file_that_changes_under_a_site_changes_nothing_until_the_site_is_started_again(tmp_path):
    """Its arrays are mapped into memory; the hash of the values was taken before."""
    np.save(tmp_path / "rows.npy", np.ones((8, 3)))
    rows = lambda: {"x": np.load(tmp_path / "rows.npy", mmap_mode="r")}
    made = averaging()._replace(load=lambda settings: fs.Federation.from_offsets(rows(), [0, 8], names=[VICTIM]))
    attacker = Attacker.alone(tmp_path, made)
    attacker.sends(begin_call())
    file = np.load(tmp_path / "rows.npy", mmap_mode="r+")
    file[0] += 100
    file.flush()
    assert attacker.evaluates().arrays["said.values['train/objective']"] == 1.5
    attacker.victim()[0].close()


def test_data_that_cannot_be_loaded_are_refused_and_no_row_leaves_with_the_error(attacker, begun, refuses):
    def broken(settings):
        raise KeyError("patient 17, born 1950, HIV positive")

    begun.start(made=deployment(load=broken))
    error = refuses(lambda: attacker.sends(call_of()), r"site-1 cannot load its data \(KeyError\); see its worker.log")
    assert "1950" not in str(error)
    assert "1950" not in (begun.victim / "log.jsonl").read_text()


def test_data_that_do_not_fit_are_refused_and_no_label_leaves_with_the_error(attacker, begun, refuses):
    """A wrong column for labels: its values are in the error for the site's owner."""
    wrong = fs.Federation.from_clients([{"x": np.ones((2, 3)), "y": np.array([19500312, 19610704], np.int32)}])
    problem = fs.Average(fs.losses.Classification(fs.models.Linear(3)))
    begun.start(made=deployment(problem=problem, load=lambda settings: wrong, options={}))
    error = refuses(
        lambda: attacker.sends(call_of()), r"data of site-1 do not fit the problem \(ValueError\); see its worker.log"
    )
    assert "19500312" not in str(error)
    assert "19500312" not in (begun.victim / "log.jsonl").read_text()


@pytest.mark.parametrize("name", versions())
def test_a_site_whose_versions_change_in_mid_run_says_so(attacker, begun, refuses, expected, name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_summary, "versions", lambda: {**versions(), name: "0.0.7"})
        begun.start()
        why = f"its version of {name}: {versions()[name]} then, 0.0.7 now; if the site has changed, restore it"
        refuses(lambda: attacker.sends(call_of()), re.escape(why))
    begun.start()
    assert begun.finishes(expected)


def with_options(**options):
    return deployment(options={**deployment().options, **options})


SETTINGS = {
    "a step size": (
        lambda: deployment(algorithm=dataclasses.replace(CASES[NAME].algorithm, step_size=0.2)),
        "SCAFFOLD.step_size: saved 0.1, now 0.2",
    ),
    "the method": (lambda: deployment(algorithm=fs.FedAvg(0.1, 4)), "algorithm: saved 'SCAFFOLD', now 'FedAvg'"),
    "the batch": (lambda: with_options(batch_size="all"), "batch_size: saved 3, now 'all'"),
    "the seed": (lambda: with_options(seed=6), "seed: saved 5, now 6"),
    "the start": (lambda: with_options(params=START + 1), "params: saved"),
    "the weights": (lambda: with_options(weights="size"), "weights: saved 'uniform', now 'size'"),
    "the noise": (lambda: with_options(privacy=fs.Privacy(1.0, noise=0.0)), "privacy: saved None"),
}


@pytest.mark.parametrize("code", ["1", "2"])
@pytest.mark.parametrize("what", SETTINGS)
def test_a_site_refuses_other_settings_in_mid_run_even_under_new_code(attacker, begun, refuses, what, code):
    """A batch of all rows, or no noise, would be the first step of many attacks."""
    make, why = SETTINGS[what]
    begun.start(made=make())
    begun.grid.workers[str(begun.victim)].code = code
    terms = attacker.terms._replace(program=code)
    refuses(lambda: attacker.sends(call_of(), terms=terms), f"of run 'first' have changed since it began: .*{why}")


def test_new_code_with_the_same_settings_continues_the_run(begun, expected):
    begun.restart()
    for worker in begun.grid.workers.values():
        worker.code = "2"
    np.testing.assert_allclose(begun.serve(program="2", new_code=True), expected, rtol=1e-12)
    agreed = [line["program"] for line in log_of(begun.victim) if line["kind"] == "terms"]
    assert agreed == ["1", "2"]
