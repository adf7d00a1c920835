"""Experiments on client-coupled problems: what they measure, FedAvg beside them, and the verdicts on MFCGD's claims."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fedstrata_papers.mfcgd import comparison, figures, robust
from fedstrata_papers.mfcgd import maml_tasks as tasks

import fedstrata as fs
from fedstrata.core.algorithm import steps_of
from fedstrata.core.vector import Vector
from fedstrata.data.sources import missing, store
from fedstrata.experiments import get
from fedstrata.experiments.reproduction import Desk, Outcome
from fedstrata.report import History


@pytest.fixture
def need():
    def check(source: str) -> None:
        if missing(source):
            pytest.skip(f"{source} not found; set FEDSTRATA_DATA to the shared data folder")

    return check


def start(problem, seed=0) -> Vector:
    return Vector(problem.init(jax.random.key(seed)))


def test_robust_has_one_large_client_and_small_ones_of_two_digits():
    federation = get("robust").build(source="digits").federation
    assert federation["train"].counts.tolist() == [500] + 9 * [20]
    for client in range(1, 10):
        digits = {client - 1, client}
        assert {*federation["train"].shard(client)["y"].tolist()} == digits
        assert {*federation["test"].shard(client)["y"].tolist()} == digits
    whole = [federation["train"].shard(i)["x"] for i in range(10)]
    assert len(np.unique(np.concatenate(whole), axis=0)) == 680  # no image is at two clients
    seen = {row.tobytes() for rows in whole for row in rows}
    assert not any(row.tobytes() in seen for i in range(10) for row in federation["test"].shard(i)["x"])


def test_robust_falls_back_to_digits_without_files(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDSTRATA_DATA", str(tmp_path))
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path))
    assert any(row.where == "missing" for row in store.status("mnist"))
    assert get("robust").build().federation["train"].shard(0)["x"].shape[1:] == (64,)
    with pytest.raises(ValueError, match="did you mean digits"):
        get("robust").build(source="digit")
    with pytest.raises(ValueError, match="network of robust"):
        get("robust").build(network="resnet")


def test_mnist_has_the_stated_sizes(need):
    need("mnist")
    for network, size in (("small", 14), ("lenet", 28)):
        federation = robust.build("mnist", network).federation
        assert federation["train"].counts.tolist() == [5000] + 9 * [20]
        assert federation["train"].examples["x"].shape[1:] == (size, size, 1)


def guarded(y, temperature, cap):
    """The exponential and, beyond the cap, its tangent."""
    return np.exp(y / temperature) if y <= cap else np.exp(cap / temperature) * (1 + (y - cap) / temperature)


def test_robust_measures_what_it_says():
    """Objective and accuracies against loops over clients."""
    setup: Any = get("robust").build(source="digits", temperature=0.7, cap=2.2)
    problem, federation = setup
    x, full = start(problem), fs.full_data(federation)
    whole = jax.jit(lambda x: (problem.evaluate(x, full), problem.evaluate_split(x, full, "test")))
    scores = jax.jit(jax.vmap(problem.model, (None, 0)))
    for split, found in zip(("train", "test"), whole(x), strict=True):
        every = np.asarray(scores(x.tree, federation[split].examples["x"]))  # one program, whatever a client's size
        costs, rights = [], []
        for client, z in enumerate(np.split(every, federation[split].offsets[1:-1])):
            rows = federation[split].shard(client)
            costs.append(np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), rows["y"]]))
            rights.append(np.mean(z.argmax(1) == rows["y"]))
        assert min(costs) < 2.2 < max(costs)  # both branches are met
        key = "objective" if split == "train" else "loss"
        np.testing.assert_allclose(found[key], np.mean([guarded(cost, 0.7, 2.2) for cost in costs]), rtol=1e-6)
        np.testing.assert_allclose(found["accuracy"], np.mean(rights), atol=1e-6)
        np.testing.assert_allclose(found["worst_accuracy"], np.min(rights), atol=1e-6)


@pytest.mark.parametrize("name", ["robust", "maml"])
def test_fedavg_sees_the_plain_loss_and_is_measured_by_the_nested_one(name):
    """The same steps as on `fs.Average`, whose monitor then is the nested problem."""
    setup: Any = get(name).build(source="digits") if name == "robust" else get(name).build(clients=3, hidden=4)
    options = {"rounds": 2, "batch_size": "all", "stationarity": False, "execution": "vmap"}
    here = fs.run(setup.problem, fs.FedAvg(0.05, 2), setup.federation, **options)
    plain = fs.Average(setup.problem.loss)
    there = fs.run(plain, fs.FedAvg(0.05, 2), setup.federation, monitor=setup.problem, **options)
    for a, b in zip(jax.tree.leaves(here.solution()), jax.tree.leaves(there.solution()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(here.history["objective"], there.history["monitor/objective"], rtol=1e-9)


def adapted(params, x, y, step, steps):
    """Gradient steps on all points at once, and the cost that they are on."""
    for _ in range(steps):
        params = jax.tree.map(lambda a, g: a - step * g, params, slope(params, x, y))
    return params, cost


@jax.jit
def cost(params, x, y):
    return 0.5 * jnp.mean((jax.vmap(lambda v: MODEL(params, v))(x) - y) ** 2)


slope = jax.jit(jax.grad(cost))


MODEL = fs.models.MLP((1, 4, 4, 1), activation="tanh")


@pytest.mark.parametrize("steps", [1, 2])
def test_sinusoids_are_measured_after_adaptation(steps):
    problem, federation = get("maml").build(clients=3, hidden=4, steps=steps, adaptation=0.05)
    x, full = start(problem), fs.full_data(federation)
    places = {"objective": ("train", "query"), "new": ("new", "new_query")}
    ask = jax.jit(lambda x: (problem.evaluate(x, full), problem.evaluate_split(x, full, "new")))
    found = dict(zip(places, ask(x), strict=True))
    for what, (support, query) in places.items():
        losses = []
        for client in range(3):
            shards = (federation[split].shard(client) for split in (support, query))
            near, far = ({key: values.astype(float) for key, values in shard.items()} for shard in shards)
            params, cost = adapted(x.tree, near["x"], near["y"], 0.05, steps)
            losses.append(float(cost(params, far["x"], far["y"])))
        measured = found[what]["objective" if what == "objective" else "loss"]
        np.testing.assert_allclose(measured, np.mean(losses), rtol=1e-5)
        np.testing.assert_allclose(found[what]["mse"], 2 * np.mean(losses), rtol=1e-5)
    assert problem.evaluate_split(x, full, "query") == {}


def test_sinusoids_are_sinusoids():
    federation = get("maml").build(clients=4).federation
    for split, rows in (("train", 100), ("new", 10)):
        for client in range(4):
            part = federation[split].shard(client)
            x, y = part["x"][:, 0].astype(float), part["y"][:, 0].astype(float)
            assert len(x) == rows
            basis = np.column_stack([np.sin(x), np.cos(x)])
            weights, *_ = np.linalg.lstsq(basis, y)
            np.testing.assert_allclose(basis @ weights, y, atol=1e-5)
            assert 0.1 <= np.hypot(*weights) <= 5.0
            assert weights[1] <= 1e-6  # a sin(x − b) with b in [0, π]


def test_omniglot_makes_the_last_layer_anew_and_keeps_the_first(need):
    need("omniglot")
    setup: Any = get("maml").build(task="omniglot", clients=2, hidden=3, adaptation=2.0)
    problem, federation = setup
    counts = {name: split.counts.tolist() for name, split in federation.splits.items()}
    assert counts == {"train": [10, 10], "query": [10, 10], "new": [1, 1], "new_query": [10, 10]}
    x, full = start(problem), fs.full_data(federation)
    _, after, last = jax.jit(lambda x: problem.values(x, full))(x)
    for client in range(2):
        rows = federation["train"].shard(client)
        images = rows["x"].reshape(-1, 20).astype(float)
        w, b = (np.asarray(x.tree[0][key]) for key in ("weight", "bias"))
        features = np.tanh(images @ w.T + b)
        slope = (np.full((len(images), 5), 0.2) - np.eye(5)[rows["y"].reshape(-1)]) / len(images)  # at zero scores
        np.testing.assert_allclose(after.tree[1]["weight"][client], -2 * slope.T @ features, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(after.tree[1]["bias"][client], -2 * slope.sum(0), rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(after.tree[0]["weight"][client], w, rtol=1e-6)
    assert last.tree.shape == (2,)


def test_the_default_methods_of_maml_improve_the_objective():
    experiment = get("maml")
    setup = experiment.build(clients=3, hidden=3)
    assert all(steps_of(experiment.algorithm(name)) == 5 for name in experiment.methods)
    for method in ("LocalSCGDM", "AdaMFCGD"):  # the others take the same steps in other tests
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fs.CouplingWarning)
            result = experiment.run(method, setup, rounds=4, seeds=1, execution="vmap", stationarity=False)
        assert not result.diverged
        assert result.history.last("objective")[0] < result.history["objective"][0, 0]
        assert {*experiment.panels} <= {*result.history.columns}


def test_methods_for_two_levels_refuse_two_steps_of_adaptation():
    setup = get("maml").build(clients=2, hidden=3, steps=2)
    options = {"rounds": 1, "batch_size": 2, "stationarity": False, "execution": "vmap"}
    for name, method in comparison.methods(local_steps=1).items():
        if name in ("FedAvg", "ComFedL"):
            continue
        with pytest.raises(ValueError, match="two levels"):
            fs.run(setup.problem, method, setup.federation, **options)


def history(levels: np.ndarray, sweep: dict, seeds: int = 10, **columns: float) -> History:
    """Objectives that fall in a straight line on a log scale to a level, one for each setting."""
    rounds = np.arange(0.0, 21.0)
    axes = {**sweep, "seed": list(range(seeds))}
    noise = 1 + 0.01 * np.random.default_rng(0).normal(size=(*levels.shape, seeds, 1))
    objective = noise * levels[..., None, None] ** (rounds / 20)
    full = lambda value: np.broadcast_to(value, objective.shape).astype(float)
    given = {name: full(value) + 0.001 * noise for name, value in columns.items()}
    return History(axes, {"round": full(rounds), "objective": objective, "bytes_up": full(1e6), **given})


class Pretend(Desk):
    """A desk whose runs come from a table of final objectives; the best step is 0.18."""

    def __init__(self, folder, ends, worst=None):
        super().__init__(folder, "small", quiet=True)
        self.ends, self.worst, self.asked = ends, worst or {}, []

    def run(self, name, build, data, algorithm, **options):
        method, sweep = type(algorithm).__name__, options["sweep"]
        scale = comparison.RHO if method == "AdaMFCGD" else 1.0
        steps = np.array(sweep["step_size"]) / scale
        self.asked.append((method, {**sweep, "step_size": steps}, options["seeds"]))
        levels = self.ends[method] * (1 + np.abs(np.log10(steps / 0.18)))
        if "value_momentum" in sweep:
            levels = levels[:, None] * (1 + np.abs(np.array(sweep["value_momentum"]) - 0.5))
        names = ("new/loss", "new/accuracy", "accuracy", "test/accuracy")
        columns = dict.fromkeys(names, 0.5) | {"test/worst_accuracy": self.worst.get(method, 0.5)}
        return history(levels, sweep, len(options["seeds"]), **columns)


BASE = dict.fromkeys(comparison.methods(), 0.1)


def verdicts(outcome: Outcome) -> list[str]:
    assert all(path.stat().st_size > 100 for path in outcome.files)
    return [claim.verdict for claim in outcome.claims]


def test_every_method_gets_as_many_settings_of_the_same_range_and_fresh_seeds(tmp_path):
    desk = Pretend(tmp_path, BASE)
    figures.figure_2(desk)
    assert len(desk.asked) == 24
    tried = [asked for number, asked in enumerate(desk.asked) if number % 3 < 2]
    for method, sweep, seeds in tried:
        assert np.prod([len(values) for values in sweep.values()]) == 10
        assert not {*seeds} & {*range(comparison.SEEDS)}
        np.testing.assert_allclose(sweep["step_size"][0], 0.02)
        assert sweep["step_size"][-1] >= 1.6
        assert ("value_momentum" in sweep) == (method not in ("FedAvg", "ComFedL"))
    for _, sweep, seeds in desk.asked[2::3]:
        np.testing.assert_allclose(sweep["step_size"], [0.18])
        assert sweep.get("value_momentum", [0.5])[0] in (0.3, 0.5)
        assert len(seeds) == 10
    table = (tmp_path / "sinusoids.md").read_text()
    assert "| AdaMFCGD | 0.018 | 0.5 |" in table
    assert "edge" not in table


def test_the_choice_passes_over_luck_and_divergence():
    """A setting that is lowest at the very end only, and one that diverged, lose to a steady one."""
    steady, lucky = [9.0, 2.0, 2.0, 2.0], [9.0, 8.0, 8.0, 1.0]
    rows = np.array([steady, lucky, [9.0, 1.0, 1.0, np.nan]])[:, None]
    found = History({"step_size": [0.1, 0.2, 0.3], "seed": [0]}, {"round": np.zeros_like(rows), "objective": rows})
    assert comparison.best([found]) == {"step_size": 0.1}
    bad = History(found.axes, {"round": found["round"], "objective": np.where(found["objective"] == 9, 9, 50.0)})
    bad.columns["objective"][1] = 1.0  # on another seed the second is so much better that it wins
    assert comparison.best([found, bad]) == {"step_size": 0.2}
    with pytest.raises(ValueError, match="every setting"):
        comparison.best([found.select(step_size=[0.3])])


def test_without_omniglot_its_claim_is_not_tested(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "missing", lambda source: True)
    desk = Pretend(tmp_path, BASE)
    assert verdicts(figures.figure_3(desk)) == ["not tested"]
    assert not desk.asked


@pytest.mark.parametrize("figure", [figures.figure_2, figures.figure_3])
def test_claims_of_meta_learning_follow_the_numbers(figure, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "missing", lambda source: False)
    better = {**BASE, "MFCGD": 0.05, "AdaMFCGD": 0.05, "TrackedMFCGD": 0.02}
    assert verdicts(figure(Pretend(tmp_path, better))) == ["holds", "holds", "holds"]
    worse = {**BASE, "MFCGD": 0.2, "AdaMFCGD": 0.2, "TrackedMFCGD": 0.3}
    assert verdicts(figure(Pretend(tmp_path, worse))) == ["does not hold"] * 3
    mixed = {**BASE, "MFCGD": 0.05, "AdaMFCGD": 0.2, "TrackedMFCGD": 0.05}
    assert verdicts(figure(Pretend(tmp_path, mixed))) == ["holds in part", "holds in part", "does not hold"]


def test_claims_of_robust_learning_look_at_the_worst_client(tmp_path):
    worst = {name: 0.7 for name in BASE if name != "FedAvg"}
    assert verdicts(figures.figure_1(Pretend(tmp_path, BASE, worst)))[2] == "holds"
    assert verdicts(figures.figure_1(Pretend(tmp_path, BASE, {"FedAvg": 0.9})))[2] == "does not hold"


def test_two_steps_of_adaptation_say_that_the_paper_is_not_tested(tmp_path):
    desk = Pretend(tmp_path, BASE)
    assert verdicts(figures.figure_4(desk)) == ["not tested"]
    assert {method for method, *_ in desk.asked} == {"FedAvg", "ComFedL"}


def test_an_unknown_task_is_refused():
    with pytest.raises(ValueError, match="did you mean omniglot"):
        tasks.build(task="omniglott")
