"""Fair problems and fairness measures against fairlearn, plain NumPy and finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.core.vector import Vector
from fedstrata.metrics import fairness
from fedstrata.models import Linear
from fedstrata.problems.fair import Fair, FairOracle
from fedstrata.problems.groups import GroupWarning

K, D, L2 = 3, 4, 0.3
LOSS = fs.losses.Classification(Linear(D), l2=L2)
MEASURES = ("equal_opportunity", "equalized_odds", "demographic_parity", "worst_group_accuracy")
COLUMNS = ("eq_opp", "eq_odds", "demographic_parity", "worst_group_accuracy")


def rows(n, seed):
    rng = np.random.default_rng(seed)
    group = np.concatenate([np.arange(K), rng.integers(0, K, n - K)]).astype(np.int32)
    return {"x": rng.normal(size=(n, D)), "y": rng.integers(0, 2, n).astype(np.int32), "group": group}


SHARDS = [rows(n, seed) for seed, n in enumerate((30, 8, 17))]
TEST = rows(25, 9)
FEDERATION = fs.Federation.from_clients(SHARDS, test=TEST)
POOLED = {name: np.concatenate([s[name] for s in SHARDS]) for name in SHARDS[0]}
FULL = fs.full_data(FEDERATION)
WEIGHTS = np.array([0.2, 1.5, 3.0])


def parameters(seed=0):
    rng = np.random.default_rng(seed)
    return {"weight": rng.normal(size=(1, D)), "bias": rng.normal(size=1)}


PARAMS = parameters()
X = Vector(jax.tree.map(jnp.asarray, PARAMS))
PROBLEM = Fair(LOSS).bind(X, FEDERATION)


def logits(data, params=PARAMS):
    return data["x"] @ params["weight"][0] + params["bias"][0]


def logloss(data, params=PARAMS):
    z = logits(data, params)
    return np.logaddexp(0, z) - data["y"] * z


def penalty(params=PARAMS):
    return L2 / 2 * (np.sum(params["weight"] ** 2) + np.sum(params["bias"] ** 2))


def slope(data, weights):
    """The gradient of mean w l, without l2."""
    error = weights * (1 / (1 + np.exp(-logits(data))) - data["y"]) / len(data["y"])
    return {"weight": (error @ data["x"])[None], "bias": np.array([error.sum()])}


def oracle(client=0, problem=PROBLEM, batch_size="all", federation=FEDERATION):
    from fedstrata.simulate.inputs import flat_split

    flat = flat_split(federation["train"])
    shard = {"train": flat.view(flat.start[client], flat.count[client])}
    return problem.oracle(shard, jax.random.key(3), batch_size, client=client)


def ask(*questions, x=X):
    """The values of these functions of x, in one program: separately, every operation would be compiled alone."""
    return jax.jit(lambda x: [question(x) for question in questions])(x)


def close(a, b, rtol=1e-12):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-14), a, b)


# Measures.


def rates(guess, label, group, kind):
    """What each measure compares, group by group; groups without meaning are left out."""
    out = []
    for k in range(K):
        mine = {"tpr": (group == k) & (label == 1), "fpr": (group == k) & (label == 0)}.get(kind, group == k)
        values = guess == label if kind == "accuracy" else guess
        out += [values[mine].mean()] if mine.any() else []
    return np.array(out)


def by_hand(guess, label, group):
    gap = lambda kind: np.ptp(found) if len(found := rates(guess, label, group, kind)) > 1 else 0.0
    odds = max(gap("tpr"), gap("fpr"))
    return gap("tpr"), odds, gap("selection"), rates(guess, label, group, "accuracy").min()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.filterwarnings("default")
def test_measures_equal_fairlearn(seed):
    metrics = pytest.importorskip("fairlearn.metrics", reason="fairlearn, which this compares with, is not installed")
    from sklearn.metrics import accuracy_score

    rng = np.random.default_rng(seed)
    n, k = 200, 5
    label, group = rng.integers(0, 2, n), rng.integers(0, k, n)
    guess = (rng.random(n) < 0.2 + 0.15 * group).astype(int)
    frame = lambda metric: metrics.MetricFrame(metrics=metric, y_true=label, y_pred=guess, sensitive_features=group)
    same = {"y_true": label, "y_pred": guess, "sensitive_features": group}
    wanted = {
        "equal_opportunity": frame(metrics.true_positive_rate).difference(),
        "equalized_odds": metrics.equalized_odds_difference(**same),
        "demographic_parity": metrics.demographic_parity_difference(**same),
        "worst_group_accuracy": frame(accuracy_score).group_min(),
    }
    for name in MEASURES:
        found = getattr(fairness, name)(guess, label, group, k)
        np.testing.assert_allclose(found, wanted[name], rtol=1e-12)
        assert found > 0


def test_groups_in_which_a_rate_has_no_meaning_are_left_out():
    guess = np.array([1, 0, 1, 1, 0, 0])
    label = np.array([1, 1, 0, 0, 1, 1])  # group 1 has no positives; group 3 no examples
    group = np.array([0, 0, 1, 1, 2, 2])
    all_of = lambda *given: jax.jit(lambda: [getattr(fairness, name)(*given) for name in MEASURES])()
    of = lambda *given: dict(zip(MEASURES, all_of(*given), strict=True))
    found = of(guess, label, group, 4)
    assert found["equal_opportunity"] == 0.5  # 1/2 and 0, not 0 of group 1 or 3
    assert found["equalized_odds"] == 0.5  # only group 1 has negatives, so no gap there
    assert found["demographic_parity"] == 1.0
    assert found["worst_group_accuracy"] == 0.0
    assert of(guess[:4], label[:4], group[:4], 4)["equal_opportunity"] == 0  # one group with positives
    assert of(guess, np.zeros(6, int), group)["equal_opportunity"] == 0
    nobody = np.zeros(0, int)
    assert np.isnan(of(nobody, nobody, nobody, 2)["worst_group_accuracy"])


def test_measures_compile_and_batch():
    rng = np.random.default_rng(0)
    guess, label, group = rng.integers(0, 2, (6, 40)), rng.integers(0, 2, 40), rng.integers(0, K, 40)
    for name in MEASURES:
        one = lambda g, name=name: getattr(fairness, name)(g, label, group, K)
        np.testing.assert_allclose(jax.jit(jax.vmap(one))(guess), [one(g) for g in guess], rtol=1e-14)
    with pytest.raises(ValueError, match="give count="):
        jax.jit(fairness.equal_opportunity)(guess[0], label, group)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"predictions": [0.5, 1]}, r"predictions must be whole numbers from 0 to 1, got 0.5"),
        ({"labels": [-1, 1]}, r"labels must be .* got -1"),
        ({"groups": [0, 2]}, r"groups must be whole numbers from 0 to 1, got 2"),
        ({"labels": [0, 1, 1]}, r"one prediction, label and group per example"),
    ],
)
def test_measures_refuse_other_numbers(change, message):
    given = {"predictions": [0, 1], "labels": [1, 1], "groups": [0, 1], **change}
    with pytest.raises(ValueError, match=message):
        fairness.equal_opportunity(**given, count=2)


# The problem on all data.


def test_without_weights_it_is_the_average_problem():
    of = lambda problem: lambda x: (problem.objective(x, FULL), problem.gradient(x, FULL), problem.evaluate(x, FULL))
    (objective, gradient, found), plain = ask(of(PROBLEM), of(fs.Average(LOSS)))
    close(objective, plain[0])
    close(gradient.tree, plain[1].tree)
    assert found["accuracy"] == plain[2]["accuracy"]


def test_weights_act_on_the_loss_and_not_on_its_l2_term():
    problem = PROBLEM.weighted(WEIGHTS)
    clients = [np.mean(WEIGHTS[s["group"]] * logloss(s)) for s in SHARDS]
    objective, sized, gradient, found, test, vector = ask(
        lambda x: problem.objective(x, FULL),
        lambda x: problem.objective(x, fs.full_data(FEDERATION, "size")),
        lambda x: problem.gradient(x, FULL),
        lambda x: problem.evaluate_clients(x, FULL["train"]),
        lambda x: problem.evaluate_split(x, FULL, "test"),
        lambda x: PROBLEM.weighted(Vector(jnp.asarray(WEIGHTS))).objective(x, FULL),
    )
    close(objective, np.mean(clients) + penalty())
    close(sized, np.mean(WEIGHTS[POOLED["group"]] * logloss(POOLED)) + penalty())
    slopes = [slope(s, WEIGHTS[s["group"]]) for s in SHARDS]
    wanted = jax.tree.map(lambda *g: np.mean(g[:3], axis=0) + L2 * g[3], *slopes, PARAMS)
    close(gradient.tree, wanted)
    close(found["objective"], np.array(clients) + penalty())
    assert "accuracy" in found
    wanted = np.mean(WEIGHTS[TEST["group"]] * logloss(TEST)) + penalty()
    close(test["loss"], wanted)
    close(vector, objective)


def test_measures_are_of_all_rows_alike_and_not_by_client():
    guess = (logits(POOLED) > 0).astype(int)
    wanted = by_hand(guess, POOLED["y"], POOLED["group"])
    found, test = ask(lambda x: PROBLEM.evaluate(x, FULL), lambda x: PROBLEM.evaluate_split(x, FULL, "test"))
    close([found[c] for c in COLUMNS], list(wanted))
    assert min(wanted) > 0
    losses = [logloss(POOLED)[POOLED["group"] == k].mean() for k in range(K)]
    close(found["worst_group_loss"], max(losses))
    guess = (logits(TEST) > 0).astype(int)
    close([test[c] for c in COLUMNS], list(by_hand(guess, TEST["y"], TEST["group"])))


def test_a_run_records_them_for_every_split():
    result = fs.run(Fair(LOSS), fs.FedAvg(0.1, 2), FEDERATION, rounds=3, params=PARAMS, batch_size=4)
    final = jax.tree.map(np.asarray, result.solution())
    for prefix, data in (("", POOLED), ("test/", TEST)):
        guess = (logits(data, final) > 0).astype(int)
        wanted = by_hand(guess, data["y"], data["group"])
        np.testing.assert_allclose([result.history.last(prefix + c).item() for c in COLUMNS], wanted, rtol=1e-12)
    assert {"objective", "stationarity", "accuracy", "worst_group_loss"} <= {*result.history.columns}


def test_a_loss_without_decisions_has_group_losses_only():
    losses = (lambda w, e: 0.5 * (w @ e["x"] - 1.0) ** 2, fs.losses.Regression(lambda w, x: w @ x))
    of = lambda loss: lambda x: Fair(loss, groups=K).evaluate(x, FULL)
    for found in (both := ask(*map(of, losses), x=Vector(jnp.ones(D)))):
        assert "worst_group_loss" in found
        assert not {*COLUMNS} & {*found}
    values = 0.5 * (POOLED["x"].sum(axis=1) - 1.0) ** 2
    close(both[0]["worst_group_loss"], max(values[POOLED["group"] == k].mean() for k in range(K)))
    with pytest.raises(TypeError, match="no decisions to compare"):
        oracle(problem=Fair(LOSS.data_loss, groups=K)).disparity(X)


# The oracle.


@jax.jit
def answers(client):
    """Values of a client's oracle, in one program for all clients."""
    asked, weights = oracle(client), Vector(jnp.asarray(WEIGHTS))
    assert isinstance(asked, FairOracle)
    return {
        "value": asked.value(X),
        "weighted value": asked.weighted_value(X, weights),
        "weighted gradient": asked.weighted_grad(X, weights),
        "gradient of the weighted": oracle(client, PROBLEM.weighted(WEIGHTS)).grad(X),
        "group sums": asked.group_sums(X),
        "count": asked.count(),
    }


@pytest.mark.parametrize("client", range(3))
def test_the_oracle_is_exact_on_a_whole_shard(client):
    data, found = SHARDS[client], answers(client)
    w = WEIGHTS[data["group"]]
    close(found["value"], logloss(data).mean() + penalty())
    close(found["weighted value"], np.mean(w * logloss(data)) + penalty())
    wanted = jax.tree.map(lambda g, p: g + L2 * p, slope(data, w), PARAMS)
    close(found["weighted gradient"].tree, wanted)
    close(found["gradient of the weighted"].tree, wanted)
    sums, counts = found["group sums"]
    close(counts.tree, np.bincount(data["group"], minlength=K).astype(float))
    close(sums.tree, np.bincount(data["group"], logloss(data), minlength=K))
    assert found["count"] == len(data["y"])


def test_all_examples_can_be_asked_for_from_a_small_sample():
    few = oracle(0, batch_size=5)
    sums, whole = ask(lambda x: few.group_sums(x), lambda x: few.fresh(0, "all").group_sums(x))
    assert np.sum(sums[1].tree) == 5
    close(whole[0].tree, answers(0)["group sums"][0].tree)


def soft_gap(data, sharpness, params=PARAMS):
    chance = 1 / (1 + np.exp(-sharpness * logits(data, params)))
    means = [chance[(data["group"] == k) & (data["y"] == 1)] for k in range(K)]
    means = [m.mean() for m in means if m.size]
    return np.ptp(means) if len(means) > 1 else 0.0


@jax.jit
def disparity(client, sharpness):
    asked = oracle(client)
    return asked.disparity(X, sharpness), asked.disparity_grad(X, sharpness).tree


@pytest.mark.parametrize("sharpness", [1.0, 10.0])
@pytest.mark.parametrize("client", range(3))
def test_the_disparity_is_the_gap_of_group_means(client, sharpness):
    value, gradient = disparity(client, sharpness)
    wanted = soft_gap(SHARDS[client], sharpness)
    close(value, wanted)
    assert wanted > 0
    for name, leaf in PARAMS.items():
        for index in np.ndindex(leaf.shape):
            ends = []
            for step in (1e-6, -1e-6):
                moved = {n: v.copy() for n, v in PARAMS.items()}
                moved[name][index] += step
                ends.append(soft_gap(SHARDS[client], sharpness, moved))
            np.testing.assert_allclose(gradient[name][index], (ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("groups_with_positives", [0, 1, 2])
def test_groups_without_positives_are_left_out_of_the_disparity(groups_with_positives):
    data = {**SHARDS[0], "y": (SHARDS[0]["group"] < groups_with_positives).astype(np.int32)}
    federation = fs.Federation.from_clients([data])
    asked = oracle(federation=federation)
    value, slopes = ask(lambda x: asked.disparity(x), lambda x: asked.disparity_grad(x))
    close(value, soft_gap(data, 1.0))
    gradient = np.concatenate([np.ravel(g) for g in jax.tree.leaves(slopes)])
    assert np.isfinite(gradient).all()
    assert (np.abs(gradient).max() > 0) == (groups_with_positives == 2)


# What is refused.


def changed(**columns):
    return fs.Federation.from_clients([{**SHARDS[0]}, {**SHARDS[1], **columns}], names=["north", "south"])


def check(problem, federation=FEDERATION, x=X):
    problem.check(x, federation)


def test_groups_are_counted_over_all_splits_or_given():
    assert PROBLEM.groups == K
    assert Fair(LOSS, groups=7).bind(X, FEDERATION).groups == 7
    more = {**TEST, "group": np.where(np.arange(25) == 3, 5, TEST["group"]).astype(np.int32)}
    wide = fs.Federation.from_clients(SHARDS, test=more)
    with pytest.warns(GroupWarning, match=r"no client has any of groups \[3, 4, 5\]"):
        check(Fair(LOSS), wide)
    assert Fair(LOSS).bind(X, wide).groups == 6
    with pytest.raises(ValueError, match="number of groups of this Fair problem is not set yet"):
        Fair(LOSS).evaluate(X, FULL)


def test_a_function_can_say_the_group():
    own = Fair(LOSS, group=lambda e: e["x"][0] > 0).bind(X, FEDERATION)
    column = POOLED["x"][:, 0] > 0
    assert own.groups == 2
    check(own)
    (found,) = ask(lambda x: own.evaluate(x, FULL))
    close(found["worst_group_loss"], max(logloss(POOLED)[column == k].mean() for k in (False, True)))


def test_bad_columns_are_refused():
    with pytest.raises(
        ValueError, match=r"unknown column of groups \(Fair, split 'train'\) 'grup'; did you mean group"
    ):
        check(Fair(LOSS, group="grup"))
    floats = fs.Federation.from_clients([{**s, "group": s["group"].astype(float)} for s in SHARDS])
    with pytest.raises(ValueError, match=r"one whole number per example, got float64 \(55,\)"):
        check(Fair(LOSS), floats)
    with pytest.raises(ValueError, match=r"split 'train': south has group -1, but groups run from 0 to 2"):
        check(Fair(LOSS), changed(group=np.full(8, -1, np.int32)))
    with pytest.raises(ValueError, match=r"split 'train': north has group 2, but groups run from 0 to 1"):
        check(Fair(LOSS, groups=2), changed())
    near = [{**s, "group": np.minimum(s["group"], 1)} for s in SHARDS]
    with pytest.raises(ValueError, match=r"split 'test': the pooled data has group 2"):
        check(Fair(LOSS, groups=2), fs.Federation.from_clients(near, test=TEST))


def test_a_missing_group_at_a_client_is_a_warning():
    lacking = changed(group=np.array([0, 1] * 4, np.int32))
    with pytest.warns(GroupWarning, match=r"south has no training example of group 2 \(1 such pairs"):
        check(Fair(LOSS), lacking)
    check(Fair(LOSS))  # and none where all is there


def test_models_with_several_outputs_are_refused():
    model = Linear(D, 2)
    with pytest.raises(ValueError, match=r"outputs of shape \(2,\).*give it one output"):
        check(Fair(fs.losses.Classification(model)), x=Vector(model.init()))
    third = fs.Federation.from_clients([{**s, "y": s["y"] + 1} for s in SHARDS])
    with pytest.raises(ValueError, match="2 labels, 0 to 1"):
        check(Fair(LOSS), third)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weights": [1.0, -0.1, 2.0]}, ValueError, "a negative weight has no minimum"),
        ({"weights": [1.0, np.nan, 2.0]}, ValueError, "must be finite"),
        ({"weights": [0.0, 0.0]}, ValueError, "not all 0"),
        ({"weights": 2.0}, ValueError, r"weights has shape \(\)"),
        ({"weights": [1.0, 2.0], "groups": 3}, ValueError, "one number for each of 3 groups"),
        ({"groups": 0}, ValueError, "groups=0 must be a whole number"),
        ({"group": 3}, TypeError, "must name a column"),
    ],
)
def test_bad_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        Fair(LOSS, **options)


def test_the_number_of_weights_must_be_that_of_the_groups():
    with pytest.raises(ValueError, match="2 weights were given for 3 groups"):
        check(Fair(LOSS, weights=[1.0, 2.0]))
