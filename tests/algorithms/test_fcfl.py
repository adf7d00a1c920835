"""FCFL against a plain loop with scipy's linear programs, its constraints, and where it ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import local_sgd
from scipy.optimize import linprog, minimize

import fedstrata as fs
from fedstrata.algorithms.fair import FCFL
from fedstrata.problems.fair import Fair
from fedstrata.solvers.gathered import (
    aligned,
    append,
    combine,
    filled,
    largest,
    products,
    shared_level,
    soft_worst,
    stack,
)

SHARPNESS = 10.0


def clients(count=3, seed=0):
    """Labels of two groups whose first feature differs, and of clients that differ in how the features matter."""
    rng = np.random.default_rng(seed)
    w, shards = rng.normal(size=4), []
    for i in range(count):
        x = rng.normal(size=(60 + 10 * i, 4))
        group = (rng.uniform(size=len(x)) < 0.4).astype(int)
        x[:, 0] += 2 * group - 1
        score = x @ (w + 0.5 * rng.normal(size=4))
        y = (rng.uniform(size=len(x)) < 1 / (1 + np.exp(-score))).astype(int)
        shards.append({"x": np.concatenate([x, np.ones((len(x), 1))], axis=1), "y": y, "group": group})
    return shards


SHARDS = clients()
FEDERATION = fs.Federation.from_clients(SHARDS)
PROBLEM = Fair(fs.losses.Classification(lambda w, x: jnp.dot(w, x)), groups=2)
START = np.zeros(5)


def run(algorithm, rounds, **options):
    given = {"params": START, "batch_size": "all", "evaluate_every": rounds, "stationarity": False, **options}
    return fs.run(PROBLEM, algorithm, FEDERATION, rounds=rounds, **given)


def loss(shard, w):
    z = shard["x"] @ w
    p = 1 / (1 + np.exp(-z))
    return np.mean(np.logaddexp(0, z) - shard["y"] * z), shard["x"].T @ (p - shard["y"]) / len(z)


def disparity(shard, w):
    p = 1 / (1 + np.exp(-SHARPNESS * (shard["x"] @ w)))
    slope = SHARPNESS * (p * (1 - p))[:, None] * shard["x"]
    some = [(shard["y"] == 1) & (shard["group"] == a) for a in (0, 1)]
    gap = p[some[0]].mean() - p[some[1]].mean()
    return abs(gap), np.sign(gap) * (slope[some[0]].mean(axis=0) - slope[some[1]].mean(axis=0))


def ask(w, members=range(3)):
    """Losses, their gradients, disparities, their gradients."""
    f, df = zip(*[loss(SHARDS[i], w) for i in members], strict=True)
    u, du = zip(*[disparity(SHARDS[i], w) for i in members], strict=True)
    return np.array(f), np.array(df), np.array(u), np.array(du)


def program(c, A):
    """max c·a over the simplex with A a >= 0, by scipy."""
    size = lambda v: np.maximum(np.abs(v).max(axis=-1, keepdims=True), 1e-300)
    tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    whole = {"A_eq": np.ones((1, len(c))), "b_eq": [1.0]}
    found = linprog(-c / size(c), A_ub=-A / size(A), b_ub=np.zeros(len(A)), **whole, options=tight, method="highs-ds")
    assert found.status == 0
    return found.x


def softmax(v, delta):
    e = np.exp((v - v.max()) / delta)
    return e / e.sum()


def fcfl(rounds, step, eps, stage_one, decay=0.01, factor=0.1, cohorts=None):
    """The rule of both stages; also how often each branch was taken and the deltas at the end."""
    w, deltas, taken = START + 0.0, [0.5, 0.5], np.zeros((2, 2), int)  # by stage, and whether the limit was kept
    for t in range(rounds):
        f, df, u, du = ask(w, range(3) if cohorts is None else cohorts[t % len(cohorts)])
        g_f, g_u, kept = softmax(f, deltas[0]) @ df, softmax(u, deltas[1]) @ du, u.max() <= eps
        taken[int(t >= stage_one), int(kept)] += 1
        if t < stage_one:
            both = np.stack([g_f, g_u])
            limits = np.zeros((0, 2)) if kept else (both @ g_f)[None]
            d = program(both @ (g_f if kept else g_u), limits) @ both
            for i, g in enumerate((g_f, g_u)):
                if deltas[i] > 1e-4 and factor * np.linalg.norm(g) <= deltas[i]:
                    deltas[i] *= decay
        else:
            rows = df if kept else np.concatenate([df, g_u[None]])
            d = program(rows @ df.mean(axis=0), rows @ rows.T) @ rows
        w = w - step * d
    return w, taken, deltas


@pytest.mark.parametrize(("eps", "stage_one"), [(0.1, 40), (0.1, 0), (0.5, 40)])
def test_it_follows_a_plain_loop_through_both_stages(eps, stage_one):
    for rounds in (1, 60):
        w, taken, deltas = fcfl(rounds, 0.1, eps, stage_one)
        result = run(FCFL(0.1, eps, stage_one), rounds)
        np.testing.assert_allclose(result.solution(), w, atol=1e-9)
        found = [float(result.state.delta_f[0]), float(result.state.delta_u[0])]
        np.testing.assert_allclose(found, deltas, rtol=1e-12)
    if (eps, stage_one) == (0.1, 40):
        assert taken.min() > 0  # every branch was tried
        assert deltas[0] < 0.5 > deltas[1]


def test_other_rules_for_delta():
    w, _, deltas = fcfl(20, 0.1, 0.1, 15, decay=0.5, factor=0.3)
    result = run(FCFL(0.1, 0.1, 15, decay=0.5, factor=0.3), 20)
    np.testing.assert_allclose(result.solution(), w, atol=1e-9)
    assert deltas[0] != fcfl(20, 0.1, 0.1, 15)[2][0]


@pytest.mark.slow
def test_the_programs_are_about_the_clients_that_are_there():
    cohorts = [[0, 2], [1], [2, 1, 0]]
    for stage_one in (0, 12):
        w, _, _ = fcfl(12, 0.1, 0.1, stage_one, cohorts=cohorts)
        given = fs.participation.Given([[0, 2, -1], [-1, 1, -1], [2, 1, 0]])
        np.testing.assert_allclose(run(FCFL(0.1, 0.1, stage_one), 12, cohort=given).solution(), w, atol=1e-9)


@pytest.mark.parametrize("count", [2, 5, 12])
def test_directions_meet_their_constraints(count):
    """On random gradients of very different lengths, in fewer dimensions than there are of them."""
    rng = np.random.default_rng(count)
    G = rng.normal(size=(40, count, 4)) * 10.0 ** rng.uniform(-3, 3, (40, count, 1))
    target = G.mean(axis=1)
    one = lambda rows, t: aligned(fs.Vector(rows), fs.Vector(t), fs.Vector(rows)).tree
    d = np.asarray(jax.jit(jax.vmap(one))(G, target))
    length = np.linalg.norm(G, axis=2)
    margins = np.einsum("bij,bj->bi", G, d) / (length * length.max(axis=1, keepdims=True))
    assert margins.min() >= -1e-12
    for rows, t, ours in zip(G, target, d, strict=True):
        best = program(rows @ t, rows @ rows.T) @ rows @ t
        assert abs(ours @ t - best) <= 1e-8 * np.abs(rows @ t).max()


def test_where_gradients_cancel_nothing_moves():
    """Two clients that want opposite things: the only direction that opposes neither is zero."""
    rows = jnp.array([[1.0, 2.0], [-0.5, -1.0]])
    d = aligned(fs.Vector(rows), fs.Vector(rows.mean(axis=0)), fs.Vector(rows)).tree
    np.testing.assert_allclose(d, 0, atol=1e-15)


def test_stage_two_makes_no_client_worse():
    """To first order: what a client loses over the same stretch is due to the step's length, unlike under FedSGD."""
    begin = local_sgd(lambda w: loss(SHARDS[0], w)[1], START, 0.2, 10)  # good for one client

    def lost(method, rounds):
        return np.max(ask(np.asarray(run(method, rounds, params=begin).solution()))[0] - ask(begin)[0])

    long, short, plain = lost(FCFL(0.02, 1.0, 0), 50), lost(FCFL(0.002, 1.0, 0), 500), lost(fs.FedSGD(0.02), 50)
    assert 5 * max(short, 0) < long < plain / 5


def test_stage_two_leaves_a_client_as_it_is_where_the_mean_gradient_would_help_all():
    """The largest inner product is that of long gradients, up to where the constraint of another client binds."""
    gained = lambda method, rounds: ask(START)[0] - ask(np.asarray(run(method, rounds).solution()))[0]
    assert gained(fs.FedSGD(0.002), 500).min() > 0.01
    ours = gained(FCFL(0.002, 1.0, 0), 500)
    assert abs(ours.min()) < 1e-4
    assert ours.max() > 0.04


def test_the_disparity_ends_within_its_limit():
    eps = 0.1
    disparities = lambda method, rounds: ask(np.asarray(run(method, rounds).solution()))[2]
    assert disparities(fs.FedSGD(0.5), 2000).max() > 2 * eps
    assert disparities(FCFL(0.01, eps, stage_one=5000), 5000).max() <= eps
    # Stage two walks along the limit, off by what a step of this length does to second order.
    assert disparities(FCFL(0.01, eps, stage_one=5000), 8000).max() <= 1.01 * eps


def test_stage_one_comes_close_to_the_lowest_worst_loss_within_the_limit():
    eps = 0.1
    room = lambda v: np.concatenate([v[5] - ask(v[:5])[0], eps - ask(v[:5])[2]])
    exact = minimize(lambda v: v[5], np.append(START, 1.0), constraints=[{"type": "ineq", "fun": room}], method="SLSQP")
    assert exact.success
    f = ask(np.asarray(run(FCFL(0.01, eps, stage_one=5000), 5000).solution()))[0]
    assert exact.fun - 1e-3 < f.max() < exact.fun + 5e-3


@pytest.mark.slow
def test_a_long_step_loses_the_limit_in_stage_two():
    """Growth is forbidden to first order only, and a loss is never recovered."""
    near = lambda key: START + 1e-9 * jax.random.normal(key, (5,))  # where long steps end depends on every bit

    def ends(step, stage_one):
        found = run(FCFL(step, 0.05, stage_one), 2 * stage_one, params=near, seeds=8)
        return np.array([ask(np.asarray(found.solution(seed=seed)))[2].max() for seed in range(8)])

    long, short = ends(0.1, 800), ends(0.01, 5000)
    assert long.max() > 0.1
    assert np.median(long) > 0.06
    assert short.max() < 0.055


def test_it_sends_two_gradients_and_two_numbers():
    result = run(FCFL(0.1), 1)
    assert (result.ledger.up, result.ledger.down) == (2 * 5 * 8 + 2 * 8, 5 * 8)
    assert {e.field: e.placement for e in result.ledger.entries if e.direction == "up"} == dict.fromkeys(
        ("f", "df", "u", "du"), "Gathered"
    )


def test_single_precision_and_trees_of_parameters():
    problem = Fair(fs.losses.Classification(lambda w, x: jnp.dot(w["w"], x[:4]) + w["b"]), groups=2)
    params = {"w": np.zeros(4, np.float32), "b": np.zeros((), np.float32)}
    shards = [{**s, "x": s["x"].astype(np.float32)} for s in SHARDS]
    federation = fs.Federation.from_clients(shards)
    options = {"rounds": 20, "batch_size": "all", "params": params, "stationarity": False}
    found = fs.run(problem, FCFL(0.1, 0.1, 10), federation, **options).solution()
    assert found["w"].dtype == np.float32
    w = fcfl(20, 0.1, 0.1, 10)[0]
    np.testing.assert_allclose(np.append(found["w"], found["b"]), w, atol=1e-3)


def test_a_negative_number_of_rounds_is_refused():
    with pytest.raises(ValueError, match="stage_one = -1"):
        run(FCFL(0.1, stage_one=-1), 1)


# What the server does with rows.


def test_rows():
    a, b = (
        fs.Vector({"w": jnp.ones((3, 2)), "b": jnp.zeros(())}),
        fs.Vector({"w": 2 * jnp.ones((3, 2)), "b": jnp.ones(())}),
    )
    rows = append(stack(a, b), a)
    np.testing.assert_allclose(products(rows, stack(b)), [[12.0], [25.0], [12.0]])
    mixed = combine(jnp.array([0.5, 2.0, -1.0]), rows).tree
    np.testing.assert_allclose(mixed["w"], np.full((3, 2), 3.5))
    np.testing.assert_allclose(mixed["b"], 2.0)


def test_empty_slots_say_nothing():
    present = jnp.array([True, False, True])
    rows = filled(fs.Vector(jnp.array([[1.0, 2.0], [jnp.nan, jnp.inf], [3.0, 4.0]])), present)
    np.testing.assert_array_equal(rows.tree, [[1, 2], [0, 0], [3, 4]])
    values = jnp.array([1.0, jnp.nan, 3.0])
    assert largest(values, present) == 3
    np.testing.assert_allclose(soft_worst(values, jnp.array(1.0), present), [1 / (1 + np.e**2), 0, 1 / (1 + np.e**-2)])
    assert shared_level(jnp.array([0.9, jnp.nan, 0.5]), jnp.array([0.5, jnp.nan, 0.5]), present) == pytest.approx(0.2)
