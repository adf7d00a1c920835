"""How the data of the fairness experiments are divided: sizes, balance, and seeds that do not touch each other."""

import numpy as np
import pytest
from fedstrata_papers.fedbio.data import SHARES, Table, divide, federation, synthetic

TABLE = synthetic()
K = 3


def counts(split, groups=K):
    """Rows by client and group."""
    return np.array([np.bincount(split.shard(i)["group"], minlength=groups) for i in range(split.clients)])


def keys(split):
    return {tuple(row) for row in np.asarray(split.examples["x"])}


@pytest.mark.parametrize("iid", [True, False])
def test_every_row_is_somewhere_once_and_each_group_is_cut_seven_to_three(iid):
    made = divide(TABLE, iid, 5)
    sizes = np.bincount(TABLE.group)
    test = counts(made["test"])[0]
    np.testing.assert_array_equal(test, np.round(0.3 * sizes))
    assert made["test"].pooled
    rest = counts(made["train"]) + counts(made["valid"])
    np.testing.assert_array_equal(rest.sum(axis=0) + test, sizes)
    parts = [keys(made[name]) for name in ("train", "valid", "test")]
    assert sum(map(len, parts)) == len(set.union(*parts)) == len(TABLE.y)
    assert made.classes == 2


def test_iid_clients_are_random_thirds():
    totals = np.concatenate([(counts(s["train"]) + counts(s["valid"])) for s in [divide(TABLE)]]).sum(axis=1)
    assert np.ptp(totals) <= 1


def test_other_clients_have_two_two_and_six_tenths_of_every_group():
    made = divide(TABLE, iid=False)
    rest = counts(made["train"]) + counts(made["valid"])
    for column in rest.T:
        np.testing.assert_allclose(np.sort(column) / column.sum(), np.array(SHARES) / 10, atol=1 / column.sum())
    orders = {tuple(np.argmax(counts(divide(TABLE, False, partition_seed=s)["train"]), axis=0)) for s in range(9)}
    assert len(orders) > 3  # who gets the large share differs by group and seed


def test_validation_is_balanced_as_far_as_there_are_rows():
    made = divide(TABLE, iid=False, validation=12)
    valid, train = counts(made["valid"]), counts(made["train"])
    np.testing.assert_array_equal(valid, np.minimum(12, valid + train - 1))
    assert valid.min() < 12  # the smallest group does not have as many everywhere
    assert train.min() >= 1
    np.testing.assert_array_equal(counts(divide(TABLE, validation=4)["valid"]), 4)


def test_numbers_are_standardised_by_train_rows_and_words_are_not():
    made = divide(TABLE, iid=False)
    x = np.asarray(made["train"].examples["x"], np.float64)
    np.testing.assert_allclose(x[:, :4].mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(x[:, :4].std(axis=0), 1, atol=1e-5)
    assert np.abs(np.asarray(made["test"].examples["x"])[:, :4].mean(axis=0)).max() > 1e-3
    for split in made.splits.values():
        np.testing.assert_array_equal(np.asarray(split.examples["x"])[:, 4:].argmax(axis=1), split.examples["group"])
    constant = TABLE._replace(x=np.concatenate([TABLE.x[:, :1] * 0 + 0.1, TABLE.x[:, 1:]], axis=1))
    assert np.abs(divide(constant)["train"].examples["x"][:, 0]).max() < 1e-6


def test_the_group_can_be_kept_from_the_model():
    made = divide(TABLE, group_feature=False)
    assert made["train"].examples["x"].shape[1] == 4
    assert made.features == TABLE.features[:4]
    assert set(np.asarray(made["train"].examples["group"])) == {0, 1, 2}


def test_seeds_are_independent():
    same = lambda a, b, name: (
        np.array_equal(a[name].examples["group"], b[name].examples["group"])
        and np.array_equal(a[name].examples["y"], b[name].examples["y"])
    )
    base = divide(TABLE)
    assert base.fingerprint() == divide(TABLE).fingerprint()
    other = divide(TABLE, partition_seed=1)
    assert same(base, other, "test")
    assert not same(base, other, "train")
    other = divide(TABLE, validation_seed=1)
    assert same(base, other, "test")
    assert not same(base, other, "valid")
    owned = lambda f: [keys_of(f, i) for i in range(3)]
    keys_of = lambda f, i: sorted(
        zip(*(np.concatenate([f[s].shard(i)[c] for s in ("train", "valid")]) for c in ("group", "y")), strict=True)
    )
    assert owned(base) == owned(other)  # the same clients; only what is held out of them changed
    assert not same(base, divide(TABLE, split_seed=1), "test")


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="unknown data of the fairness experiment 'adlut'; did you mean adult"):
        federation("adlut")
    with pytest.raises(ValueError, match="must be at least 1"):
        divide(TABLE, validation=0)
    with pytest.raises(ValueError, match="for 3 clients, not 4"):
        divide(TABLE, iid=False, clients=4)
    with pytest.raises(ValueError, match="between 0 and 1"):
        divide(TABLE, test=1.5)


@pytest.mark.parametrize(
    ("name", "rows", "features", "sizes", "hidden"),
    [
        # Counts of race over both files, and of sex and status: UCI's own documentation of the two sets.
        ("adult", 48842, 107, [470, 1519, 4685, 406, 41762], 5),
        ("german_credit", 1000, 20, [50, 310, 548, 92], 1),
    ],
)
def test_the_real_data(name, rows, features, sizes, hidden):
    try:
        made = federation(name, iid=False, validation=5)
    except FileNotFoundError:
        pytest.skip(f"the files of {name} are not here")
    total = sum(counts(made[s], len(sizes)).sum(axis=0) for s in ("train", "valid", "test"))
    assert total.sum() == rows
    np.testing.assert_array_equal(total, sizes)
    assert made["train"].examples["x"].shape[1] == features == len(made.features)
    assert np.abs(np.asarray(made["train"].examples["x"])).max() < 100  # no raw capital gains
    assert counts(made["train"], len(sizes)).min() >= 1
    assert federation(name, group_feature=False)["train"].examples["x"].shape[1] == features - hidden


def test_a_table_of_ones_own_will_do():
    rng = np.random.default_rng(0)
    table = Table(rng.normal(size=(60, 2)), rng.integers(0, 2, 60), np.arange(60) % 2, ("a", "b"), (0, 1), ())
    assert divide(table, clients=4, validation=2)["valid"].counts.tolist() == [4, 4, 4, 4]
