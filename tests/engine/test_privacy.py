"""Clipping, noise and ε against NumPy, statistics and closed forms."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, task_of
from scipy.optimize import brentq
from scipy.stats import norm

import fedstrata as fs
from fedstrata.base.accounting import epsilon
from fedstrata.core.clipping import bounded, clipped
from fedstrata.core.clipping import flat as vector
from fedstrata.core.fingerprint import describe
from fedstrata.core.grid import Grid
from fedstrata.core.placement import placements
from fedstrata.engine.exchange import exchanges
from fedstrata.engine.privacy import Privacy, Spent, mechanisms, noise_key


def fields(seed, scale=1.0):
    """Two fields as they are sent: one a tree of two dtypes, the other one array."""
    rng = np.random.default_rng(seed)
    tree = {"w": jnp.asarray(rng.normal(size=(4, 3)) * scale), "b": jnp.asarray(rng.normal() * scale, jnp.float32)}
    return {"x": fs.Vector(tree), "h.1": jnp.asarray(rng.normal(size=5) * scale)}


def flat(values):
    return np.concatenate([np.ravel(np.asarray(a, np.float64)) for a in jax.tree.leaves(values)])


@pytest.mark.parametrize("clip", [0.01, 1.0, 5.0, 1e3])
def test_one_norm_over_all_fields_is_clipped(clip):
    sent, reference = fields(0), fields(1, scale=2.0)
    change = flat(sent) - flat(reference)
    expected = flat(reference) + change * min(1, clip / np.linalg.norm(change))
    out = clipped(sent, reference, clip)
    np.testing.assert_allclose(flat(out), expected, rtol=1e-6)  # b is a float32
    if clip == 1e3:
        np.testing.assert_array_equal(flat(out), flat(sent))  # what is not clipped is not touched
    assert jax.tree.map(lambda a: a.dtype, out) == jax.tree.map(lambda a: a.dtype, sent)


def test_large_changes_do_not_overflow_and_those_that_are_not_finite_count_as_none():
    reference = {"x": jnp.ones(3)}
    huge = clipped({"x": jnp.array([1e200, 0.0, 0.0])}, reference, 2.0)["x"]
    np.testing.assert_allclose(huge, [3.0, 1.0, 1.0], rtol=1e-12)
    for bad in (jnp.nan, jnp.inf):
        np.testing.assert_array_equal(clipped({"x": jnp.array([bad, 5.0, 1.0])}, reference, 2.0)["x"], np.ones(3))
    assert clipped({}, {}, 1.0) == {}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [3, 300, 5000, 70_000])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_one_number_that_is_not_finite_among_many_makes_the_whole_change_none(bad, size, dtype):
    """XLA's maximum on a CPU loses a NaN among a few hundred numbers."""
    grid, reference = Grid.of(1.0, 4, size), jnp.full(size, 2.0, dtype)
    clip = lambda x: clipped({"x": x}, {"x": reference}, 1.0)["x"]
    change = lambda x: vector(x) - vector(reference)
    integers = lambda x: grid.integers(change(x), 1.0)
    sent = np.full((3, size), 3.0, np.float32)
    sent[range(3), [0, size // 2, size - 1]] = bad
    rows = jnp.asarray(sent, dtype)
    shortened = lambda x: bounded(change(x), 1.0)
    for function, none in ((clip, reference), (shortened, 0), (integers, 0)):
        for way in (
            jax.vmap(function),
            jax.jit(jax.vmap(function)),
            lambda x, f=function: jnp.stack([f(r) for r in x]),
        ):
            np.testing.assert_array_equal(np.float64(way(rows)), np.float64(np.broadcast_to(none, (3, size))))


@pytest.mark.parametrize("scale", [1e-30, 1e-25, 1.0, 1e20, 1e30, 3e38])
def test_changes_of_float32_are_clipped_to_the_norm_at_any_scale(scale):
    """The squares, the norm, and clip / norm of such changes overflow or underflow; float64 is the reference."""
    change = jnp.asarray(np.array([1.0, -0.5, 0, 1]) * scale, jnp.float32)
    exact = np.asarray(change, np.float64)
    for clip in (1e-25, 1.0, 1e20):
        out = jax.jit(clipped, static_argnums=2)({"x": change}, {"x": jnp.zeros_like(change)}, clip)["x"]
        np.testing.assert_allclose(out, exact * min(1, clip / np.linalg.norm(exact)), rtol=2e-6, atol=1e-37)


def test_noise_has_its_standard_deviation_and_is_independent_between_fields_and_exchanges():
    size, std, key = 40_000, 0.3, jax.random.key(1)
    zeros, grid = {"x": jnp.zeros(size), "dx": jnp.zeros(size)}, Grid.of(0.6, 4, 2 * size)
    exchanges = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (-1, 0, 0)]
    values = lambda when: grid.values(grid.noise(noise_key(key, *when), zeros["x"].dtype), zeros, clip=2.0, weight=0.25)
    noise = np.stack([np.asarray(values(when)[f]) for when in exchanges for f in zeros])
    np.testing.assert_allclose(noise.std(axis=1), std, rtol=5 / np.sqrt(2 * size))
    assert np.abs(noise.mean(axis=1)).max() < 5 * std / np.sqrt(size)
    assert np.abs(np.corrcoef(noise) - np.eye(len(noise))).max() < 5 / np.sqrt(size)
    inside = np.mean(np.abs(noise) < std)  # it is a bell, and not only as wide as one
    assert abs(inside - (norm.cdf(1) - norm.cdf(-1))) < 5 * 0.5 / np.sqrt(noise.size)


def exact(noise, exchanges, delta):
    """ε of k Gaussian mechanisms from the exact trade-off of Gaussians: they are one with μ = √k / noise."""
    mu = np.sqrt(exchanges) / noise
    excess = lambda e: norm.cdf(-e / mu + mu / 2) - np.exp(e + norm.logcdf(-e / mu - mu / 2)) - delta
    return brentq(excess, 1e-9, mu**2 + 20 * mu + 20)


@pytest.mark.parametrize(
    ("noise", "exchanges"), [(1.0, 1), (0.7, 20), (1.1, 100), (5.0, 10), (20.0, 400), (0.3, 1000), (0.05, 1)]
)
def test_epsilon_is_an_upper_bound_within_a_thousandth_of_the_exact_one(noise, exchanges):
    """Also where ε is in the thousands, in little time: the table has a limited size."""
    told, true = epsilon(noise, exchanges, 1e-5), exact(noise, exchanges, 1e-5)
    assert true * (1 - 1e-12) <= told <= 1.001 * true


def test_epsilon_is_below_that_of_renyi_divergences_and_falls_back_to_it():
    from dp_accounting import GaussianDpEvent, rdp

    by_renyi = lambda *of: rdp.RdpAccountant().compose(GaussianDpEvent(of[0]), of[1]).get_epsilon(1e-5)
    assert epsilon(1.1, 10, 1e-5) < 0.94 * by_renyi(1.1, 10)
    assert epsilon(0.05, 1000, 1e-5) == by_renyi(0.05, 1000)


def test_nothing_released_costs_nothing_and_no_noise_hides_nothing():
    assert epsilon(1.0, 0, 1e-5) == 0
    assert epsilon(0.0, 1, 1e-5) == np.inf
    assert "after 3 exchanges" in str(Spent(1.0, 1e-5, 3))


def test_epsilon_names_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match=r"pip install 'fedstrata\[privacy\]'"):
        epsilon(1.0, 1, 1.23e-5)  # not asked before: values are kept


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"clip": 0.0, "noise": 1.0}, "clip=0.0 must be a finite number > 0"),
        ({"clip": 1.0, "noise": 1e308}, r"noise=1e\+308 must be at most 1e12"),
        ({"clip": float("inf"), "noise": 1.0}, "clip=inf"),
        ({"clip": 1.0, "noise": -1.0}, "noise=-1.0 must be a finite number >= 0"),
        ({"clip": 1.0, "noise": 1.0, "delta": 1.0}, "delta=1.0 must be between 0 and 1"),
        ({"clip": 1.0, "noise": 1.0, "accept": "s"}, r"accept=\('s',\)"),
        ({"clip": 1.0, "noise": 1.0, "where": "site"}, r"unknown place of the noise.*'site'; did you mean sites"),
    ],
)
def test_wrong_values_are_refused(wrong, why):
    with pytest.raises(ValueError, match=why):
        Privacy(**wrong)


@pytest.mark.parametrize("number", [1, np.float32(1.0), np.int64(1)])
def test_numbers_of_any_kind_are_the_same_setting(number):
    assert repr(Privacy(number, number)) == repr(Privacy(1.0, 1.0))


@pytest.mark.parametrize(
    ("dtype", "clip", "noise"),
    [(jnp.float32, 1e30, 1.0), (jnp.float32, 1e10, 1e10), (jnp.float16, 1e5, 1.0), (jnp.bfloat16, 1e20, 0.0)],
)
def test_a_clip_that_the_numbers_cannot_hold_is_refused_before_the_run(dtype, clip, noise):
    """Otherwise every round fails, and each attempt counts as a release."""
    problem = fs.Average(lambda w, example: (w - example["x"].astype(dtype)) @ (w - example["x"].astype(dtype)))
    federation = fs.Federation.from_clients([{"x": np.ones((4, 3), np.float32)}] * 3)
    with pytest.raises(ValueError, match=r"with which .* cannot compute; use less, or scale the parameters"):
        fs.run(
            problem, fs.FedAvg(0.1, 1), federation, params=jnp.zeros(3, dtype), privacy=Privacy(clip, noise), rounds=1
        )


def check(name, **options):
    algorithm = CASES[name].algorithm
    return Privacy(1.0, 1.0, **options).check(algorithm, task_of(algorithm).problem)


@pytest.mark.parametrize("name", ["FedX1", "FedX2", "AFL", "FCFL"])
def test_rows_are_refused_unless_accepted(name):
    with pytest.raises(ValueError, match=rf"{name} sends rows .*accept") as refused:
        check(name)
    state = CASES[name].algorithm.State
    rows = [f for f, place in placements(state).items() if place.merge in ("rows", "union")]
    assert all(repr(f) in str(refused.value) for f in rows)
    check(name, accept=rows)
    with pytest.raises(ValueError, match=rf"sends rows.*{rows[-1]!r}"):
        check(name, accept=rows[:-1])


def test_what_cannot_be_accepted_or_protected_is_refused():
    check("FedAvg")
    with pytest.raises(ValueError, match="Pooled or Gathered field of FedAvg"):
        check("FedAvg", accept=("x",))
    with pytest.raises(ValueError, match="CentralSGD is centralised"):
        check("CentralSGD")


# FedNest with T inner rounds and N terms: 2 T exchanges, N of the series, and 2 outer ones. AFL's second sends nothing.
@pytest.mark.parametrize(
    ("name", "counts"), [("FedAvg", (0, 1)), ("AdaMFCGD", (1, 1)), ("FedNest", (0, None)), ("AFL", (0, 1))]
)
def test_exchanges_with_a_mean_are_counted(name, counts):
    algorithm = CASES[name].algorithm
    if name == "FedNest":
        counts = (0, 2 * algorithm.inner_rounds + algorithm.terms + 2)
    assert mechanisms(algorithm, exchanges(algorithm, task_of(algorithm).problem)) == counts


def test_a_checkpoint_stores_the_privacy_of_its_run():
    assert describe(Privacy(1.0, 2.0)) == describe(Privacy(1.0, 2.0))
    assert describe(Privacy(1.0, 2.0)) != describe(Privacy(1.0, 3.0))
