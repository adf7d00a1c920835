"""The exact sampler of ⌊2^s G⌋ against probabilities, moments and its own slow path."""

import decimal
import hashlib

import numpy as np
import pytest
from scipy import stats

from fedstrata.base import gaussian
from fedstrata.base.gaussian import floor_gaussian


class Stream:
    """Bytes of SHAKE-256, in order, however they are requested."""

    def __init__(self, seed, length=2**24):
        self.bytes, self.at = hashlib.shake_256(seed.to_bytes(8, "little")).digest(length), 0

    def __call__(self, count):
        self.at += count
        assert self.at <= len(self.bytes)
        return self.bytes[self.at - count : self.at]


@pytest.mark.parametrize("bits", [0, 1, 3, 6])
def test_frequencies_are_those_of_the_floor_of_a_gaussian(bits):
    size = 300_000
    found = floor_gaussian(bits, size, Stream(bits))
    edges = np.arange(-6 * 2**bits, 6 * 2**bits + 1)
    expected = size * np.diff(stats.norm.cdf(edges / 2**bits))
    counts = np.bincount(found + 6 * 2**bits, minlength=expected.size)
    large = expected > 10
    counts, expected = (np.append(a[large], a[~large].sum()) for a in (counts, expected))
    assert stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > 1e-4


def test_moments_tails_and_independence():
    size = 900_000
    x = (floor_gaussian(20, size, Stream(7)) + 0.5) / 2**20
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(np.mean(x**power) - moment) < 5 * np.sqrt(variance / size)
    for z in (2, 3, 4):
        rare = 2 * stats.norm.sf(z)
        assert abs(np.mean(np.abs(x) > z) - rare) < 5 * np.sqrt(rare / size)
    assert stats.kstest(x, "norm").pvalue > 1e-4
    assert abs(np.corrcoef(x[1:], x[:-1])[0, 1]) < 5 / np.sqrt(size)


def test_samples_depend_on_the_bytes_alone():
    """Not on chunks; and a finer grid only adds bits."""
    whole = floor_gaussian(20, 5000, Stream(1))
    for chunk in (1, 7, 1000):
        np.testing.assert_array_equal(floor_gaussian(20, 5000, Stream(1), chunk=chunk), whole)
    np.testing.assert_array_equal(floor_gaussian(3, 5000, Stream(1)), whole >> 17)
    assert np.any(floor_gaussian(20, 5000, Stream(2)) != whole)
    assert np.any(floor_gaussian(20, 5000) != floor_gaussian(20, 5000))  # the operating system's bytes
    stream = Stream(1)
    floor_gaussian(20, 5000, stream)
    assert stream.at >= 16 * 5000  # 128 bits for every number: no key stands behind them


def test_floats_decide_nothing_that_exact_arithmetic_decides_differently():
    """With a huge error bound every case goes the exact way."""
    np.testing.assert_array_equal(floor_gaussian(20, 2000, Stream(3), error=2.0), floor_gaussian(20, 2000, Stream(3)))


@pytest.mark.parametrize("x", [12345 * 2**40, -(2**58) - 3, 5 * 2**57 + 1, -1])
def test_undecided_cases_draw_more_bits(x):
    """rest + u < T exp(−x²/2) where the rest is the integer below: only u decides, against 80 digits."""
    top = gaussian._staircase()[0]
    with decimal.localcontext(prec=80):
        height = top * (-((decimal.Decimal(x) / 2**58) ** 2) / 2).exp()
        rest = int(height)
        fraction = height - rest
        drawn = []

        def source(u):
            def give(count):  # no more bits of x, so that it is as given; then the bits of u
                drawn.append(count)
                word = int(u * 2 ** (64 * len(drawn))) % 2**64
                return word.to_bytes(8, "little") + bytes(8)

            return give

        for shift in (decimal.Decimal("1e-25"), decimal.Decimal("1e-15")):
            above, below = fraction + shift, fraction - shift
            if above < 1:
                assert not gaussian._below(rest, x, top, source(above))
            drawn.clear()
            if below > 0:
                assert gaussian._below(rest, x, top, source(below))
                assert len(drawn) >= 1
            drawn.clear()
    assert gaussian._below(rest - 1, x, top, source(0)) or rest == 0
    assert not gaussian._below(rest + 1, x, top, source(0))


def test_the_error_bound_of_floats_holds_everywhere():
    """T exp(−x²/2) of floats against 60 digits, at random positions: the difference is far below the bound."""
    top, rng = gaussian._staircase()[0], np.random.default_rng(0)
    x = rng.integers(-12 * 2**58, 12 * 2**58, 2000)
    told = top * np.exp(-0.5 * (x * 2.0**-58) ** 2)
    with decimal.localcontext(prec=60):
        true = [top * (-((decimal.Decimal(int(a)) / 2**58) ** 2) / 2).exp() for a in x]
        worst = max(abs(decimal.Decimal(float(t)) - e) for t, e in zip(told, true, strict=True)) / top
    assert worst < gaussian.ERROR / 500


def test_the_staircase_covers_the_curve():
    top, ends, heights, edges = gaussian._staircase()
    assert ends[-1] == heights.sum() < 2**63
    assert ends[-1] > 0.999 * 2**63  # few draws are refused
    inner = np.minimum(np.abs(edges), np.abs(edges + 1)) / 16
    curve = top * np.exp(-0.5 * inner**2)
    assert np.all(heights >= curve * (1 - 1e-13))
    assert np.all(heights <= curve * (1 + 1e-13) + 3)


def test_a_grid_too_fine_is_refused():
    with pytest.raises(ValueError, match="bits=41 must be between 0 and 40"):
        floor_gaussian(41, 1)
