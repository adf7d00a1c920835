"""Methods for f + φ: their listings as plain loops, identities between them, and where each of them ends up."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedstrata as fs
from references import composite, soft, squared_error

WEIGHT = 0.25
TASK = composite(weight=WEIGHT, clients=5, dimension=4, seed=3)
SMOOTH = fs.Regularized(squared_error, fs.prox.Zero())
START = np.array([0.5, -1.0, 0.0, 2.0])
N = TASK.federation.clients
STEP, Q, SERVER = 0.04, 5, 0.8
WHOLE = STEP * Q * SERVER  # η̂
GRADIENTS = [lambda w, i=i: TASK.gradient(i, w) for i in range(N)]


def prox(z, step):
    return soft(z, step * WEIGHT)


def run(algorithm, problem=TASK.problem, rounds=12, batch_size="all", **options):
    given = {"params": START, "evaluate_every": rounds, **options}
    return fs.run(problem, algorithm, TASK.federation, rounds=rounds, batch_size=batch_size, **given)


def distance(algorithm, rounds, **options):
    return np.linalg.norm(run(algorithm, rounds=rounds, **options).solution() - TASK.optimum())


def same(left, right, **options):
    a, b = (run(m, **options).solution() for m in (left, right))
    np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
    assert not np.allclose(a, START)


# The listings, as the papers print them.


def fednmap(rounds, gamma=1.5):
    """Algorithm 1, with (9) checked in every round."""
    z, c, y = START, np.zeros((N, 4)), np.zeros((N, 4))
    for t in range(rounds):
        if t > 0:
            c = c - y + y.mean(axis=0)
        x, taken = prox(z, gamma), []
        for i in range(N):
            z_i = z
            for _ in range(Q):
                taken.append(GRADIENTS[i](prox(z_i, gamma)))
                z_i = z_i - STEP * (taken[-1] + (z - x) / gamma + c[i])
            y[i] = (z - z_i) / (STEP * Q)
        np.testing.assert_allclose(y.mean(axis=0), np.mean(taken, axis=0) + (z - x) / gamma, rtol=1e-12, atol=1e-13)
        z = z - WHOLE * y.mean(axis=0)
    return prox(z, gamma)


def zhang(rounds, local_prox=True):
    """(30)–(32), with x the old one; without the local prox it is our reconstruction of FedCanon."""
    z, c = START, np.zeros((N, 4))
    x = prox(z, WHOLE)
    for _ in range(rounds):
        ends, means = [], []
        for i in range(N):
            z_i, x_i, taken = x, x, []
            for step in range(Q):
                taken.append(GRADIENTS[i](x_i))
                z_i = z_i - STEP * (taken[-1] + c[i])
                x_i = prox(z_i, (step + 1) * STEP) if local_prox else z_i
            ends.append(z_i)
            means.append(np.mean(taken, axis=0))
        z = x + SERVER * (np.mean(ends, axis=0) - x)
        c = (x - z) / WHOLE - np.array(means)
        x = prox(z, WHOLE)
    return x


def fedda(rounds):
    """With the counters of the spec: round t and local step l, both from 0."""
    z = START
    for t in range(rounds):
        ends = []
        for i in range(N):
            z_i = z
            for step in range(Q):
                z_i = z_i - STEP * GRADIENTS[i](prox(z_i, SERVER * STEP * t * Q + STEP * step))
            ends.append(z_i)
        z = z + SERVER * (np.mean(ends, axis=0) - z)
    return prox(z, SERVER * STEP * rounds * Q)


def fedmid(rounds):
    x = prox(START, STEP)
    for _ in range(rounds):
        ends = []
        for i in range(N):
            x_i = x
            for _ in range(Q):
                x_i = prox(x_i - STEP * GRADIENTS[i](x_i), STEP)
            ends.append(x_i)
        x = prox(x + SERVER * (np.mean(ends, axis=0) - x), WHOLE)
    return x


def fast_fedda(rounds, mu=0.3, beta=20.0):
    """The public rule: t counts from 1, X starts as x0, and the last local point of a round is not added."""
    g, X, w = np.zeros(4), START.copy(), START
    point = lambda g, X, t: prox((-g + mu / 2 * X + beta * START) / (t * (mu / 2 + beta / t)), 1 / (mu / 2 + beta / t))
    for r in range(rounds):
        sums, points = [], []
        for i in range(N):
            g_i, X_i, w_i = g, X, w
            for k in range(1, Q + 1):
                g_i = g_i + GRADIENTS[i](w_i)
                w_i = point(g_i, X_i, r * Q + k)
                X_i = X_i + w_i if k < Q else X_i
            sums.append(g_i)
            points.append(X_i)
        g, X = np.mean(sums, axis=0), np.mean(points, axis=0)
        w = point(g, X, (r + 1) * Q)
        X = X + w
    return w


def naive(rounds, at_server):
    x = prox(START, STEP * Q if at_server else STEP)
    for _ in range(rounds):
        ends = []
        for i in range(N):
            x_i = x
            for _ in range(Q):
                x_i = x_i - STEP * GRADIENTS[i](x_i)
                x_i = x_i if at_server else prox(x_i, STEP)
            ends.append(x_i)
        x = np.mean(ends, axis=0)
        x = prox(x, STEP * Q) if at_server else x
    return x


LISTINGS = {
    "FedNMap": (fs.FedNMap(STEP, Q, 1.5, SERVER), fednmap),
    "Zhang2024": (fs.Zhang2024(STEP, Q, SERVER), zhang),
    "FedCanon": (fs.FedCanon(STEP, Q, SERVER), lambda rounds: zhang(rounds, local_prox=False)),
    "FedDA": (fs.FedDA(STEP, Q, SERVER), fedda),
    "FedMid": (fs.FedMid(STEP, Q, SERVER), fedmid),
    "FastFedDA": (fs.FastFedDA(0.3, 20.0, Q), fast_fedda),
    "FedAvgLocalProx": (fs.FedAvgLocalProx(STEP, Q), lambda rounds: naive(rounds, at_server=False)),
    "FedAvgServerProx": (fs.FedAvgServerProx(STEP, Q), lambda rounds: naive(rounds, at_server=True)),
}


@pytest.mark.parametrize("name", LISTINGS)
def test_it_follows_its_listing(name):
    algorithm, listing = LISTINGS[name]
    for rounds in (1, 7):
        np.testing.assert_allclose(run(algorithm, rounds=rounds).solution(), listing(rounds), rtol=1e-12, atol=1e-14)


# Identities.

STOCHASTIC = [{"batch_size": 3}, {"batch_size": 3, "cohort": 2}, {"batch_size": "all", "weights": "size"}]


@pytest.mark.parametrize("options", STOCHASTIC)
@pytest.mark.parametrize("gamma", [0.1, 4.0])
def test_fednmap_without_a_regulariser_is_scaffold(gamma, options):
    ours = run(fs.FedNMap(STEP, Q, gamma, SERVER), SMOOTH, **options).solution()
    theirs = run(fs.Scaffold(STEP, Q, SERVER), TASK.smooth.problem, **options).solution()
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("options", STOCHASTIC)
def test_zhang_without_a_regulariser_is_scaffold(options):
    ours = run(fs.Zhang2024(STEP, Q, SERVER), SMOOTH, **options).solution()
    theirs = run(fs.Scaffold(STEP, Q, SERVER), TASK.smooth.problem, **options).solution()
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("kind", [fs.FedDA, fs.FedMid])
def test_fedda_and_fedmid_without_a_regulariser_are_fedavg_with_a_server_step(kind):
    options = {"batch_size": 3, "cohort": 3}
    ours = run(kind(STEP, Q, SERVER), SMOOTH, **options).solution()
    theirs = run(fs.FedOpt(STEP, Q, SERVER, optax.sgd), TASK.smooth.problem, **options).solution()
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("options", STOCHASTIC)
def test_the_reconstructed_fedcanon_is_scaffold_with_a_server_prox(options):
    same(fs.FedCanon(STEP, Q, SERVER), fs.ScaffoldServerProx(STEP, Q, SERVER), **options)


def test_proximal_gradient_descent_is_what_one_step_leaves():
    """With Q = 1 clients never move apart, so three methods are the proximal gradient method."""
    same(fs.FedAvgServerProx(0.1, 1), fs.Zhang2024(0.1, 1))
    same(fs.FedAvgServerProx(0.1, 1), fs.FedCanon(0.1, 1))


@pytest.mark.parametrize("method", [fs.FedNMap(STEP, Q, 1.5), fs.Zhang2024(STEP, Q), fs.FedCanon(STEP, Q)])
@pytest.mark.parametrize("cohort", [None, 2])
def test_corrections_sum_to_zero_over_all_clients(method, cohort):
    result = run(method, batch_size=2, cohort=cohort, rounds=9)
    h, h_i = np.asarray(result.state.h.tree), np.asarray(result.local["h_i"].tree)[0]
    assert np.abs(h_i).max() > 0.1
    np.testing.assert_allclose((h - h_i).sum(axis=-2), 0, atol=1e-13)


def test_fednmap_sends_half_of_what_scaffold_sends():
    ours, theirs = (run(m, rounds=1).ledger for m in (fs.FedNMap(STEP, Q), fs.ScaffoldServerProx(STEP, Q)))
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


@pytest.mark.parametrize("name", STALLING)
def test_the_others_stand_still_short_of_it(name):
    early, late = (distance(STALLING[name], rounds) for rounds in (1500, 3000))
    assert late > 1e-3
    assert abs(early - late) < 1e-3 * late


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
    end = lambda gamma: run(fs.FedNMap(STEP, Q, gamma), rounds=2000).history.last("normal_map")
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


@pytest.mark.parametrize("name", REGULARISERS)
def test_fednmap_finds_a_stationary_point_under_any_regulariser(name):
    phi = REGULARISERS[name]
    problem = fs.Regularized(squared_error, phi, gamma=1.0)
    result = run(fs.FedNMap(STEP, Q, 1.0), problem, rounds=3000)
    assert result.history.last("normal_map") < 1e-8
    assert result.history.last("stationarity") < 1e-8
    assert np.isfinite(result.history.last("objective"))
    if phi.has_distance:
        assert result.history.last("subdifferential_distance") < 1e-8


def test_fednmap_finds_a_low_rank_matrix():
    problem = fs.Regularized(matrix_error, fs.prox.NuclearNorm(1.0))
    result = run(fs.FedNMap(0.02, Q, 1.0), problem, rounds=3000, params=np.zeros((3, 4)))
    assert result.history.last("normal_map") < 1e-8
    assert 0 < np.linalg.matrix_rank(result.solution(), tol=1e-9) < 3


@pytest.mark.parametrize("name", ["mcp", "scad", "elastic net"])
def test_the_measures_of_stationarity_are_ordered(name):
    """(17): (1 − γρ) |F_nat(x)| ≤ dist(0, ∂ψ(x)) ≤ |F_nor(z)| along the way."""
    phi, gamma = REGULARISERS[name], 1.2
    problem = fs.Regularized(squared_error, phi, gamma=gamma)
    history = run(fs.FedNMap(STEP, Q, gamma), problem, rounds=40, evaluate_every=1).history
    natural, near, normal = (history[c][0] for c in ("stationarity", "subdifferential_distance", "normal_map"))
    assert ((1 - gamma * phi.rho) * natural <= near + 1e-12).all()
    assert (near <= normal + 1e-12).all()
    assert near[0] > 0.1


# Rates: ½|w − ξ|² has gradients with the same noise everywhere, so that the noise floor is known.


def mean_estimation(clients, seed=0, dimension=8):
    rng = np.random.default_rng(seed)
    shards = [{"x": rng.normal(size=(64, dimension)) + rng.normal(size=dimension)} for _ in range(clients)]
    problem = fs.Regularized(lambda w, e: 0.5 * jnp.sum((w - e["x"]) ** 2), fs.prox.L1(0.1))
    return problem, fs.Federation.from_clients(shards)


def floor(clients, steps, seeds=24, rounds=60):
    """Mean squared stationarity of the second half, for each seed, with the same η̂ = 0.2 in all."""
    problem, federation = mean_estimation(clients)
    method = fs.FedNMap(0.2 / steps, steps, gamma=1.0)
    options = {"params": np.zeros(8), "batch_size": 1, "seeds": seeds, "evaluate_every": 2}
    found = fs.run(problem, method, federation, rounds=rounds, **options).history["stationarity"] ** 2
    return found[:, found.shape[1] // 2 :].mean(axis=1)


@pytest.mark.parametrize("sizes", [[(n, 2) for n in (2, 4, 8, 16)], [(4, q) for q in (1, 2, 4, 8)]])
def test_the_noise_falls_with_clients_and_with_local_steps(sizes):
    ends = np.log(np.stack([floor(*size) for size in sizes], axis=1))
    x = np.log([n * q for n, q in sizes])
    x = x - x.mean()
    slopes = ends @ x / (x @ x)
    half = 2.07 * slopes.std(ddof=1) / math.sqrt(len(slopes))  # Student, 23 degrees of freedom
    assert slopes.mean() + half < -0.5
    assert abs(slopes.mean() + 1) < half + 0.15  # theory for a strongly convex f: the floor is proportional to 1/(nQ)


def test_under_the_pl_condition_convergence_is_linear_down_to_the_floor():
    problem, federation = mean_estimation(8)
    method = fs.FedNMap(0.02, 5, gamma=1.0)
    options = {"params": np.full(8, 50.0), "batch_size": 1, "seeds": 4, "evaluate_every": 10}
    history = fs.run(problem, method, federation, rounds=150, **options).history
    full = fs.full_data(federation)
    centre = np.asarray(full["train"].mean(lambda e: e["x"]))
    best = problem.objective(fs.Vector(jnp.asarray(soft(centre, 0.1))), full)
    gap = (history["objective"] - float(best)).mean(axis=0)
    # x contracts by 1 − η̂ a round (μ = L = 1), the gap by its square: ten rounds by 0.9^20, while noise is far away.
    np.testing.assert_allclose(gap[1:4] / gap[:3], 0.9**20, rtol=0.1)
    assert gap[-1] < 1e-4 * gap[0]
    assert gap[-1] > 1e-9  # and there it stays


# Theory's steps.

POSITIVE = st.floats(0.01, 100.0)


@settings(max_examples=50, deadline=None)
@given(POSITIVE, st.floats(0.0, 50.0), POSITIVE, st.floats(0.0, 100.0), st.integers(1, 200), st.integers(1, 50))
def test_theory_steps_respect_the_bounds_of_theorem_5(smooth, rho, gap, noise, clients, q):
    T = 1000
    method = fs.FedNMap.theory(
        smoothness=smooth, weak_convexity=rho, gap=gap, noise=noise, clients=clients, rounds=T, local_steps=q
    )
    m = max(1, math.ceil(math.sqrt(noise**2 * T / (9 * (rho + smooth) * gap * clients * q))))
    gamma = method.gamma
    bound = (1 - gamma * rho) / (100 * math.sqrt(smooth**2 + 1 / gamma**2))
    assert gamma <= 1 / (5 * (rho + smooth)) * (1 + 1e-12)
    whole = method.step_size * q * method.server_step_size
    assert 0 < whole <= bound / m * (1 + 1e-9)
    assert 0 < method.step_size <= bound / (q * math.sqrt(m)) * (1 + 1e-9)


def test_theory_steps_are_those_of_15_when_noise_is_large():
    L, rho, gap, noise, n, T, q = 2.0, 0.5, 3.0, 200.0, 10, 500, 4
    method = fs.FedNMap.theory(
        smoothness=L, weak_convexity=rho, gap=gap, noise=noise, clients=n, rounds=T, local_steps=q
    )
    whole = 1 / (320 * math.sqrt(noise**2 * T * (rho + L) / (n * q * gap)))
    first = 380 * (noise**2 * T * q**3 * (L + rho) ** 3 / (n * gap)) ** (1 / 4)
    local = 1 / (first + 240 * math.sqrt((L + rho) * T * q * noise**2 / gap))
    assert method.step_size == pytest.approx(local)
    assert method.step_size * q * method.server_step_size == pytest.approx(whole)


@settings(max_examples=50, deadline=None)
@given(POSITIVE, st.floats(0.001, 1.0), st.integers(1, 100), st.integers(2, 5000), st.integers(1, 50))
def test_theory_steps_respect_the_bounds_of_theorem_8(smooth, ratio, clients, T, q):
    pl = ratio * smooth
    method = fs.FedNMap.theory_pl(smoothness=smooth, pl=pl, clients=clients, rounds=T, local_steps=q)
    m = math.ceil(pl * T / smooth)
    whole = method.step_size * q * method.server_step_size
    assert whole <= 1 / (120 * m * (smooth + pl)) * (1 + 1e-9)
    assert method.step_size <= 1 / (96 * q * (smooth + pl)) * (1 + 1e-9)
    assert method.gamma == pytest.approx(1 / (5 * (smooth + pl)))
    assert method.step_size <= math.log(clients * q * T) / (120 * q * (smooth + pl) * T) * (1 + 1e-9)


# Bad input.


@pytest.mark.parametrize(
    ("method", "phi", "message"),
    [
        (fs.FedNMap(STEP, Q, 4.0), fs.prox.MCP(0.3, theta=2.0), r"FedNMap: the prox is taken at gamma = 4.*1/ρ = 2"),
        (fs.Zhang2024(1.0, Q), fs.prox.MCP(0.3, theta=2.0), r"Zhang2024: .* step_size \* local_steps = 5"),
        (fs.FedMid(0.1, Q, 9.0), fs.prox.MCP(0.3, theta=2.0), r"server_step_size = 4.5"),
        (fs.FedDA(STEP, Q), fs.prox.MCP(0.3, theta=2.0), r"FedDA: .*no bound.*must be convex.*FedNMap"),
        (fs.FastFedDA(0.5, 1.0, Q), fs.prox.MCP(0.3, theta=2.0), r"FastFedDA: .* 2 / strong_convexity = 4"),
        (fs.FedNMap(STEP, Q, 0.1), fs.prox.L0(0.1), r"not weakly convex.*MCP"),
        (fs.FedNMap(STEP, Q, optax.constant_schedule(1.0)), fs.prox.L1(0.1), r"gamma must be a number"),
    ],
)
def test_steps_out_of_range_are_refused_before_anything_runs(method, phi, message):
    with pytest.raises(ValueError, match=message):
        run(method, fs.Regularized(squared_error, phi))


def test_swept_values_out_of_range_are_refused_too():
    problem = fs.Regularized(squared_error, fs.prox.MCP(0.3, theta=2.0))
    with pytest.raises(ValueError, match=r"gamma = 3.*1/ρ"):
        run(fs.FedNMap(STEP, Q, 1.0), problem, sweep={"gamma": [1.0, 3.0]})


def test_a_schedule_out_of_range_stops_the_run_and_keeps_the_last_good_state():
    problem = fs.Regularized(squared_error, fs.prox.MCP(0.3, theta=2.0))
    growing = fs.per_round(lambda t: 0.04 * 1.5 ** t.astype(float))
    with pytest.warns(fs.DivergenceWarning):
        result = run(fs.FedAvgServerProx(growing, Q), problem)
    assert result.diverged
    assert np.isfinite(result.solution()).all()


def test_a_regulariser_that_does_not_fit_the_parameters_is_refused():
    with pytest.raises(ValueError, match="slopes"):
        run(fs.FedNMap(STEP, Q), fs.Regularized(squared_error, fs.prox.L1(0.1).on("slopes")))
    with pytest.raises(ValueError, match="NuclearNorm"):
        run(fs.FedNMap(STEP, Q), fs.Regularized(squared_error, fs.prox.NuclearNorm(0.1)))


class Broken(fs.prox.Regularizer):
    """A prox that fails at once, or once it sees a large entry."""

    limit: float = 0.0

    def _value(self, x):
        return jnp.sum(x) * 0

    def _prox(self, z, step):
        return jnp.where(jnp.max(jnp.abs(z)) > self.limit, jnp.nan, z)

    def _distance(self, x, g):
        return jnp.sum(g**2)


def test_a_prox_that_returns_nan_is_named():
    with pytest.raises(ValueError, match=r"the prox of Broken.*not finite at the start"):
        run(fs.FedNMap(STEP, Q), fs.Regularized(squared_error, Broken()))
    late = fs.Regularized(squared_error, Broken(limit=2.01))
    with pytest.warns(fs.DivergenceWarning, match="z"):
        result = run(fs.FedNMap(0.5, Q), late)
    assert result.diverged


def test_methods_for_smooth_problems_are_refused_and_the_right_ones_named():
    with pytest.raises(TypeError, match=r"FedAvg does not solve Regularized.*FedNMap"):
        run(fs.FedAvg(STEP, Q))
    with pytest.raises(TypeError, match=r"FedNMap does not solve Average.*Scaffold"):
        run(fs.FedNMap(STEP, Q), TASK.smooth.problem)


@pytest.mark.parametrize(
    "arguments", [{"regularizer": 0.1}, {"gamma": 0.0}, {"gamma": 9.0}, {"more_gammas": (1.0, 9.0)}]
)
def test_a_regularised_problem_is_checked_where_it_is_made(arguments):
    with pytest.raises((TypeError, ValueError), match=r"Regularized|step"):
        fs.Regularized(squared_error, **{"regularizer": fs.prox.MCP(0.3, theta=2.0), **arguments})
