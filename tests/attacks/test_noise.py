"""Attacks on noise and clipping: reachable floats, clips that floats exceed, clients that send anything, true ε."""

import math
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from fedstrata.base.accounting import epsilon
from fedstrata.base.gaussian import CUT, STRIPS, _staircase, beyond_the_cut
from fedstrata.core.clipping import bounded, clipped, margin
from fedstrata.core.grid import LEAST, Grid
from fedstrata.core.placement import Averaged
from fedstrata.engine.privacy import Privacy


class State(NamedTuple):
    x: Averaged[jax.Array]


def every_normal():
    """All values that `jax.random.normal` can take in float32: one for each of its 2²³ uniform numbers."""
    mantissas = (np.arange(2**23, dtype=np.uint32) | np.uint32(0x3F800000)).view(np.float32)
    low = np.nextafter(np.float32(-1), np.float32(0))
    uniform = jnp.maximum(low, (mantissas - np.float32(1)) * (np.float32(1) - low) + low)
    return np.asarray(np.float32(np.sqrt(2)) * jax.lax.erf_inv(jnp.asarray(uniform)))


def test_floats_plus_float_noise_tell_who_is_present():
    """The attack, on the formula that this library used: the control of the next test."""
    noise = np.float32(0.5) * every_normal()
    without, present = np.unique(noise), np.unique(np.float32(0.1234567) + noise)
    assert np.isin(present, without).mean() < 0.2


@pytest.mark.parametrize("reference", [0.0, 1.0, 1e8])
def test_every_value_that_is_reachable_with_a_client_is_reachable_without_it(reference):
    """Its integers shift the release on one grid: the same floats, bit for bit, and the noise reaches all integers."""
    privacy, start = Privacy(clip=1.0, noise=0.5), State(jnp.full(1, reference, jnp.float32))
    grid = privacy.grid(start, ("x",), 4)
    ratios, largest = jnp.ones(4, jnp.float32), jnp.float32(0.25)
    rng = np.random.default_rng(0)
    spread = np.float32(800 if reference == 1e8 else 0.1)  # floats are 8 apart there
    others = np.float32(reference) + rng.normal(size=(4, 1)).astype(np.float32) * spread
    sums = [
        privacy.summed({"x": jnp.asarray(sent)}, start, grid, ratios)
        for sent in (others, np.concatenate([others[:3], np.float32([[reference]])]))
    ]
    shift = int(sums[0]["x"][0]) - int(sums[1]["x"][0])
    assert shift != 0
    window = np.arange(-5000, 5000)
    release = jax.jit(jax.vmap(lambda s, n: privacy.noised(s, start, grid, largest, n[None])["x"][0], (None, 0)))
    present, absent = (
        np.asarray(release(s, jnp.asarray(n, jnp.int32))) for s, n in ((sums[0], window), (sums[1], window + shift))
    )
    np.testing.assert_array_equal(present, absent)
    if reference == 0:
        assert np.unique(present).size == window.size


def overshoot(value, reference, clip):
    """(‖value − reference‖ / clip)², in exact arithmetic."""
    difference = [Fraction(float(a)) - Fraction(float(b)) for a, b in zip(value, reference, strict=True)]
    return sum(d * d for d in difference) / Fraction(clip) ** 2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4, 1e8])
def test_what_is_sent_is_in_the_ball_exactly(dtype, scale):
    """Around references that are large compared with the clip, for random changes and for ones just outside."""
    largest = float(jnp.finfo(dtype).max)
    if scale > largest:
        pytest.skip("not a number of this dtype")
    rng, clip = np.random.default_rng(1), jax.jit(clipped, static_argnums=2)
    for size, radius in ((1, 1.0), (3, 0.3), (300, 10.0), (300, 100.0)):
        reference = jnp.asarray(scale * rng.uniform(0.5, 1, size), dtype)
        spread = rng.normal(size=size)
        for length in (1 + 1e-7, 1.001, 1.3, 10.0, 1e4):
            change = spread * (radius * length / np.linalg.norm(spread))
            sent = jnp.asarray(np.clip(np.asarray(reference, np.float64) + change, -largest, largest), dtype)
            out = clip({"x": sent}, {"x": reference}, radius)["x"]
            assert out.dtype == dtype
            assert overshoot(out, reference, radius) <= 1
            if scale <= 1 and length > 1.01 and jnp.finfo(dtype).bits >= 32:
                assert overshoot(out, reference, radius) > 0.999


def test_half_steps_of_floats_do_not_add_up_beyond_the_clip():
    """The worst case at 1e8, where floats are 8 apart: every entry's change would be rounded up, from 4.0001 to 8."""
    size = 1000
    reference = jnp.full(size, 1e8, jnp.float32)
    radius = 4.0001 * np.sqrt(size)
    out = clipped({"x": reference + 800}, {"x": reference}, radius)["x"]
    assert overshoot(out, reference, radius) <= 1


@pytest.mark.parametrize("size", [1, 255, 257, 70_000, 2_000_000])
def test_the_bound_of_the_norm_holds_and_is_close(size):
    rng, norm_of = np.random.default_rng(size), jax.jit(bounded, static_argnums=1)
    for change in (rng.normal(size=size), np.ones(size), rng.uniform(size=size) ** 20):
        change = np.float32(change * 1e3)
        out = np.asarray(norm_of(jnp.asarray(change), 1.0), np.float64)
        length = np.sqrt(np.sum(out**2))  # float64: wrong by less than 1e-10
        assert 1 - 2 * margin(size, jnp.float32) - 1e-6 <= length <= 1 - 1e-9


def worst_clients(rng, reference, clip):
    """What clients may send to break a bound: each row is one client."""
    size, big = reference.size, np.finfo(reference.dtype).max
    unit = rng.normal(size=size) / np.sqrt(size)
    return np.stack(
        [
            np.full(size, np.nan),
            np.full(size, np.inf),
            np.where(np.arange(size) == 0, np.nan, 1e3),
            np.full(size, big),
            np.full(size, -big),
            np.where(np.arange(size) % 2, big, -big),
            reference + 1e30,
            reference + clip * unit * 1.0000001,
            reference + clip * unit,
            reference + 1e-30,
            reference,
        ]
    ).astype(reference.dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("centre", "clip", "noise", "size"), [(0, 1.0, 1.0, 7), (1e8, 3.0, 0.3, 999), (1.0, 1e-3, 8.0, 4000)]
)
def test_no_client_moves_the_integers_by_more_than_the_bound_whatever_it_sends(dtype, centre, clip, noise, size):
    privacy, start = Privacy(clip, noise), State(jnp.full(size, centre, dtype))
    grid, rng = privacy.grid(start, ("x",), 11), np.random.default_rng(2)
    rows = worst_clients(rng, np.asarray(start.x), clip)
    summed = jax.jit(lambda sent, ratios: privacy.summed({"x": sent}, start, grid, ratios)["x"])
    for ratio in (1.0, 0.3, 1e-3):
        for number in range(len(rows)):
            alone = np.zeros(len(rows), dtype)
            alone[number] = ratio
            q = [int(k) for k in summed(rows, alone)]
            assert sum(k * k for k in q) <= Fraction(grid.bound) ** 2  # integers: exact
            assert sum(k * k for k in q) <= (ratio * grid.bound + np.sqrt(size) / 2) ** 2
    largest = jnp.asarray(0.2, dtype)
    moved = [
        privacy.noised(
            {"x": summed(rows, jnp.asarray(ratios, dtype))}, start, grid, largest, jnp.zeros(size, jnp.int32)
        )["x"]
        for ratios in (np.eye(11)[5], np.zeros(11))
    ]
    rounding = np.sqrt(size) * float(np.spacing(dtype(centre)))  # of the released values themselves
    assert np.linalg.norm(np.float64(moved[0]) - np.float64(moved[1])) <= 0.2 * clip * (1 + 1e-5) + rounding


@pytest.mark.parametrize(
    ("noise", "clients", "size"), [(LEAST, 3, 10), (1.0, 100, 10**6), (50.0, 10, 10**5), (1.1, 10**4, 10**5)]
)
def test_sums_of_integers_fit(noise, clients, size):
    grid = Grid.of(noise, clients, size)
    assert grid.bound <= 2**22  # exact in float32
    assert clients * grid.bound + CUT * 2**grid.bits + 1 < 2**31
    assert grid.bound * noise <= 2**grid.bits * (1 + 1e-15)  # the accounted sensitivity is at least the true one
    assert 0.95 <= grid.kept < 1


@pytest.mark.parametrize(
    ("given", "why"), [((0.99 * LEAST, 2, 1), "hides next to nothing"), ((1.0, 10**6, 10**7), "smaller cohort")]
)
def test_grids_that_cannot_be_are_refused(given, why):
    with pytest.raises(ValueError, match=why):
        Grid.of(*given)


@pytest.mark.parametrize("noise", [LEAST, 0.1, 1.0])
def test_values_that_only_one_neighbour_can_release_are_rarer_than_any_delta(noise):
    """The Gaussian is cut; a change of 1 / noise standard deviations moves the ends of its support."""
    left, right = (edges[i] / STRIPS for edges, i in ((_staircase()[3], 0), (_staircase()[3] + 1, -1)))
    alone = max(norm.cdf(left + 1 / noise), norm.sf(right - 1 / noise))
    assert alone <= beyond_the_cut(1 / noise) * (1 + 1e-9) < 1e-20
    assert math.isfinite(epsilon(noise, 100, 1e-15))


def test_with_less_noise_than_the_sampler_is_made_for_no_epsilon_is_told():
    assert epsilon(0.035, 1, 1e-5) == math.inf


def test_a_secure_sum_moves_the_integers_by_at_most_the_bound():
    """The worst case: every number is rounded down without a client, and up with it."""
    clip, size = 1.0, 10_000
    grid = Grid.of(1.0, 4, size)
    step, most = clip / grid.bound, grid.kept * grid.bound / np.sqrt(size)  # most: of each number of a clipped change
    change, before = np.floor(most - 0.001) + 0.001, 0.4995
    assert change <= most
    zero = np.zeros(size)
    without, present = (grid.nearest(zero + step * k, zero, step) for k in (before, before + change))
    moved = np.linalg.norm(np.float64(present - without))
    assert moved > change * np.sqrt(size)  # rounding has added to it
    assert moved <= grid.bound
    with pytest.raises(ValueError, match="rounded more coarsely"):
        grid.nearest(zero + 2.0**50 * step, zero + 2.0**50 * step * 1.01, step)
    for huge in (2.0**50 * step, 1e300, -1e300):  # a site has sent anything: no error that would end the run
        np.testing.assert_array_equal(grid.nearest(zero + huge, zero, step), np.sign(huge) * 2**30)


@pytest.mark.parametrize(("noise", "delta"), [(0.5, 1e-5), (1.0, 1e-5), (4.0, 1e-7)])
def test_the_distribution_that_is_released_has_the_epsilon_that_is_told(noise, delta):
    """The hockey-stick divergence of the integers of two neighbours, both ways, from exact probabilities."""
    bits = 10
    shift = int(2**bits / noise)  # the largest change of one number
    k = np.arange(-12 * 2**bits, 12 * 2**bits)
    chance = lambda k: np.where(
        k > 0, norm.sf(k / 2**bits) - norm.sf((k + 1) / 2**bits), norm.cdf((k + 1) / 2**bits) - norm.cdf(k / 2**bits)
    )
    told = epsilon(noise, 1, delta)
    for sign in (1, -1):
        excess = np.maximum(chance(k) - np.exp(told) * chance(k + sign * shift), 0).sum()
        assert 0.9 * delta < excess <= delta
        assert np.maximum(chance(k) - np.exp(0.95 * told) * chance(k + sign * shift), 0).sum() > delta
