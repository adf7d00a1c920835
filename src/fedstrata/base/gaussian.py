"""Exact samples of ⌊2^s G⌋, G a standard Gaussian, from random bytes: no rounding of a float decides an outcome.

Rejection from a staircase of 960 strips, each 1/16 wide, over [−30, 30). A strip is drawn in proportion to its height,
an integer that is at least T exp(−x²/2) in the whole strip; the remainder r of that draw is uniform below the height. A
position x is drawn uniformly in the strip, and kept if r + u < T exp(−x²/2), where u is uniform in [0, 1). Of x, 58
bits after the point are drawn, and none of u. Floats decide only where their error cannot matter. Otherwise intervals
of decimals do, with more and more bits of x and u. The kept x has the density of a Gaussian.

The Gaussian is cut at 30 standard deviations. Where two neighbours' releases can both occur, the ratio of their chances
is that of uncut ones. The rest, values that one neighbour alone can release, has a chance of at most Φ(s − 30) for a
change of s standard deviations, and d Φ(−30) < d × 5e-198 for the other numbers: δ grows by that (`beyond_the_cut`).
"""

import decimal
import functools
import math
import secrets
from collections.abc import Callable

import numpy as np

Source = Callable[[int], bytes]  # that many random bytes

CUT = 30  # standard deviations; positions up to 32 fit 63 bits
STRIPS = 16  # in one standard deviation
_PLACE = 54  # bits of the position within a strip, drawn at once
_POINT = _PLACE + 4  # bits after the point of a position: a strip is 2⁻⁴ wide
# Of T exp(−x²/2) in float64, relative to T: x² / 2 is wrong by less than x² × 2⁻⁵¹, where exp(−x²/2) is tiny; the
# product x² exp(−x²/2) is at most 0.74. With exp itself, r and T rounded, less than 2⁻⁴⁹ is left. The rest is margin.
ERROR = 2.0**-40
_MORE = 8  # further bytes of x and of u


def beyond_the_cut(shift: float) -> float:
    """A bound of the chance of a release that is impossible for a neighbour, because the Gaussian is cut.

    Args:
        shift: the largest change between neighbours, in standard deviations.
    """
    return 0.5 * math.erfc((CUT - shift) / math.sqrt(2))


def floor_gaussian(
    bits: int, size: int, source: Source = secrets.token_bytes, *, chunk: int = 2**18, error: float = ERROR
) -> np.ndarray:
    """`size` independent samples of ⌊2^bits G⌋, as int64.

    Args:
        bits: the standard deviation is 2^bits; 0 to 40.
        size: how many.
        source: of random bytes; by default the operating system's generator.
        chunk: proposals at a time, which bounds the memory; the samples do not depend on it.
        error: of a comparison of floats, relative to T; a larger one only sends more cases to exact arithmetic.
    """
    if not 0 <= bits <= 40:
        raise ValueError(f"floor_gaussian: bits={bits} must be between 0 and 40")
    out, done = np.empty(size, np.int64), 0
    while done < size:
        kept = _positions(min(chunk, 16 + (size - done) * 21 // 20), source, error)[: size - done]
        out[done : done + kept.size] = kept >> (_POINT - bits)  # of negative numbers, too, a shift is a floor
        done += kept.size
    return out


def _positions(proposals: int, source: Source, error: float) -> np.ndarray:
    """The positions that are kept, in units of 2⁻⁵⁸."""
    top, ends, heights, edges = _staircase()
    words = np.frombuffer(source(16 * proposals), "<u8").reshape(-1, 2)
    draw = words[:, 0] >> np.uint64(1)
    inside = draw < np.uint64(ends[-1])
    draw, place = draw[inside].astype(np.int64), (words[inside, 1] >> np.uint64(64 - _PLACE)).astype(np.int64)
    strip = np.searchsorted(ends, draw, side="right")
    rest, x = draw - (ends[strip] - heights[strip]), edges[strip] * 2**_PLACE + place
    gap = top * np.exp(-0.5 * (x * 2.0**-_POINT) ** 2) - rest
    keep = gap > 0
    for i in np.flatnonzero(np.abs(gap) <= error * top + 2):  # u adds up to 1 to the rest
        keep[i] = _below(int(rest[i]), int(x[i]), top, source)
    return x[keep]


@functools.cache
def _staircase() -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """T, the cumulative heights, the heights, and the left edges in strips; all heights together just fit 63 bits."""
    edges = np.arange(-CUT * STRIPS, CUT * STRIPS)
    nearest = [int(e) if e >= 0 else int(-e - 1) for e in edges]  # the end of the strip that is nearer to zero
    with decimal.localcontext(prec=60):
        curve = [(-((decimal.Decimal(n) / STRIPS) ** 2) / 2).exp() for n in nearest]
        top = int((2**63 - 10**6) / sum(curve))
        heights = np.array([int(top * c) + 2 for c in curve], np.int64)  # at least the curve, also if c is rounded
    return top, np.cumsum(heights), heights, edges


def _below(rest: int, x: int, top: int, source: Source) -> bool:
    """Whether rest + u < T exp(−x²/2), exactly; bits of x and u are drawn until it is decided."""
    u, bits = 0, 0
    while True:
        scale = 2**bits
        with decimal.localcontext(prec=60 + bits):
            near, far = sorted((abs(x), abs(x + 1)))  # x is in [x, x + 1) of its last bit, on one side of zero
            curve = lambda n, s=scale: top * (-((decimal.Decimal(n) / (s * 2**_POINT)) ** 2) / 2).exp()
            slack = top * decimal.Decimal(10) ** (-50 - bits)
            if rest + decimal.Decimal(u + 1) / scale <= curve(far) - slack:
                return True
            if rest + decimal.Decimal(u) / scale >= curve(near) + slack:
                return False
        more = int.from_bytes(source(2 * _MORE), "little")
        bits += 8 * _MORE
        x, u = x * 2 ** (8 * _MORE) + (more >> (8 * _MORE)), u * 2 ** (8 * _MORE) + more % 2 ** (8 * _MORE)
