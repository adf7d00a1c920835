"""FedReg and FedMinMax: plain loops in NumPy, identities, where they end, and what they reveal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.algorithms.fair import FedMinMax, FedReg
from fedstrata.cli.explanation import explain
from fedstrata.models import Linear
from fedstrata.problems.fair import Fair
from fedstrata.problems.groups import GroupWarning

K, D, L2 = 3, 3, 0.05
LOSS = fs.losses.Classification(lambda w, x: jnp.dot(w, x)[None], l2=L2)
PROBLEM = Fair(LOSS)
START = np.array([0.4, -0.3, 0.2])


def shard(n, seed):
    rng = np.random.default_rng(seed)
    group = np.concatenate([np.arange(K), rng.choice(K, n - K, p=[0.6, 0.3, 0.1])]).astype(np.int32)
    x = rng.normal(size=(n, D)) + 0.4 * group[:, None]
    slope = np.array([[2.0, -1.0, 0.5], [0.5, 1.0, -1.0], [-1.0, 0.3, 2.0]])
    y = (np.sum(x * slope[group], axis=1) + rng.normal(size=n) > 0).astype(np.int32)
    return {"x": x, "y": y, "group": group}


SHARDS = [shard(n, seed) for seed, n in enumerate((40, 11, 23))]
SIZES = np.array([40, 11, 23])
FEDERATION = fs.Federation.from_clients(SHARDS)
POOLED = {name: np.concatenate([s[name] for s in SHARDS]) for name in SHARDS[0]}


def run(algorithm, problem=PROBLEM, rounds=9, batch_size="all", federation=FEDERATION, **options):
    given = {"params": START, "evaluate_every": rounds, "stationarity": False, **options}
    return fs.run(problem, algorithm, federation, rounds=rounds, batch_size=batch_size, **given)


def same(left, right, rtol=1e-12, **options):
    a, b = (np.asarray(run(*method, **options).solution()) for method in (left, right))
    np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-14)
    assert not np.allclose(a, START)


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def slope(data, w, weights=1.0):
    """∇ of mean weights · logloss + l2."""
    return (weights * (sigmoid(data["x"] @ w) - data["y"])) @ data["x"] / len(data["y"]) + L2 * w


def logloss(data, w):
    z = data["x"] @ w
    return np.logaddexp(0, z) - data["y"] * z


def take(data, rows):
    return {name: column[rows] for name, column in data.items()}


# FedReg.


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"batch_size": 4}, {"batch_size": 4, "cohort": 2}, {"weights": "size"}])
def test_fedreg_without_strength_is_fedavg(options):
    same((FedReg(0.1, 3, strength=0.0),), (fs.FedAvg(0.1, 3),), **options)
    if "cohort" in options:  # where most is drawn, also on the problem without groups
        same((FedReg(0.1, 3, strength=0.0),), (fs.FedAvg(0.1, 3), fs.Average(LOSS)), **options)


def gap_slope(data, w, sharpness):
    """∇ of max − min over groups of the mean of σ(s z) over the positives."""
    chance = sigmoid(sharpness * (data["x"] @ w))
    positive = [np.flatnonzero((data["y"] == 1) & (data["group"] == k)) for k in range(K)]
    positive = [rows for rows in positive if rows.size]
    means = [chance[rows].mean() for rows in positive]
    pull = lambda rows: (sharpness * chance * (1 - chance))[rows] @ data["x"][rows] / rows.size
    return pull(positive[np.argmax(means)]) - pull(positive[np.argmin(means)])


@pytest.mark.parametrize("sharpness", [1.0, 10.0])
def test_fedreg_follows_its_rule(sharpness):
    x = START
    for _ in range(9):
        ends = []
        for data in SHARDS:
            w = x
            for _ in range(3):
                w = w - 0.1 * (slope(data, w) + 0.4 * gap_slope(data, w, sharpness))
            ends.append(w)
        x = np.mean(ends, axis=0)
    found = run(FedReg(0.1, 3, strength=0.4, sharpness=sharpness)).solution()
    np.testing.assert_allclose(found, x, rtol=1e-11)


def test_fedreg_lowers_the_smoothed_gap_where_local_data_are_all_data():
    """Minimisers of f + λD have a smaller D the larger λ is; here the few of group 1 have labels of the other sign."""
    x = np.random.default_rng(0).normal(size=(60, D))
    group = (np.arange(60) % 4 == 0).astype(np.int32)
    y = (x[:, 0] * (1 - 2 * group) > 0).astype(np.int32)
    alone, gaps = fs.Federation.from_clients([{"x": x, "y": y, "group": group}]), []
    for strength in (0.0, 0.05, 0.2):
        w = np.asarray(run(FedReg(0.05, 10, strength=strength), rounds=150, federation=alone).solution())
        gaps.append(np.ptp([sigmoid(x @ w)[(y == 1) & (group == k)].mean() for k in (0, 1)]))
    assert gaps[0] > gaps[1] + 0.02
    assert gaps[1] > gaps[2] + 0.02


def test_fedreg_refuses_a_loss_without_decisions():
    with pytest.raises(TypeError, match="FedReg compares decisions"):
        run(FedReg(0.1), Fair(lambda w, e: jnp.sum((w - e["x"]) ** 2)))
    with pytest.raises(TypeError, match="FedReg does not solve Average problems"):
        run(FedReg(0.1), fs.Average(LOSS))


# FedMinMax.


def onto_simplex(z):
    """By the sorted form of the projection."""
    u = np.sort(z)[::-1]
    level = (np.cumsum(u) - 1) / np.arange(1, z.size + 1)
    return np.maximum(z - level[np.flatnonzero(u > level)[-1]], 0)


def minmax(rounds, eta=0.3, eta_mu=0.2, picked=None, whole=True):
    """The rule with counts written out; picked[t][k]: the rows of a client's batch."""
    n_ak = np.array([np.bincount(s["group"], minlength=K) for s in SHARDS])
    n_a, n, n_k = n_ak.sum(axis=0), n_ak.sum(), n_ak.sum(axis=1)
    rho = n_a / n
    theta, mu, visited = START, rho, []
    for t in range(rounds):
        w, ends, r = mu / rho, [], np.zeros(K)
        for k, data in enumerate(SHARDS):
            batch = data if picked is None else take(data, picked[t][k])
            ends.append(theta - eta * slope(batch, theta, w[batch["group"]]))
            seen = data if whole else batch
            for a in range(K):
                losses = logloss(seen, theta)[seen["group"] == a]
                share = losses.sum() / len(seen["y"]) * n_k[k]  # n_ak r_ak, or its estimate from the batch
                r[a] += share / n_a[a]
        theta = n_k / n @ np.array(ends)
        mu = onto_simplex(mu + eta_mu * r)
        visited.append(theta)
    return theta, mu, np.mean(visited, axis=0)


@pytest.mark.parametrize("rounds", [1, 7])
def test_fedminmax_follows_its_rule(rounds):
    theta, mu, mean = minmax(rounds)
    result = run(FedMinMax(0.3, 0.2), rounds=rounds, weights="size")
    np.testing.assert_allclose(result.solution(), theta, rtol=1e-12)
    np.testing.assert_allclose(np.ravel(result.state.mu.tree), mu, rtol=1e-12)
    averaged = run(FedMinMax(0.3, 0.2, average_iterates=True), rounds=rounds, weights="size")
    np.testing.assert_allclose(averaged.solution(), mean, rtol=1e-12)


@pytest.mark.parametrize("whole", [True, False])
def test_fedminmax_follows_its_rule_with_batches(whole):
    rng = np.random.default_rng(0)
    picked = np.stack([rng.integers(0, n, (6, 1, 5)) for n in SIZES], axis=2)  # rounds, steps, clients, batch
    theta, mu, _ = minmax(6, picked=picked[:, 0], whole=whole)
    method = FedMinMax(0.3, 0.2, whole_risks=whole)
    result = run(method, rounds=6, batch_size=fs.Replay({"batch": picked}), weights="size")
    np.testing.assert_allclose(result.solution(), theta, rtol=1e-12)
    np.testing.assert_allclose(np.ravel(result.state.mu.tree), mu, rtol=1e-12)


@pytest.mark.parametrize("options", [{"weights": "size"}, {}, {"batch_size": 4, "weights": "size"}, {"cohort": 2}])
def test_fedminmax_with_one_group_is_fedsgd(options):
    one = Fair(LOSS, group=lambda e: jnp.array(0))
    same((FedMinMax(0.2, 0.7), one), (fs.FedSGD(0.2), fs.Average(LOSS)), **options)


@pytest.mark.parametrize("eta_mu", [1e-3, 0.5, 50.0])
def test_group_weights_stay_on_the_simplex(eta_mu):
    seen = [np.bincount(POOLED["group"]) / SIZES.sum()]
    for rounds in (1, 2, 5, 20):
        mu = np.ravel(run(FedMinMax(0.1, eta_mu), rounds=rounds, batch_size=3, weights="size").state.mu.tree)
        seen.append(mu)
        assert mu.min() >= 0
        np.testing.assert_allclose(mu.sum(), 1, rtol=1e-12)
    assert np.ptp(seen, axis=0).max() > 1e-4


def test_fedminmax_ends_at_the_saddle_point():
    """Strongly convex: no gradient of Σ μ_a r_a + l2 is left, and every group with weight has the largest risk."""
    result = run(FedMinMax(0.3, 0.05), rounds=6000, weights="size")
    w, mu = np.asarray(result.solution()), np.ravel(result.state.mu.tree)
    members = [take(POOLED, POOLED["group"] == a) for a in range(K)]
    risks = np.array([logloss(data, w).mean() for data in members])
    gradient = sum(m * slope(data, w) for m, data in zip(mu, members, strict=True))  # Σ μ = 1, so l2 counts once
    assert np.linalg.norm(gradient) < 1e-8
    assert (mu > 1e-3).sum() >= 2
    np.testing.assert_allclose(risks[mu > 0], risks.max(), atol=1e-8)
    average = run(fs.FedSGD(0.3), rounds=6000, weights="size").history.last("worst_group_loss").item()
    assert result.history.last("worst_group_loss").item() < average - 0.05


def test_with_a_large_weight_step_the_last_iterate_circles_and_the_mean_does_not():
    worst = lambda rounds, **o: run(FedMinMax(0.3, 5.0, **o), rounds=rounds, weights="size").history.last(
        "worst_group_loss"
    )
    last, mean = ([worst(r, average_iterates=a).item() for r in (1500, 1501, 1507)] for a in (False, True))
    assert np.ptp(last) > 1e-3
    assert np.ptp(mean) < 1e-4
    assert np.mean(mean) < np.mean(last)


def test_uniform_weights_are_those_of_data_in_which_every_client_counts_the_same():
    """Each client's rows repeated to a common number: weights by size then equal uniform weights on the plain data."""
    common = int(np.lcm.reduce(SIZES))
    wide = [
        {name: np.repeat(c, common // n, axis=0) for name, c in s.items()} for s, n in zip(SHARDS, SIZES, strict=True)
    ]
    plain = run(FedMinMax(0.3, 0.2)).solution()
    repeated = run(FedMinMax(0.3, 0.2), federation=fs.Federation.from_clients(wide), weights="size").solution()
    np.testing.assert_allclose(plain, repeated, rtol=1e-11)
    assert np.abs(plain - run(FedMinMax(0.3, 0.2), weights="size").solution()).max() > 1e-3


def test_group_shares_travel_once_and_are_said_to():
    result = run(FedMinMax(0.1), rounds=2, weights="size")
    sent = {(e.field, e.direction): e.bytes for e in result.ledger.entries if e.repeat}
    assert sent == {("x", "up"): 8 * D, ("risks", "up"): 8 * K, ("x", "down"): 8 * D, ("w", "down"): 8 * K}
    shares = np.array([np.bincount(s["group"], minlength=K) for s in SHARDS]).sum(axis=0) / SIZES.sum()
    np.testing.assert_allclose(np.ravel(result.state.group_shares.tree), shares, rtol=1e-12)
    about = explain(FedMinMax, 100, 3)
    fields = {row["field"]: row for row in about["state"]}
    assert fields["group_shares"]["placement"] == "Reported"
    assert "the server sees each client's own value" in fields["group_shares"]["reveals"]
    assert any("group counts" in note for note in (*about["converges_to"], *about["does_not"], *about["notes"]))


def test_group_shares_are_those_of_all_clients_whoever_comes_first():
    """ρ = n_a/n, also of a group that no client of the first cohort has; it is not ignored."""
    lacking = [take(s, s["group"] < 2) for s in SHARDS[:2]]
    federation = fs.Federation.from_clients([*lacking, SHARDS[2]])
    given = {"cohort": fs.participation.Given([[0, 1], [1, 2]]), "weights": "size", "rounds": 20}
    with pytest.warns(GroupWarning):
        result = run(FedMinMax(0.1, 0.3), federation=federation, **given)
    groups = np.concatenate([s["group"] for s in (*lacking, SHARDS[2])])
    rho = np.bincount(groups, minlength=K) / len(groups)
    np.testing.assert_allclose(np.ravel(result.state.group_shares.tree), rho, rtol=1e-12)
    mu = np.ravel(result.state.mu.tree)
    assert mu[2] > 0
    assert np.isfinite(result.solution()).all()
    np.testing.assert_allclose(mu.sum(), 1, rtol=1e-12)


def test_fedminmax_refuses_weights_and_problems_without_groups():
    with pytest.raises(ValueError, match="FedMinMax learns the weights"):
        run(FedMinMax(0.1), PROBLEM.weighted([1.0, 2.0, 1.0]))
    with pytest.raises(TypeError, match="FedMinMax does not solve Average problems"):
        run(FedMinMax(0.1), fs.Average(LOSS))


def test_half_precision_parameters_keep_their_type():
    start = jax.tree.map(lambda a: a.astype(jnp.bfloat16), Linear(D).init())
    shards = [{**s, "x": s["x"].astype(np.float32)} for s in SHARDS]
    problem = Fair(fs.losses.Classification(Linear(D), l2=L2))
    for method in (FedMinMax(0.1), FedReg(0.1, 2)):
        result = run(method, problem, params=start, rounds=2, federation=fs.Federation.from_clients(shards))
        assert result.solution()["weight"].dtype == jnp.bfloat16


# Stage two: weights that were learned elsewhere.


def test_fedavg_trains_on_the_weighted_loss():
    weights, x = np.array([0.3, 1.2, 4.0]), START
    for _ in range(9):
        ends = []
        for data in SHARDS:
            w = x
            for _ in range(4):
                w = w - 0.1 * slope(data, w, weights[data["group"]])
            ends.append(w)
        x = SIZES / SIZES.sum() @ np.array(ends)
    found = run(fs.FedAvg(0.1, 4), PROBLEM.weighted(weights), weights="size").solution()
    np.testing.assert_allclose(found, x, rtol=1e-12)
