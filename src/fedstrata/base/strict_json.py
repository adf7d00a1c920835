"""JSON from a peer: whole numbers, texts, lists and objects, within limits that are checked before any work."""

import contextlib
import gc
import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from fedstrata.base.text import one_line

LONGEST = 2**20  # bytes of a JSON text
VALUES = 100_000  # commas in it, which bound its values
KEYS = 20_000  # colons in it, which bound the keys of its objects
DIGITS = 19  # of a number, its sign not counted

_LONG = re.compile(rf"[0-9]{{{DIGITS + 1},}}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PAIR = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..")


def loads(data: bytes | str, objects: int = 0, *, values: int = VALUES, keys: int = KEYS) -> Any:
    """The value of a JSON text. Fractions, NaN, repeated keys and lone surrogates are refused.

    Args:
        data: the text, in UTF-8 if it is bytes.
        objects: the most objects in it.
        values: the most commas in it.
        keys: the most colons in it.

    Raises:
        ValueError: the text is malformed, or beyond a limit.

    >>> loads(b'[["x", "float64", [3]]]')
    [['x', 'float64', [3]]]
    >>> loads('{"seed": 1' + "0" * 30 + "}", objects=1)
    Traceback (most recent call last):
    ValueError: a number of 31 digits, and at most 19 are allowed
    """
    text = check(data, values=values, keys=keys)
    left = objects

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"more than {objects} objects")
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a repeated key")
        return found

    # Python's own parser of numbers is three times as fast as one of ours, and takes any number of digits.
    if _LONG.search(text) and (digits := _digits_beyond_limit(text)):
        raise ValueError(f"a number of {digits} digits, and at most {DIGITS} are allowed")
    try:
        with _collector_paused():
            return json.loads(text, parse_float=_refuse, parse_constant=_refuse, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("lists nested too deeply") from None


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Many small lists start the garbage collector, which then walks through all objects of the process.

    With JAX imported that takes 0.1 s, twenty times as long as the parsing. Values of JSON have no cycles to collect.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def check(data: bytes | str, *, values: int = VALUES, keys: int = KEYS) -> str:
    """The text, if it is within the limits on its length and values and has no lone surrogates.

    Args:
        data: the text, in UTF-8 if it is bytes.
        values: the most commas in it.
        keys: the most colons in it.

    Raises:
        ValueError: it is not.
    """
    if len(data) > LONGEST:
        raise ValueError(f"{len(data):,} bytes of JSON, and at most {LONGEST:,} are allowed")
    try:
        raw = data.encode() if isinstance(data, str) else data
        text = raw.decode()
    except UnicodeError:
        raise ValueError("text that is not valid Unicode") from None
    for mark, most, what in ((b",", values, "values"), (b":", keys, "keys")):
        if raw.count(mark) > most:
            raise ValueError(f"more than {most:,} {what}")
    if _SURROGATE.search(raw) and _SURROGATE.search(_PAIR.sub(b"", raw.replace(rb"\\", b""))):
        raise ValueError("text that is not valid Unicode")
    return text


def _digits_beyond_limit(text: str) -> int:
    """The digits of the first number with too many of them; 0 if there is none.

    Digits in a string do not count. They come after an odd number of quotes, if escaped ones are left out. In a text
    that is no JSON this holds up to its first mistake, where the parser stops.
    """
    plain = text.replace("\\\\", "  ").replace('\\"', "  ")
    quotes = end = 0
    for run in _LONG.finditer(plain):
        quotes += plain.count('"', end, run.start())
        end = run.start()
        if quotes % 2 == 0:
            return len(run[0])
    return 0


def _refuse(number: str) -> NoReturn:
    raise ValueError(f"{one_line(number, 40)} is not a whole number")
