"""FedX1, FedX2, TrackedX, LocalPair, SOX and PairSGD: listings, first directions, identities, and where they end."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from layouts import prepare
from pairwise_references import LOSSES, fedx1, fedx2, gradient, kl_opauc, pair_task, sox
from sklearn.metrics import roc_auc_score

import fedstrata as fs
from fedstrata.algorithms.pairwise import theory
from fedstrata.core.memory import Pool
from fedstrata.data.sampling import Epochs
from fedstrata.experiments.trap import offset_sites
from fedstrata.simulate.result import DivergenceWarning

W = np.array([0.3, -0.2, 0.5])
TASK = pair_task()
# Client 1 has no positives, client 2 no negatives.
SOME = pair_task(((3, 5), (0, 3), (4, 0), (2, 2)), seed=4)
# The first cohort and that of round 2 have no negatives at all, that of round 3 no positives.
COHORTS = [[2], [0, 1], [2], [1], [3, 0], [0, 1]]


def run(task, problem, algorithm, rounds, batch_size: Any = "all", **options):
    """Stationarity is left to NumPy, where it is not the point: its program costs as much as the run's."""
    given = {"params": W, "evaluate_every": rounds, "stationarity": False, **options}
    return fs.run(problem, algorithm, task.federation, rounds=rounds, batch_size=batch_size, **given)


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-11)


def table(result, logs=True):
    """u of all examples of the first set, client by client."""
    rows = np.asarray(result.local["u"].rows)[0]
    return np.exp(rows) if logs else rows


# Listings.


class Listing(NamedTuple):
    loss: str
    steps: int
    history: int
    cohorts: Any = None

    @property
    def task(self):
        return TASK if self.cohorts is None else SOME

    def run(self, algorithm, rounds=4, **options):
        rounds = len(self.cohorts) if self.cohorts else rounds
        cohort = fs.participation.Given(self.cohorts) if self.cohorts else None
        return run(self.task, LOSSES[self.loss].problem(l2=0.1), algorithm, rounds, cohort=cohort, **options)


@pytest.mark.parametrize(
    "case", [Listing("psm", 2, 1), Listing("squared hinge", 3, 2), Listing("psm", 2, 2, COHORTS)], ids=str
)
def test_fedx1_follows_its_listing(case):
    result = case.run(fs.FedX1(0.3, case.steps, history=case.history))
    w = fedx1(case.task, LOSSES[case.loss], W, 0.3, case.steps, result.rounds, case.history, case.cohorts, 0.1)
    assert np.linalg.norm(w - W) > 0.1
    close(result.solution(), w)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [Listing("kl", 2, 1), Listing("precision", 2, 2), Listing("two-way", 1, 1), Listing("kl", 2, 2, COHORTS)],
    ids=str,
)
def test_fedx2_follows_its_listing(case):
    """w, G, every u, and what the last round pooled; with cohorts, absent clients keep their u (Algorithm 3)."""
    loss, logs = LOSSES[case.loss], case.loss != "precision"
    step = 0.02 if case.loss == "two-way" or case.cohorts else 0.2
    result = case.run(fs.FedX2(step, case.steps, 0.3, 0.4, history=case.history))
    end = fedx2(case.task, loss, W, step, case.steps, result.rounds, 0.3, 0.4, case.history, case.cohorts, 0.1)
    assert np.linalg.norm(end.w - W) > 0.01
    close(result.solution(), end.w)
    close(result.state.g.tree[0], end.g)
    u = np.concatenate([np.reshape(rows, (-1, loss.value(0.0, 0.0, 1).size)) for rows in end.u if len(rows)])
    close(table(result, logs), u[:, 0] if logs else u)
    # The pool of the last round is the entries of its cohort, in their order; copies fill it up.
    pool = result.state.first
    assert pool.valid.shape[1:3] == (case.history, 2 if case.cohorts else 3)
    for slot, block in enumerate(end.pool):
        count, most = len(case.task.first(block.client)), max(n for n, _ in case.task.counts)
        taken = np.concatenate([k * most + np.arange(count) for k in range(case.steps)])
        assert (pool.client[0, -1, slot] == block.client).all()
        close(pool.rows["score"][0, -1, slot][taken], [a for a, _ in block.first])
        found = pool.rows["u"][0, -1, slot][taken]
        close(np.exp(found) if logs else found, [u[0] if logs else u for _, u in block.first])


def test_samples_of_clients_that_lack_a_kind_are_not_counted():
    """Every present client looks at all it has in each of the two steps."""
    result = Listing("kl", 2, 2, COHORTS).run(fs.FedX2(0.02, 2, 0.3, 0.4, history=2))
    seen = 2 * sum(sum(SOME.counts[i]) for cohort in COHORTS for i in cohort)
    assert result.history.last("samples") == seen


# Directions.

STEPS = [0.1, 0.01, 0.001]


def gap(algorithm, loss, steps, rounds=6):
    """|(w_r − w_{r+1}) / η − ∇F(w_r)| with K = 1, where that is the mean direction, for r = 0 and r = rounds."""
    problem, out = loss.problem(), []
    at = {r: run(TASK, problem, algorithm, r, sweep={"step_size": steps}) for r in (1, rounds, rounds + 1)}
    for step in steps:
        point = {0: W, **{r: result.solution(step_size=step) for r, result in at.items()}}
        error = lambda r, point=point, step=step: np.linalg.norm(
            (point[r] - point[r + 1]) / step - gradient(TASK, loss, point[r])
        )
        out.append((error(0), error(rounds)))
    return np.array(out).T


def test_first_directions_are_exact_and_later_gaps_shrink_with_the_step():
    for algorithm, loss, steps in (
        (fs.FedX1(0.1), LOSSES["psm"], STEPS),
        (fs.FedX2(0.1, momentum=1.0), LOSSES["kl"], [s / 100 for s in STEPS]),
    ):
        first, later = gap(algorithm, loss, steps)
        np.testing.assert_allclose(first, 0, atol=1e-10)
        assert later[0] > 1e-4
        ratio = later[:-1] / later[1:]
        assert np.all((ratio > 5) & (ratio < 15)), (type(algorithm).__name__, later)


@pytest.mark.parametrize(
    ("algorithm", "loss"),
    [(fs.FedX1(0.1), "psm"), (fs.FedX2(1e-3, momentum=1.0), "kl"), (fs.TrackedX(1e-3, momentum=1.0), "kl")],
)
def test_first_directions_of_a_cohort_are_paired_with_the_scores_of_all(algorithm, loss):
    """The step of each client alone, as a cohort of one, is its part of ∇F: their mean is the whole (line 26)."""
    alone = lambda i: run(TASK, LOSSES[loss].problem(), algorithm, 1, cohort=fs.participation.Given([[i]])).solution()
    mean = np.mean([(W - alone(i)) / algorithm.step_size for i in range(TASK.clients)], axis=0)
    np.testing.assert_allclose(mean, gradient(TASK, LOSSES[loss], W), rtol=1e-8, atol=1e-10)


def test_u_that_begins_as_one_makes_the_first_direction_wrong():
    """The authors' later code starts so; with u_start="pool" there is no error, as above."""
    loss, step = kl_opauc(1.0), 1e-6
    wanted = gradient(TASK, loss, W)
    result = run(TASK, loss.problem(), fs.FedX2(step, momentum=1.0, u_start=1), 1)
    assert np.linalg.norm((W - result.solution()) / step - wanted) > 0.3 * np.linalg.norm(wanted)


def test_u_that_begins_as_zero_with_a_logarithm_stops_the_run():
    """f'(0) = λ/0 as published: the run ends in round 1, and its note names the field."""
    problem = LOSSES["kl"].problem()
    with pytest.warns(DivergenceWarning, match="round 1.*'u'"):
        result = run(TASK, problem, fs.FedX2(0.01, u_start=0), 3, batch_size=1)
    assert result.diverged
    np.testing.assert_array_equal(result.solution(), W)


# Samples.

SEEDS, ETA, K, ROUNDS = 300, 1e-7, 2, 4
NOISY = pair_task(((6, 9), (0, 5), (9, 3), (4, 12)), seed=7)
SAMPLED = {
    "shuffled": fs.FedX1(ETA, K),
    "replacement": fs.FedX1(ETA, K, draws="replacement", shared_partners=False),
    "small pools": fs.FedX1(ETA, K, history=2, pool_size=1, extra_samples=True),
}


def sampled(algorithm, seeds=SEEDS):
    """The mean direction over all rounds and steps, one row per seed; the steps are too short to move."""
    result = run(NOISY, LOSSES["logistic"].problem(), algorithm, ROUNDS, batch_size=2, seeds=seeds)
    return (W - np.asarray(result.solutions.tree)) / (ROUNDS * K * ETA), result


@pytest.fixture(scope="module")
def shuffled():
    return sampled(SAMPLED["shuffled"])


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_directions_have_the_exact_gradient_for_their_mean(name, shuffled):
    """Unequal clients, one without positives, and pools of any size: within 4.5 standard errors."""
    found, result = shuffled if name == "shuffled" else sampled(SAMPLED[name])
    wanted, error = gradient(NOISY, LOSSES["logistic"], W), found.std(axis=0) / np.sqrt(SEEDS)
    assert np.all(error < 0.05 * np.linalg.norm(wanted))
    assert np.all(np.abs(found.mean(axis=0) - wanted) < 4.5 * error)
    # Without the weights ω of clients it would be off by far more than that.
    alike = gradient(NOISY, LOSSES["logistic"], W, "clients")
    assert np.linalg.norm(alike - wanted) > 6 * np.linalg.norm(error)
    drawn = 2 * (2 if SAMPLED[name].extra_samples else 1)
    assert result.history.last("samples")[0] == ROUNDS * K * drawn * (3 + 4)  # of the first set three clients have some


@pytest.mark.slow
def test_fedx2_without_f_and_momentum_is_fedx1(shuffled):
    found, result = sampled(fs.FedX2(ETA, K, momentum=1.0))
    np.testing.assert_allclose(found, shuffled[0], rtol=1e-7, atol=1e-7)  # 1e-14 of the iterates, over η
    close(result.state.second.rows["score"], shuffled[1].state.second.rows["score"])


def test_pools_keep_scores_and_u_together():
    """Sub-sampled pools, with steps too short to move: a row's u is that of its example, found by its score."""
    problem = kl_opauc(5.0).problem()
    result = run(NOISY, problem, fs.FedX2(ETA, 2, 1e-12, pool_size=3, draws="replacement"), 2, batch_size=2)
    scores = NOISY.federation["positives"].examples["x"] @ W
    pool = result.state.first
    for slot in (0, 2, 3):  # client 1 has none
        for score, u in zip(pool.rows["score"][0, 0, slot], pool.rows["u"][0, 0, slot], strict=True):
            row = np.argmin(np.abs(scores - score))
            assert abs(scores[row] - score) < 1e-5
            np.testing.assert_allclose(u, np.asarray(result.local["u"].rows)[0, row], rtol=1e-6)
        assert len({*np.round(pool.rows["score"][0, 0, slot], 4)}) > 1


# Identities.


class Refreshed(fs.FedX2):
    """FedX2 without staleness: buffers hold what the active examples have now, u included. A mode for tests."""

    def estimate(self, oracle: fs.PairwiseOracle, start, state):
        scores, at = oracle.scores(state.x), oracle.sample("first").position
        size = scores.first.shape[0]

        def now(rows):
            owner = jnp.full((size,), oracle.client)
            return Pool(rows, owner, jnp.ones(size, bool), size, 1)

        def buffers(u):
            first, second = {"score": scores.first, "u": u}, {"score": scores.second}
            return start._replace(first=now(first), second=now(second))

        _, after = super().estimate(oracle, buffers(state.u[at]), state)
        return super().estimate(oracle, buffers(after.u[at]), state)


ALONE = pair_task(((8, 12),), seed=3)


@pytest.mark.slow
def test_one_client_without_staleness_is_sox():
    """Refreshed FedX2, LocalPair and SOX on one client draw the same epochs and go the same way."""
    problem, given = LOSSES["kl"].problem(l2=0.1), {"step_size": 0.1, "u_start": 1, "momentum": 0.3}
    wanted = run(ALONE, problem, fs.SOX(**given), 8, Epochs(4))
    assert np.linalg.norm(wanted.solution() - W) > 0.05
    for kind in (fs.LocalPair, Refreshed):
        result = run(ALONE, problem, kind(**given), 8, Epochs(4))
        close(result.solution(), wanted.solution())
        close(table(result), table(wanted))


@pytest.mark.parametrize("updated", [True, False])
def test_sox_follows_its_listing_on_pooled_data(updated):
    result = run(TASK, LOSSES["kl"].problem(), fs.SOX(0.1, 3, 0.4, 0.3, updated_u=updated), 2)
    w = sox(TASK, LOSSES["kl"], W, 0.1, 6, 0.4, 0.3, updated)
    assert np.linalg.norm(w - W) > 0.05
    close(result.solution(), w)
    other = sox(TASK, LOSSES["kl"], W, 0.1, 6, 0.4, 0.3, not updated)
    assert np.linalg.norm(other - w) > 1e-4


def test_pair_sgd_is_local_pair_on_one_client():
    problem = LOSSES["psm"].problem()
    one = run(ALONE, problem, fs.PairSGD(0.5), 8, Epochs(4))
    two = run(ALONE, problem, fs.LocalPair(0.5, momentum=1.0), 8, Epochs(4))
    assert np.linalg.norm(one.solution() - W) > 0.05
    close(two.solution(), one.solution())


def test_pair_sgd_on_all_data_is_gradient_descent():
    result = run(TASK, LOSSES["psm"].problem(l2=0.1), fs.PairSGD(0.5, 2), 2)
    w = W
    for _ in range(4):
        w = w - 0.5 * gradient(TASK, LOSSES["psm"], w, l2=0.1)
    close(result.solution(), w)


def test_pair_sgd_has_no_settings_of_u():
    assert [field.name for field in dataclasses.fields(fs.PairSGD)] == ["step_size", "local_steps", "momentum"]


# The trap of local pairs.


@pytest.mark.slow
def test_local_pairs_walk_into_the_trap():
    """Each site is ranked almost perfectly, and all together badly: only pairs across sites see the offset."""
    fed = offset_sites().by_label()
    x, y = fed["train"].examples["x"], fed["train"].examples["y"]
    settings = {
        "local": (fs.LocalPair(0.5, 10), LOSSES["psm"]),
        "FedX1": (fs.FedX1(0.5, 10, draws="replacement"), LOSSES["psm"]),
        "FedX2": (fs.FedX2(0.02, 10, momentum=0.5, draws="replacement"), kl_opauc(5.0)),
    }
    found = {}
    for name, (algorithm, loss) in settings.items():
        problem = loss.problem(metrics=("auc",) if name == "local" else ())
        options = {"params": np.zeros(2), "evaluate_every": 80, "stationarity": False}
        result = fs.run(problem, algorithm, fed, rounds=80, batch_size=32, **options)
        found[name] = roc_auc_score(y, x @ result.solution())
        if name == "local":
            np.testing.assert_allclose(result.history.last("auc"), found["local"], atol=1e-9)
            assert result.history.last("mean_local_auc") > 0.99
    assert 0.74 < found["local"] < 0.76
    assert found["FedX1"] > 0.9
    assert found["FedX2"] > 0.9


def test_the_sites_of_the_trap():
    fed = offset_sites(seed=1, patients=4000, sites=3, offset=6.0)
    x, y, site = fed["train"].examples["x"], fed["train"].examples["y"], fed["train"].owners
    assert abs(roc_auc_score(y, x[:, 1]) - 0.931) < 0.01  # Φ(2.1 / √2)
    assert all(roc_auc_score(y[site == i], x[site == i, 0]) > 0.99 for i in range(3))
    assert abs(roc_auc_score(y, x[:, 0]) - 2 / 3) < 0.01  # of nine kinds of pairs six are right
    with pytest.raises(ValueError, match="patients=1"):
        offset_sites(patients=1)


# TrackedX.


def norms(loss, result, l2=0.1):
    return np.linalg.norm(gradient(TASK, loss, np.asarray(result.solution()), l2=l2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "step", "other"),
    [("psm", 0.4, fs.FedX1(0.4, 2)), ("kl", 0.2, fs.FedX2(0.2, 2))],  # two steps, as in the listings: one program
    ids=["psm", "kl"],
)
def test_tracked_steps_end_at_a_stationary_point(name, step, other):
    """Constant steps, unequal clients that differ, f linear or not: exact, where FedX stays a distance away."""
    loss = LOSSES[name]
    problem, momentum = loss.problem(l2=0.1), 0.1 if name == "kl" else 1.0
    tracked = run(TASK, problem, fs.TrackedX(step, 2, momentum=momentum), 1200)
    assert norms(loss, tracked) < 1e-10
    assert norms(loss, run(TASK, problem, other, 1200)) > 3e-3
    if name == "kl":  # u has become the exact mean loss
        first, second = (TASK.federation[s].examples["x"] @ tracked.solution() for s in ("positives", "negatives"))
        close(table(tracked), np.exp(np.maximum(1 - first[:, None] + second, 0) ** 2 / 2).mean(axis=1))


def test_tracking_keeps_its_sum_where_some_take_part_but_pools_of_some_are_not_exact():
    """Σ_i c_i = 0 at any time. But the pool is that of a cohort, another one in every round: nothing stands still."""
    loss = LOSSES["psm"]
    result = run(TASK, loss.problem(l2=0.1), fs.TrackedX(0.2, 4, momentum=1.0), 300, cohort=2)
    close(result.state.mean.tree[0], np.mean(result.local["said"].tree[0], axis=0))
    assert 1e-6 < norms(loss, result) < 0.1


# Bytes.


def test_what_is_sent():
    """Numbers of eight bytes: d = 3, B₁ = B₂ = 2, K = 4, N = 3."""

    def bytes_of(algorithm, name="kl", **options):
        given = {"rounds": 1, "params": W, "batch_size": 2, **options}
        ledger = prepare(LOSSES[name].problem(), algorithm, TASK.federation, **given).ledger
        return ledger.up / 8, ledger.down / 8

    assert bytes_of(fs.FedX1(0.1, 4), "psm") == (3 + 4 * 4, 3 + 3 * 4 * 4)
    assert bytes_of(fs.FedX2(0.1, 4)) == (2 * 3 + 4 * 6, 2 * 3 + 3 * 4 * 6)
    assert bytes_of(fs.TrackedX(0.1, 4)) == bytes_of(fs.FedX2(0.1, 4))
    assert bytes_of(fs.FedX2(0.1, 4), cohort=2) == (2 * 3 + 4 * 6, 2 * 3 + 2 * 4 * 6)
    # ⌈K/N⌉ scores for each set are the least that gives every step a new one.
    assert bytes_of(fs.FedX1(0.1, 4, pool_size=2), "psm") == (3 + 2 * 2, 3 + 3 * 2 * 2)
    assert bytes_of(fs.LocalPair(0.1, 4)) == (2 * 3, 2 * 3)
    assert bytes_of(fs.SOX(0.1, 4)) == (0, 0)
    assert "scores" in fs.FedX1.privacy


# Theory.


def test_constants_of_the_theorems():
    one = theory.fedx1(clients=4, rounds=64_000, scale=0.5)
    assert (one.local_steps, round(one.step_size, 12)) == (10, 0.5 * 4 / 1600)
    two = theory.fedx2(examples=64, rounds=1000, scale=0.5)
    assert two.local_steps == 40
    np.testing.assert_allclose(
        [two.step_size, two.memory_weight, two.momentum], [0.5 / 1600, 4 / 100, 1 / (2 * 100)], rtol=1e-12
    )
