"""The fairness experiment: what it records, equal tuning on other splits, pairing, two stages, and the verdicts."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fedstrata_papers.fedbio import claims, comparison, figures, methods, tasks
from fedstrata_papers.fedbio.comparison import Found, Task
from fedstrata_papers.fedbio.exact import outer_loss, solved, with_bias
from fedstrata_papers.fedbio.floor import by_chance
from fedstrata_papers.fedbio.pareto import Cloud, front, pareto
from fedstrata_papers.fedbio.printed import TABLE_1
from fedstrata_papers.fedbio.table import rows

import fedstrata as fs
from fedstrata.core.algorithm import steps_of
from fedstrata.core.hyperparameters import hyperparameters
from fedstrata.core.vector import Vector
from fedstrata.experiments import get, reproductions
from fedstrata.experiments.reproduction import Desk

SYNTHETIC = Task("synthetic", True, 10)  # splits of equal sizes, which share a program


def random_model(setup, seed=0, stack=()):
    rng = np.random.default_rng(seed)
    make = lambda a: jnp.asarray(rng.normal(size=(*stack, *a.shape)))
    return Vector(jax.tree.map(make, setup.problem.init(jax.random.key(0))))


def logits(model, part):
    return part["x"].astype(float) @ np.asarray(model["weight"])[0] + np.asarray(model["bias"])[0]


def test_more_gaps_are_those_of_a_plain_loop():
    setup: Any = tasks.model_task("synthetic", False, 0)
    x = random_model(setup)
    part = setup.federation["test"].examples
    guess = logits(x.tree, part) > 0
    found = [np.mean(~guess[(part["group"] == k) & (part["y"] == 0)]) for k in range(3)]
    full = fs.full_data(setup.federation)
    measured = jax.jit(lambda x: setup.problem.evaluate_split(x, full, "test"))(x)
    np.testing.assert_allclose(measured["eq_opp_zero"], max(found) - min(found), atol=1e-6)
    pairs = [abs(a - b) for a, b in itertools.combinations(found, 2)]
    np.testing.assert_allclose(measured["mean_gap_zero"], np.mean(pairs), atol=1e-6)
    z = logits(x.tree, part)
    np.testing.assert_allclose(measured["log_loss"], np.mean(np.logaddexp(0, z) - part["y"] * z), rtol=1e-6)


def test_followed_records_the_outer_loss_of_the_models_at_hand():
    setup: Any = tasks.weight_task("synthetic", False, 0)
    x = Vector(jnp.array([0.3, -1.0, 2.0]))
    y = random_model(tasks.model_task("synthetic", False, 0), stack=(3,))
    full = fs.full_data(setup.federation)
    found = jax.jit(lambda x, y: setup.problem.observed(x, y, full))(x, y)
    losses = []
    for client in range(3):
        part = setup.federation["valid"].shard(client)
        z = logits(jax.tree.map(lambda a, i=client: a[i], y.tree), part)
        losses.append(np.mean(np.logaddexp(0, z) - part["y"] * z))
    np.testing.assert_allclose(found["objective"], np.mean(losses), rtol=1e-6)
    weights = [found[f"weight_{k}"] for k in range(3)]
    np.testing.assert_allclose(weights, 1 / (1 + np.exp(-np.array([0.3, -1.0, 2.0]))), rtol=1e-6)


def test_small_group_weights_are_solved_for_too():
    """To first order in small weights, θ = mean w (y − ½) x / l2."""
    rng = np.random.default_rng(0)
    train = {"x": rng.normal(size=(30, 2)), "y": rng.integers(0, 2, 30), "group": rng.integers(0, 2, 30)}
    weights = np.array([1e-9, 2e-9])
    right = (weights[train["group"]] * (train["y"] - 0.5)) @ with_bias(train["x"]) / 30
    np.testing.assert_allclose(solved(train, weights, l2=0.1), right / 0.1, rtol=1e-6)


def test_the_exact_outer_loss_is_the_problems_own():
    setup: Any = tasks.model_task("synthetic", False, 1)
    problem = setup.problem.learn_weights(setup.problem.init(jax.random.key(0)))
    x = Vector(jnp.array([1.0, -0.5, 0.2]))
    full = fs.full_data(setup.federation)
    exact = jax.jit(lambda x: problem.smooth_part(x, full))(x)
    ours = outer_loss(setup.federation, np.asarray(problem.weights(x)), tasks.L2)
    np.testing.assert_allclose(ours, exact, rtol=1e-6)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """FedAvg and FedBiO on a tiny comparison, all its runs, and FedBiO's curves."""
    patch = pytest.MonkeyPatch()
    patch.setattr(comparison, "STEPS", (0.1, 1.0))
    patch.setattr(comparison, "SPLITS", (0, 1, 2))
    patch.setattr(comparison, "TUNING_SPLITS", (1000,))
    asked, real = {}, Desk.run

    def run(desk, name, build, data, algorithm, **options):
        asked[name] = (data, algorithm, options, real(desk, name, build, data, algorithm, **options))
        return asked[name][-1]

    patch.setattr(Desk, "run", run)
    desk = Desk(tmp_path_factory.mktemp("desk"), quiet=True)
    found = comparison.compared(desk, SYNTHETIC, ["FedAvg", "FedBiO"])
    curves = comparison.curves(desk, SYNTHETIC, "FedBiO")
    patch.undo()
    return found, asked, curves


def label(name, step, split):
    return f"synthetic_iid_{name}_step_{step:g}_split_{split}"


def test_steps_are_chosen_on_other_divisions_and_seeds(small):
    found, asked, _ = small
    for name, last in (("FedAvg", "FedAvg"), ("FedBiO", "FedAvg_after_FedBiO")):
        scores = [asked[label(last, step, 1000)][-1].last("valid/log_loss")[0] for step in (0.1, 1.0)]
        step = found[name].step
        assert step == (0.1, 1.0)[int(np.argmin(scores))]
        assert found[name].edge
        other = 1.1 - step
        assert {n for n in asked if f"_{last}_step" in n} == {
            *(label(last, s, 1000) for s in (0.1, 1.0)),
            *(label(last, step, split) for split in (0, 1, 2)),
        }, "the step that was not chosen has no reported run"
        assert label(last, other, 0) not in asked
        ends = [asked[label(last, step, split)][-1].last("test/eq_opp")[0] for split in (0, 1, 2)]
        np.testing.assert_array_equal(found[name].values["test/eq_opp"], ends)
    for data, algorithm, options, _ in asked.values():
        assert options["seeds"] == [data["split"]]
        assert options["rounds"] * steps_of(algorithm) == 10


def test_stage_two_trains_with_the_weights_that_its_run_has_found(small):
    found, asked, _ = small
    step = found["FedBiO"].step
    for split in (0, 1, 2):
        first, second = (asked[label(name, step, split)] for name in ("FedBiO", "FedAvg_after_FedBiO"))
        learned = [first[-1].last(f"weight_{k}")[0] for k in range(3)]
        assert np.ptp(learned) > 0
        np.testing.assert_array_equal(second[0]["weights"], learned)
        assert second[1].step_size == first[1].lower_step_size == step
    # Stage one sends three weights, stage two a model of seven features and a bias; 3 clients, 2 rounds each.
    width = jnp.zeros(()).dtype.itemsize
    np.testing.assert_array_equal(found["FedBiO"].values["bytes_up"], 3 * 2 * (3 + 8) * width)
    np.testing.assert_array_equal(found["FedAvg"].values["bytes_up"], 3 * 2 * 8 * width)


def test_curves_are_those_of_the_reported_runs(small):
    found, asked, (rounds, values) = small
    assert values.shape == (3, len(rounds))
    for split in (0, 1, 2):
        history = asked[label("FedBiO", found["FedBiO"].step, split)][-1]
        np.testing.assert_array_equal(values[split], history["objective"][0])


def test_every_method_tries_the_same_steps():
    for name in methods.METHODS:
        for step in comparison.STEPS:
            chosen: Any = methods.method(name, step, 2000)
            moves = chosen.lower_step_size if name in methods.BILEVEL else chosen.step_size
            scale = chosen.alpha(3.0) if name == "FedBiOAcc" else 1.0
            assert np.isclose(moves * scale, step)
            if name in methods.BILEVEL:
                assert np.isclose(chosen.step_size * scale, 0.1)  # η as printed
    fcfl: Any = methods.method("FCFL", 0.1, 2000)
    assert fcfl.stage_one == 800
    assert methods.rounds("FCFL", 2000) == methods.rounds("FedMinMax", 2000) == 2000
    assert methods.rounds("FedBiO", 2000) == 400
    recursive: Any = methods.method("FedBiOAcc", 0.1, 2000)
    assert (recursive.delta, recursive.offset, recursive.momentum, recursive.lower_momentum) == (0.1, 1.0, 1.0, 1.0)


def made(**means):
    """Final values of 20 runs; the divisions differ much more than the methods."""
    split = np.random.default_rng(0).normal(size=20)
    out = {}
    for number, (name, (accuracy, gap)) in enumerate(means.items()):
        noise = 1e-4 * np.random.default_rng(number).normal(size=20)
        columns = {"test/accuracy": accuracy, "eq_opp": gap, "test/eq_opp": gap}
        values = {column: mean + noise + 0.05 * split for column, mean in columns.items()}
        rest = dict.fromkeys(("test/eq_opp_zero", "test/mean_gap_zero", comparison.CRITERION), split)
        sent = 1e6 * (number + 1) * np.ones(20)
        out[name] = Found(0.1, False, {**values, **rest, "bytes_up": sent, "samples": sent})
    return out


ALL = dict.fromkeys(methods.METHODS, (0.8, 0.2))


def test_differences_are_between_runs_of_one_division():
    found = made(FedAvg=(0.8, 0.2), FedBiO=(0.79, 0.15))
    mean, low, high = comparison.against(found, "FedBiO", "test/eq_opp")
    assert -0.0502 < low < mean < high < -0.0498  # the divisions, which spread by 0.05, cancel
    mean, low, high = comparison.paired(np.arange(20.0), np.zeros(20))
    assert np.isclose(mean, 9.5)
    assert np.isclose(high - mean, 2.0930 * np.std(np.arange(20), ddof=1) / 20**0.5, atol=1e-3)  # Student, 19


def test_the_table_has_paper_and_ours_side_by_side():
    task = Task("adult", True, 2000)
    lines = rows(task, made(**ALL))
    head = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert all(len(line.strip("|").split("|")) == len(head) for line in lines)
    for text in ("test accuracy: paper", "train EqOpp: paper", "test EqOpp: paper", "test EqOpp less FedAvg's (95 %)"):
        assert text in head
    assert "0.823 ± 0.016" in lines[6]  # FedBiO
    assert "0.034 ± 0.001" in lines[6]
    assert "TrackedBiO (ours)" in lines[-1]
    lost = made(**ALL)
    lost["FedReg"].values["test/accuracy"][3] = np.nan
    assert "1 of 20 diverged" in rows(task, lost)[3]


def verdicts(found):
    return {c.claim.split(" (")[0]: c.verdict for c in claims.claims_about_table(3, found)}


def test_verdicts_follow_the_numbers():
    tasks_ = [Task("adult", iid, 2000) for iid in (True, False)]
    good = {**ALL, "FedBiO": (0.81, 0.1), "FedBiOAcc": (0.82, 0.1), "FedMinMax": (0.7, 0.15)}
    bad = {**ALL, "FedBiO": (0.7, 0.1), "FedBiOAcc": (0.8, 0.3), "FedReg": (0.9, 0.05)}
    fair, best = "fairer than FedAvg at comparable accuracy", "either FedBiO or FedBiOAcc gets the best result for most"
    yes, no = (verdicts({task: made(**means) for task in tasks_}) for means in (good, bad))
    at = lambda found, words: next(v for k, v in found.items() if k.startswith(words))
    assert (at(yes, fair), at(no, fair)) == ("holds", "does not hold")
    assert (at(yes, best), at(no, best)) == ("holds", "does not hold")
    assert (at(yes, "FedMinMax"), at(no, "FedMinMax")) == ("holds", "does not hold")
    one = verdicts({tasks_[0]: made(**good)})
    assert at(one, "FedReg and FCFL") == "not tested"
    half = verdicts({tasks_[0]: made(**good), tasks_[1]: made(**bad)})
    assert at(half, fair) == "holds in part"


def test_verdicts_on_curves_follow_the_curves():
    rounds = np.arange(0, 101, 10)
    fall = lambda rate: np.tile(np.exp(-rate * rounds), (20, 1))
    assert np.all(claims.rounds_to(rounds, fall(0.1)) == 30)  # e⁻³ < 0.1 < e⁻²
    lines = {"FedBiO": (rounds, fall(0.05)), "FedBiOAcc": (rounds, fall(0.1)), "TrackedBiO": (rounds, fall(0.05))}
    slow = {name: (rounds, fall(0.03)) for name in lines}
    seen = {Task("adult", True, 500): lines, Task("adult", False, 500): slow}
    exact = {task: {**dict.fromkeys(lines, np.zeros(20)), "equal weights": np.ones(20)} for task in seen}
    exact[Task("adult", True, 500)]["FedBiO"] = np.arange(20) / 10
    alike = {task: found["FedBiOAcc"][1] for task, found in seen.items()}
    faster, slower, useful, drift = claims.claims_about_curves(1, seen, alike, exact)
    assert faster.verdict == "holds in part"
    assert slower.verdict == "holds"
    assert useful.verdict == "holds in part"
    assert drift.verdict == "holds in part"


def test_few_examples_make_gaps_of_their_own():
    """Two groups of n: the mean of |difference| of two shares, which are nearly normal, is 2 sqrt(p(1 − p)/(nπ))."""
    part = {"y": np.tile([1, 0], 400), "group": np.repeat([0, 1], 400)}
    np.testing.assert_allclose(by_chance(part, 1, 0.3, 2), 2 * np.sqrt(0.21 / (200 * np.pi)), rtol=0.02)
    assert by_chance(part, 1, 0.3, 5) == by_chance(part, 1, 0.3, 2)  # groups that are not there do not count


def test_the_printed_table_is_complete():
    assert {*TABLE_1} == {(data, iid) for data in ("adult", "german_credit") for iid in (True, False)}
    for printed in TABLE_1.values():
        assert tuple(printed) == methods.PAPER
        for row in printed.values():
            assert 0.6 < row.accuracy[0] < 0.9
            assert 0.02 <= row.train[0] < 0.1
            assert 0.03 < row.test[0] < 0.15


@pytest.mark.slow
def test_the_experiment_compares_models_of_one_and_of_two_stages():
    experiment: Any = get("fairness")
    setup = experiment.build(data="synthetic", iid=False)
    one = experiment.run("FedAvg", setup, rounds=2, seeds=[3]).history
    result = experiment.run("FedBiO", setup, rounds=2, seeds=[3], sweep={"lower_step_size": [0.01, 1.0]})
    two = result.history
    assert two.axes == {"lower_step_size": [0.01, 1.0], "seed": [3]}
    assert {*experiment.panels} <= {*one.columns} <= {*two.columns}
    assert result.solutions.tree["weight"].shape == (2, 1, 1, 7)
    assert (one.last("round")[0], two.last("round")[0, 0]) == (2, 4)
    sent = 3 * 2 * 3 * jnp.zeros(()).dtype.itemsize  # three clients, two rounds, three weights
    assert two.last("bytes_up")[0, 0] == one.last("bytes_up")[0] + sent
    assert two.last("accuracy")[0, 0] != two.last("accuracy")[1, 0]  # stage two has the step of stage one
    assert two.last("objective")[0, 0] > two.last("objective")[1, 0]


def test_the_experiment_has_the_settings_of_the_reproduction():
    experiment: Any = get("fairness")
    for name in methods.METHODS:
        here, there = experiment.algorithm(name), methods.method(name, 0.01, 2000)
        assert hyperparameters(here) == hyperparameters(there)


def test_methods_that_average_after_every_step_get_as_many_steps():
    experiment: Any = get("fairness")
    setup = experiment.build(data="synthetic")
    options = {name: experiment.run_options(experiment.algorithm(name), setup, rounds=7) for name in methods.METHODS}
    for name, given in options.items():
        each = 1 if name in ("FedMinMax", "FCFL") else 5
        assert given["rounds"] * each == 35
        assert given.get("weights", "uniform") == ("size" if name == "FedMinMax" else "uniform")


def test_without_files_the_data_are_made_up(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDSTRATA_DATA", str(tmp_path))
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path))
    assert tasks.chosen("auto") == "synthetic"
    with pytest.raises(ValueError, match="did you mean adult"):
        get("fairness").build(data="adlt")
    desk = Desk(tmp_path, quiet=True)
    assert [claim.verdict for draw in (figures.figure_1, figures.figure_3) for claim in draw(desk).claims] == [
        "not tested",
        "not tested",
    ]


def test_figures_are_known_by_number():
    assert [*reproductions()["fedbio"].figures] == [1, 2, 3, 4, 5]


def test_pareto_draws_and_finds_the_front(tmp_path):
    assert front({"a": (0.8, 0.2), "b": (0.8, 0.1), "c": (0.9, 0.3)}) == ["b", "c"]
    rng = np.random.default_rng(0)
    points = {name: (rng.normal(0.8, 0.01, 5), rng.normal(0.2, 0.01, 5)) for name in methods.METHODS}
    path = pareto([Cloud("one", points)], "title", tmp_path / "p.png", "note")
    assert path.stat().st_size > 5000
