"""Nested methods side by side: identities between them, their hyper-parameters, and whose inner level they use."""

import dataclasses
import inspect
import re
import warnings

import numpy as np
import pytest
from references import nested

import fedstrata as fs
from fedstrata.algorithms import families
from fedstrata.core.hyperparameters import declarations
from fedstrata.simulate.options import RunOptions
from fedstrata.simulate.run import prepare

METHODS = families()["nested"]

START = np.array([0.3, -0.2, 0.5])
STEPS = 12


@pytest.mark.parametrize("radius", [None, 0.8])
def test_mfcgd_of_one_client_is_smvr_of_two_levels(radius):
    task = nested("global")
    alone = task.federation.select([2])
    rng = np.random.default_rng(0)
    drawn = {s: rng.integers(0, alone["train"].counts[0], (STEPS, 1, 1, 2)) for s in ("level1", "level2")}
    # MFCGD estimates before a step and SMVR after it: the same samples, one step later.
    later = {s: np.concatenate([d[:1], d[:-1]]) for s, d in drawn.items()}
    options = {"rounds": STEPS, "params": START, "evaluate_every": STEPS, "stationarity": False}
    go = lambda method, indices: fs.run(
        task.problem, method, alone, batch_size=fs.Replay(indices), **options
    ).solution()
    smvr = go(fs.SMVR(0.05, 0.3, radius=radius), drawn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fs.CouplingWarning)  # with one client both couplings are the same
        mfcgd = go(fs.MFCGD(0.05, 1, 0.3, jacobian_radius=radius, gradient_radius=radius), later)
    np.testing.assert_allclose(mfcgd, smvr, rtol=1e-10)
    assert np.linalg.norm(smvr - START) > 0.01


def test_a_method_for_the_other_coupling_warns_and_names_both():
    task = nested("global")
    options = RunOptions(rounds=1, params=START, batch_size="all")
    start = lambda method, problem: prepare(problem, method, task.federation, options)
    with pytest.warns(fs.CouplingWarning, match="inner='client'.*inner='global'"):
        start(fs.MFCGD(0.05), task.problem)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fs.CouplingWarning)
        start(fs.TrackedSCGD(0.05, 0.1), task.problem)


def test_at_a_common_point_the_couplings_have_different_optima():
    both = [nested(inner).optimum() for inner in ("global", "client")]
    assert np.linalg.norm(both[0] - both[1]) > 0.01


@pytest.mark.parametrize("name", METHODS)
def test_hyper_parameters_are_declared_and_described_in_their_order(name):
    fields = [f.name for f in dataclasses.fields(METHODS[name])]
    assert list(declarations(METHODS[name])) == fields
    arguments = re.search(r"^Args:\n((?:    .*\n)+)", inspect.getdoc(METHODS[name]) or "", re.MULTILINE)
    assert arguments is not None
    assert re.findall(r"^    (\w+): \S", arguments[1], re.MULTILINE) == fields


WRONG = [
    (fs.FedDRSCGD, {"momentum": 0.1, "local_steps": 0}, "local_steps = 0 must be a whole number >= 1"),
    (fs.FedDRSCGD, {"momentum": 0.1, "separate_samples": 1}, "separate_samples: 1; .*Known: False, True"),
    (fs.TrackedSCGD, {"momentum": 0.1, "init_batch_size": 0}, "init_batch_size = 0 must be a whole number >= 1, or"),
    (fs.SMVR, {"momentum": 0.1, "radius": 0.0}, r"radius = 0\.0 is out of range; it must be > 0"),
    (fs.LocalMOML, {"first_order": "no"}, "first_order: 'no'; .*Known: False, True"),
    (fs.CompositionalFedNest, {"inner_rounds": True}, "inner_rounds = True must be a whole number >= 1"),
]


@pytest.mark.parametrize(("kind", "given", "message"), WRONG)
def test_wrong_hyper_parameters_are_refused_at_once(kind, given, message):
    with pytest.raises(ValueError, match=f"{kind.__name__}: {message}"):
        kind(step_size=0.1, **given)
