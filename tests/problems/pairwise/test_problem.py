"""Pairwise problems against loops over all pairs, their parts at the clients, partners out of pools, and refusals."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import prepare
from pairwise_references import LINEAR, LOSSES, gradient, linear_score, objective, pair_task
from sklearn.metrics import average_precision_score, roc_auc_score

import fedstrata as fs
from fedstrata.base.clock import Clock
from fedstrata.core.memory import Pool
from fedstrata.core.vector import Vector
from fedstrata.data.sampling import Epochs, sampler
from fedstrata.problems.pairwise import exact
from fedstrata.problems.weighting import full_data
from fedstrata.simulate.inputs import flat_split

W = np.array([0.3, -0.2, 0.5])
TASK = pair_task()
# One client without positives, one without negatives.
LACKING = pair_task(((3, 5), (0, 3), (4, 0), (2, 2)), seed=4)
WEIGHTINGS = ["examples", "clients"]


def vector(w=W):
    return Vector(jnp.asarray(w))


# Objective and gradient.


# Weights do not depend on the loss: both kinds for one of each form (f linear, in logs, of a vector), else in turn.
WEIGHED = [(name, weighting) for name in ("psm", "kl", "precision") for weighting in WEIGHTINGS]
WEIGHED += zip([name for name in LOSSES if (name, "clients") not in WEIGHED], WEIGHTINGS * 5, strict=False)


@pytest.mark.parametrize(("name", "weighting"), WEIGHED)
def test_value_and_gradient_are_those_of_all_pairs(name, weighting):
    loss = LOSSES[name]
    problem = loss.problem(weighting=weighting, l2=0.3)
    for task in (TASK, LACKING) if name in ("psm", "kl") else (TASK,):
        value, slope = jax.jit(problem.smooth)(vector(), full_data(task.federation))
        np.testing.assert_allclose(value, objective(task, loss, W, weighting, 0.3), rtol=1e-12)
        np.testing.assert_allclose(slope.tree, gradient(task, loss, W, weighting, 0.3), rtol=1e-11, atol=1e-13)


def test_numpys_gradients_are_finite_differences():
    eps = 1e-6
    for name, loss in LOSSES.items():
        at = lambda w, loss=loss: objective(TASK, loss, w, "clients", 0.3)
        differ = [(at(W + eps * e) - at(W - eps * e)) / 2 / eps for e in np.eye(3)]
        np.testing.assert_allclose(gradient(TASK, loss, W, "clients", 0.3), differ, rtol=1e-6, atol=1e-8, err_msg=name)


MLP = fs.models.MLP((3, 4, 1), "tanh")


def two_scores(w, example):
    """A vector: w·x and its sine."""
    score = jnp.dot(w, example["x"])
    return jnp.stack([score, jnp.sin(3 * score)])


def of_two(a, b):
    return jax.nn.softplus(b[0] - a[0]) + jnp.square(a[1] - b[1]) * b[0]


@pytest.mark.parametrize(
    ("case", "weighting"),
    list(zip(["vector", "vector, f", *LINEAR, "kl", "two-way", "precision"], WEIGHTINGS * 5, strict=False)),
)
def test_other_scores_against_finite_differences(case, weighting):
    if case.startswith("vector"):
        outer = None if case == "vector" else jnp.log1p
        problem, x = fs.Pairwise(two_scores, of_two, outer, weighting=weighting), vector()
    else:
        loss = LOSSES[case]
        problem = fs.Pairwise(MLP, loss.ours, second=loss.second, weighting=weighting)
        x = Vector(problem.init(jax.random.key(3)))
    full, rng, eps = full_data(TASK.federation), np.random.default_rng(0), 1e-5
    value = jax.jit(problem.objective)
    slope = jax.jit(problem.gradient)(x, full)
    for _ in range(3):
        v = Vector(jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape)), x.tree))
        differ = (value(x + eps * v, full) - value(x - eps * v, full)) / 2 / eps
        np.testing.assert_allclose(sum(jnp.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (slope, v)), strict=True)),
                                   differ, rtol=2e-6, atol=1e-8)  # fmt: skip


@pytest.mark.parametrize(("name", "weighting"), [("psm", "clients"), ("kl", "examples"), ("precision", "clients")])
def test_chunks_change_nothing(name, weighting, monkeypatch):
    problem, full = LOSSES[name].problem(weighting=weighting), full_data(TASK.federation)
    whole = jax.jit(lambda x: problem.smooth(x, full))(vector())
    for pairs in (1, 60):  # one row at a time; chunks whose last one is not full
        monkeypatch.setattr(exact, "PAIRS", pairs)
        value, slope = jax.jit(lambda x: problem.smooth(x, full))(vector())
        np.testing.assert_allclose(value, whole[0], rtol=1e-13)
        np.testing.assert_allclose(slope.tree, whole[1].tree, rtol=1e-11, atol=1e-14)


def test_average_precision_rises_with_minus_and_falls_with_plus():
    """The paper prints f = +u₁/u₂: minimised, that lowers what it is to raise."""
    rng = np.random.default_rng(1)
    y = (np.arange(120) % 6 == 0).astype(int)
    x = rng.normal(size=(120, 4)) + 1.2 * y[:, None] * np.array([1, 0.5, 0, 0])
    fed = fs.Federation.from_clients([{"x": x[::2], "y": y[::2]}, {"x": x[1::2], "y": y[1::2]}], classes=2).by_label()
    full, start = full_data(fed), np.array([0.2, 0.1, 0.4, -0.2])
    loss = LOSSES["precision"].ours

    def descended(problem):
        step = lambda _, w: w - 0.3 * problem.gradient(Vector(w), full).tree
        w = jax.jit(lambda w: jax.lax.fori_loop(0, 150, step, w))(jnp.asarray(start))
        return average_precision_score(y, x @ np.asarray(w))

    before = average_precision_score(y, x @ start)
    assert descended(fs.Pairwise(linear_score, loss, second="train")) > before + 0.1
    plus = lambda u: u[0] / u[1]
    assert descended(fs.Pairwise(linear_score, loss, plus, second="train")) < before - 0.1


# Pools, as clients have them.


def shard_of(federation, problem, client):
    flat = {split: flat_split(federation[split]) for split in {*problem.streams.values()}}
    return {split: f.view(f.start[client], f.count[client]) for split, f in flat.items()}


def oracle_of(problem, task, client, batch: Any = "all", key=0, step=0, w=W):
    bound = problem.bind(vector(w), task.federation, sampler(batch))
    shard = shard_of(task.federation, problem, client)
    return bound.oracle(shard, jax.random.key(key), batch, clock=Clock.at(0, 8, step), client=client)


def exact_pools(oracles, x):
    """Every client's current message: scores, with the exact u beside those of the first set."""
    clients, scores = len(oracles), [oracle.scores(x) for oracle in oracles]

    def pool(rows):
        size = jax.tree.leaves(rows[0])[0].shape[0]
        together = jax.tree.map(lambda *parts: jnp.concatenate(parts), *rows)
        return Pool(together, jnp.repeat(jnp.arange(clients), size), jnp.ones(clients * size, bool), size, 1)

    second = pool([{"score": s.second} for s in scores])
    first = pool([{"score": s.first} for s in scores])
    u = [o.inner(s.first, o.partners(first, second)) for o, s in zip(oracles, scores, strict=True)]
    return pool([{"score": s.first, "u": v} for s, v in zip(scores, u, strict=True)]), second, u


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "weighting"),
    [("square", "examples"), ("psm", "clients"), ("kl", "examples"), ("kl", "clients"), ("two-way", "clients"),
     ("precision", "examples"), ("precision", "clients"), ("own f", "examples")],
)  # fmt: skip
def test_the_parts_of_the_clients_average_to_the_gradient(name, weighting):
    """Mean over clients of Δ_i1 + Δ_i2 is ∇F, though they have very different sizes and some lack a kind."""
    loss, x = LOSSES[name], vector()
    problem = loss.problem(weighting=weighting, l2=0.3)

    @jax.jit
    def directions(x):
        oracles = [oracle_of(problem, LACKING, i) for i in range(LACKING.clients)]
        first, second, u = exact_pools(oracles, x)
        return [o.grad(x, o.partners(first, second), v).tree for o, v in zip(oracles, u, strict=True)]

    parts = directions(x)
    wanted = gradient(LACKING, loss, W, weighting, 0.3)
    np.testing.assert_allclose(np.mean(parts, axis=0), wanted, rtol=1e-11, atol=1e-12)
    assert np.linalg.norm(parts[0] - wanted) > 0.1 * np.linalg.norm(wanted)


@pytest.mark.parametrize("name", ["psm", "kl", "precision"])
def test_each_half_of_a_direction_is_its_equation(name):
    """G_1 and G_2 of equations (4), (5) and (9), pair by pair, with every other client's examples as partners."""
    loss, x, task = LOSSES[name], vector(), TASK
    problem, omega, n = loss.problem(), task.omegas(loss), task.clients

    @jax.jit
    def halves(x):
        oracles = [oracle_of(problem, task, i) for i in range(n)]
        first, second, u = exact_pools(oracles, x)
        o = oracles[1]
        scores, partners = o.scores(x), o.partners(first, second)
        g_1, g_2 = o.first_gradient(scores, partners, u[1]), o.second_gradient(scores, partners)
        pull = lambda g_1, g_2: o.pull(x, scores, g_1, g_2).tree
        return pull(g_1, jnp.zeros_like(g_2)), pull(jnp.zeros_like(g_1), g_2)

    def mean_loss(z):
        pairs = [(omega[1, j], len(task.second(j, loss)), row) for j in range(n) for row in task.second(j, loss)]
        return sum(w / count / n * loss.value(W @ z, W @ other, y) for w, count, (other, y) in pairs)

    wanted_1, wanted_2 = np.zeros(3), np.zeros(3)
    for z in task.first(1):
        for j in range(n):
            for other, y in task.second(j, loss):
                share = omega[0, 1] * omega[1, j] / n / len(task.first(1)) / len(task.second(j, loss))
                wanted_1 += share * loss.slope(mean_loss(z)) @ loss.d1(W @ z, W @ other, y) * z
    for other, y in task.second(1, loss):
        for j in range(n):
            for z in task.first(j):
                share = omega[0, j] * omega[1, 1] / n / len(task.first(j)) / len(task.second(1, loss))
                wanted_2 += share * loss.slope(mean_loss(z)) @ loss.d2(W @ z, W @ other, y) * other
    for found, wanted in zip(halves(x), (wanted_1, wanted_2), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-13)


def test_swapped_buffers_are_no_gradient():
    """Line 12 of the published listing takes ξ from the scores of the first set and ζ from those of the second."""
    task, loss, w = pair_task(((4, 4), (4, 4)), seed=2), LOSSES["squared hinge"], np.ones(3)
    problem, wanted = loss.problem(), gradient(task, loss, w)

    @jax.jit
    def directions(x):
        oracles = [oracle_of(problem, task, i, w=w) for i in range(2)]
        first, second, _ = exact_pools(oracles, x)
        mean = lambda *pools: sum(o.grad(x, o.partners(*pools)).tree for o in oracles) / 2
        return mean(first, second), mean(second, first)

    ours, swapped = directions(vector(w))
    np.testing.assert_allclose(ours, wanted, rtol=1e-12)
    assert np.linalg.norm(swapped - wanted) > 0.3 * np.linalg.norm(wanted)


def test_u_that_is_shuffled_apart_from_its_scores_is_biased():
    """h_ζ and u_ζ are of one example: "with shuffling, respectively" must not mean a shuffle for each."""
    loss, x = LOSSES["kl"], vector(3 * W)
    problem = loss.problem()
    wanted, rng = gradient(TASK, loss, 3 * W), np.random.default_rng(0)
    rows = np.concatenate([6 * i + np.arange(TASK.counts[i][0]) for i in range(3)])  # those that count
    orders = np.tile(np.arange(18), (201, 1))
    orders[1:, rows] = [rng.permutation(rows) for _ in range(200)]

    @jax.jit
    def directions(orders):
        oracles = [oracle_of(problem, TASK, i, w=3 * W) for i in range(3)]
        first, second, u = exact_pools(oracles, x)

        def direction(order):
            pool = dataclasses.replace(first, rows={"score": first.rows["score"], "u": first.rows["u"][order]})
            return sum(o.grad(x, o.partners(pool, second), v).tree for o, v in zip(oracles, u, strict=True)) / 3

        return jax.vmap(direction)(orders)

    ours, *shuffled = directions(orders)
    np.testing.assert_allclose(ours, wanted, rtol=1e-10)
    assert np.linalg.norm(np.mean(shuffled, axis=0) - wanted) > 0.3 * np.linalg.norm(wanted)


def numbered_pool(clients=3, capacity=4, gaps=()):
    """Row number k has score k and u 100 + k; some rows are not filled."""
    size = clients * capacity
    number = jnp.arange(size).astype(float)
    valid = ~jnp.isin(jnp.arange(size), jnp.asarray(list(gaps), int))
    owner = jnp.where(valid, jnp.repeat(jnp.arange(clients), capacity), -1)
    return Pool({"score": number, "u": 100 + number}, owner, valid, capacity, 1)


def drawn(draws, shared, pool, steps, key=0):
    """The partners of each step: rows of both sides, and weights."""
    problem = LOSSES["psm"].problem()
    take = lambda step: oracle_of(problem, TASK, 0, 2, key, step).partners(pool, pool, draws, shared)
    found = jax.jit(jax.vmap(take))(jnp.arange(steps, dtype=jnp.int32))
    return [jax.tree.map(lambda a, step=step: a[step], found) for step in range(steps)]


@pytest.mark.parametrize("draws", ["shuffled", "replacement"])
@pytest.mark.parametrize("shared", [True, False])
def test_partners_keep_their_u_and_bring_their_clients_weight(draws, shared):
    pool, omega = numbered_pool(gaps=(1, 5, 6)), TASK.omegas(LOSSES["psm"])
    for partners in drawn(draws, shared, pool, 3):
        for side, of in enumerate((partners.first, partners.second)):
            score = np.asarray(of.rows["score"])
            assert score.shape == of.weight.shape == ((2,) if shared else (2, 2))
            np.testing.assert_array_equal(of.rows["u"], 100 + score)
            np.testing.assert_allclose(of.weight, omega[side][score.astype(int) // 4] / 2, rtol=1e-14)
            assert not {1.0, 5.0, 6.0} & {*score.ravel()}
        np.testing.assert_allclose(partners.own, omega[:, 0], rtol=1e-14)


@pytest.mark.parametrize("shared", [True, False])
def test_shuffled_partners_use_every_score_before_any_twice(shared):
    pool, steps, orders = numbered_pool(gaps=(1, 5, 6)), 9 if shared else 5, []  # nine rows count
    for key in (0, 1, 2):
        partners = drawn("shuffled", shared, pool, steps, key=key)
        for side in (0, 1):
            order = np.concatenate([np.ravel(step[side].rows["score"]) for step in partners])
            for turn in range(order.size // 9):
                np.testing.assert_array_equal(np.sort(order[9 * turn : 9 * turn + 9]), [0, 2, 3, 4, 7, 8, 9, 10, 11])
            assert not np.array_equal(order[:9], order[9:18])
            orders.append(tuple(order[:9]))
    assert len({*orders}) == len(orders)  # another key or side goes another way


def test_replacement_draws_every_score_alike():
    problem, pool = LOSSES["psm"].problem(), numbered_pool(gaps=(1, 5, 6))
    oracle = oracle_of(problem, TASK, 0, 2)
    take = lambda key: dataclasses.replace(oracle, round_key=key).partners(pool, pool, "replacement")
    rows = jax.jit(jax.vmap(take))(jax.random.split(jax.random.key(5), 4500))
    for side in (rows.first, rows.second):
        counts = np.bincount(np.asarray(side.rows["score"], int).ravel(), minlength=12)
        assert counts[[1, 5, 6]].sum() == 0
        assert np.abs(counts[counts > 0] - 1000).max() < 5 * np.sqrt(1000)
        assert (counts > 0).sum() == 9


@pytest.mark.parametrize("logs", [False, True])
def test_u_keeps_its_mean_where_some_clients_lack_the_second_set(logs):
    """E[(1−γ)u + γ ω_2j ℓ] has the exact mean loss, even if a step meets only rows of clients that count nothing."""
    task, loss, x = pair_task(((3, 4), (3, 0)), seed=1), LOSSES["kl" if logs else "own f"], vector()
    problem, gamma, many = loss.problem(), 0.5, 4000

    @jax.jit
    def estimates(keys):
        oracles = [oracle_of(problem, task, i) for i in range(2)]
        first, second, u = exact_pools(oracles, x)
        one = oracle_of(problem, task, 0, 1)  # one partner in a step: with chance one half from who has none

        def estimate(key):
            partners = dataclasses.replace(one, round_key=key).partners(first, second, "replacement")
            return one.blend(u[0], one.inner(oracles[0].scores(x).first, partners), gamma, partners)

        return u[0], jax.vmap(estimate)(keys)

    wanted, found = map(np.asarray, estimates(jax.random.split(jax.random.key(0), many)))
    wanted, found = (np.exp(wanted), np.exp(found)) if logs else (wanted, found)
    error = found.std(axis=0) / np.sqrt(many)
    assert np.all(error < 0.02 * wanted)
    assert np.all(np.abs(found.mean(axis=0) - wanted) < 4.5 * error)


def test_with_nothing_to_compare_with_u_stays():
    task, x = pair_task(((3, 0), (2, 4)), seed=1), vector()
    for name in ("kl", "precision"):
        problem = LOSSES[name].problem(second="negatives")

        @jax.jit
        def after(x, problem=problem):
            oracle = oracle_of(problem, task, 0)
            scores = oracle.scores(x)
            u = jnp.full((scores.first.shape[0], *oracle.problem.blank("u").shape), 0.7)
            partners = oracle.own_partners(scores, u)  # the client has none of the second set
            blended = oracle.blend(u, oracle.inner(scores.first, partners), 0.2, partners)
            return blended, oracle.grad(x, partners, u).tree

        u, direction = after(x)
        np.testing.assert_array_equal(u, 0.7)
        np.testing.assert_array_equal(direction, 0)


# Metrics.

EXACT = np.array([0.25, -0.5, 0.75])  # scores of whole numbers have no rounding, and ties stay ties
NAMES = ("auc", "pauc_0.3", "pauc_raw_0.3", "tpauc_0.5_0.3", "ap")


def sites(seed=3):
    """Four sites that score differently, one without positives, with ties; and a test split."""
    rng, parts = np.random.default_rng(seed), []
    for i, n in enumerate((30, 12, 9, 40)):
        y = (rng.random(n) < 0.4).astype(int) * (i != 2)
        parts.append({"x": np.round(rng.normal(size=(n, 3)) + 0.8 * y[:, None] + 1.5 * i), "y": y})
    return fs.Federation.from_clients(parts, classes=2, test=parts[::-1]).by_label()


def check_metrics(found, x, y, prefix=""):
    score = x @ EXACT
    np.testing.assert_allclose(found[prefix + "auc"], roc_auc_score(y, score), rtol=1e-12)
    np.testing.assert_allclose(found[prefix + "pauc_0.3"], roc_auc_score(y, score, max_fpr=0.3), rtol=1e-12)
    np.testing.assert_allclose(found[prefix + "ap"], average_precision_score(y, score), rtol=1e-12)
    area = (2 * found[prefix + "pauc_0.3"] - 1) * (0.3 - 0.045) + 0.045  # McClish's scale undone
    np.testing.assert_allclose(found[prefix + "pauc_raw_0.3"], area / 0.3, rtol=1e-12)
    assert 0 <= found[prefix + "tpauc_0.5_0.3"] <= 1


@pytest.mark.parametrize("first", ["positives", "negatives", "train"])
def test_metrics_are_scikit_learns_over_all_clients(first):
    """Whatever the two sets are, and with the mean of the clients' own areas beside the area of all."""
    fed = sites()
    second = {"positives": "negatives", "negatives": "positives", "train": "train"}[first]
    problem = fs.Pairwise(linear_score, LOSSES["psm"].ours, first=first, second=second, metrics=NAMES)
    full, train = full_data(fed), fed["train"]
    found, own, test = jax.jit(
        lambda x: (
            problem.evaluate(x, full),
            problem.evaluate_clients(x, full["train"])["auc"],
            problem.evaluate_split(x, full, "test"),
        )
    )(vector(EXACT))
    check_metrics(found, train.examples["x"], train.examples["y"])
    shards = [train.shard(i) for i in (0, 1, 3)]
    local = [roc_auc_score(s["y"], s["x"] @ EXACT) for s in shards]
    np.testing.assert_allclose(found["mean_local_auc"], np.mean(local), rtol=1e-12)
    assert abs(found["mean_local_auc"] - found["auc"]) > 0.05
    np.testing.assert_allclose(own, [*local[:2], np.nan, local[2]], rtol=1e-12)
    check_metrics(test, fed["test"].examples["x"], fed["test"].examples["y"])


def test_another_label_may_be_the_positive_one():
    """by_label(positive=…) defines which examples rank above; the problem needs the same value, or refuses."""
    fed = sites()
    flipped = fs.Federation({n: s for n, s in fed.splits.items() if n == "train"}).by_label(positive=0)
    with pytest.raises(ValueError, match="positive=1"):
        fs.Pairwise(linear_score, LOSSES["psm"].ours).check(vector(EXACT), flipped)
    problem, train = fs.Pairwise(linear_score, LOSSES["psm"].ours, positive=0), fed["train"].examples
    problem.check(vector(EXACT), flipped)
    found = jax.jit(lambda x: problem.evaluate(x, full_data(flipped)))(vector(EXACT))
    np.testing.assert_allclose(found["auc"], roc_auc_score(train["y"] == 0, train["x"] @ EXACT), rtol=1e-12)


def test_no_column_is_made_of_one_class_alone():
    """With second="train" the negatives alone are no split to measure on."""
    problem = LOSSES["precision"].problem(metrics=("ap",))
    job = prepare(problem, fs.FedX2(0.1), sites(), rounds=1, params=W)
    found = jax.jit(lambda x: job.context.problem.evaluate_split(x, job.inputs.full, "negatives"))(vector(EXACT))
    assert not [name for name, value in found.items() if np.isnan(value)]


# Refusals.


def test_refusals():
    psm, fed = LOSSES["psm"].ours, TASK.federation
    plain = fs.Federation.from_clients([fed["train"].shard(i) for i in range(3)])

    def start(problem, algorithm=None, federation=fed, **options):
        return prepare(problem, algorithm or fs.FedX1(0.1), federation, rounds=1, **{"params": W, **options})

    with pytest.raises(ValueError, match=r"by_label\(\)"):
        start(fs.Pairwise(linear_score, psm), federation=plain)
    with pytest.raises(ValueError, match="evens"):
        start(fs.Pairwise(linear_score, psm, first="evens"))
    with pytest.raises(ValueError, match="one real number"):
        start(fs.Pairwise(linear_score, lambda a, b: jnp.stack([a, b])))
    with pytest.raises(ValueError, match="one real number"):
        start(fs.Pairwise(linear_score, LOSSES["precision"].ours, lambda u: u, second="train"))
    with pytest.raises(ValueError, match="real numbers"):
        start(fs.Pairwise(lambda w, e: e["y"], psm))
    with pytest.raises((ValueError, TypeError), match=r"Pairwise.*one output|one output.*Pairwise"):
        start(fs.Pairwise(fs.models.Linear(3, 2), psm), params=None)
    with pytest.raises(ValueError, match='weights="size"'):
        start(fs.Pairwise(linear_score, psm), weights="size")
    with pytest.raises(ValueError, match="FedX2"):
        start(LOSSES["kl"].problem())
    with pytest.raises(ValueError, match="SOX"):
        start(LOSSES["kl"].problem(), fs.PairSGD(0.1))
    with pytest.raises(ValueError, match="u_start"):
        start(LOSSES["kl"].problem(), fs.FedX2(0.1, u_start=2))
    with pytest.raises(ValueError, match="pool_size"):
        start(fs.Pairwise(linear_score, psm), fs.FedX1(0.1, 2, pool_size=9), batch_size=4)
    with pytest.raises(ValueError, match="pool_size"):
        start(fs.Pairwise(linear_score, psm), fs.FedX1(0.1, 2, pool_size=1), batch_size="all")
    with pytest.raises(ValueError, match="Epochs"):
        start(fs.Pairwise(linear_score, psm), batch_size=Epochs(2, per_round=1))
    with pytest.raises(TypeError, match="FedAvg does not solve Pairwise"):
        start(fs.Pairwise(linear_score, psm), fs.FedAvg(0.1))
    with pytest.raises(ValueError, match="every example to count alike"):
        start(fs.Pairwise(linear_score, psm, weighting="clients"), fs.PairSGD(0.1))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"metrics": ("accuracy",)}, "accuracy"),
        ({"metrics": ("pauc_2",)}, "pauc_2"),
        ({"metrics": ("tpauc_0.5",)}, "tpauc_0.5"),
        ({"metrics": ("pauc_raw_0",)}, "pauc_raw_0"),
        ({"weighting": "size"}, "size"),
        ({"l2": -1.0}, "l2=-1"),
    ],
)
def test_wrong_arguments(options, named):
    with pytest.raises(ValueError, match=named):
        fs.Pairwise(linear_score, LOSSES["psm"].ours, **options)


def test_what_must_be_a_function():
    with pytest.raises(TypeError, match="pair_loss"):
        fs.Pairwise(linear_score, "psm")  # pyright: ignore[reportArgumentType]
