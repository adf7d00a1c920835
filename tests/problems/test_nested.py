"""Nested problems on full data and through samples, against plain NumPy loops; what they refuse, and how they fail."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import prepare

import fedstrata as fs
from fedstrata.algorithms.nested import FedDRSCGD
from fedstrata.data.shard import View
from fedstrata.problems.compositions import maml, risk_averse, robust
from fedstrata.problems.nested import Jacobian, Nested

# Three levels on trees, once for the library and once in NumPy; xp is the array library.


def first(x, e, xp=jnp):
    return {"u": xp.tanh(e["a"] * x["w"]), "z": x["s"] * e["t"]}


def second(y, e, xp=jnp):
    return (y["u"] * e["t"] + y["z"], y["z"] ** 2 + e["a"][:2])


def third(y, e, xp=jnp):
    return xp.sum(y[0] ** 2) / 2 + xp.sum(xp.sin(y[1])) * e["t"]


def squares(y, xp=jnp):
    """A level without data, from and to what the second level returns."""
    return (y[0] ** 2, y[1])


LEVELS = [first, lambda y, e: second(y, e), squares, third]
INNERS = ["global", "client"]
X = {"w": np.array([0.4, -0.7, 1.1]), "s": np.array(0.8)}


def shards(sizes=(2, 5, 3), seed=0, alike=False):
    rng = np.random.default_rng(seed)
    common = {"a": rng.normal(size=(sizes[0], 3)), "t": rng.normal(size=sizes[0])}
    draw = lambda i, n: {"a": rng.normal(size=(n, 3)) + i, "t": rng.normal(size=n) - i / 2}
    return [common if alike else draw(i, n) for i, n in enumerate(sizes)]


def rows(shard):
    return [jax.tree.map(lambda a, j=j: a[j], shard) for j in range(len(shard["t"]))]


def weighted(weights, trees):
    return jax.tree.map(lambda *leaves: sum(w * leaf for w, leaf in zip(weights, leaves, strict=True)), *trees)


def level_mean(level, y, shard):
    """The mean of a NumPy level over one client's rows."""
    if level is squares:
        return level(y, np)
    found = [level(y, e, np) for e in rows(shard)]
    return weighted([1 / len(found)] * len(found), found)


def by_hand(inner, x, data, p, levels=(first, second, squares, third)):
    """All values of all levels; data: for every level the clients' shards."""
    if inner == "client":
        each = []
        for i in range(len(p)):
            values = [x]
            for level, split in zip(levels, data, strict=True):
                values.append(level_mean(level, values[-1], split[i]))
            each.append(values)
        stacked = [jax.tree.map(lambda *a: np.stack(a), *column) for column in zip(*each, strict=True)]
        return stacked, float(np.dot(p, stacked[-1]))
    values = [x]
    for level, split in zip(levels, data, strict=True):
        values.append(weighted(p, [level_mean(level, values[-1], shard) for shard in split]))
    return values, float(values[-1])


def shares(data, weights):
    counts = np.array([len(s["t"]) for s in data], float)
    return counts / counts.sum() if weights == "size" else np.full(len(data), 1 / len(data))


def vector(tree):
    return fs.Vector(jax.tree.map(jnp.asarray, tree))


def ask(x, *questions):
    """The values of these functions of x, in one program: separately, every operation would be compiled alone."""
    return jax.jit(lambda x: [question(x) for question in questions])(vector(x))


def close(ours, theirs, rtol=1e-10):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-12), ours, theirs)


def slopes(function, x, width=1e-6):
    """Central differences of a function of a tree, or of its flattened outputs (rows)."""
    leaves, structure = jax.tree.flatten(x)
    sizes = [leaf.size for leaf in leaves]

    def at(flat):
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        out = function(
            structure.unflatten([part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)])
        )
        return flatten(out)

    flat = flatten(x)
    steps = width * np.eye(len(flat))
    return np.stack([(at(flat + d) - at(flat - d)) / (2 * width) for d in steps], axis=-1)


def flatten(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


# The true objective.


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [4096, 3])
@pytest.mark.parametrize("weights", ["uniform", "size"])
@pytest.mark.parametrize("inner", INNERS)
def test_values_objective_and_gradient_equal_a_loop(inner, weights, chunk):
    data = shards()
    problem, p = Nested(LEVELS, inner), shares(data, weights)
    full = fs.full_data(fs.Federation.from_clients(data), weights)
    full = {name: dataclasses.replace(r, chunk=chunk) for name, r in full.items()}
    values, objective = by_hand(inner, X, [data] * 4, p)
    found, value, gradient, stationarity = ask(
        X,
        lambda x: problem.values(x, full),
        lambda x: problem.objective(x, full),
        lambda x: problem.gradient(x, full),
        lambda x: problem.stationarity(x, full),
    )
    assert len(found) == 5
    for ours, theirs in zip(found, values, strict=True):
        close(ours.tree, theirs)
    assert float(value) == pytest.approx(objective, rel=1e-12)
    numeric = slopes(lambda x: by_hand(inner, x, [data] * 4, p)[1], X)[0]
    np.testing.assert_allclose(flatten(gradient.tree), numeric, rtol=1e-6, atol=1e-8)
    assert float(stationarity) == pytest.approx(np.linalg.norm(numeric), rel=1e-6)


def test_couplings_differ_where_clients_do():
    full = lambda data: fs.full_data(fs.Federation.from_clients(data))
    at = lambda full, inner: lambda x: Nested(LEVELS, inner).objective(x, full)
    different, alike = full(shards()), full(shards((4, 4, 4), alike=True))
    found = map(float, ask(X, *(at(data, inner) for data in (different, alike) for inner in INNERS)))
    together, apart, same, again = found
    assert abs(together - apart) > 0.1
    assert same == pytest.approx(again, rel=1e-12)


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("splits", [("train", "test", "train", "test"), ["test", "train", "test", "train"]])
def test_each_level_may_draw_from_its_own_split(inner, splits):
    data = {"train": shards((2, 5, 3)), "test": shards((4, 1, 6), seed=1)}
    federation = fs.Federation.from_clients(data["train"], test=data["test"])
    problem = Nested(LEVELS, inner, splits=splits)
    assert problem.streams == {f"{what}{k}": splits[k - 1] for what in ("level", "jacobian") for k in (1, 2, 4)}
    assert problem.level_streams == ("level1", "level2", "level4")
    full = fs.full_data(federation)
    expected = by_hand(inner, X, [data[s] for s in splits], np.full(3, 1 / 3))[1]
    assert float(ask(X, lambda x: problem.objective(x, full))[0]) == pytest.approx(expected, rel=1e-12)
    hash(jax.tree.structure(problem.bind(vector(X), federation)))  # or no program could be compiled with it


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("at", [0, 1])
def test_metrics_are_measured_at_their_level(inner, at):
    data = shards()
    problem = Nested(LEVELS, inner, metrics={"gap": measure_of[at]}, metrics_level=at)
    full = fs.full_data(fs.Federation.from_clients(data))
    values = by_hand(inner, X, [data] * 4, np.full(3, 1 / 3))[0][at]
    own = lambda i: jax.tree.map(lambda a: a[i], values) if inner == "client" else values
    each = [np.mean([measure_of[at](own(i), e) for e in rows(data[i])]) for i in range(3)]
    found, clients = ask(X, lambda x: problem.evaluate(x, full), lambda x: problem.evaluate_clients(x, full["train"]))
    assert float(found["gap"]) == pytest.approx(np.mean(each), rel=1e-12)
    if at == 0:
        np.testing.assert_allclose(clients["gap"], each, rtol=1e-12)
    assert ("objective" in clients) == (inner == "client")
    if inner == "client":
        np.testing.assert_allclose(clients["objective"], by_hand(inner, X, [data] * 4, np.ones(3))[0][-1], rtol=1e-10)


measure_of = [lambda x, e: x["s"] * e["t"] + x["w"][0], lambda y, e: y["z"] * e["t"] + y["u"][0]]


def test_a_client_without_examples_in_a_split_does_not_count_there():
    """Its levels have no value: a logarithm of nothing must not become the objective of the others."""
    train = [{"v": np.array([1.0, 2.0])}, {"v": np.array([3.0])}]
    federation = fs.Federation.from_clients(train).with_split("test", {"v": np.array([2.0, 6.0])}, np.array([1, 1]))
    problem = Nested([lambda x, e: x * e["v"], jnp.log], "client", metrics={"v": lambda x, e: e["v"]})
    full = fs.full_data(federation)
    found, clients = ask(
        np.array(1.5),
        lambda x: problem.evaluate_split(x, full, "test"),
        lambda x: problem.evaluate_clients(x, full["test"]),
    )
    assert float(found["loss"]) == pytest.approx(np.log(1.5 * 4), rel=1e-12)
    assert float(clients["objective"][1]) == pytest.approx(np.log(1.5 * 4), rel=1e-12)
    assert np.isnan(clients["objective"][0])  # as for metrics
    assert np.isnan(clients["v"][0])


# With a regulariser.


def test_stationarity_is_zero_at_a_constrained_optimum():
    """min ½|Ā x − c|² over the simplex with Ā = 1: the projection of c, which is not the free optimum."""
    A = np.stack([np.eye(3) + D for D in (0.5, -0.5)])
    c = np.array([0.9, 0.5, -1.0])
    problem = Nested(
        [lambda x, e: e["A"] @ x, lambda y: 0.5 * jnp.sum((y - jnp.asarray(c)) ** 2)], regularizer=fs.prox.Simplex()
    )
    full = fs.full_data(fs.Federation.from_clients([{"A": A[[0]]}, {"A": A[[1]]}]))
    optimum = np.array([0.7, 0.3, 0.0])
    free = dataclasses.replace(problem, regularizer=fs.prox.Zero())
    found, gradient = ask(
        optimum, lambda x: problem.evaluate(x, full, problem.smooth(x, full)), lambda x: problem.gradient(x, full)
    )
    assert float(found["stationarity"]) < 1e-14
    assert float(found["subdifferential_distance"]) < 1e-14
    assert float(found["objective"]) == pytest.approx(0.5 * (0.04 + 0.04 + 1.0), rel=1e-12)
    assert np.linalg.norm(gradient.tree) > 1
    (beside,) = ask(np.array([0.6, 0.4, 0.0]), lambda x: problem.stationarity(x, full))
    assert float(beside) > 0.1
    outside, found, nothing = ask(
        c,
        lambda x: problem.objective(x, full),
        lambda x: free.evaluate(x, full, free.smooth(x, full)),
        lambda x: free.stationarity(x, full),
    )
    assert float(outside) == np.inf
    assert set(found) == {"objective", "stationarity"}
    assert float(nothing) < 1e-14


# Through samples.


def oracle_of(data, client, draws, levels=LEVELS):
    federation = fs.Federation.from_clients(data)
    split = federation["train"]
    start, count = int(split.offsets[client]), int(split.counts[client])
    examples = jax.tree.map(jnp.asarray, split.examples)
    shard = {"train": View(examples, jnp.asarray(start), jnp.asarray(count), int(max(split.counts)))}
    given = {name: (jnp.asarray(index, jnp.int32), None) for name, index in draws.items()}
    return Nested(levels).oracle(shard, jax.random.key(0), draws=given, client=client)


DRAWS = {
    "level1": [0, 3],
    "level2": [1, 1],
    "level4": [4, 2],
    "jacobian1": [2, 2],
    "jacobian2": [0, 4],
    "jacobian4": [1, 3],
}
INPUTS = [
    X,
    {"u": np.array([0.3, -0.5, 0.2]), "z": np.array(-0.6)},
    (np.array([1.0, 2.0, -0.3]), np.array([0.2, -0.9])),
    (np.array([1.0, 2.0, -0.3]), np.array([0.2, -0.9])),
]


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_values_products_and_jacobians_of_a_sample(k, separate):
    data, level, y = shards(), [first, second, squares, third][k - 1], INPUTS[k - 1]
    oracle = oracle_of(data, 1, DRAWS)
    index = DRAWS.get(f"{'jacobian' if separate else 'level'}{k}", [0])
    seen = jax.tree.map(lambda a: a[index], data[1])
    value = lambda at: level_mean(level, at, seen)
    assert oracle.levels == 4
    dense = slopes(value, y)
    rng = np.random.default_rng(k)
    into = jax.tree.map(lambda a: rng.normal(size=np.shape(a)), y)
    out = jax.tree.map(lambda a: rng.normal(size=np.shape(a)), value(y))
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)
    out_v, into_v = vector(out), vector(into)

    def questions(x):
        jacobian = oracle.jacobian(k, x, separate)
        mixed = (jacobian - 3 * jacobian) / 2  # arithmetic keeps it a Jacobian
        pulled = jacobian.pull(out_v), oracle.pull(k, x, out_v, separate), mixed.pull(out_v)
        last = oracle.pull(k, x, separate=separate) if k == 4 else None
        return oracle.value(k, x, separate), jacobian, jacobian.push(into_v), pulled, last

    found, jacobian, pushed, (pulled, at_once, mixed), last = ask(y, questions)[0]
    close(found.tree, value(y))
    assert isinstance(jacobian, Jacobian)
    assert jacobian.size == dense.size
    near(flatten(pushed.tree), dense @ flatten(into))
    near(flatten(pulled.tree), dense.T @ flatten(out))
    assert jax.tree.structure(pulled.tree) == jax.tree.structure(y)
    close(at_once.tree, pulled.tree)
    close(mixed.tree, jax.tree.map(np.negative, pulled.tree))
    if last is not None:
        near(flatten(last.tree), dense[0])


def test_zeros_have_the_shapes_of_levels_and_jacobians():
    data = shards()
    federation = fs.Federation.from_clients(data)
    with pytest.raises(ValueError, match="shapes of this Nested problem are not set"):
        Nested(LEVELS).zeros(0)
    problem = Nested(LEVELS).bind(vector(X), federation)
    assert problem.sizes() == (4, 4, 5, 5, 1)
    assert problem.clients == 3
    oracle = oracle_of(data, 0, {name: [0] for name in DRAWS})
    for k in range(1, 5):
        zero = problem.zero_jacobian(k)
        jacobian = lambda y, k=k: oracle.jacobian(k, y)
        nothing = lambda y, at=jacobian, zero=zero: (at(y) + zero - at(y)).norm()
        found, rest, value = ask(INPUTS[k - 1], jacobian, nothing, lambda y, k=k: oracle.value(k, y))
        shape = lambda tree: jax.tree.map(jnp.shape, tree)
        assert shape(found) == shape(zero)
        assert jax.tree.structure(found) == jax.tree.structure(zero)
        assert float(rest) == 0
        assert shape(problem.zeros(k).tree) == shape(value.tree)


# Refusals, before anything compiles.

NUMBER = [lambda x, e: jnp.sum(x * e["a"])]


def vectors(clients=2, seed=0):
    rng = np.random.default_rng(seed)
    return fs.Federation.from_clients([{"a": rng.normal(size=(3, 3))} for _ in range(clients)])


def refused(kind, match, problem, params=None, **options):
    """A run is refused, with this message, and no program was compiled on the way."""
    events = []
    params = np.ones(3) if params is None else params
    jnp.isfinite(jnp.asarray(params)).all()  # what a check of the start values needs is compiled already
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
    try:
        with pytest.raises(kind, match=match):
            fs.run(problem(), FedDRSCGD(0.1, 0.1), vectors(), rounds=1, params=params, batch_size=1, **options)
    finally:
        jax.monitoring.clear_event_listeners()
    assert sum("jaxpr_to_mlir" in name for name in events) < 20  # single operations at most


@pytest.mark.parametrize(
    ("levels", "options", "kind", "match"),
    [
        (NUMBER, {"splits": ("tarin",)}, ValueError, r"split of level 1 of Nested 'tarin'; did you mean train\?"),
        (NUMBER, {"splits": ("train",) * 2}, ValueError, "must name one split for each of 1 levels"),
        (NUMBER, {"inner": "clients"}, ValueError, r"unknown inner of Nested 'clients'; did you mean client\?"),
        (NUMBER, {"metrics_level": 1}, ValueError, r"metrics_level=1 must be 0 \(parameters\) or an inner level"),
        (NUMBER, {"regularizer": "l1"}, TypeError, "Nested: regularizer='l1' is not one of fs.prox"),
        (NUMBER, {"gamma": 0.0}, ValueError, r"Nested: gamma=0\.0, .*must be > 0"),
        ([lambda x, e: x * e["a"]], {}, ValueError, r"the last level must return one real number, not .*\(3,\)"),
        ([lambda x, e: {"v": x @ e["a"]}], {}, ValueError, "the last level must return one real number"),
        ([lambda x: x, jnp.sum], {}, ValueError, "no level takes an example"),
        ([], {}, TypeError, "Nested: levels must be .*functions"),
        ([3], {}, TypeError, "Nested: levels must be .*functions"),
        (
            [lambda x, e: x @ e["a"], lambda y, e: jnp.sum(y["u"])],
            {},
            ValueError,
            "level 2 does not take the output of level 1",
        ),
        ([lambda x, e: jnp.sum(x @ e["b"])], {}, ValueError, "level 1 does not take the parameters.*'b'"),
        ([lambda x, e: jnp.eye(4) @ x], {}, ValueError, "level 1 does not take the parameters"),
        (
            [lambda x, e: jnp.sum(x > e["a"]), lambda y: y * 1.0],
            {},
            ValueError,
            "level 1 must return real numbers, not .*int",
        ),
        ([lambda x, e: {}, lambda y: 1.0], {}, ValueError, "level 1 must return real numbers"),
    ],
)
def test_refusals(levels, options, kind, match):
    refused(kind, match, lambda: Nested(levels, **options))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: maml(NUMBER[0], 0.1, steps=0), "maml: steps=0 must be a whole number >= 1"),
        (lambda: robust(NUMBER[0], temperature=0.0), r"robust: temperature=0\.0 must be > 0"),
        # The slope of the root at its floor would be infinite, and the guard none.
        (lambda: risk_averse(floor=0.0), "floor"),
        (lambda: risk_averse(eps=-1.0), "eps"),
    ],
)
def test_compositions_refuse_what_they_cannot_do(make, match):
    with pytest.raises(ValueError, match=match):
        make()


# Compositions.


def regression(clients=3, seed=0):
    rng = np.random.default_rng(seed)
    sizes = (4, 6, 3)[:clients]
    return [{"x": rng.normal(size=(n, 2)) + i, "y": rng.normal(size=n) * (i + 1)} for i, n in enumerate(sizes)]


def squared(w, e):
    return 0.5 * (e["x"] @ w - e["y"]) ** 2


@pytest.mark.parametrize("steps", [1, 2])
def test_maml_is_the_loss_after_adaptation(steps):
    data, w, eta = regression(), np.array([0.3, -0.4]), 0.1
    total, each = 0.0, []
    for s in data:
        adapted = w
        for _ in range(steps):
            adapted = adapted - eta * s["x"].T @ (s["x"] @ adapted - s["y"]) / len(s["y"])
        each.append(0.5 * np.mean((s["x"] @ adapted - s["y"]) ** 2))
        total += each[-1] / 3
    problem = maml(squared, eta, steps, metrics={"squared": squared})
    full = fs.full_data(fs.Federation.from_clients(data))
    assert len(problem.levels) == steps + 1
    objective, found, clients = ask(
        w,
        lambda w: problem.objective(w, full),
        lambda w: problem.evaluate(w, full),
        lambda w: problem.evaluate_clients(w, full["train"]),
    )
    assert float(objective) == pytest.approx(total, rel=1e-12)
    assert float(found["squared"]) == pytest.approx(total, rel=1e-12)
    np.testing.assert_allclose(clients["objective"], each, rtol=1e-12)


@pytest.mark.parametrize("weights", ["uniform", "size"])
def test_robust_learning_is_dominated_by_the_worst_client(weights):
    data, w = regression(), np.array([0.3, -0.4])
    losses = np.array([0.5 * np.mean((s["x"] @ w - s["y"]) ** 2) for s in data])
    p = shares([{"t": s["y"]} for s in data], weights)
    full = fs.full_data(fs.Federation.from_clients(data), weights)
    for temperature in (0.5, 5.0):
        problem = robust(squared, temperature)
        expected = float(p @ np.exp(losses / temperature))
        objective, found = ask(w, lambda w, p=problem: p.objective(w, full), lambda w, p=problem: p.evaluate(w, full))
        assert float(objective) == pytest.approx(expected, rel=1e-12)
        assert float(found["objective"]) == pytest.approx(expected, rel=1e-12)
        assert float(found["mean_loss"]) == pytest.approx(float(p @ losses), rel=1e-12)


def test_robust_learning_with_a_regulariser_reports_loss_and_regulariser_apart():
    """Whatever a column is called, objective = smooth part + regulariser must be recoverable, on other splits too."""
    data, w = regression(), np.array([0.3, -0.4])
    problem = robust(squared, regularizer=fs.prox.L1(0.1))
    full = fs.full_data(fs.Federation.from_clients(data))
    found, plain = ask(
        w,
        lambda w: problem.evaluate(w, full, problem.smooth(w, full)),
        lambda w: robust(squared).objective(w, full),
    )
    assert float(found["regularizer"]) == pytest.approx(0.07, rel=1e-12)
    assert float(found["objective"]) == pytest.approx(float(plain) + 0.07, rel=1e-12)


def test_the_risk_averse_portfolio_is_that_of_the_pooled_returns():
    rng = np.random.default_rng(0)
    R, x, risk, eps = rng.normal(size=(12, 4)) + 0.3, rng.normal(size=4), 2.0, 0.05
    full = fs.full_data(fs.Federation.from_clients([{"r": part} for part in np.split(R, 3)]))
    expected = risk * np.sqrt(np.var(R @ x) + eps) - np.mean(R @ x)
    problem = risk_averse(risk, eps)
    objective, slope, unguarded = ask(
        x,
        lambda x: problem.objective(x, full),
        lambda x: problem.gradient(x, full),
        lambda x: risk_averse(risk).objective(x, full),
    )
    assert float(objective) == pytest.approx(expected, rel=1e-12)
    S = np.cov(R.T, bias=True)
    gradient = risk * S @ x / np.sqrt(x @ S @ x + eps) - R.mean(0)
    np.testing.assert_allclose(slope.tree, gradient, rtol=1e-10)
    assert float(unguarded) == pytest.approx(risk * np.sqrt(np.var(R @ x)) - np.mean(R @ x), rel=1e-12)


def test_guards_of_the_root():
    """At x = 0 the variance vanishes: a guarded root has a gradient there, the mean's, and the plain one has not."""
    R = np.random.default_rng(1).normal(size=(8, 3))
    full = fs.full_data(fs.Federation.from_clients([{"r": R}]))
    ask_both = lambda problem: [lambda x: problem.objective(x, full), lambda x: problem.gradient(x, full)]
    for problem, value in ((risk_averse(eps=0.04), 0.2), (risk_averse(floor=0.09), 0.3)):
        found, slope = ask(np.zeros(3), *ask_both(problem))
        assert float(found) == pytest.approx(value, rel=1e-12)
        np.testing.assert_allclose(slope.tree, -R.mean(0), atol=1e-14)
    assert risk_averse(floor=0.09).advice() == ""
    assert not np.isfinite(ask(np.zeros(3), *ask_both(risk_averse()))[1].tree).all()
    assert "may be negative; give risk_averse(floor=...)" in risk_averse().advice()
    # Far above its floor the root does not depend on it.
    floored, plain = ask(np.full(3, 5.0), ask_both(risk_averse(floor=0.09))[0], ask_both(risk_averse())[0])
    assert float(floored) == float(plain)
    value, slope = jax.jit(jax.value_and_grad(risk_averse(floor=0.09).levels[2]))(jnp.array([0.0, -1.0]))
    assert float(slope[1]) == 0  # no slope below
    assert float(value) == pytest.approx(0.3)


@pytest.mark.slow
def test_a_variance_that_turns_negative_stops_the_run_with_advice():
    """Batch 1, a = 0.95 and returns in per cent: z₂ is an average of differences, and nothing keeps it positive."""
    rng = np.random.default_rng(0)
    shards = [{"r": rng.normal(size=(200, 10)) + 0.05} for _ in range(4)]
    federation = fs.Federation.from_clients(shards)
    options = {"params": np.full(10, 0.1), "batch_size": 1, "evaluate_every": 50, "stationarity": False}
    with pytest.warns(fs.DivergenceWarning, match=r"not finite: .*risk_averse\(floor=\.\.\.\)") as caught:
        result = fs.run(risk_averse(), FedDRSCGD(1e-3, 0.95, 4), federation, rounds=400, **options)
    assert len(caught) == 1
    assert result.diverged
    assert np.isfinite(result.solution()).all()
    assert np.isfinite(result.history["objective"]).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guarded = fs.run(risk_averse(eps=1.0), FedDRSCGD(1e-3, 0.95, 4), federation, rounds=400, **options)
    assert not guarded.diverged


def test_a_run_records_the_objective_and_metrics_of_the_problem():
    """The whole path: the history of `fs.run` at round 0 agrees with the loop."""
    data = shards()
    problem = Nested(LEVELS, metrics={"gap": measure_of[1]}, metrics_level=1)
    federation = fs.Federation.from_clients(data)
    options = {"params": X, "batch_size": 2, "weights": "size", "execution": "vmap", "stationarity": False}
    history = fs.run(problem, FedDRSCGD(0.01, 0.5), federation, rounds=1, **options).history
    p = shares(data, "size")
    values, objective = by_hand("global", X, [data] * 4, p)
    assert history["objective"][0, 0] == pytest.approx(objective, rel=1e-12)
    gaps = [np.mean([measure_of[1](values[1], e) for e in rows(s)]) for s in data]
    assert history["gap"][0, 0] == pytest.approx(float(p @ gaps), rel=1e-12)
    job = prepare(problem, FedDRSCGD(0.01, 0.5), federation, rounds=1, **options)
    assert job.context.problem.sizes() == (4, 4, 5, 5, 1)


@pytest.mark.slow
def test_a_run_that_takes_the_root_of_a_negative_variance_is_told_what_helps():
    """With batches of one the estimates go below −eps; a floor has a root for all of them."""
    rng = np.random.default_rng(0)
    federation = fs.Federation.from_clients([{"r": rng.normal(size=(50, 4))} for _ in range(4)])
    options = {"rounds": 60, "params": np.full(4, 0.25), "batch_size": 1, "stationarity": False, "seeds": 3}
    run = lambda **guard: fs.run(risk_averse(**guard), fs.TrackedSCGD(0.01, 0.1, 4), federation, **options)
    with pytest.warns(fs.DivergenceWarning, match=r"may be below -0\.01; give risk_averse\(floor=\.\.\.\)"):
        run(eps=0.01)
    assert not run(floor=0.01).diverged
