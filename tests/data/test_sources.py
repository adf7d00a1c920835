"""Every set against its publishers' description: rows, columns, class counts, missing values."""

import io

import numpy as np
import pytest

from fedstrata.data import IID, Contiguous, Federation, available, federate, load
from fedstrata.data.sources import store

BUNDLED = {  # rows, columns, classes: scikit-learn's documentation
    "breast_cancer": (569, 30, 2),
    "digits": (1797, 64, 10),
    "wine": (178, 13, 3),
    "iris": (150, 4, 3),
    "diabetes": (442, 10, None),
}


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_sets(name):
    rows, columns, classes = BUNDLED[name]
    data = load(name)
    assert data.train["x"].shape == (rows, columns)
    assert (data.classes, len(data.features), data.train["x"].dtype) == (classes, columns, np.float32)
    if classes:
        np.testing.assert_array_equal(np.unique(data.train["y"]), np.arange(classes))
    else:
        assert data.train["y"].dtype == np.float32


def test_digits_are_scaled_to_one():
    assert (load("digits").train["x"].min(), load("digits").train["x"].max()) == (0, 1)


def test_heart_disease_hospitals(need):
    need("heart_disease")
    fed = federate("heart_disease")
    assert fed.names == ("Cleveland", "Hungarian", "Switzerland", "VA Long Beach")
    np.testing.assert_array_equal(fed["train"].counts, [303, 294, 123, 200])
    positives = [int(fed["train"].shard(i)["y"].sum()) for i in range(4)]
    assert positives == [139, 106, 115, 149]
    assert fed.features is not None
    chol = fed.features.index("chol")
    marked = fed["train"].examples["missing"]
    assert marked.shape == fed["train"].examples["x"].shape
    assert fed["train"].shard(2)["missing"][:, chol].all()  # Switzerland measured none
    assert (fed["train"].examples["x"][marked] == 0).all()


def test_heart_disease_marks_what_is_missing(need):
    need("heart_disease")
    plain, marked = load("heart_disease"), load("heart_disease", indicators=True)
    x, gone = marked.train["x"], marked.features.index("thalach missing")
    column = marked.features.index("thalach")
    missing = x[:, gone] == 1
    assert missing.sum() == 0 + 1 + 1 + 53  # question marks in the four files
    np.testing.assert_array_equal(missing, marked.train["missing"][:, column])
    many = len(plain.features)
    assert not marked.train["missing"][:, many:].any()  # the indicators themselves are always known
    for leaf in ("x", "missing"):
        np.testing.assert_array_equal(marked.train[leaf][:, :many], plain.train[leaf])
    codes = [k for k, name in enumerate(plain.features) if name.startswith("restecg")]
    assert (plain.train["missing"][:, codes].sum(axis=0) == 2).all()  # a missing code is missing in all its columns


def test_heart_disease_is_filled_in_from_training_rows_only(need):
    need("heart_disease")
    held = federate("heart_disease", test=0.25)
    whole = held.impute()
    assert set(whole["train"].examples) == {"x", "y"}
    x, gone = (held["train"].examples[leaf] for leaf in ("x", "missing"))
    for split in ("train", "test"):
        given = held[split].examples
        for column in range(x.shape[1]):
            middle = np.median(x[~gone[:, column], column])
            wanted = np.where(given["missing"][:, column], middle, given["x"][:, column])
            np.testing.assert_array_equal(whole[split].examples["x"][:, column], wanted)


def test_tcga_regions(need):
    need("tcga_brca")
    fed = federate("tcga_brca")
    np.testing.assert_array_equal(fed["train"].counts, [248, 156, 164, 129, 129, 40])
    np.testing.assert_array_equal(fed["test"].counts, [63, 40, 42, 33, 33, 11])
    assert fed["train"].examples["x"].shape == (866, 39)


def test_adult(need):
    need("adult")
    data = load("adult", group="race", clients="education")
    np.testing.assert_array_equal(np.bincount(data.train["y"]), [24720, 7841])
    np.testing.assert_array_equal(np.bincount(data.test["y"]), [12435, 3846])
    assert np.unique(data.train["group"]).size == 5
    assert data.train["x"].shape[1] == data.test["x"].shape[1] == len(data.features) == 107
    np.testing.assert_allclose(data.train["x"][:, :6].mean(axis=0), 0, atol=1e-4)
    for name in ("race", "workclass"):  # one-hot: exactly one value each
        block = [j for j, f in enumerate(data.features) if f.startswith(f"{name} = ")]
        assert (data.train["x"][:, block].sum(axis=1) == 1).all()
    assert len(data.client_names) == 16
    doctorate = data.client_names.index("education = Doctorate")
    column = data.features.index("education = Doctorate")
    np.testing.assert_array_equal(data.clients == doctorate, data.train["x"][:, column] == 1)
    raw = load("adult", scale=False)
    assert (raw.train["x"][0, 0], raw.train["x"][0, 1]) == (39, 77516)


def test_german_credit(need):
    need("german_credit")
    for encoding, columns in (("numeric", 24), ("ordinal", 20)):
        data = load("german_credit", encoding=encoding, scale=False)
        assert data.train["x"].shape == (1000, columns)
        np.testing.assert_array_equal(np.bincount(data.train["y"]), [700, 300])
    np.testing.assert_array_equal(data.train["x"][0, :5], [1, 6, 4, 3, 1169])  # A11 6 A34 A43 1169
    assert np.unique(load("german_credit", group="sex_status").train["group"]).size == 4
    raw = store.find("german_credit", "german.data").read_text()
    assert " A95 " not in raw  # german.doc: A92 and A95 are women, and no row has A95
    assert load("german_credit", group="sex").train["group"].sum() == raw.count(" A92 ")


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_mnist_and_fashion(need, name):
    need(name)
    data = load(name)
    assert data.train["x"].shape == (60000, 28, 28, 1)
    assert data.test["x"].shape == (10000, 28, 28, 1)
    # Published mean and deviation of the training pixels.
    mean, deviation = {"mnist": (0.1307, 0.3081), "fashion_mnist": (0.2860, 0.3530)}[name]
    assert abs(data.train["x"].mean(dtype=np.float64) - mean) < 1e-4
    assert abs(data.train["x"].std(dtype=np.float64) - deviation) < 1e-4
    published = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949] if name == "mnist" else [6000] * 10
    np.testing.assert_array_equal(np.bincount(data.train["y"]), published)


def test_cifar10_files_are_whole(need):
    need("cifar10")
    assert {row.file: row.checksum for row in store.check("cifar10")} == dict.fromkeys(CIFAR, "ok")
    with np.load(io.BytesIO(store.read("cifar10", "labels.npz"))) as labels:
        train = np.concatenate([labels[f"data_batch_{k}"] for k in range(1, 6)])
        np.testing.assert_array_equal(np.bincount(train), [5000] * 10)
    data = load("cifar10", flat=True, batches=1)
    assert (data.train["x"].shape, data.test["x"].shape) == ((10000, 3072), (10000, 3072))
    np.testing.assert_array_equal(np.bincount(data.test["y"]), [1000] * 10)
    assert (data.train["x"].min(), data.train["x"].max()) == (0, 1)


CIFAR = [*(f"{name}.npy.xz" for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")), "labels.npz"]


def test_cifar10_has_all_train_batches_by_default(monkeypatch):
    """Small files in place of the real ones: batch k has three pictures, all of whose numbers are k."""

    def read(source, name):
        file = io.BytesIO()
        stems = [word.partition(".")[0] for word in CIFAR[:-1]]
        if name == "labels.npz":
            np.savez(file, **{stem: np.full(3, i, np.uint8) for i, stem in enumerate(stems)})
        else:
            np.save(file, np.full((3, 32, 32, 3), 51 * stems.index(name.partition(".")[0]), np.uint8))
        return file.getvalue()

    monkeypatch.setattr(store, "read", read)
    whole, part = load("cifar10"), load("cifar10", batches=2)
    np.testing.assert_array_equal(whole.train["y"], np.repeat(np.arange(5), 3))
    np.testing.assert_allclose(whole.train["x"][:, 0, 0, 0], np.repeat(np.arange(5), 3) / 5, rtol=1e-6)
    np.testing.assert_array_equal(whole.test["y"], [5, 5, 5])
    np.testing.assert_array_equal(part.train["y"], np.repeat(np.arange(2), 3))


@pytest.mark.parametrize("batches", [0, 6, 2.0, True])
def test_cifar10_has_five_batches(batches):
    with pytest.raises(ValueError, match=r"batches=.* must be a whole number from 1 to 5"):
        load("cifar10", batches=batches)


@pytest.mark.parametrize(("name", "counts"), [("pneumoniamnist", (4708, 524, 624)), ("breastmnist", (546, 78, 156))])
def test_medmnist(need, name, counts):
    need("medmnist")
    fed = federate("medmnist", IID(4), name=name)
    assert tuple(fed[s].size for s in ("train", "valid", "test")) == counts
    expected = {"pneumoniamnist": [1214, 3494], "breastmnist": [147, 399]}[name]
    np.testing.assert_array_equal(np.bincount(fed["train"].examples["y"]), expected)
    assert fed["test"].pooled


@pytest.mark.slow
def test_omniglot(need):
    need("omniglot")
    data = load("omniglot")
    assert (data.train["x"].shape, data.test["x"].shape) == ((19280, 28, 28, 1), (13180, 28, 28, 1))
    np.testing.assert_array_equal(np.bincount(data.train["y"]), [20] * 964)
    np.testing.assert_array_equal(np.bincount(data.test["y"])[964:], [20] * 659)
    assert (data.classes, len(data.client_names), data.clients.max()) == (1623, 30, 29)
    by_drawer = load("omniglot", clients="drawer")
    assert np.unique(by_drawer.clients).size == len(by_drawer.client_names) == 600
    full = load("omniglot", size=105).train["x"]
    # Averaging 4 x 4 blocks keeps the amount of ink.
    np.testing.assert_allclose(full[:50].sum(axis=(1, 2, 3)), 16 * data.train["x"][:50].sum(axis=(1, 2, 3)), rtol=1e-5)


@pytest.mark.parametrize(
    ("table", "cells", "days"), [("us_size_bm", 2111, 1513), ("us_size_op", 501, 501), ("us_size_inv", 1013, 1013)]
)
def test_fama_french_missing_returns(need, table, cells, days):
    need("fama_french")
    as_nan = load("fama_french", table=table, missing="nan").train["x"]
    assert as_nan.shape == (13781, 100)
    assert np.isnan(as_nan).sum() == cells
    zero = load("fama_french", table=table).train["x"]
    np.testing.assert_array_equal(zero, np.nan_to_num(as_nan))
    dropped = load("fama_french", table=table, missing="drop", dates=True).train
    assert dropped["x"].shape[0] == dropped["date"].shape[0] == 13781 - days
    assert zero.min() > -99
    with pytest.raises(ValueError, match="NaN or infinity"):
        federate("fama_french", Contiguous(5), table=table, missing="nan")


def test_fama_french_developed_markets_by_period(need):
    need("fama_french")
    data = load("fama_french", table="Japan_OP", dates=True)
    fed = federate(data, Contiguous(4))
    assert fed["train"].size == 7240
    dates = fed["train"].examples["date"]
    assert (dates[0], dates[-1]) == (19900702, 20180330)
    assert (np.diff(dates) > 0).all()


@pytest.mark.parametrize(
    ("name", "columns", "train", "test"),
    [
        ("a9a", 123, [24720, 7841], [12435, 3846]),
        ("w8a", 300, [48270, 1479], None),
        ("ijcnn1", 22, [45137, 4853], [82989, 8712]),
        ("german", 24, [700, 300], None),
    ],
)
def test_libsvm(need, name, columns, train, test):
    need("libsvm")
    data = load("libsvm", name=name)
    assert data.train["x"].shape == (sum(train), columns)
    np.testing.assert_array_equal(np.bincount(data.train["y"]), train)
    assert (data.test is None) == (test is None)
    if test is not None:
        assert data.test["x"].shape == (sum(test), columns)
        np.testing.assert_array_equal(np.bincount(data.test["y"]), test)


def test_adult_and_a9a_are_the_same_people(need):
    need("adult")
    need("libsvm")
    np.testing.assert_array_equal(load("adult").train["y"], load("libsvm", name="a9a").train["y"])


def test_federate_options_and_errors():
    fed = federate("iris", IID(3), test=0.2)
    assert isinstance(fed, Federation)
    np.testing.assert_array_equal(fed["test"].counts, [10, 10, 10])
    assert set(federate("iris", IID(3), test=False).splits) == {"train"}
    for call, words in [
        (lambda: federate("iris"), "iris has no natural clients"),
        (lambda: federate("iriss", IID(2)), "unknown data set 'iriss'; did you mean iris"),
        (lambda: load("iris", flat=True), "unknown option of data set 'iris': 'flat'"),
        (lambda: load("medmnist", name="chestmnist"), "unknown medmnist set 'chestmnist'"),
        (lambda: load("fama_french", missing="skip"), "unknown missing policy of fama_french 'skip'"),
        (lambda: load("omniglot", size=32), "size must be 28 or 105"),
        (lambda: federate("iris", IID(2), test=3), "test must be True, False or a fraction"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()


def test_the_registry_has_all_names():
    assert {*BUNDLED, "heart_disease", "adult", "mnist", "omniglot", "libsvm", "fama_french"} <= set(available())
    assert all(name == source.name and source.licence for name, source in available().items())
