"""Methods for f + φ: their listings as plain loops, identities between them, and where each of them ends up."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from listings import LISTINGS, SERVER, START, STEP, TASK, WEIGHT, Q
from references import soft, squared_error

import fedstrata as fs

SMOOTH = fs.Regularized(squared_error, fs.prox.Zero())


def run(algorithm, problem=TASK.problem, rounds=12, batch_size="all", **options):
    given = {"params": START, "evaluate_every": rounds, "stationarity": False, **options}
    return fs.run(problem, algorithm, TASK.federation, rounds=rounds, batch_size=batch_size, **given)


def distance(algorithm, rounds, **options):
    return np.linalg.norm(run(algorithm, rounds=rounds, **options).solution() - TASK.optimum())


def same(left, right, **options):
    a, b = (run(m, **options).solution() for m in (left, right))
    np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
    assert not np.allclose(a, START)


@pytest.mark.slow
@pytest.mark.parametrize("name", LISTINGS)
def test_it_follows_its_listing(name):
    algorithm, listing = LISTINGS[name]
    for rounds in (1, 7):
        np.testing.assert_allclose(run(algorithm, rounds=rounds).solution(), listing(rounds), rtol=1e-12, atol=1e-14)


# Identities.

STOCHASTIC = [{"batch_size": 3}, {"batch_size": 3, "cohort": 2}, {"batch_size": "all", "weights": "size"}]


@pytest.mark.slow
@pytest.mark.parametrize("options", STOCHASTIC)
@pytest.mark.parametrize("gamma", [0.1, 4.0])
def test_fednmap_without_a_regulariser_is_scaffold(gamma, options):
    ours = run(fs.FedNMap(STEP, Q, gamma, SERVER), SMOOTH, **options).solution()
    theirs = run(fs.SCAFFOLD(STEP, Q, SERVER), TASK.smooth.problem, **options).solution()
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("options", STOCHASTIC)
def test_zhang_without_a_regulariser_is_scaffold(options):
    ours = run(fs.Zhang2024(STEP, Q, SERVER), SMOOTH, **options).solution()
    theirs = run(fs.SCAFFOLD(STEP, Q, SERVER), TASK.smooth.problem, **options).solution()
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("kind", [fs.FedDA, fs.FedMid])
def test_fedda_and_fedmid_without_a_regulariser_are_fedavg_with_a_server_step(kind):
    options = {"batch_size": 3, "cohort": 3}
    ours = run(kind(STEP, Q, SERVER), SMOOTH, **options).solution()
    theirs = run(fs.FedOpt(STEP, Q, SERVER, optax.sgd), TASK.smooth.problem, **options).solution()
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("options", STOCHASTIC)
def test_the_reconstructed_fedcanon_is_scaffold_with_a_server_prox(options):
    same(fs.FedCanon(STEP, Q, SERVER), fs.SCAFFOLDServerProx(STEP, Q, SERVER), **options)


def test_proximal_gradient_descent_is_what_one_step_leaves():
    """With Q = 1 clients never move apart, so three methods are the proximal gradient method."""
    same(fs.FedAvgServerProx(0.1, 1), fs.Zhang2024(0.1, 1))
    same(fs.FedAvgServerProx(0.1, 1), fs.FedCanon(0.1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("method", [fs.FedNMap(STEP, Q, 1.5), fs.Zhang2024(STEP, Q), fs.FedCanon(STEP, Q)])
@pytest.mark.parametrize("cohort", [None, 2])
def test_corrections_sum_to_zero_over_all_clients(method, cohort):
    result = run(method, batch_size=2, cohort=cohort, rounds=9)
    h, h_i = np.asarray(result.state.h.tree), np.asarray(result.local["h_i"].tree)[0]
    assert np.abs(h_i).max() > 0.1
    np.testing.assert_allclose((h - h_i).sum(axis=-2), 0, atol=1e-13)


def test_fednmap_sends_half_of_what_scaffold_sends():
    ours, theirs = (run(m, rounds=1).ledger for m in (fs.FedNMap(STEP, Q), fs.SCAFFOLDServerProx(STEP, Q)))
    assert (2 * ours.up, ours.down) == (theirs.up, theirs.down)


# Where they end: full batches, clients that differ, Q = 5.


@pytest.mark.parametrize("method", [fs.FedNMap(STEP, Q, g, SERVER) for g in (0.3, 4.0)] + [fs.Zhang2024(STEP, Q)])
def test_the_corrected_methods_reach_the_composite_optimum(method):
    result = run(method, rounds=2500)
    assert np.linalg.norm(result.solution() - TASK.optimum()) < 1e-10
    assert (np.asarray(result.solution()) == 0).any()  # with exact zeros, not small numbers


STALLING = {
    "FedDA": fs.FedDA(STEP, Q),
    "FedMid": fs.FedMid(STEP, Q),
    "FedCanon": fs.FedCanon(STEP, Q),
    "FedAvgLocalProx": fs.FedAvgLocalProx(STEP, Q),
    "FedAvgServerProx": fs.FedAvgServerProx(STEP, Q),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STALLING)
def test_the_others_stand_still_short_of_it(name):
    early, late = (distance(STALLING[name], rounds) for rounds in (1500, 3000))
    assert late > 1e-3
    assert abs(early - late) < 1e-3 * late


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FedDA", "FedCanon", "FedAvgServerProx"])
def test_their_error_is_in_proportion_to_the_step(name):
    method = STALLING[name]
    far, near = (distance(dataclasses.replace(method, step_size=s), r) for s, r in ((0.02, 3000), (0.005, 12000)))
    assert 3 < far / near < 5


def test_fedmid_counts_the_regulariser_twice():
    """As the step falls its limit goes to the optimum of f + 2φ, not of f + φ."""
    x = run(fs.FedMid(0.002, Q), rounds=8000).solution()
    once, twice = TASK.optimum(), TASK.optimum(2 * WEIGHT)
    assert np.linalg.norm(x - twice) < 0.05 * np.linalg.norm(once - twice)


def test_fast_fedda_falls_like_one_over_t():
    method = fs.FastFedDA(float(np.linalg.eigvalsh(TASK.smooth.hessians.mean(axis=0))[0]), 20.0, Q)
    distances = np.array([distance(method, rounds) for rounds in (1000, 2000, 4000)])
    np.testing.assert_allclose(distances[1:] / distances[:-1], 0.5, rtol=0.1)


@pytest.mark.parametrize("method", [fs.FedNMap(0.02, Q, 1.0), fs.Zhang2024(0.02, Q)])
def test_partial_participation_still_reaches_the_optimum(method):
    assert distance(method, 4000, cohort=3) < 1e-9


def test_fednmap_does_not_settle_when_the_step_exceeds_twice_gamma():
    """On a coordinate held at zero the map is z/γ + const, so its step is stable only for η̂ < 2γ."""
    end = lambda gamma: run(fs.FedNMap(STEP, Q, gamma), rounds=2000, stationarity=True).history.last("normal_map")
    assert end(0.09) > 1e-3  # η̂ = 0.2
    assert end(0.11) < 1e-10


def test_an_average_with_a_relative_error_makes_zhang_drift_and_not_fednmap():
    """Σc_i grows by the error of the mean y; where FedNMap stands still y is zero, where Zhang does it is ∇f."""

    class RoundedZhang(fs.Zhang2024):
        def server_step(self, problem, start, merged, cohort):
            return super().server_step(problem, start, merged._replace(y=merged.y * (1 + 2**-11)), cohort)

    class RoundedNMap(fs.FedNMap):
        def server_step(self, problem, start, merged, cohort):
            return super().server_step(problem, start, merged._replace(y=merged.y * (1 + 2**-11)), cohort)

    early, late = (distance(RoundedZhang(STEP, Q), rounds) for rounds in (500, 1000))
    assert late > 1.5 * early > 1e-2
    early, late = (distance(RoundedNMap(STEP, Q, 1.5), rounds) for rounds in (500, 1000))
    assert late < 5e-3  # what the way to the optimum left
    assert abs(early - late) < 1e-9


# Other regularisers.


def matrix_error(w, example):
    return 0.5 * jnp.sum((w @ example["x"] - example["y"] * jnp.array([1.0, -0.5, 0.2])) ** 2)


REGULARISERS = {
    "mcp": fs.prox.MCP(0.3, theta=4.0),
    "scad": fs.prox.SCAD(0.3, a=5.0),
    "elastic net": fs.prox.ElasticNet(0.2, 0.05),
    "group lasso": fs.prox.GroupLasso(0.2, axis=None),
    "box": fs.prox.Box(-0.2, 0.3),
    "nonnegative": fs.prox.NonNegative(),
    "simplex": fs.prox.Simplex(),
    "l1 ball": fs.prox.L1Ball(0.7),
    "l2 ball": fs.prox.L2Ball(0.4),
    "total variation": fs.prox.TotalVariation(0.2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REGULARISERS)
def test_fednmap_finds_a_stationary_point_under_any_regulariser(name):
    phi = REGULARISERS[name]
    problem = fs.Regularized(squared_error, phi, gamma=1.0)
    result = run(fs.FedNMap(STEP, Q, 1.0), problem, rounds=3000, stationarity=True)
    assert result.history.last("normal_map") < 1e-8
    assert result.history.last("stationarity") < 1e-8
    assert np.isfinite(result.history.last("objective"))
    if phi.has_distance:
        assert result.history.last("subdifferential_distance") < 1e-8


def test_fednmap_finds_a_low_rank_matrix():
    problem = fs.Regularized(matrix_error, fs.prox.NuclearNorm(1.0))
    result = run(fs.FedNMap(0.02, Q, 1.0), problem, rounds=3000, params=np.zeros((3, 4)), stationarity=True)
    assert result.history.last("normal_map") < 1e-8
    assert 0 < np.linalg.matrix_rank(result.solution(), tol=1e-9) < 3


@pytest.mark.parametrize("name", ["mcp", "scad", "elastic net"])
def test_the_measures_of_stationarity_are_ordered(name):
    """(17): (1 − γρ) |F_nat(x)| ≤ dist(0, ∂ψ(x)) ≤ |F_nor(z)| along the way."""
    phi, gamma = REGULARISERS[name], 1.2
    problem = fs.Regularized(squared_error, phi, gamma=gamma)
    history = run(fs.FedNMap(STEP, Q, gamma), problem, rounds=40, evaluate_every=1, stationarity=True).history
    natural, near, normal = (history[c][0] for c in ("stationarity", "subdifferential_distance", "normal_map"))
    assert ((1 - gamma * phi.rho) * natural <= near + 1e-12).all()
    assert (near <= normal + 1e-12).all()
    assert near[0] > 0.1


# Rates: ½|w − ξ|² has gradients with the same noise everywhere, so that the noise floor is known.


def from_mean(w, e):
    return 0.5 * jnp.sum((w - e["x"]) ** 2)


def mean_estimation(clients, seed=0, dimension=8):
    rng = np.random.default_rng(seed)
    shards = [{"x": rng.normal(size=(64, dimension)) + rng.normal(size=dimension)} for _ in range(clients)]
    return fs.Regularized(from_mean, fs.prox.L1(0.1)), fs.Federation.from_clients(shards)


def floor(clients, steps, seeds=24, rounds=60):
    """Mean squared stationarity of the second half, for each seed, with the same η̂ = 0.2 in all."""
    problem, federation = mean_estimation(clients)
    method = fs.FedNMap(0.2 / steps, steps, gamma=1.0)
    options = {"params": np.zeros(8), "batch_size": 1, "seeds": seeds, "evaluate_every": 2}
    found = fs.run(problem, method, federation, rounds=rounds, **options).history["stationarity"] ** 2
    return found[:, found.shape[1] // 2 :].mean(axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[(n, 2) for n in (2, 4, 16)], [(4, q) for q in (1, 2, 8)]])
def test_the_noise_falls_with_clients_and_with_local_steps(sizes):
    ends = np.log(np.stack([floor(*size) for size in sizes], axis=1))
    x = np.log([n * q for n, q in sizes])
    x = x - x.mean()
    slopes = ends @ x / (x @ x)
    half = 2.07 * slopes.std(ddof=1) / math.sqrt(len(slopes))  # Student, 23 degrees of freedom
    assert slopes.mean() + half < -0.5
    assert abs(slopes.mean() + 1) < half + 0.15  # theory for a strongly convex f: the floor is proportional to 1/(nQ)


@pytest.mark.slow
def test_under_the_pl_condition_convergence_is_linear_down_to_the_floor():
    problem, federation = mean_estimation(8)
    method = fs.FedNMap(0.02, 5, gamma=1.0)
    options = {"params": np.full(8, 50.0), "batch_size": 1, "seeds": 4, "evaluate_every": 10, "stationarity": False}
    history = fs.run(problem, method, federation, rounds=150, **options).history
    full = fs.full_data(federation)
    centre = np.asarray(full["train"].mean(lambda e: e["x"]))
    best = problem.objective(fs.Vector(jnp.asarray(soft(centre, 0.1))), full)
    gap = (history["objective"] - float(best)).mean(axis=0)
    # x contracts by 1 − η̂ a round (μ = L = 1), the gap by its square: ten rounds by 0.9^20, while noise is far away.
    np.testing.assert_allclose(gap[1:4] / gap[:3], 0.9**20, rtol=0.1)
    assert gap[-1] < 1e-4 * gap[0]
    assert gap[-1] > 1e-9  # and there it stays
