"""Hospitals and clinics: no leak, seeds are divisions, sites alone are alone, and the numbers are scikit-learn's."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import fedstrata as fs
from fedstrata.cli.main import main
from fedstrata.data import Federation, Split
from fedstrata.data.sources import store
from fedstrata.experiments import get
from fedstrata.experiments.clinics import _tumours
from fedstrata.experiments.site_study import outcome, tuning
from fedstrata.experiments.site_study.outcome import Row
from fedstrata.experiments.site_study.problems import column
from fedstrata.experiments.site_study.sites import Sites, divided, prepared
from fedstrata.experiments.site_study.study import ALL

SMALL: dict[str, Any] = {"rounds": 3, "evaluate_every": 3, "seeds": [3, 5]}
NAMES = ("north", "east", "south", "west")


def measured(seed=0, rows=120):
    """Three sites with missing values; the third has never measured the last column."""
    rng = np.random.default_rng(seed)
    y, site = np.arange(rows) % 2, np.arange(rows) // 2 % 3
    missing = rng.random((rows, 3)) < 0.2
    missing[site == 2, 2] = True
    x = np.where(missing, 0, rng.normal(3, 2, (rows, 3)) + y[:, None])
    return Federation.from_arrays(
        {"x": x, "y": y, "missing": missing, "row": np.arange(rows)}, site, names=["a", "b", "c"]
    )


def changed(federation, split, rows=slice(None)):
    """The same federation with other features in some rows of a split."""
    part = federation[split]
    x = part.examples["x"].copy()
    x[rows] += 100 * np.random.default_rng(1).random(x[rows].shape)
    splits = {**federation.splits, split: Split({**part.examples, "x": x}, part.offsets, part.pooled)}
    return Federation(splits, federation.names, federation.classes, federation.features)


def values(federation, split):
    return federation[split].examples["x"]


@pytest.mark.parametrize("site", [None, 1])
@pytest.mark.parametrize("other", ["test", "valid"])
def test_held_out_rows_have_no_say_in_training_values(site, other):
    division = divided(measured(), 0)
    before, after = prepared(division, site), prepared(changed(division, other), site)
    for split in {"train", "positives", "negatives", "valid", "test"} - {other}:
        np.testing.assert_array_equal(values(before, split), values(after, split))
    assert not np.array_equal(values(before, other), values(after, other))
    again = prepared(changed(division, "train"), site)
    assert not np.array_equal(values(before, "test"), values(again, "test"))  # what matters does


def test_medians_and_scales_are_those_of_training_rows():
    division = divided(measured(), 0)
    for site in (None, 0, 2):
        train = division["train"].examples if site is None else division["train"].shard(site)
        x, gone = train["x"], np.asarray(train["missing"])
        middle = [np.median(x[~gone[:, j], j]) if (~gone[:, j]).any() else 0.0 for j in range(3)]
        fill = lambda part, middle=middle: np.where(part["missing"], middle, part["x"])
        own = fill(train)
        scale = np.where(own.std(axis=0) > 0, own.std(axis=0), 1)
        found = prepared(division, site)
        for split in ("train", "valid", "test"):
            wanted = (fill(division[split].examples) - own.mean(axis=0)) / scale
            np.testing.assert_allclose(values(found, split), wanted, atol=1e-9)
        assert found.names == division.names
        assert "missing" not in found["train"].examples


def test_marks_are_needed_and_must_fit():
    division = divided(measured(), 0)
    with pytest.raises(ValueError, match="missing"):
        division.impute().impute()
    with pytest.raises(ValueError, match="shape"):
        division.impute(mask="y")


def test_seeds_divide_the_rows_and_every_row_is_somewhere():
    whole = measured()
    parts = [divided(whole, seed) for seed in (0, 1)]
    for part in parts:
        rows = np.concatenate([part[split].examples["row"] for split in ("train", "valid", "test")])
        np.testing.assert_array_equal(np.sort(rows), np.arange(120))
        np.testing.assert_array_equal(part["test"].counts, [12, 12, 12])
    assert not np.array_equal(parts[0]["test"].examples["row"], parts[1]["test"].examples["row"])


@pytest.fixture(scope="module")
def clinics():
    """A short run of the embedded experiment: every method, two divisions."""
    study: Any = get("clinics")
    setup = study.build()
    return study, setup, {name: study.run(name, setup, **SMALL) for name in study.methods}


def test_columns_are_scikit_learns_numbers_of_the_last_model(clinics):
    _, setup, results = clinics
    for result in results.values():
        history = result.history
        for at, seed in enumerate(SMALL["seeds"]):
            assert history.seeds[at] == seed
            for on in history.axes.get("trained_on", [ALL]):
                labels = {"trained_on": on} if "trained_on" in history.axes else {}
                site = None if on == ALL else NAMES.index(on)
                test = prepared(setup.divide(seed), site)["test"]
                model = result.solution(**labels, seed=seed)
                scores = test.examples["x"] @ np.asarray(model["weight"])[0] + np.asarray(model["bias"])[0]
                last = lambda c, h=history.select(**labels), at=at: h.last(c)[at]
                y, owner = test.examples["y"], test.owners
                np.testing.assert_allclose(last("test/auc"), roc_auc_score(y, scores), atol=1e-9)
                np.testing.assert_allclose(last("test/pauc_0.3"), roc_auc_score(y, scores, max_fpr=0.3), atol=1e-9)
                own = [roc_auc_score(y[owner == k], scores[owner == k]) for k in range(4)]
                np.testing.assert_allclose([last(f"test/{column(n)}") for n in NAMES], own, atol=1e-9)
                np.testing.assert_allclose(last("test/mean_local_auc"), np.mean(own), atol=1e-9)
    assert results["PairSGD"].history.axes["trained_on"] == [ALL, *NAMES]


def test_a_division_is_part_of_the_seed(clinics):
    study, setup, results = clinics
    alone = study.run("FedX1", setup, **{**SMALL, "seeds": [5]})
    np.testing.assert_array_equal(alone.history["test/auc"][0], results["FedX1"].history["test/auc"][1])
    counts = {name: result.history.last("samples")[..., 0].ravel()[0] for name, result in results.items()}
    assert len(set(counts.values())) == 1, "every method looks at as many rows"


@pytest.mark.filterwarnings("ignore:.* got worse:fedstrata.simulate.result.DivergenceWarning")  # at sites not asked
def test_a_site_alone_sees_its_own_rows_only(clinics):
    """Its model does not change with the others' rows, changes with its own, and is a plain loop's on them alone."""
    study, setup, results = clinics
    division = setup.divide(3)
    owner = division["train"].owners
    others, mine = (dataclass_with(setup, changed(division, "train", owner == k)) for k in (1, 2))
    run = lambda s: study.run("PairSGD", s, **{**SMALL, "seeds": [3]}).solution(trained_on="south", seed=3)
    kept = results["PairSGD"].solution(trained_on="south", seed=3)
    np.testing.assert_array_equal(run(others)["weight"], kept["weight"])
    assert not np.allclose(run(mine)["weight"], kept["weight"])
    only = prepared(division, 2).select([2])
    problem = setup.pairwise(fs.pair_losses.SquaredHinge(), "all")
    problem = dataclasses.replace(problem, sites=("south",))
    method = fs.LocalPair(0.01, local_steps=2)
    options: dict[str, Any] = {"rounds": 2, "batch_size": "all", "stationarity": False}
    one = fs.run(problem, method, only, **options)
    four = study.simulate(
        study.algorithm("PairSGD", step_size=0.01, local_steps=2), setup, **{**options, "seeds": [3], "rounds": 2}
    )
    np.testing.assert_allclose(four.solution(trained_on="south", seed=3)["weight"], one.solution()["weight"], atol=1e-9)


def dataclass_with(setup, division):
    made = Sites(setup.problem, setup.federation)
    made.divide, made.l2 = lambda seed: division, setup.l2
    return made


def test_alone_sends_nothing_and_the_others_what_they_say(clinics):
    _, _, results = clinics
    assert not results["PairSGD"].history["bytes_up"].any()
    width = np.dtype(float).itemsize
    np.testing.assert_array_equal(results["FedAvg"].history.last("bytes_up"), 4 * 3 * 7 * width)  # 6 weights and a bias


def test_made_clinics_are_what_they_say():
    table, malignant = _tumours()
    plain, moved = (get("clinics").build(shift=shift) for shift in (0.0, 2.0))
    assert isinstance(plain, Sites)
    assert isinstance(moved, Sites)
    assert malignant.sum() == 212
    first, second = plain.divide(4), moved.divide(4)
    rates = [np.mean(np.concatenate([first[s].shard(k)["y"] for s in first.splits])) for k in range(4)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 0.6
    assert rates[3] < 0.2
    offsets = []
    for k in range(4):
        apart = {s: second[s].shard(k)["x"] - first[s].shard(k)["x"] for s in first.splits}
        apart = np.concatenate(list(apart.values())) / table.std(axis=0)
        np.testing.assert_allclose(np.ptp(apart, axis=0), 0, atol=1e-4)  # one offset for all patients of a clinic
        offsets.append(apart[0])
    assert 1 < np.std(offsets) < 3.5
    with pytest.raises(ValueError, match="shift=-1"):
        get("clinics").build(shift=-1.0)


def test_the_trap_is_there_and_only_with_the_shift():
    """Own pairs rank each clinic's patients well and all together badly; without offsets there is no such gap."""
    study: Any = get("clinics")
    gap = {}
    for shift in (0.0, 1.0):
        setup = study.build(shift=shift)
        ends = {name: study.run(name, setup, seeds=2, evaluate_every=100).history for name in ("FedX1", "LocalPair")}
        gap[shift] = {
            c: float(np.mean(ends["FedX1"].last(f"test/{c}") - ends["LocalPair"].last(f"test/{c}")))
            for c in ("auc", "mean_local_auc")
        }
    assert gap[1.0]["auc"] > 0.03
    assert abs(gap[0.0]["auc"]) < 0.02
    assert gap[1.0]["mean_local_auc"] < 0.01


def test_steps_are_chosen_on_divisions_that_are_not_reported(monkeypatch):
    study: Any = get("clinics")
    assert not {*tuning.DIVISIONS} & {*range(study.seeds)}
    assert not {*tuning.DIVISIONS} & {*range(get("hospitals").seeds)}
    small = dataclasses.replace(study, methods={name: study.methods[name] for name in ("FedAvg", "PairSGD")})
    monkeypatch.setattr(tuning, "STEPS", (0.1, 1e9))
    found = {name: (step, means) for name, step, means in tuning.tuned(small, rounds=2, divisions=[1000])}
    assert [*found] == ["FedAvg", "PairSGD", "alone"]
    for name in ("PairSGD", "alone"):  # the huge step diverges, and is out
        assert found[name][0] == 0.1
        assert np.isnan(found[name][1][1e9])
    run = study.run("FedAvg", study.build(), rounds=2, seeds=[1000], evaluate_every=2, sweep={"step_size": [0.1]})
    np.testing.assert_allclose(found["FedAvg"][1][0.1], run.history.last("valid/auc").mean())


def test_every_chosen_step_was_tried():
    for name in ("hospitals", "clinics"):
        study: Any = get(name)
        steps = [study.alone_step, *(setting["step_size"] for setting in study.methods.values())]
        assert {*steps} <= {*tuning.STEPS}


def row(label, method, auc, site=""):
    columns = ("test/auc", "test/pauc_0.3", "test/mean_local_auc", "test/auc_a", "test/auc_b")
    sent = dict.fromkeys(("bytes_up", "bytes_down"), np.full(len(auc), 5e5))
    return Row(label, method, site, {**dict.fromkeys(columns, np.array(auc)), **sent}, [0, 1, 2])


def test_the_table_pairs_divisions_and_the_headline_says_whether_a_gap_is_clear():
    found = [
        row("X", "FedX1", [0.9, 0.8, 0.7]),
        row("FedAvg", "FedAvg", [0.88, 0.78, 0.68]),
        row("a alone", "PairSGD", [0.6, 0.6, 0.6], "A"),
    ]
    lines = outcome.table(found, "site").splitlines()
    head = [cell.strip() for cell in lines[0].strip("|").split("|")]
    for words in ("global AUC", "less FedAvg's", "mean of the sites' AUCs", "AUC A", "AUC b", "MB sent"):
        assert words in head
    assert "+0.020 (+0.020 to +0.020)" in lines[2]
    assert lines[2].rstrip(" |").endswith(" 1")
    assert "two different numbers" in " ".join(lines)
    assert "0.020 above FedAvg (0.020 to 0.020)" in outcome.headline(found, "site")
    assert "alone reaches 0.60 to 0.60" in outcome.headline(found, "site")
    noisy = [row("X", "FedX1", [0.9, 0.8, 0.7]), row("FedAvg", "FedAvg", [0.7, 0.9, 0.75])]
    assert "FedAvg, 0.783, is not clearly worse" in outcome.headline(noisy, "site")


def test_the_command_leaves_table_picture_and_models(tmp_path, capsys):
    out = tmp_path / "demo"
    words = ["run", "clinics", "--rounds", "2", "--seeds", "2", "--out", str(out), "--quiet", "--no-cache"]
    names = ("FedX1", "FedAvg", "PairSGD")
    assert main([*words, *(w for name in names for w in ("--algorithm", name))]) == 0
    text = (out / "sites.md").read_text()
    assert text.count("alone |") == 4
    assert (out / "sites.png").stat().st_size > 20_000
    printed = capsys.readouterr().out
    assert "mean_local_auc" in printed
    saved = json.loads((out / "table.json").read_text())
    assert {"test/auc", "test/mean_local_auc", "test/auc_north"} <= {*saved["columns"]}
    model = fs.load_model(out / "FedX1.npz")
    study: Any = get("clinics")
    test = prepared(study.build().divide(0))["test"].examples
    scores = model.scores(test["x"])
    history = study.run("FedX1", rounds=2, seeds=1, evaluate_every=2).history
    np.testing.assert_allclose(roc_auc_score(test["y"], scores), history.last("test/auc")[0], atol=1e-6)
    for name in names[:2]:  # a ranking labels as many training rows as are positive, a classifier by its log-odds
        train, model = prepared(study.build().divide(0))["train"].examples, fs.load_model(out / f"{name}.npz")
        wanted = train["y"].sum() if name == "FedX1" else (model.scores(train["x"]) > 0).sum()
        assert model.predict(train["x"]).sum() == wanted
    alone = fs.load_model(out / "PairSGD.npz")
    assert np.isfinite(alone.threshold)


def test_absent_data_are_named_with_a_remedy(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FEDSTRATA_DATA", str(tmp_path))
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path / "cache"))
    if not any(entry.where == "missing" for entry in store.status("heart_disease")):
        pytest.skip("the files are in a place that cannot be hidden")
    assert main(["run", "hospitals", "--quiet", "--no-cache"]) != 0
    assert "heart_disease" in capsys.readouterr().err


def test_hospitals():
    if any(entry.where == "missing" for entry in store.status("heart_disease")):
        pytest.skip("heart_disease is not here")
    study: Any = get("hospitals")
    setup = study.build()
    assert setup.federation.names == ("Cleveland", "Hungarian", "Switzerland", "VA Long Beach")
    for seed in range(20):  # every hospital has both kinds of patients in every split, or its AUC would be no number
        division = setup.divide(seed)
        for split in ("train", "valid", "test"):
            assert all(np.unique(division[split].shard(k)["y"]).size == 2 for k in range(4))
    result = study.run("PairSGD", setup, **{**SMALL, "seeds": 1})
    assert not result.diverged
    assert np.isfinite(result.history.last("test/auc_va_long_beach")).all()
