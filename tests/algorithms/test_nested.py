"""Fed-DR-SCGD, its repaired forms and TrackedSCGD: their listings, identities, and where each of them ends up."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from nested_references import (
    NestedTask,
    ball,
    fed_dr_scgd,
    level_by_level,
    nested_task,
    quadratic_level,
    samples,
    tracked_scgd,
)
from references import soft

import fedstrata as fs
from fedstrata.algorithms.nested import (
    AnchoredDRSCGD,
    CouplingWarning,
    FedDRSCGD,
    LevelwiseDRSCGD,
    SeparateDRSCGD,
    TrackedSCGD,
    theory,
)
from fedstrata.core.hyperparameters import hyperparameters
from fedstrata.problems.compositions import risk_averse
from fedstrata.problems.nested import Nested
from fedstrata.simulate.options import RunOptions
from fedstrata.simulate.run import prepare

START = np.array([0.3, -0.2, 0.5])
FORMS = (FedDRSCGD, SeparateDRSCGD, AnchoredDRSCGD, LevelwiseDRSCGD, TrackedSCGD)


def run(task, algorithm, rounds, batch_size: Any = "all", problem=None, **options):
    """Stationarity is left to NumPy: its program would cost more than the run's."""
    given = {"params": START, "evaluate_every": rounds, "stationarity": False, **options}
    return fs.run(problem or task.problem, algorithm, task.federation, rounds=rounds, batch_size=batch_size, **given)


# Listings.

DIMS = (3, 2, 4, 3, 2)  # d_0 … d_4
ROUNDS, STEP, A = 3, 0.1, 0.3
LISTINGS = {
    "published": (FedDRSCGD, fed_dr_scgd),
    "ball": (FedDRSCGD, fed_dr_scgd),
    "third": (FedDRSCGD, fed_dr_scgd),
    "separate": (SeparateDRSCGD, fed_dr_scgd),
    "anchored": (AnchoredDRSCGD, fed_dr_scgd),
    "levelwise": (LevelwiseDRSCGD, level_by_level),
    "tracked": (TrackedSCGD, tracked_scgd),
}


class Listing(NamedTuple):
    name: str
    levels: int
    batch: int
    steps: int
    separate: bool

    def task(self, **options) -> NestedTask:
        given = {"clients": 3, "sizes": (4,), "dims": DIMS[: self.levels], "noise": 0.5, **options}
        return nested_task(self.levels, **given)

    def algorithm(self, **options):
        kind = LISTINGS[self.name][0]
        more = {"projection": self.name, "radius": 1.3} if self.name in ("ball", "third") else {}
        return kind(STEP, A, self.steps, separate_samples=self.separate, **more, **options)

    def loop(self, task, look, rounds=ROUNDS, a=A, **options):
        more = {"anchored": {"anchored": True}, "third": {"project": lambda v, n: v / 3}}.get(self.name, {})
        if self.name == "ball":
            more = {"project": ball(1.3)}
        given = {"separate": self.separate, **more, **options}
        workers = LISTINGS[self.name][1](task, START, STEP, a, self.steps, rounds, look, **given)
        if self.name == "ball":
            assert min(more["project"].counts) >= 5  # it clips, and not always
        return workers


SMALL = [
    Listing("published", 2, 1, 1, False),
    Listing("separate", 2, 1, 3, True),
    Listing("anchored", 2, 2, 3, False),
    Listing("levelwise", 2, 1, 1, False),
    Listing("tracked", 2, 2, 1, True),
]
# Every form with either batch, number of steps and kind of samples that it has, on two levels and on more. Five
# levels once for a form that averages all levels together and once for one that averages level by level.
CASES = [
    *SMALL,
    Listing("third", 2, 2, 3, False),
    Listing("separate", 3, 2, 1, True),
    Listing("ball", 3, 1, 3, False),
    Listing("anchored", 3, 1, 1, True),
    Listing("levelwise", 3, 2, 3, True),
    Listing("tracked", 3, 1, 3, False),
    Listing("published", 5, 2, 3, False),
    Listing("levelwise", 5, 1, 1, False),
]
in_words = lambda case: f"{case.name}-K{case.levels}-b{case.batch}-p{case.steps}-{case.separate}"


def agree(result, workers, levels):
    """x, every h and every v, as averaged in the last step."""
    assert not np.allclose(workers[0].h[0], START, atol=1e-3)
    close = lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-11)
    close(result.solution(), workers[0].h[0])
    for k in range(1, levels):
        close(result.state.h[k - 1].tree[0], workers[0].h[k])
    for k in range(1, levels + 1):
        close(result.state.v[k - 1].tree[0], workers[0].v[k])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=in_words)
def test_it_follows_its_listing(case):
    task = case.task()
    drawn = samples(task, ROUNDS, case.steps, case.batch, case.separate)
    result = run(task, case.algorithm(), ROUNDS, fs.Replay(drawn.indices))
    agree(result, case.loop(task, drawn.look), case.levels)
    # Phases of one step share their samples: whatever the form, a level's sample is drawn once a step.
    streams = case.levels * (2 if case.separate else 1)
    assert result.history.last("samples") == ROUNDS * case.steps * case.batch * task.clients * streams


# Identities.


@pytest.mark.slow
@pytest.mark.parametrize("case", SMALL, ids=in_words)
def test_equal_workers_are_one(case):
    """Driven with the same samples, three copies of a worker do what the listing does with one."""
    alone = case.task(clients=1, seed=1)
    federation = fs.Federation.from_clients(alone.shards * 3)
    drawn = samples(alone, ROUNDS, case.steps, case.batch, case.separate, seed=1)
    copied = {name: np.repeat(table, 3, axis=2) for name, table in drawn.indices.items()}
    result = run(alone._replace(federation=federation), case.algorithm(), ROUNDS, fs.Replay(copied))
    agree(result, case.loop(alone, drawn.look), case.levels)


@pytest.mark.parametrize("case", SMALL[:3], ids=in_words)
def test_without_a_past_it_is_plug_in_sgd(case):
    """a = 1: the gradient of the composed sample functions, carried with x, averaged with x."""
    task = case.task(seed=2)
    drawn = samples(task, ROUNDS, case.steps, case.batch, case.separate, seed=2)
    jacobian = "jacobian" if case.separate else "level"

    def composed(i, x, r, s):
        h = [x]
        for k in range(1, task.levels):
            h.append(task.value(k, i, h[-1], drawn.look("level", k, r, s, i)))
        v = None
        for k in range(task.levels, 0, -1):
            v = task.pull(k, i, h[k - 1], v, drawn.look(jacobian, k, r, s, i))
        return v

    x, g = [START] * 3, [composed(i, START, 0, 0) for i in range(3)]
    for r in range(ROUNDS):
        for s in range(case.steps):
            x = [x_i - STEP * g_i for x_i, g_i in zip(x, g, strict=True)]
            g = [composed(i, x[i], r, s) for i in range(3)]
        x, g = [np.mean(x, axis=0)] * 3, [np.mean(g, axis=0)] * 3
    result = run(task, dataclasses.replace(case.algorithm(), momentum=1.0), ROUNDS, fs.Replay(drawn.indices))
    np.testing.assert_allclose(result.solution(), x[0], rtol=1e-9)
    np.testing.assert_allclose(result.state.v[0].tree[0], g[0], rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMS)
def test_one_client_with_all_data_is_proximal_gradient_descent_for_any_momentum(kind):
    task = nested_task(2, clients=1, sizes=(3,), noise=0.5)
    problem = dataclasses.replace(task.problem, regularizer=fs.prox.L1(0.6))
    x = START
    for _ in range(8):
        x = soft(x - 0.1 * task.gradient(x), 0.1 * 0.6)
    assert (x == 0).any()
    assert not (x == 0).all()
    for momentum in (1.0, 0.3, 0.01):
        result = run(task, kind(0.1, momentum, 2), 4, problem=problem)
        np.testing.assert_allclose(result.solution(), x, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [FedDRSCGD, LevelwiseDRSCGD, TrackedSCGD])
def test_one_level_and_one_client_is_storm(kind):
    rng = np.random.default_rng(0)
    shard = {"A1": rng.normal(size=(6, 4, 3)), "b1": rng.normal(size=(6, 4))}
    index = rng.integers(0, 6, (5, 2, 1, 1))

    def g(x, row):
        A, b = shard["A1"][row], shard["b1"][row]
        return A.T @ (A @ x - b) + 0.2 * x

    x, a, eta = START, 0.2, 0.05
    d = g(x, index[0, 0, 0, 0])
    for row in index.reshape(-1):
        new = x - eta * d
        d = g(new, row) + (1 - a) * (d - g(x, row))
        x = new
    federation = fs.Federation.from_clients([shard])
    options = {"params": START, "batch_size": fs.Replay({"level1": index}), "evaluate_every": 5, "stationarity": False}
    result = fs.run(Nested([quadratic_level(1)]), kind(eta, a, 2), federation, rounds=5, **options)
    np.testing.assert_allclose(result.solution(), x, rtol=1e-10)


def test_a_third_is_no_projection():
    """At a point that stands still v_k is (a/(2+a))^{K−k+1} of the product that it estimates."""
    task, a = nested_task(2, clients=1, sizes=(2,), noise=0.5), 0.6
    result = run(task, FedDRSCGD(1e-13, a, 1, projection="third"), 60)
    h = [START, task.value(1, 0, START, task.every(0))]
    product = None
    for k in (2, 1):
        product = task.pull(k, 0, h[k - 1], product, task.every(0))
        found = result.state.v[k - 1].tree[0]
        np.testing.assert_allclose(found, (a / (2 + a)) ** (2 - k + 1) * product, rtol=1e-9)


# Where they end: clients that differ, all data.

MOMENTA = [0.04, 0.01, 0.0025]
SEEDS = (0, 1, 2)


def limits(kind, levels=2, rounds=4000, step_size=0.03):
    """|∇Φ| after these rounds of p = 4, for three random problems (down) and falling a (across)."""
    out = []
    for seed in SEEDS:
        task = nested_task(levels, seed=seed)
        result = run(task, kind(step_size, 0.1, 4), rounds, sweep={"momentum": MOMENTA})
        out.append([np.linalg.norm(task.gradient(np.asarray(result.solution(momentum=a)))) for a in MOMENTA])
    return np.array(out)


@pytest.mark.slow
def test_the_published_form_stalls_however_small_a_is():
    found = limits(FedDRSCGD)
    assert (found > 1e-2).all()
    np.testing.assert_allclose(found / found[:, :1], 1, rtol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AnchoredDRSCGD, LevelwiseDRSCGD])
def test_the_repaired_forms_stop_at_a_distance_in_proportion_to_a(kind):
    found = limits(kind)
    assert (found[:, -1] > 1e-6).all()  # not exact
    np.testing.assert_allclose(found[:, 1] / found[:, 2], 4, rtol=0.15)
    np.testing.assert_allclose(found[:, 0] / found[:, 1], 4, rtol=0.3)


def test_with_one_local_step_the_published_form_solves_the_client_coupled_problem():
    """Affine inner and quadratic outer levels: both optima solve linear systems."""
    rng = np.random.default_rng(4)
    affine = lambda x, e: e["A"] @ x + e["b"]
    outer = lambda y, e: 0.5 * y @ (e["H"] @ y) - e["c"] @ y
    A = np.eye(3) + 0.4 * rng.normal(size=(4, 3, 3))
    B = 0.3 * rng.normal(size=(4, 3, 3))
    b, c, H = rng.normal(size=(4, 3)), rng.normal(size=(4, 3)), np.eye(3) + B @ np.swapaxes(B, 1, 2)
    federation = fs.Federation.from_clients([{"A": A[[i]], "b": b[[i]], "H": H[[i]], "c": c[[i]]} for i in range(4)])
    T = np.swapaxes(A, 1, 2)
    each = np.linalg.solve((T @ H @ A).mean(0), -np.einsum("ijk,ik->j", T, np.einsum("ijk,ik->ij", H, b) - c) / 4)
    m = {name: value.mean(0) for name, value in {"A": A, "b": b, "H": H, "c": c}.items()}
    together = np.linalg.solve(m["A"].T @ m["H"] @ m["A"], -m["A"].T @ (m["H"] @ m["b"] - m["c"]))
    assert np.linalg.norm(each - together) > 0.1
    options = {"params": START, "batch_size": "all", "evaluate_every": 6000, "stationarity": False}
    sweep = {"momentum": [0.5, 0.02]}
    result = fs.run(Nested([affine, outer]), FedDRSCGD(0.03, 0.5), federation, rounds=6000, sweep=sweep, **options)
    for a in sweep["momentum"]:
        np.testing.assert_allclose(result.solution(momentum=a), each, atol=1e-10)


# All nine of K = 2, 3, 4 and p = 1, 4, 10 were seen to pass; three of them keep this file short.
@pytest.mark.slow
@pytest.mark.parametrize(("levels", "steps"), [(2, 1), (2, 10), (3, 4)])
def test_tracked_scgd_is_exact(levels, steps):
    momenta = [0.5, 0.05, 0.0025]
    for seed in SEEDS:
        task = nested_task(levels, seed=seed)
        assert np.linalg.norm(task.gradient(START)) > 0.1
        result = run(task, TrackedSCGD(0.03, 0.1, steps), max(2500, 9000 // steps), sweep={"momentum": momenta})
        ends = [np.linalg.norm(task.gradient(np.asarray(result.solution(momentum=a)))) for a in momenta]
        assert max(ends) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("phi", [fs.prox.L1(0.5), fs.prox.Simplex()], ids=["l1", "simplex"])
def test_tracked_scgd_is_exact_under_a_regulariser_and_with_weights(phi):
    """Clients of different sizes, weighted by them."""
    task = nested_task(2, sizes=(1, 2, 5, 3), noise=0.3, seed=5)
    problem = dataclasses.replace(task.problem, regularizer=phi)
    start = np.array([0.3, 0.2, 0.5])  # inside the simplex
    result = run(task, TrackedSCGD(0.03, 0.1, 4), 2000, problem=problem, weights="size", params=start)
    x = np.asarray(result.solution())
    sizes = np.array([len(task.every(i)) for i in range(task.clients)])
    natural = lambda weights: np.linalg.norm(
        x - phi.prox(fs.Vector(jnp.asarray(x - task.gradient(x, weights))), 1.0).tree
    )
    assert natural(sizes / sizes.sum()) <= 1e-10
    assert natural(None) > 1e-3
    assert np.linalg.norm(task.gradient(x, sizes / sizes.sum())) > 0.01  # it is the regulariser that holds x there


@pytest.mark.slow
def test_tracked_scgd_with_half_of_the_clients_at_a_time_comes_near():
    """Corrections then are against the mean of a cohort, not of all clients: it settles in a neighbourhood."""
    task = nested_task(2, seed=0)
    ends = {}
    for step_size, rounds in ((0.02, 1000), (0.005, 4000)):
        result = run(task, TrackedSCGD(step_size, 0.1, 2), rounds, cohort=2, seeds=4)
        ends[step_size] = np.mean([np.linalg.norm(task.gradient(x)) for x in np.asarray(result.solutions.tree)])
    assert 1e-3 < ends[0.005] < 0.7 * ends[0.02] < 0.2 * np.linalg.norm(task.gradient(START))


# Noise.


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "separate"), [(FedDRSCGD, False), (SeparateDRSCGD, True), (TrackedSCGD, True)])
def test_one_sample_for_value_and_jacobian_solves_the_plug_in_problem(kind, separate):
    """With F(x; ξ) = A_ξ x and f(y) = ½|y − c|² the recursions are linear in the state, so means are exact.

    In the stationary regime E[AᵀA] E[x] = E[A]ᵀ c with shared samples and E[A]ᵀ E[A] E[x] = E[A]ᵀ c with separate ones.
    """
    rng = np.random.default_rng(1)
    A, c = np.eye(3) + 0.6 * rng.normal(size=(5, 3, 3)), np.array([1.0, -1.0, 0.5])
    mean = A.mean(0)
    plug_in = np.linalg.solve((np.swapaxes(A, 1, 2) @ A).mean(0), mean.T @ c)
    true = np.linalg.solve(mean.T @ mean, mean.T @ c)
    problem = Nested([lambda x, e: e["A"] @ x, lambda y: 0.5 * jnp.sum((y - jnp.asarray(c)) ** 2)])
    options = {"params": true if not separate else plug_in, "seeds": 256, "evaluate_every": 600, "stationarity": False}
    algorithm = kind(0.03, 0.1, 2, separate_samples=separate)
    result = fs.run(problem, algorithm, fs.Federation.from_clients([{"A": A}]), rounds=600, batch_size=1, **options)
    x = np.asarray(result.solutions.tree).reshape(256, 3)
    error = x.std(axis=0, ddof=1) / math.sqrt(256)
    right, wrong = (true, plug_in) if separate else (plug_in, true)
    assert (np.abs(x.mean(0) - right) < 4.5 * error).all()
    assert (np.abs(x.mean(0) - wrong) / error).max() > 10


# Messages, schedules, checks.


def returns(clients=2, days=6, assets=100, seed=0):
    rng = np.random.default_rng(seed)
    return fs.Federation.from_clients([{"r": rng.normal(size=(days, assets))} for _ in range(clients)])


@pytest.mark.parametrize(
    ("kind", "down"),
    [(FedDRSCGD, 406), (SeparateDRSCGD, 406), (AnchoredDRSCGD, 406), (LevelwiseDRSCGD, 712), (TrackedSCGD, 506)],
)
def test_messages(kind, down):
    """d_0 + Σ_{k<K} d_k + Σ_k d_{k−1} = 100 + 103 + 203 numbers."""
    options = {"rounds": 1, "params": np.full(100, 0.01), "batch_size": 1, "execution": "vmap"}
    ledger = prepare(risk_averse(eps=1e-3), kind(0.01, 0.1, 4), returns(), RunOptions(**options)).ledger
    assert ledger.up == 406 * 8
    assert ledger.down == down * 8


@pytest.mark.parametrize(("clients", "rounds"), [(8, 1000), (16, 10_000), (3, 777), (50, 200)])
def test_theory(clients, rounds):
    """Remark 4.3 with T = R p: p = T^{1/3}/N^{2/3} means p = √R / N, rounded up."""
    found = theory.fed_dr_scgd(clients=clients, rounds=rounds, alpha=0.5, eta=0.7, gamma=3.0)
    p = max(1, math.ceil(math.sqrt(rounds) / clients))
    T = rounds * p
    eta = 0.7 * clients ** (2 / 3) / T ** (1 / 3)
    assert (found.local_steps, found.init_batch_size) == (p, p)
    assert found.step_size == pytest.approx(3.0 * eta, rel=1e-12)
    assert found.momentum == pytest.approx(0.5 / clients * eta**2, rel=1e-12)
    if p > 1:  # orders: a ~ N^{1/3} / T^{2/3}
        assert found.momentum == pytest.approx(0.5 * 0.49 * clients ** (1 / 3) / T ** (2 / 3), rel=1e-12)
    assert type(TrackedSCGD(0.1, found.momentum).momentum) is float
    variant = theory.fed_dr_scgd(clients=clients, rounds=rounds, alpha=0.5, eta=0.7, gamma=3.0, method=AnchoredDRSCGD)
    assert type(variant) is AnchoredDRSCGD
    assert hyperparameters(variant) == hyperparameters(found)


def test_theory_refuses_a_momentum_above_one():
    with pytest.raises(ValueError, match=r"theory\.fed_dr_scgd: a = αη² = 2 must be at most 1; take a smaller alpha"):
        theory.fed_dr_scgd(clients=8, rounds=1)


def test_refusals():
    task = nested_task(2)
    with pytest.raises(ValueError, match=r"FedDRSCGD: projection: 'bal'; did you mean ball\?"):
        FedDRSCGD(0.1, 0.1, projection="bal")
    with pytest.raises(ValueError, match=r"momentum = 1\.5 is out of range; it must be > 0 and <= 1"):
        TrackedSCGD(0.1, 1.5)
    options = {"rounds": 1, "params": START, "batch_size": 1, "execution": "vmap"}
    other = dataclasses.replace(task.problem, inner="client")
    with pytest.warns(CouplingWarning, match="FedDRSCGD is made for inner='global'.*inner='client'"):
        prepare(other, FedDRSCGD(0.1, 0.1), task.federation, RunOptions(**options))
    with pytest.raises(TypeError, match="FedAvg does not solve Nested problems"):
        run(task, fs.FedAvg(0.1), 1)


@pytest.mark.slow
def test_first_estimates_may_look_at_more():
    """The variance of the first h falls with init_batch_size."""
    task = nested_task(2, clients=1, sizes=(50,), noise=1.0, seed=6)
    exact = task.value(1, 0, START, task.every(0))

    def spread(size):
        algorithm = AnchoredDRSCGD(0.1, 0.1, init_batch_size=size)  # keeps its first h where it can be read
        options = {"rounds": 1, "params": START, "batch_size": 1, "seeds": 128, "execution": "vmap"}
        job = prepare(task.problem, algorithm, task.federation, RunOptions(**options))
        h = job.begin()[0].local["points"][1].tree
        return np.mean((np.asarray(h).reshape(128, -1) - exact) ** 2)

    assert 9 < spread(None) / spread(16) < 28  # 16 in theory; means of 128 × 3 squares are known to about 10 %
