import jax
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.data import IID, ByColumn, Dirichlet, Federation, Split


def toy(seed=0, clients=3, rows=24):
    rng = np.random.default_rng(seed)
    examples = {"x": rng.normal(size=(rows, 2)).astype(np.float32), "y": rng.integers(3, size=rows)}
    return Federation.from_arrays(examples, rng.permutation(np.arange(rows) % clients), classes=3)


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@given(st.integers(1, 6), st.integers(0, 40), st.integers(0, 999))
def test_arrays_keep_every_row_with_its_client(clients, extra, seed):
    rng = np.random.default_rng(seed)
    ids = rng.permutation(np.concatenate([np.arange(clients), rng.integers(clients, size=extra)]))
    fed = Federation.from_arrays({"x": np.arange(ids.size), "owner": ids}, ids)
    assert fed.clients == clients
    for client in range(clients):
        shard = fed["train"].shard(client)
        np.testing.assert_array_equal(shard["x"], np.flatnonzero(ids == client))  # in the old order
        assert (shard["owner"] == client).all()
    np.testing.assert_array_equal(fed["train"].owners, fed["train"].examples["owner"])


def test_clients_round_trip():
    fed = toy()
    parts = [fed["train"].shard(i) for i in range(fed.clients)]
    again = Federation.from_clients(parts, names=["a", "b", "c"], test=parts)
    same(again["train"], fed["train"])
    same(again["test"], fed["train"])
    assert (again.names, again.name(1), again.classes) == (("a", "b", "c"), "b", 3)


def test_frame_and_files_give_the_same_federation(tmp_path):
    frame = pd.DataFrame({"site": ["b", "a", "b"], "age": [40, 50, 60], "bmi": [20.5, 21.0, 25.0], "sick": [1, 0, 1]})
    fed = Federation.from_frame(frame, client="site", label="sick")
    assert (fed.names, fed.features, fed.classes) == (("a", "b"), ("age", "bmi"), 2)
    np.testing.assert_array_equal(fed["train"].shard(1)["x"], np.float32([[40, 20.5], [60, 25]]))

    frame.to_csv(tmp_path / "all.csv", index=False)
    frame.to_parquet(tmp_path / "all.parquet")
    for name in ("all.csv", "all.parquet"):
        loaded = Federation.from_files(tmp_path / name, client="site", label="sick")
        assert loaded.fingerprint() == fed.fingerprint()
        assert (loaded.names, loaded.features) == (fed.names, fed.features)

    (tmp_path / "sites").mkdir()
    for site, rows in frame.groupby("site"):
        rows.drop(columns="site").to_csv(tmp_path / "sites" / f"{site}.csv", index=False)
    by_folder = Federation.from_files(tmp_path / "sites", label="sick")
    assert (by_folder.fingerprint(), by_folder.names) == (fed.fingerprint(), fed.names)


def test_npz_files(tmp_path):
    x, y, site = np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1]), np.array(["u", "v", "u", "v"])
    np.savez(tmp_path / "all.npz", x=x, target=y, site=site)
    fed = Federation.from_files(tmp_path / "all.npz", client="site", label="target")
    assert fed.fingerprint() == Federation.from_arrays({"x": x, "y": y}, ByColumn(site)).fingerprint()
    paths = []
    for name in "uv":
        paths.append(tmp_path / f"{name}.npz")
        np.savez(paths[-1], x=x[site == name], y=y[site == name])
    assert Federation.from_files(paths).fingerprint() == fed.fingerprint()


def test_types_are_float32_or_the_given_float64_and_int32_labels():
    fed = Federation.from_arrays(
        {
            "x": np.ones((2, 1)),
            "half": np.ones(2, np.float16),
            "list": [0.5, 1.5],
            "pixel": np.ones(2, np.uint8),
            "y": [True, False],
        },
        [0, 1],
    )
    found = {name: leaf.dtype.name for name, leaf in fed["train"].examples.items()}
    assert found == {"x": "float64", "half": "float32", "list": "float32", "pixel": "uint8", "y": "int32"}


def test_classes_are_counted_over_train_and_test_and_never_for_signs_or_reals():
    build = lambda y, test=None: Federation.from_arrays({"y": y}, [0, 1], test=test).classes
    assert build([0, 1], {"y": [4]}) == 5
    assert build([-1, 1]) is None
    assert build([0.0, 1.0]) is None
    assert Federation.from_arrays({"y": [0.0, 1.0]}, [0, 1], classes=2)["train"].examples["y"].dtype == np.int32


def test_it_is_a_pytree_that_jit_accepts():
    fed = toy().with_split("test", {"x": np.ones((5, 2), np.float32)})
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(fed))
    sums = jax.jit(lambda f: (f["train"].examples["x"].sum(), f["train"].counts, f["test"].size, f.clients))(fed)
    np.testing.assert_allclose(sums[0], fed["train"].examples["x"].sum(), rtol=1e-5)
    np.testing.assert_array_equal(sums[1], fed["train"].counts)
    assert (int(sums[2]), int(sums[3])) == (5, 3)
    moved = jax.tree.map(jax.numpy.asarray, fed)
    assert moved["test"].pooled
    assert moved.fingerprint() == fed.fingerprint()
    same(moved["train"].shard(2), fed["train"].shard(2))


def test_fingerprint_depends_on_values_types_owners_and_splits():
    x = np.zeros((4, 2), np.float32)
    y = x.copy()
    y[3, 1] = 1e-30
    feds = [
        Federation.from_offsets({"x": x}, [0, 2, 4]),
        Federation.from_offsets({"x": y}, [0, 2, 4]),
        Federation.from_offsets({"x": x}, [0, 3, 4]),
        Federation.from_offsets({"x": x.astype(np.float64)}, [0, 2, 4]),
        Federation.from_offsets({"x": x.reshape(4, 1, 2)}, [0, 2, 4]),
        Federation.from_offsets({"z": x}, [0, 2, 4]),
        Federation.from_offsets({"x": x}, [0, 2, 4]).with_split("test", {"x": x}),
        Federation.from_offsets({"x": x}, [0, 2, 4]).with_split("valid", {"x": x}),
    ]
    assert len({fed.fingerprint() for fed in feds}) == len(feds)
    assert feds[0].fingerprint() == Federation.from_arrays({"x": x}, [0, 0, 1, 1]).fingerprint()


def test_a_million_clients_need_no_million_names():
    bounds = np.arange(10**6 + 1)
    fed = Federation.from_offsets({"x": np.zeros((10**6, 1), np.float32)}, bounds)
    assert (fed.clients, fed.name(10**6 - 1), fed.names[0]) == (10**6, "client 999999", "client 0")
    assert isinstance(hash(fed.names), int)
    assert fed.select([999_999, 3]).names == ("client 999999", "client 3")


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.floats(0.05, 0.95), st.integers(0, 99))
def test_hold_out_is_an_exact_stratified_cut(labels, fraction, seed):
    clients = 1 + len(labels) // 8
    y = np.array(labels)
    fed = Federation.from_arrays({"row": np.arange(y.size), "y": y}, IID(clients), seed=seed)
    cut = fed.hold_out("held", fraction, seed)
    for client in range(clients):
        before, kept, gone = (s.shard(client) for s in (fed["train"], cut["train"], cut["held"]))
        np.testing.assert_array_equal(np.sort(np.concatenate([kept["row"], gone["row"]])), np.sort(before["row"]))
        count = before["row"].size
        wanted = min(int(np.floor(fraction * count + 0.5)), count - 1)
        assert gone["row"].size == wanted
        shares = np.bincount(before["y"], minlength=5) * wanted / count
        assert (abs(np.bincount(gone["y"], minlength=5) - shares) < 1 + 1e-6).all()
    assert cut.fingerprint() == fed.hold_out("held", fraction, seed).fingerprint()


def test_standardize_uses_train_statistics_everywhere_and_only_centres_constants():
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.normal(5, 3, 50), np.full(50, 0.1), rng.normal(-2, 0.1, 50)])
    test = rng.normal(size=(7, 3))
    fed = Federation.from_arrays({"x": x}, IID(4), test={"x": test}).standardize()
    rows = fed["train"].examples["x"]
    np.testing.assert_allclose(rows.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(rows.std(axis=0), [1, 0, 1], atol=1e-12)
    scale = np.where([True, False, True], x.std(axis=0), 1)
    np.testing.assert_allclose(fed["test"].examples["x"], (test - x.mean(axis=0)) / scale)


def test_select_keeps_order_names_and_pooled_splits():
    fed = toy().hold_out("valid", 0.3).with_split("test", {"x": np.ones((5, 2), np.float32)})
    some = fed.select([2, 0])
    assert some.names == ("client 2", "client 0")
    for split in ("train", "valid"):
        same(some[split].shard(0), fed[split].shard(2))
        same(some[split].shard(1), fed[split].shard(0))
    same(some["test"], fed["test"])


def test_splits_may_leave_clients_empty_and_bring_their_own_owners():
    fed = toy().with_split("test", {"x": np.ones((2, 2), np.float32), "y": [0, 2]}, clients=[2, 0])
    np.testing.assert_array_equal(fed["test"].counts, [1, 0, 1])
    assert fed["test"].shard(0)["y"] == [2]
    assert fed["test"].shard(1)["x"].shape == (0, 2)


def test_any_pytree_is_an_example():
    fed = Federation.from_arrays({"pair": (np.arange(4), np.arange(4.0)), "y": [0, 1, 0, 1]}, Dirichlet(2, 1.0))
    left, right = fed["train"].examples["pair"]
    np.testing.assert_array_equal(left, right)
    assert isinstance(fed["train"], Split)


@given(st.integers(1, 5), st.integers(2, 40), st.integers(0, 999))
def test_by_label_parts_the_train_rows_of_every_client(clients, rows, seed):
    rng = np.random.default_rng(seed)
    ids = np.concatenate([np.arange(clients), rng.integers(clients, size=rows)])
    y = np.concatenate([[0, 2], rng.integers(3, size=ids.size - 2)]) if ids.size > 2 else np.array([0, 2])[: ids.size]
    fed = Federation.from_arrays({"x": np.arange(ids.size), "y": y}, ids, classes=3)
    again = fed.by_label(positive=2)
    same(again["train"], fed["train"])
    for client in range(clients):
        shard = fed["train"].shard(client)
        for name, has in (("positives", shard["y"] == 2), ("negatives", shard["y"] != 2)):
            same(again[name].shard(client), {leaf: column[has] for leaf, column in shard.items()})  # in the old order
    assert again["positives"].size + again["negatives"].size == ids.size


def test_by_label_keeps_other_splits_and_refuses_one_class():
    fed = toy().hold_out("valid", 0.25)
    parted = fed.by_label()
    assert {*parted.splits} == {"train", "valid", "positives", "negatives"}
    same(parted["valid"], fed["valid"])
    assert (parted["positives"].examples["y"] == 1).all()
    assert not (parted["negatives"].examples["y"] == 1).any()
    with pytest.raises(ValueError, match=r"no row has y = 7"):
        fed.by_label(positive=7)
    alike = Federation.from_clients([{"x": np.zeros((3, 1)), "y": np.ones(3, int)}])
    with pytest.raises(ValueError, match=r"all rows have y = 1"):
        alike.by_label()
    with pytest.raises(ValueError, match="colour"):
        fed.by_label(label="colour")
    with pytest.raises(ValueError, match="no named columns"):
        Federation.from_clients([np.zeros((3, 2))]).by_label()
