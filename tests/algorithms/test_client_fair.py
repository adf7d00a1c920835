"""AFL and q-FFL: fairness between clients, against plain loops, closed forms and optimality conditions."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from references import least_squares, local_sgd

import fedstrata as fs
from fedstrata.algorithms.fair import AFL, QFFL

TASK = least_squares(clients=4, dimension=3, seed=0)
N = TASK.federation.clients
START = np.array([0.3, -0.2, 0.5])


def run(algorithm, rounds=12, batch_size="all", task=TASK, **options):
    given = {"params": START, "evaluate_every": rounds, "stationarity": False, **options}
    return fs.run(task.problem, algorithm, task.federation, rounds=rounds, batch_size=batch_size, **given)


def losses(w, task=TASK):
    shards = [task.federation["train"].shard(i) for i in range(task.federation.clients)]
    return np.array([np.mean(0.5 * (s["x"] @ w - s["y"]) ** 2) for s in shards])


def gradients(w):
    return np.array([TASK.gradient(i, w) for i in range(N)])


def onto_simplex(v, total=1.0):
    """By bisection on the level: another way than the library's."""
    low, high = v.min() - total, v.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(v - middle, 0).sum() > total else (low, middle)
    return np.maximum(v - low, 0)


def weights(result):
    return np.asarray(result.local["weight"])[0] / N


# AFL.


def afl(rounds, step, rate):
    x, lam, seen = START, np.full(N, 1 / N), []
    for _ in range(rounds):
        x, lam = x - step * lam @ gradients(x), onto_simplex(lam + rate * losses(x))
        seen.append(x)
    return x, lam, np.mean(seen, axis=0)


@pytest.mark.parametrize("rate", [0.001, 0.2])  # the larger one empties clients within the rounds
def test_afl_follows_its_rule(rate):
    for rounds in (1, 2, 12):
        x, lam, mean = afl(rounds, 0.1, rate)
        result = run(AFL(0.1, rate), rounds)
        np.testing.assert_allclose(result.solution(), x, rtol=1e-10)
        np.testing.assert_allclose(weights(result), lam, rtol=1e-10, atol=1e-13)
        averaged = run(AFL(0.1, rate, average_iterates=True), rounds)
        np.testing.assert_allclose(averaged.solution(), mean, rtol=1e-10)
    assert (lam.min() == 0) == (rate == 0.2)


def test_afl_with_one_client_is_gradient_descent():
    alone = TASK.federation.select([2])
    result = fs.run(TASK.problem, AFL(0.1, 5.0), alone, rounds=9, batch_size="all", params=START)
    x = local_sgd(lambda w: TASK.gradient(2, w), START, 0.1, 9)
    np.testing.assert_allclose(result.solution(), x, rtol=1e-12)
    np.testing.assert_allclose(result.local["weight"], 1, rtol=1e-14)


@pytest.mark.parametrize("options", [{}, {"cohort": 2}, {"batch_size": 2, "cohort": 3}, {"weights": "size"}])
def test_afl_keeps_its_weights_on_the_simplex(options):
    lam = weights(run(AFL(0.05, 0.1), 40, **options))
    assert (lam >= 0).all()
    assert lam.std() > 0.05
    np.testing.assert_allclose(lam.sum(), 1, rtol=1e-12)


def test_a_cohort_shares_out_what_it_held_and_the_others_keep_theirs():
    cohorts = [[0, 2], [3, -1], [1, 2]]
    x, lam, rate = START, np.full(N, 1 / N), 0.03
    for members in cohorts:
        here = [i for i in members if i >= 0]
        direction = N / len(here) * lam[here] @ gradients(x)[here]
        new = onto_simplex(lam[here] + rate * losses(x)[here], total=lam[here].sum())
        x, lam[here] = x - 0.1 * direction, new
    result = run(AFL(0.1, rate), 3, cohort=fs.participation.Given(cohorts))
    np.testing.assert_allclose(result.solution(), x, rtol=1e-10)
    np.testing.assert_allclose(weights(result), lam, rtol=1e-10)


def test_a_cohort_that_holds_nothing_changes_nothing():
    """A large rate empties all clients but the worst; two of the others then meet alone."""
    before = run(AFL(0.01, 50.0), 3)
    poor = np.flatnonzero(weights(before) == 0)
    assert len(poor) == N - 1
    everyone = list(range(N))
    schedule = fs.participation.Given([everyone, everyone, everyone, poor[:2].tolist()])
    after = run(AFL(0.01, 50.0), 4, cohort=schedule)
    np.testing.assert_array_equal(weights(after), weights(before))
    np.testing.assert_array_equal(after.solution(), before.solution())


def test_afl_finds_where_two_scalar_losses_are_equal():
    """f = a(x − 1)²/2 and b(x + 2)²/2 with a = 4, b = 1: the worst is least at √a (1 − x) = √b (x + 2), x = 0."""
    rows = [{"x": np.full(3, s), "y": np.full(3, s * c)} for s, c in ((2.0, 1.0), (1.0, -2.0))]
    federation = fs.Federation.from_clients(rows)
    problem = fs.Average(lambda w, e: 0.5 * (w * e["x"] - e["y"]) ** 2)
    options = {"rounds": 3000, "batch_size": "all", "params": np.array(0.7), "evaluate_every": 3000}
    result = fs.run(problem, AFL(0.05, 0.02), federation, **options)
    assert abs(float(result.solution())) < 1e-10
    # At the saddle the weighted gradients cancel: 4 λ (x − 1) + (1 − λ)(x + 2) = 0 at x = 0, so λ = 1/3.
    np.testing.assert_allclose(np.asarray(result.local["weight"])[0] / 2, [1 / 3, 2 / 3], rtol=1e-9)


@pytest.mark.parametrize("options", [{}, {"weights": "size"}])
def test_afl_ends_at_the_lowest_worst_loss(options):
    """The saddle's conditions: the carriers of weight have the worst loss, and their gradients cancel."""
    result = run(AFL(0.1, 0.02), 6000, **options)
    x, lam = np.asarray(result.solution()), weights(result)
    carry = lam > 0
    assert 2 <= carry.sum() < N
    np.testing.assert_allclose(losses(x)[carry], losses(x).max(), rtol=1e-9)
    p = TASK.federation["train"].counts if options else np.ones(N)
    np.testing.assert_allclose((p * lam) @ gradients(x), 0, atol=1e-8)
    assert losses(x).max() < losses(TASK.optimum()).max() - 0.1


def test_the_weights_of_afl_cost_four_numbers():
    entries = {(e.phase, e.field, e.direction): e.bytes for e in run(AFL(0.1, 0.1), 1).ledger.entries}
    number, vector = 8, 3 * 8
    assert entries == {
        (0, "x", "down"): vector,
        (0, "g", "up"): vector,
        (0, "f", "up"): number,
        (0, "held", "up"): number,
        (1, "gain", "down"): number,
        (1, "level", "down"): number,
    }


# q-FFL.


def qffl(rounds, step, steps, q, L, p=None):
    p, x = np.full(N, 1 / N) if p is None else p, START
    for _ in range(rounds):
        F = losses(x)
        ends = [local_sgd(lambda w, i=i: TASK.gradient(i, w), x, step, steps) for i in range(N)]
        dw = L * (x - np.array(ends))
        D = (F**q)[:, None] * dw
        h = q * F ** (q - 1) * (dw**2).sum(axis=1) + L * F**q
        x = x - (p @ D) / (p @ h)
    return x


@pytest.mark.parametrize(("q", "L"), [(0.5, None), (2.0, None), (1.0, 3.0)])
def test_qffl_follows_its_rule(q, L):
    for rounds in (1, 12):
        expected = qffl(rounds, 0.05, 3, q, 1 / 0.05 if L is None else L)
        np.testing.assert_allclose(run(QFFL(0.05, 3, q, L), rounds).solution(), expected, rtol=1e-11)
    counts = TASK.federation["train"].counts
    sized = run(QFFL(0.05, 3, q, L), weights="size").solution()
    expected = qffl(12, 0.05, 3, q, 1 / 0.05 if L is None else L, counts / counts.sum())
    np.testing.assert_allclose(sized, expected, rtol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"batch_size": 2, "cohort": 2}, {"batch_size": 2, "weights": "size"}])
@pytest.mark.parametrize(("steps", "L"), [(1, None), (5, None), (5, 7.0)])
def test_qffl_without_fairness_is_fedavg(steps, L, options):
    ours, theirs = (run(a, **options).solution() for a in (QFFL(0.05, steps, 0.0, L), fs.FedAvg(0.05, steps)))
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    assert not np.allclose(run(QFFL(0.05, steps, 1.0, L), **options).solution(), theirs, rtol=1e-3)


@pytest.mark.parametrize("q", [0.5, 2.0])
def test_qffl_with_one_step_is_stationary_for_the_powers_of_losses(q):
    x = np.asarray(run(QFFL(0.1, 1, q), 4000).solution())
    np.testing.assert_allclose((losses(x) ** q) @ gradients(x), 0, atol=1e-9)
    assert np.linalg.norm(gradients(x).sum(axis=0)) > 0.05


def test_more_q_is_a_lower_worst_loss_down_to_that_of_afl():
    worst = [losses(np.asarray(run(QFFL(0.1, 1, q), 4000).solution())).max() for q in (0.0, 1.0, 5.0, 20.0)]
    least = losses(np.asarray(run(AFL(0.1, 0.02), 4000).solution())).max()
    assert worst == sorted(worst, reverse=True)
    assert least < worst[-1] < least + 0.1


def test_qffl_takes_the_loss_of_all_data_at_the_start_of_the_round():
    """With batches of one example and a step of almost nothing, D/h is still that of F over the whole shard."""
    step = 1e-6
    rng = np.random.default_rng(0)
    index = np.stack([rng.integers(0, n, (1, 1, 1)) for n in TASK.federation["train"].counts], axis=2)
    shards = [TASK.federation["train"].shard(i) for i in range(N)]
    rows = [(s["x"][index[0, 0, i, 0]], s["y"][index[0, 0, i, 0]]) for i, s in enumerate(shards)]
    g = np.array([(a @ START - b) * a for a, b in rows])
    F = losses(START)
    h = 2.0 * F * (g**2).sum(axis=1) + F**2 / step
    found = run(QFFL(step, 1, 2.0), 1, fs.Replay({"batch": index})).solution()
    np.testing.assert_allclose(np.asarray(found) - START, -(F**2 @ g) / h.sum(), rtol=1e-8)


@pytest.mark.parametrize("q", [0.0, 0.5, 3.0])
def test_a_client_without_loss_leaves_the_model_finite(q):
    federation = fs.Federation.from_clients([{"x": np.eye(3), "y": np.zeros(3)}, {"x": np.eye(3), "y": np.ones(3)}])
    result = fs.run(TASK.problem, QFFL(0.1, 2, q), federation, rounds=5, batch_size="all", params=np.zeros(3))
    assert np.isfinite(result.solution()).all()
    assert (np.asarray(result.solution()) > 0.01).all()


def test_a_negative_loss_is_not_taken():
    problem = fs.Average(lambda w, e: jnp.sum(w * e["x"]))
    with pytest.warns(fs.DivergenceWarning):
        fs.run(problem, QFFL(0.1, 1, 2.0), TASK.federation, rounds=3, batch_size="all", params=-100 * START)


def test_hyper_parameters_may_be_schedules_and_are_checked():
    falling = fs.per_round(optax.exponential_decay(0.05, 5, 0.5))
    assert np.isfinite(run(QFFL(falling, 3, 1.0)).solution()).all()
    assert np.isfinite(run(AFL(falling, falling)).solution()).all()
    with pytest.raises(ValueError, match="q = -1"):
        QFFL(0.1, 1, -1.0)
    with pytest.raises(ValueError, match="weight_step_size = 0"):
        AFL(0.1, 0.0)
