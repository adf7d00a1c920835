"""FedX's experiments: the preparation of data, the choice of settings, the tables and the claims."""

import io
import tarfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fedstrata_papers.fedx import EXPERIMENT, cifar, comparison, figures, methods, rates, tables, tasks
from fedstrata_papers.fedx.comparison import Case, Found, Size, compared, tuned
from fedstrata_papers.fedx.methods import TABLES, Setting
from fedstrata_papers.fedx.problems import Held, Quartered, Ranked, Squashed
from sklearn.metrics import average_precision_score, roc_auc_score

import fedstrata as fs
from fedstrata.data import load
from fedstrata.data.sources import by_hand
from fedstrata.experiments.base import Setup
from fedstrata.experiments.reproduction import Desk
from fedstrata.report import History
from fedstrata.simulate.options import RunOptions
from fedstrata.simulate.run import prepare

TINY = Size(rounds=2, tuning_rounds=2, seeds=2, tuning_seeds=2, local_steps=2, evaluations=2, steps=(0.1,), lams=())


def digits(**options) -> Setup:
    return tasks.build("digits", hidden=3, **options)


# Data.


def test_noise_has_the_mean_and_the_deviation_of_its_client():
    owner = np.repeat(np.arange(16), 500)
    noise = tasks.noisy(np.zeros((8000, 10), np.float32), owner, 16, 0.2, np.random.default_rng(0)) * tasks.PIXEL
    for i in (0, 7, 15):
        mine = noise[owner == i]
        assert abs(mine.mean() - (-0.08 + 0.01 * i)) < 5 * 0.2 / np.sqrt(mine.size)
        assert abs(mine.std() - 0.2) < 5 * 0.2 / np.sqrt(2 * mine.size)


def test_training_data_are_imbalanced_and_shared_out_alike():
    federation = digits().federation
    positives, negatives = federation["positives"], federation["negatives"]
    assert negatives.size == 5 * positives.size
    for split in (positives, negatives):
        assert split.counts.max() - split.counts.min() <= 1
    for name in ("valid", "test"):  # as they come
        assert 0.4 < federation[name].examples["y"].mean() < 0.6
    assert digits(ratio=0).federation["train"].size > federation["train"].size


def test_held_out_rows_are_not_trained_on():
    federation = digits(deviation=0.0, ratio=0).federation
    rows = {name: {x.tobytes() for x in federation[name].examples["x"]} for name in ("train", "valid", "test")}
    assert sum(federation[name].size for name in rows) == 1797
    assert not rows["train"] & rows["valid"]
    assert not rows["train"] & rows["test"]
    assert not rows["valid"] & rows["test"]


def test_a_fifth_of_each_class_is_flipped():
    y = np.repeat([0, 1], [500, 100])
    wrong = tasks._flip(y, 0.2, np.random.default_rng(0)) != y
    assert (wrong[:500].sum(), wrong[500:].sum()) == (100, 20)
    clean, flipped = digits(deviation=0.0).federation, digits(deviation=0.0, flipped=0.2).federation
    label = {x.tobytes(): y for x, y in zip(*(clean["train"].examples[k] for k in "xy"), strict=True)}
    rows = zip(*(flipped["train"].examples[k] for k in "xy"), strict=True)
    assert np.mean([label[x.tobytes()] != y for x, y in rows]) == pytest.approx(0.2, abs=0.01)
    np.testing.assert_array_equal(clean["test"].examples["y"], flipped["test"].examples["y"])


def test_only_some_clients_means_only_their_data():
    all_, some = digits().federation, digits(only=2).federation
    np.testing.assert_array_equal(some["positives"].counts, all_["positives"].counts[:2])
    np.testing.assert_array_equal(some["train"].shard(1)["x"], all_["train"].shard(1)["x"])
    assert some["test"].size == all_["test"].size


def test_files_that_are_put_there_by_hand(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSTRATA_DATA", str(tmp_path))
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path / "cache"))
    for name in by_hand.FILES:
        assert tasks.absent(name)
        with pytest.raises(FileNotFoundError, match=f"{name}: data absent, .* Put {by_hand.FILES[name][0]}"):
            load(name)
    pixels = np.arange(2 * 3072).astype(np.uint8).reshape(2, 3, 32, 32)  # red, green, blue of two pictures
    raw = b"".join(bytes([0, 40 + i]) + pixels[i].tobytes() for i in range(2))
    (tmp_path / "cifar100").mkdir()
    with tarfile.open(tmp_path / "cifar100" / "cifar-100-binary.tar.gz", "w:gz") as archive:
        for part in ("train", "test"):
            about = tarfile.TarInfo(f"cifar-100-binary/{part}.bin")
            about.size = len(raw)
            archive.addfile(about, io.BytesIO(raw))
    data = load("cifar100")
    assert data.train["y"].tolist() == [40, 41]  # the fine label
    assert data.train["x"][1, 3, 5, 2] == np.float32(pixels[1, 2, 3, 5]) / 255
    labels = np.zeros((4, 14), np.uint8)
    labels[2, 4] = labels[1, 3] = 1
    parts = {
        f"{p}_{k}": v for p in ("train", "val", "test") for k, v in (("images", pixels[:1, 0]), ("labels", labels))
    }
    parts = {k: np.repeat(v, 4, 0) if k.endswith("images") else v for k, v in parts.items()}
    (tmp_path / "chestmnist").mkdir()
    np.savez(tmp_path / "chestmnist" / "chestmnist.npz", **parts)
    assert load("chestmnist").train["y"].tolist() == [0, 0, 1, 0]
    assert not tasks.absent("chestmnist")


# Problems.


def test_the_step_falls_after_each_quarter():
    step = Quartered.of(2.0, 8)
    np.testing.assert_allclose([step(jnp.asarray(k)) for k in range(9)], [2, 2, 0.2, 0.2, 0.02, 0.02, *[0.002] * 3])


@pytest.mark.parametrize("loss", ["cross_entropy", "kl", "ap"])
def test_metrics_are_those_of_scikit_learn_on_held_out_rows(loss):
    problem, federation = digits(loss=loss, metrics="pauc_0.3 auc ap")
    params = problem.init(jax.random.key(3))
    x = np.asarray(federation["test"].examples["x"], np.float64)
    for layer in params[:-1]:
        x = np.maximum(x @ np.asarray(layer["weight"]).T + np.asarray(layer["bias"]), 0)
    scores = (x @ np.asarray(params[-1]["weight"]).T + np.asarray(params[-1]["bias"]))[:, 0]
    y = federation["test"].examples["y"]
    full = fs.full_data(federation, dtype=np.float64)
    found = problem.evaluate_split(fs.Vector(params), full, "test")
    assert float(found["auc"]) == pytest.approx(roc_auc_score(y, scores), abs=1e-12)
    assert float(found["pauc_0.3"]) == pytest.approx(roc_auc_score(y, scores, max_fpr=0.3), abs=1e-12)
    assert float(found["ap"]) == pytest.approx(average_precision_score(y, scores), abs=1e-12)
    assert "auc" not in problem.evaluate(fs.Vector(params), full)


def test_every_method_gets_a_problem_that_it_solves():
    setup = digits()
    kinds = {"FedAvg": Ranked, "SCAFFOLD": Ranked, "FedX2": Held, "SOX": Held}
    for name, kind in kinds.items():
        algorithm = EXPERIMENT.algorithm(name)
        problem = EXPERIMENT.problem_for(algorithm, setup)
        assert type(problem) is kind
        algorithm.check(problem)  # as `fedstrata run` does before it begins
        options = EXPERIMENT.run_options(algorithm, setup, rounds=1)
        prepare(problem, algorithm, setup.federation, RunOptions(**options, execution="vmap"))
    assert EXPERIMENT.run_options(EXPERIMENT.algorithm("FedAvg"), setup)["batch_size"] == 64
    for table, rows in TABLES.items():
        for method in rows.values():
            algorithm = methods.algorithm(table, method, Setting(0.1), 8, 2, 5)
            problem, federation = digits(loss=method.loss or table)
            algorithm.check(problem.bind(fs.Vector(problem.init(jax.random.key(0))), federation))


def test_codascas_steps_are_those_of_the_square_loss():
    """Its function is p(1−p) times the mean pairwise loss, less one."""
    method = TABLES["kl"]["CODASCA"]
    algorithm = methods.algorithm("kl", method, Setting(0.3), 8, 2, ratio=5)
    assert float(algorithm.step_size.first) * (1 / 6) * (5 / 6) == pytest.approx(0.3)


# Choosing.


def history(seeds, rows: int = 3, **columns) -> History:
    wide = {name: np.broadcast_to(np.asarray(v, float), (len(seeds), rows)) for name, v in columns.items()}
    rounds = np.broadcast_to(np.arange(float(rows)), (len(seeds), rows))
    return History({"seed": list(seeds)}, {"round": rounds, "seconds": rounds, "samples": rounds, **wide})


class Pretend(Desk):
    """A desk whose runs come from a formula of the algorithm and the data."""

    def __init__(self, folder, formula, scale="small"):
        super().__init__(folder, scale, quiet=True)
        self.formula, self.asked = formula, []

    def run(self, name, build, data, algorithm, **options):
        self.asked.append((data, algorithm, options))
        return self.formula(data, algorithm, options)


def score_by(best: float, lam: float = 3.0):
    """Better the nearer a step is to `best`, and λ to `lam`."""

    def formula(data, algorithm, options):
        step = float(algorithm.step_size.first)
        value = 0.9 - 0.1 * abs(np.log10(step / best)) - 0.01 * abs(data.get("lam", lam) - lam)
        columns = {f"{s}/{c}": value for s in ("valid", "test") for c in ("pauc_0.3", "pauc_0.5", "auc", "ap")}
        return history(options["seeds"], objective=1.0, **columns)

    return formula


def test_the_best_round_on_validation_data_is_tested():
    found = history([0, 1], **{"valid/auc": [[1, 3, 2], [5, 4, np.nan]], "test/auc": [[7, 8, 9], [6, 5, 4]]})
    np.testing.assert_array_equal(comparison.at_best(found, "auc"), [8, 6])


@pytest.mark.parametrize("table", ["kl", "psm"])
def test_all_methods_are_given_as_many_settings(table, tmp_path):
    size = Size(rounds=4, tuning_rounds=2, seeds=4, tuning_seeds=2)
    counts = {}
    for name, method in TABLES[table].items():
        desk = Pretend(tmp_path, score_by(0.1))
        setting, counts[name] = tuned(desk, Case(table, "digits", size), name)
        if name != "CODASCA":  # whose steps have another unit
            assert setting.step == pytest.approx(0.1)
        assert setting.lam == (3.0 if table == "kl" and not method.loss else 1.0)
        assert [options["rounds"] for *_, options in desk.asked].count(4) == 1  # the choice, once more and longer
        assert min(seed for *_, options in desk.asked for seed in options["seeds"]) >= comparison.TUNING
    assert counts.pop("Centralized") == 8 + len(methods.BATCHES)
    assert set(counts.values()) == {8}


def test_a_setting_that_diverges_is_not_chosen(tmp_path):
    def formula(data, algorithm, options):
        step = float(algorithm.step_size.first)
        columns = {f"{s}/auc": 0.5 + 0.1 * step for s in ("valid", "test")}
        return history(options["seeds"], objective=np.nan if step > 0.5 else 1.0, **columns)

    size = Size(4, 2, 4, 2)
    assert tuned(Pretend(tmp_path, formula), Case("psm", "digits", size), "FedX1")[0].step < 0.5
    everywhere = lambda *given: history(given[-1]["seeds"], objective=np.nan, **{"valid/auc": 0.5})
    with pytest.raises(ValueError, match="every setting diverged"):
        tuned(Pretend(tmp_path, everywhere), Case("psm", "digits", size), "FedX1")


def test_a_setting_that_does_not_last_is_passed_over(tmp_path):
    def formula(data, algorithm, options):
        step = float(algorithm.step_size.first)
        late = step > 0.5 and options["rounds"] == 4
        columns = {f"{s}/auc": 0.5 + 0.1 * step for s in ("valid", "test")}
        return history(options["seeds"], objective=np.nan if late else 1.0, **columns)

    chosen = lambda size: tuned(Pretend(tmp_path, formula), Case("psm", "digits", size), "FedX1")[0].step
    assert chosen(Size(2, 2, 4, 2)) > 0.5 > chosen(Size(4, 2, 4, 2))


def test_a_method_is_run_once_and_then_read(tmp_path):
    case = Case("psm", "digits", TINY._replace(model=(("hidden", 3),)))
    first = compared(Desk(tmp_path, quiet=True), case, ["FedX1"])["FedX1"]
    assert first.values["auc"].shape == (2,)
    assert np.all((first.values["auc"] > 0) & (first.values["auc"] < 1))
    again = compared(figures.Shelf(tmp_path, quiet=True), case, ["FedX1"])["FedX1"]
    np.testing.assert_array_equal(first.values["auc"], again.values["auc"])
    with pytest.raises(figures.NotHere):
        compared(figures.Shelf(tmp_path, quiet=True), case, ["Local Pair"])


# Tables, claims and figures.


def found(mean: float, seeds: int = 6) -> Found:
    noise = 0.001 * np.random.default_rng(round(1e4 * mean)).normal(size=seeds)
    return Found(Setting(0.1), False, dict.fromkeys(("pauc_0.3", "pauc_0.5"), mean + noise - noise.mean()), 8)


PAPERS = {"Centralized": 0.7655, "Local SGD": 0.6825, "CODASCA": 0.7288, "Local Pair": 0.7487, "FedX2": 0.7580}


def verdicts(claims) -> list[str]:
    return [claim.verdict for claim in claims]


def test_claims_follow_the_paired_intervals():
    rows = {name: found(mean) for name, mean in PAPERS.items()} | {"TrackedX": found(0.78)}
    assert verdicts(tables.claims(3, "kl", {"cifar10": rows}, {})) == ["holds"] * 5
    rows["Local Pair"], rows["Centralized"], rows["TrackedX"] = found(0.80), found(0.79), rows["FedX2"]
    expected = ["holds in part", "does not hold", "does not hold", "holds in part", "does not hold"]
    assert verdicts(tables.claims(3, "kl", {"cifar10": rows}, {})) == expected
    assert verdicts(tables.claims(3, "kl", {}, {"cifar10": "data absent"})) == ["not tested"]


def test_a_table_says_what_is_absent_and_what_cannot_be_compared(tmp_path):
    rows = {name: found(mean) for name, mean in PAPERS.items()}
    path = tables.write(Desk(tmp_path), "kl", {"cifar10": rows}, {"cifar100": "data absent"}, {"cifar10": cifar.SIZE})
    text = path.read_text()
    assert "| CIFAR-100 | data absent |" in text
    assert "not comparable" in text
    assert "| 0.6332 (FedX2) |" in text  # the paper's
    line = next(line for line in text.splitlines() if "| CODASCA |" in line)
    assert "| 0.7288 | 0.7288 ± 0.00" in line
    assert "| −0.0292 (" in line  # less FedX2's 0.7580


def test_tables_are_written_without_data_and_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "absent", lambda task: task not in ("cifar10", "pneumonia"))
    desk = Pretend(tmp_path, score_by(0.1))
    outcome = figures.figure_4(desk)
    assert {data["task"] for data, *_ in desk.asked} == {"pneumonia"}
    assert "not run: full scale, on a GPU" in outcome.files[0].read_text()
    full = figures.figure_3(Desk(tmp_path / "full", "full", quiet=True))  # reads an empty folder, and begins nothing
    assert verdicts(full.claims) == ["not tested"]
    monkeypatch.setattr(figures, "absent", lambda task: True)
    for figure in (figures.figure_1, figures.figure_2, figures.figure_5):
        assert verdicts(figure(desk).claims) == ["not tested"]


@pytest.mark.slow
def test_figures_1_and_2_judge_by_paired_intervals(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "absent", lambda task: False)

    def formula(gain):
        def run(data, algorithm, options):
            noise = 1e-4 * np.random.default_rng(options["seeds"]).normal(size=(len(options["seeds"]), 1))
            value = 0.8 + gain * (data.get("only", 1) + algorithm.history) - 0.001 * gain * algorithm.local_steps
            columns = {f"{s}/{c}": value + noise + np.zeros((1, 3)) for s in ("valid", "test") for c in RATES}
            return history(options["seeds"], objective=1.0, **columns)

        return run

    for gain, first, second in ((0.01, ["holds"] * 2, ["holds"]), (0.0, ["holds", "does not hold"], ["does not hold"])):
        desk = Pretend(tmp_path, formula(gain))
        outcome = figures.figure_1(desk)
        assert verdicts(outcome.claims) == first
        assert outcome.files[0].stat().st_size > 10_000
        assert verdicts(figures.figure_2(desk).claims) == second
    steps = {options["rounds"] * algorithm.local_steps for _, algorithm, options in desk.asked}
    assert steps == {640}  # the same number of iterations for every K


RATES = ("pauc_0.3", "pauc_0.5")


def test_the_speed_up_is_a_slope(tmp_path):
    def formula(power):
        def run(data, algorithm, options):
            noise = 1 + 0.02 * np.random.default_rng(data["clients"]).normal(size=(4, 1))
            level = np.sqrt(data["clients"] ** power * noise) + np.zeros((1, 21))
            return history(range(4), 21, stationarity=level)

        return run

    outcome = rates.speed_up(Pretend(tmp_path, formula(-1.0)))
    assert verdicts(outcome.claims) == ["holds"]
    slope = outcome.claims[0].ours.split("FedX1 −")[1].split()[0]
    assert abs(float(slope) - 1.0) < 0.03
    assert verdicts(rates.speed_up(Pretend(tmp_path, formula(-0.2))).claims) == ["does not hold"]


def test_clients_that_are_alike_have_one_objective():
    x = fs.Vector({"weight": np.ones((1, 5)), "bias": np.ones(1)})
    value = lambda n, spread: float(
        (setup := rates.build("kl", n, spread)).problem.objective(x, fs.full_data(setup.federation, dtype=np.float64))
    )
    assert value(2, 0.0) == pytest.approx(value(7, 0.0), rel=1e-12)
    assert abs(value(2, 0.5) - value(7, 0.5)) > 1e-4


def test_squashed_scores_are_between_zero_and_one():
    model = Squashed(fs.models.Linear(1))
    out = model({"weight": jnp.array([[1.0]]), "bias": jnp.zeros(1)}, jnp.array([np.log(3.0)]))
    assert float(out[0]) == pytest.approx(0.75)
