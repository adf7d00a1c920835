"""Ranking metrics against scikit-learn, their definitions over all pairs, and areas of polygons cut by lines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from fedstrata.metrics import ranking as metrics

MANY = 12  # data sets of a kind, in one vmapped call
RATES = (0.013, 0.3, 0.5, 1.0)
CORNERS = ((0.0, 1.0), (0.5, 0.5), (0.3, 0.7), (0.613, 0.187), (0.9, 1.0))
SIZES = [(levels, n) for levels in (1, 2, 7, 10**6) for n in (2, 60)]

METRICS = {
    "auc": metrics.auc,
    "mcclish": lambda s, y, weights=None: metrics.partial_auc(s, y, 0.3, weights=weights),
    "raw": lambda s, y, weights=None: metrics.partial_auc(s, y, 0.3, standardized=False, weights=weights),
    "two-way": lambda s, y, weights=None: metrics.two_way_partial_auc(s, y, 0.4, 0.7, weights=weights),
    "precision": metrics.average_precision,
}
every = pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)


def datasets(levels, n, weighted=False):
    """Scores from so many levels, labels of which both occur, and weights of which some are 0 but none of a class."""
    rng = np.random.default_rng([levels, n])
    labels = rng.random((MANY, n)) < rng.uniform(0.1, 0.9, (MANY, 1))
    labels[:, 0], labels[:, 1] = True, False
    scores = rng.integers(0, levels, (MANY, n)) / 7 + (levels > 2) * labels * rng.integers(-1, 3, (MANY, 1))
    weights = rng.exponential(size=(MANY, n)) * (rng.random((MANY, n)) < 0.8)
    weights[:, :2] = 0.5
    return (scores, labels, weights) if weighted else (scores, labels)


def cut_area(scores, labels, min_tpr, max_fpr, weights=None):
    """The two-way area by cutting the polygon under the curve, half-plane by half-plane (Sutherland-Hodgman)."""
    fpr, tpr, _ = roc_curve(labels, scores, sample_weight=weights)
    corners = [*zip(fpr, tpr, strict=True), (1.0, 0.0)]
    for inside in (lambda p: max_fpr - p[0], lambda p: p[1] - min_tpr):
        kept = []
        for here, there in zip(corners, corners[1:] + corners[:1], strict=True):
            a, b = inside(here), inside(there)
            if a >= 0:
                kept.append(here)
            if a * b < 0:
                kept.append(tuple(h + a / (a - b) * (t - h) for h, t in zip(here, there, strict=True)))
        corners = kept
    x, y = np.array(corners).T if corners else np.zeros((2, 1))
    return abs(x @ np.roll(y, 1) - y @ np.roll(x, 1)) / 2 / ((1 - min_tpr) * max_fpr)


def close(found, wanted, tolerance=1e-12):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance)


# One program for all metrics of a test and all data sets of a size: alone each operation of each would be compiled.


@jax.jit
@jax.vmap
def ranked(s, y, w=None):
    return metrics.auc(s, y, w), metrics.average_precision(s, y, w)


@jax.jit
@jax.vmap
def partial(s, y, w=None):
    return [metrics.partial_auc(s, y, rate, weights=w) for rate in RATES]


@jax.jit
@jax.vmap
def areas(s, y, w=None):
    cut = [metrics.two_way_partial_auc(s, y, bottom, right, w) for bottom, right in CORNERS]
    return cut, metrics.partial_auc(s, y, 0.3, False, w)


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("levels", "n"), SIZES)
def test_they_are_scikit_learns(levels, n, weighted):
    data = datasets(levels, n, weighted)
    rows = [(s, y, w[0] if w else None) for s, y, *w in zip(*data, strict=True)]

    def wanted(metric, **options):
        return [metric(y, s, sample_weight=w, **options) for s, y, w in rows]

    auc, precision = ranked(*data)
    close(auc, wanted(roc_auc_score))
    close(precision, wanted(average_precision_score))
    for rate, found in zip(RATES, partial(*data), strict=True):
        close(found, wanted(roc_auc_score, max_fpr=rate))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("levels", "n"), SIZES)
def test_the_areas_are_those_of_cut_polygons(levels, n, weighted):
    data = datasets(levels, n, weighted)
    found, raw = areas(*data)
    for (bottom, right), area in zip(CORNERS, found, strict=True):
        close(area, [cut_area(s, y, bottom, right, *w) for s, y, *w in zip(*data, strict=True)])
    close(raw, [cut_area(s, y, 0.0, 0.3, *w) for s, y, *w in zip(*data, strict=True)])


@pytest.mark.parametrize(("levels", "n"), SIZES)
def test_auc_is_the_share_of_pairs(levels, n):
    scores, labels, weights = datasets(levels, n, weighted=True)
    alike, weighted = ranked(scores, labels)[0], ranked(scores, labels, weights)[0]
    for s, y, w, plain, found in zip(scores, labels, weights, alike, weighted, strict=True):
        gap, both = s[y][:, None] - s[~y][None, :], w[y][:, None] * w[~y][None, :]
        close(plain, ((gap > 0) + (gap == 0) / 2).mean())
        close(found, (((gap > 0) + (gap == 0) / 2) * both).sum() / both.sum())


def test_a_curve_that_crosses_the_corner_within_a_segment():
    """All scores tie: TPR = FPR, and the area above β and left of α is a triangle."""
    for bottom, right in CORNERS:
        wanted = max(right - bottom, 0) ** 2 / (2 * right * (1 - bottom))
        close(metrics.two_way_partial_auc(np.zeros(5), [0, 1, 0, 1, 0], bottom, right), wanted, 1e-15)


@every
def test_weights_are_repeated_rows(metric):
    rng = np.random.default_rng(3)
    scores, labels = rng.integers(0, 9, 50) / 3, rng.random(50) < 0.4
    times = rng.integers(0, 4, 50)
    wanted = metric(np.repeat(scores, times), np.repeat(labels, times))
    for weights in (times, 0.7 * times, times.astype(np.float32), 1e200 * times, 1e-200 * times):
        close(metric(scores, labels, weights=weights), wanted, 1e-13)
    assert metric(scores, labels, weights=times > 0) == metric(scores[times > 0], labels[times > 0])


@every
def test_only_the_order_of_scores_counts_and_not_that_of_rows(metric):
    rng = np.random.default_rng(4)
    scores, labels, weights = rng.integers(-9, 9, 80), rng.random(80) < 0.4, rng.exponential(size=80)
    value, weighted = metric(scores, labels), metric(scores, labels, weights=weights)
    unsigned = (scores + 128).astype(np.uint8)
    for other in (np.exp(scores / 3), unsigned, scores.astype(np.float16), scores**3 - 1e6):
        assert metric(other, labels) == value
    infinite = np.where(scores == 8, np.inf, np.where(scores == -9, -np.inf, scores))
    assert metric(infinite, labels) == value
    order = rng.permutation(80)
    assert metric(scores[order], labels[order]) == value
    close(metric(scores[order], labels[order], weights=weights[order]), weighted, 1e-14)


def test_either_zero_is_the_same_score():
    scores, labels = np.array([0.0, -0.0, 0.0, -0.0]), [1, 0, 0, 1]
    assert metrics.auc(scores, labels) == 0.5
    assert metrics.auc_by_client(scores, labels, [0, 0, 1, 1], 2).tolist() == [0.5, 0.5]


@every
def test_labels_may_be_of_any_kind(metric):
    scores, labels = np.array([3.0, 1.0, 2.0, 2.0, 0.5]), np.array([1, 0, 1, 0, 0])
    value = metric(scores, labels)
    for kind in (bool, np.int8, np.uint8, np.float32):
        assert metric(scores, labels.astype(kind)) == value
    assert metric(scores, 2 * labels - 1) == value


@pytest.mark.parametrize("weights", [None, np.array([1, 3, 2, 10])])
def test_perfect_reversed_and_constant_scores(weights):
    labels, perfect = np.array([0, 0, 1, 1]), np.array([1.0, 2.0, 3.0, 4.0])
    for metric in METRICS.values():
        close(metric(perfect, labels, weights=weights), 1, 1e-15)
    constant = np.zeros(4)
    close([metrics.auc(-perfect, labels, weights), metrics.auc(constant, labels, weights)], [0, 0.5], 1e-15)
    for rate in RATES:
        close(metrics.partial_auc(constant, labels, rate, weights=weights), 0.5, 1e-15)
        close(metrics.partial_auc(constant, labels, rate, False, weights), rate / 2, 1e-15)
        close(metrics.partial_auc(-perfect, labels, rate, False, weights), 0, 1e-15)
    share = 0.5 if weights is None else 12 / 16
    close(metrics.average_precision(constant, labels, weights), share, 1e-15)


@every
def test_a_missing_class_is_nan(metric):
    scores = np.array([1.0, 2.0, 3.0])
    assert np.isnan(metric(scores, np.zeros(3)))
    assert np.isnan(metric(scores, [0, 0, 1], weights=[1.0, 1.0, 0.0]))
    assert np.isnan(metric(np.zeros(0), np.zeros(0)))
    assert np.isnan(metric(np.zeros(0), np.zeros(0), weights=np.zeros(0)))
    only_positives = [metric(scores, np.ones(3)), metric(scores, [1, 1, 0], weights=[1.0, 2.0, 0.0])]
    if metric is metrics.average_precision:  # as scikit-learn has it
        np.testing.assert_array_equal(only_positives, [average_precision_score(np.ones(3), scores)] * 2)
    else:
        assert np.isnan(only_positives).all()


@every
def test_a_nan_score_is_nan_unless_its_row_does_not_count(metric):
    scores, labels = np.array([1.0, np.nan, 2.0, 3.0, 0.0]), np.array([0, 1, 1, 0, 1])
    assert np.isnan(metric(scores, labels))
    assert np.isnan(metric(scores, labels, weights=[1.0, 0.1, 1.0, 1.0, 1.0]))
    rest = metric(np.delete(scores, 1), np.delete(labels, 1))
    assert metric(scores, labels, weights=[1.0, 0.0, 1.0, 1.0, 1.0]) == rest
    assert metric(scores, labels, weights=[True, False, True, True, True]) == rest


@every
def test_they_compile(metric):
    scores, labels, weights = datasets(7, 60, weighted=True)
    one = [metric(s, y, weights=w) for s, y, w in zip(scores, labels, weights, strict=True)]
    compiled = jax.jit(jax.vmap(lambda s, y, w: metric(s, y, weights=w)))
    close(compiled(scores, labels, weights), one, 1e-15)
    assert compiled(scores, labels, weights).dtype == jnp.float64
    compiled(scores + 1, ~labels, weights)
    assert compiled._cache_size() == 1


def test_rates_may_be_traced():
    scores, labels = (rows[0] for rows in datasets(7, 60))
    rates = jnp.array(RATES)
    found = jax.jit(jax.vmap(lambda rate: metrics.partial_auc(scores, labels, rate)))(rates)
    close(found, [roc_auc_score(labels, scores, max_fpr=rate) for rate in RATES])
    bottoms, rights = jnp.array(CORNERS).T
    found = jax.vmap(lambda bottom, right: metrics.two_way_partial_auc(scores, labels, bottom, right))(bottoms, rights)
    close(found, [cut_area(scores, labels, *corner) for corner in CORNERS])


@pytest.mark.parametrize("levels", [2, 7, 10**6])
def test_every_client_has_the_auc_of_its_rows(levels):
    rng = np.random.default_rng(levels)
    n, clients = 400, 12
    client = rng.choice(clients + 1, n, p=rng.dirichlet(np.full(clients + 1, 0.5)))  # the last is padding
    client = np.where(client == clients, rng.choice([-3, clients, clients + 5], n), client)
    client[client == 4] = 5  # nobody
    labels = (rng.random(n) < 0.4) & (client != 2)  # a client without positives, if it has rows
    client[:1], labels[:1] = 2, False
    scores = rng.integers(0, levels, n) / 7 + client
    found = metrics.auc_by_client(scores, labels, client, clients)
    assert found.shape == (clients,)
    wanted = []
    for k in range(clients):
        mine = client == k
        both = 0 < labels[mine].sum() < mine.sum()
        wanted.append(roc_auc_score(labels[mine], scores[mine]) if both else np.nan)
    assert np.isnan(wanted).any()
    assert not np.isnan(wanted).all()
    close(found, wanted)
    close(metrics.local_auc_mean(scores, labels, client, clients), np.nanmean(wanted))
    order = rng.permutation(n)
    again = jax.jit(metrics.auc_by_client, static_argnums=3)(scores[order], labels[order], client[order], clients)
    np.testing.assert_array_equal(again, found)
    small = np.where(client < 0, 100, client).astype(np.uint8)
    np.testing.assert_array_equal(metrics.auc_by_client(scores, labels, small, clients), found)


def test_a_nan_score_spoils_its_own_client_only():
    scores = np.array([1.0, 2.0, np.nan, 3.0, 1.0, 2.0, np.nan])
    labels, client = np.array([0, 1, 1, 0, 0, 1, 1]), np.array([0, 0, 1, 1, 2, 2, 7])
    np.testing.assert_array_equal(metrics.auc_by_client(scores, labels, client, 3), [1, np.nan, 1])
    assert np.isnan(metrics.local_auc_mean(scores, labels, client, 3))
    assert metrics.local_auc_mean(scores, labels, np.where(client == 1, 9, client), 3) == 1


def test_clients_without_rows():
    assert np.isnan(metrics.auc_by_client(np.zeros(0), np.zeros(0), np.zeros(0, int), 2)).all()
    assert np.isnan(metrics.local_auc_mean([1.0, 2.0], [1, 1], [0, 1], 2))


def test_perfect_clients_may_have_a_poor_global_auc():
    """K clients with a pair each, each pair above the last: every client has 1, all pairs together (K + 1) / 2K."""
    for clients in (2, 50):
        scores, client = np.arange(2 * clients), np.arange(2 * clients) // 2
        labels = scores % 2
        assert metrics.local_auc_mean(scores, labels, client, clients) == 1
        close(metrics.auc(scores, labels), (clients + 1) / (2 * clients), 1e-15)


@pytest.mark.slow
def test_a_million_rows_in_float32():
    rng = np.random.default_rng(0)
    n = 10**6
    labels = rng.random(n) < 0.01
    scores = (rng.normal(size=n) + labels).astype(np.float32)
    weights = rng.exponential(size=n).astype(np.float32)
    client = rng.choice(5, n, p=[0.9, 0.04, 0.03, 0.02, 0.01])
    names = ("auc", "mcclish", "precision", "two-way")
    together = jax.jit(lambda s, y, w: [METRICS[name](s, y, weights=w) for name in names])  # one sort for all
    for given in (None, weights):
        wanted = [roc_auc_score(labels, scores, sample_weight=given)]
        wanted += [roc_auc_score(labels, scores, max_fpr=0.3, sample_weight=given)]
        wanted += [average_precision_score(labels, scores, sample_weight=given)]
        wanted += [two_way_by_interpolation(scores, labels, 0.4, 0.7, given)]
        with jax.enable_x64(False):
            found = together(scores, labels, given)
        assert {value.dtype for value in found} == {jnp.dtype("float32")}
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    with jax.enable_x64(False):
        found = metrics.auc_by_client(scores, labels, client, 5)
    wanted = [roc_auc_score(labels[client == k], scores[client == k]) for k in range(5)]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def two_way_by_interpolation(scores, labels, bottom, right, weights):
    """The same area where a polygon has too many corners: the curve with the points where it meets the two lines."""
    fpr, tpr, _ = roc_curve(labels, scores, sample_weight=weights)
    fpr, tpr = np.r_[fpr[fpr < right], right], np.r_[tpr[fpr < right], np.interp(right, fpr, tpr)]
    above = tpr > bottom
    area = np.trapezoid(np.r_[0, tpr[above] - bottom], np.r_[np.interp(bottom, tpr, fpr), fpr[above]])
    return area / ((1 - bottom) * right)


@pytest.mark.parametrize("value", [0, -0.1, 1.5, np.float32(2), float("nan"), float("inf")])
def test_a_false_positive_rate_out_of_range_is_refused(value):
    with pytest.raises(ValueError, match=r"partial_auc: max_fpr=.* must be above 0 and at most 1"):
        metrics.partial_auc([1.0, 2.0], [0, 1], value)
    with pytest.raises(ValueError, match="two_way_partial_auc: max_fpr="):
        metrics.two_way_partial_auc([1.0, 2.0], [0, 1], 0.5, value)


@pytest.mark.parametrize("value", [1, -0.1, 1.5, np.float32(2), float("nan")])
def test_a_true_positive_rate_out_of_range_is_refused(value):
    with pytest.raises(ValueError, match=r"two_way_partial_auc: min_tpr=.* must be at least 0 and below 1"):
        metrics.two_way_partial_auc([1.0, 2.0], [0, 1], value, 0.5)


def test_columns_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"'scores': \(2, 1\)"):
        metrics.auc(np.zeros((2, 1)), [0, 1])
    with pytest.raises(ValueError, match=r"'labels': \(3,\)"):
        metrics.average_precision([1.0, 2.0], [0, 1, 1])
    with pytest.raises(ValueError, match=r"'weights': \(1,\)"):
        metrics.auc([1.0, 2.0], [0, 1], [1.0])
    with pytest.raises(ValueError, match=r"'client': \(3,\)"):
        metrics.auc_by_client([1.0, 2.0], [0, 1], [0, 1, 1], 2)
    with pytest.raises(ValueError, match="clients=0"):
        metrics.auc_by_client([1.0, 2.0], [0, 1], [0, 1], 0)
