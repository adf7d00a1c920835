"""Identities between the families of nested methods: what is the same method under two names."""

import warnings

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.runtime.run import prepare
from references import nested

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
    start = lambda method, problem: prepare(problem, method, task.federation, rounds=1, params=START, batch_size="all")
    with pytest.warns(fs.CouplingWarning, match="inner='client'.*inner='global'"):
        start(fs.MFCGD(0.05), task.problem)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fs.CouplingWarning)
        start(fs.TrackedSCGD(0.05, 0.1), task.problem)


def test_at_a_common_point_the_couplings_have_different_optima():
    both = [nested(inner).optimum() for inner in ("global", "client")]
    assert np.linalg.norm(both[0] - both[1]) > 0.01
