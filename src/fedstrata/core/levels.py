"""Levels of a nested problem, counted from 1 as papers count them, with the parameters at level 0."""

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")

ABSENT: Any = object()  # None is a value that a level may have


class Levels(Generic[T]):
    """Values of levels 1 … K, read and written as `h[k]`; `h[0]` and `h[K + 1]` exist where they are given.

    A working copy of a state's tuple: the state keeps the plain tuple, and `tuple(h)` is the next one. Writing to
    level K + 1 of a copy without `above` adds a level.

    Args:
        values: the values of levels 1 … K.
        below: the value of level 0; for estimates h of a nested problem it is x.
        above: the value of level K + 1; for products v it is None, since the last level has a gradient and no
            vector to multiply with. Iteration and `len` leave out both.

    >>> h = Levels(("mean", "variance"), below="x")
    >>> h[0], h[1], h[2], len(h)
    ('x', 'mean', 'variance', 2)
    >>> for k in range(1, 3):
    ...     h[k] = f"{h[k]} of {h[k - 1]}"
    >>> tuple(h)
    ('mean of x', 'variance of mean of x')
    """

    def __init__(self, values: Sequence[T] = (), *, below: T = ABSENT, above: Any = ABSENT):
        self._values, self._below, self._above = list(values), below, above

    @classmethod
    def from_zero(cls, values: Sequence[T], *, above: Any = ABSENT) -> "Levels[T]":
        """Levels of a tuple that begins with level 0.

        Args:
            values: the values of levels 0 … K.
            above: the value of level K + 1.

        >>> Levels.from_zero(("x", "mean"))[1]
        'mean'
        """
        below, *rest = values
        return cls(rest, below=below, above=above)

    def __getitem__(self, level: int) -> T:
        count = len(self._values)
        if 1 <= level <= count:
            return self._values[level - 1]
        outside = {0: self._below, count + 1: self._above}.get(level, ABSENT)
        if outside is ABSENT:
            raise IndexError(f"there is no level {level}: {self._range()}")
        return outside

    def __setitem__(self, level: int, value: T) -> None:
        count = len(self._values)
        if 1 <= level <= count:
            self._values[level - 1] = value
        elif level == count + 1 and self._above is ABSENT:
            self._values.append(value)
        else:
            raise IndexError(f"level {level} cannot be written: {self._range()}")

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[T]:
        return iter(self._values)

    def __repr__(self) -> str:
        given = {"below": self._below, "above": self._above}
        outside = [f", {name}={value!r}" for name, value in given.items() if value is not ABSENT]
        return f"Levels({tuple(self._values)!r}{''.join(outside)})"

    def _range(self) -> str:
        return f"these are levels 1 to {len(self._values)}" if self._values else "there are none"
