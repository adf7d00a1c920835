"""Formatting: printed text reads back as the number, to the digits that it shows."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.report.format import human_bytes, human_number, human_seconds, plus_minus

SIZES = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}


@given(st.integers(0, 10**17))
def test_bytes_read_back_within_three_digits(count):
    number, unit = human_bytes(count).split()
    assert float(number) * SIZES[unit] == pytest.approx(count, rel=5.1e-3)
    assert float(number) < 1000


@given(st.floats(1e-6, 1e6))
def test_seconds_read_back(seconds):
    sizes = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
    text = human_seconds(seconds)
    value = sum(float(n) * sizes[unit] for n, unit in re.findall(r"([\d.e+-]+) (ms|s|min|h)", text))
    resolution = 60 if " h " in text else 1 if " min " in text else 0
    assert value == pytest.approx(seconds, rel=5.1e-3, abs=resolution)
    assert "60 s" not in text
    assert " 60 min" not in text


@given(st.floats(-1e300, 1e300))
def test_numbers_keep_four_digits(value):
    assert float(human_number(value)) == pytest.approx(value, rel=5.1e-4)


@given(st.floats(-1e9, 1e9), st.floats(1e-9, 1e9))
def test_plus_minus_digits_match(mean, std):
    match = re.fullmatch(r"\(?(-?[\d.]+) ± ([\d.]+)\)?(e[+-]\d+)?", plus_minus(mean, std))
    assert match is not None
    left, right, power = match.groups()
    scale = float(f"1{power or ''}")
    assert len(left.partition(".")[2]) == len(right.partition(".")[2])
    # Two digits of the spread, or six decimals of the leading number, whichever is coarser.
    step = max(0.051 * std, 5.1e-7 * scale)
    assert abs(float(right) * scale - std) <= max(step, 0.51 * scale * (std >= scale))
    assert abs(float(left) * scale - mean) <= max(step, 0.51 * scale * (std >= scale))


def test_special_values():
    assert human_number(float("nan")) == "diverged"
    assert plus_minus(float("nan"), 1.0) == "diverged"
    assert plus_minus(float("inf"), float("nan")) == "inf"
    assert plus_minus(3.0, 0.0) == "3"
    assert human_seconds(float("inf")) == "unknown"
