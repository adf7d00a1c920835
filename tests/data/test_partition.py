import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.data import IID, ByColumn, Contiguous, Dirichlet, LabelShards, QuantitySkew

sizes = st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, n + 60)))
alphas = st.sampled_from([1e-3, 0.1, 1.0, 100.0])


def covers(ids, rows, clients):
    """Each row once (an id per row, within range) and no client without a row."""
    return ids.shape == (rows,) and ids.dtype == np.int64 and np.array_equal(np.unique(ids), np.arange(clients))


@given(sizes, alphas, st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_random_rules_cover_exactly_and_depend_on_the_seed_only(size, alpha, classes, seed):
    clients, rows = size
    labels = np.random.default_rng(seed).integers(classes, size=rows)
    for rule in (IID(clients), Dirichlet(clients, alpha), QuantitySkew(clients, alpha), LabelShards(clients, 1)):
        ids = rule.assign(labels, rng=seed)
        assert covers(ids, rows, clients), rule
        np.testing.assert_array_equal(ids, rule.assign(labels, rng=seed))


@given(sizes, st.integers(0, 2**32 - 1))
def test_iid_and_contiguous_sizes_differ_by_at_most_one(size, seed):
    clients, rows = size
    for rule in (IID(clients), Contiguous(clients)):
        assert np.ptp(np.bincount(rule.assign(rows, rng=seed))) <= 1
    assert (np.diff(Contiguous(clients).assign(rows)) >= 0).all()


@given(st.lists(st.sampled_from(["Oslo", "Bergen", "Bodø", "Ås"]), min_size=1, max_size=40))
def test_by_column_groups_equal_values(values):
    rule = ByColumn(values)
    assert [rule.names[i] for i in rule.assign(len(values))] == values
    assert rule.clients == len(set(values))


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 99))
def test_label_shards_gives_few_labels_to_each_client(clients, shards, seed):
    # As many labels as shards, three rows each: every shard is one label, so a client has exactly `shards` labels.
    labels = np.repeat(np.arange(clients * shards), 3)
    ids = LabelShards(clients, shards).assign(labels, rng=seed)
    assert all(np.unique(labels[ids == c]).size == shards for c in range(clients))
    assert (np.bincount(ids) == 3 * shards).all()


def test_another_seed_is_another_partition():
    labels = np.repeat([0, 1], 50)
    for rule in (IID(4), Dirichlet(4, 1.0), QuantitySkew(4, 1.0), LabelShards(4, 2)):
        assert (rule.assign(labels, rng=0) != rule.assign(labels, rng=1)).any(), rule


def test_dirichlet_shares_have_the_moments_of_the_dirichlet_law():
    # A share of Dirichlet(a, …, a) over N clients has mean 1/N and variance (N-1) / (N^2 (N a + 1)).
    clients, alpha, draws, rows = 4, 0.5, 1500, 400
    shares = (
        np.array([np.bincount(Dirichlet(clients, alpha).assign(np.zeros(rows, int), s)) for s in range(draws)]) / rows
    )
    expected = (clients - 1) / (clients**2 * (clients * alpha + 1))
    assert abs(shares[:, 0].mean() - 1 / clients) < 4 * np.sqrt(expected / draws)
    assert abs(shares.var(axis=0).mean() / expected - 1) < 0.1


def test_large_alpha_is_nearly_even_and_small_alpha_nearly_one_client():
    labels = np.repeat(np.arange(5), 1000)
    even = Dirichlet(5, 1e6).assign(labels, rng=0)
    table = np.bincount(even * 5 + labels, minlength=25).reshape(5, 5)
    assert (abs(table - 200) < 10).all()
    skewed = Dirichlet(5, 1e-3).assign(labels, rng=0)
    top = np.bincount(skewed * 5 + labels, minlength=25).reshape(5, 5).max(axis=0)
    assert (top > 950).all()


@pytest.mark.slow
def test_a_million_clients_take_seconds():
    assert covers(QuantitySkew(10**6, 0.5).assign(3 * 10**6, rng=0), 3 * 10**6, 10**6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: IID(0), "IID: clients must be a positive whole number, got 0"),
        (lambda: IID(2.5), "got 2.5"),
        (lambda: IID(5).assign(4), "5 clients cannot share 4 rows"),
        (lambda: Dirichlet(2, 0.0), "Dirichlet: alpha must be a positive number, got 0.0"),
        (lambda: QuantitySkew(2, float("nan")), "QuantitySkew: alpha"),
        (lambda: Dirichlet(2, 1.0).assign(10), "there are no labels"),
        (lambda: LabelShards(3, 0), "shards_per_client must be at least 1"),
        (lambda: LabelShards(3, 2).assign(np.zeros(5, int)), "more than 5 rows"),
        (lambda: ByColumn([1, 2]).assign(3), "2 values and the data 3 rows"),
        (lambda: ByColumn([1.0, np.nan]), "1 rows have no value"),
    ],
)
def test_bad_input_is_named(make, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        make()


def test_real_labels_are_refused():
    with pytest.raises(TypeError, match="one discrete label per row"):
        Dirichlet(2, 1.0).assign(np.linspace(0, 1, 10))
