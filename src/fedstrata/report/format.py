"""Numbers as text: bytes, times, means with their spread."""

import math

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def byte_unit(count: float) -> tuple[float, str]:
    """The decimal unit in which a number of bytes reads best, and its size.

    >>> byte_unit(1_600)
    (1000.0, 'kB')
    """
    power = 0
    while power < len(_BYTE_UNITS) - 1 and float(f"{abs(count) / 1000**power:.3g}") >= 1000:
        power += 1
    return 1000.0**power, _BYTE_UNITS[power]


def human_bytes(count: float) -> str:
    """A number of bytes in its best unit.

    >>> human_bytes(0), human_bytes(999), human_bytes(1_624), human_bytes(999_999)
    ('0 B', '999 B', '1.62 kB', '1 MB')
    """
    size, unit = byte_unit(count)
    return f"{count / size:.3g} {unit}"


def human_seconds(seconds: float) -> str:
    """A time in its best unit.

    >>> human_seconds(0.0123), human_seconds(12.34), human_seconds(125), human_seconds(7_384)
    ('12.3 ms', '12.3 s', '2 min 05 s', '2 h 03 min')
    """
    if not math.isfinite(seconds):
        return "unknown"
    if round(seconds, 3) < 1:
        return f"{seconds * 1e3:.3g} ms"
    if round(seconds, 1) < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def human_number(value: float, digits: int = 4) -> str:
    """A number with a few digits; NaN is "diverged".

    >>> human_number(0.123456), human_number(12), human_number(1.5e-7), human_number(float("nan"))
    ('0.1235', '12', '1.5e-07', 'diverged')
    """
    if math.isnan(value):
        return "diverged"
    if float(value).is_integer() and abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def plus_minus(mean: float, std: float) -> str:
    """A mean and its spread, to the precision of the spread rounded to two digits.

    >>> plus_minus(0.123456, 0.0123), plus_minus(1234.5, 56.7), plus_minus(2.0, 0.0)
    ('0.123 ± 0.012', '1234 ± 57', '2')
    >>> plus_minus(1.234e-7, 2.5e-9)
    '(1.234 ± 0.025)e-07'
    """
    if not (math.isfinite(mean) and math.isfinite(std)) or std == 0:
        return human_number(mean)
    largest = max(abs(mean), std)
    if not 1e-4 <= largest < 1e6:
        power = math.floor(math.log10(largest))
        return f"({_aligned(mean / 10.0**power, std / 10.0**power)})e{power:+03d}"
    return _aligned(mean, std)


def _aligned(mean: float, std: float) -> str:
    exponent = int(f"{std:.1e}".split("e")[1])  # after rounding, so that 0.0996 counts as 0.10
    decimals = min(max(1 - exponent, 0), 6)
    return f"{mean:.{decimals}f} ± {std:.{decimals}f}"
