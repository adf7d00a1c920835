"""Texts from a peer, made safe for a line of a log or an error."""

import re
from collections.abc import Sequence

# Controls, line and paragraph separators, marks and overrides of the writing direction, lone surrogates.
_CONTROLS = re.compile("[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def one_line(text: object, longest: int = 300) -> str:
    r"""A text as one line of printable characters; all others are escaped, as in `repr`. A long text is cut.

    Args:
        text: any text; other objects are converted with `str`.
        longest: the most characters of the result.

    >>> one_line("not finite\n2026-01-01 all sites replied \x1b[2K\u202e")
    'not finite\\n2026-01-01 all sites replied \\x1b[2K\\u202e'
    >>> one_line("a" * 1000, longest=8)
    'aaaaaaa…'
    """
    given = str(text)
    shown = "".join(c if c.isprintable() else _escaped(c) for c in given[: longest + 1])
    return shown if len(shown) <= longest else shown[: max(longest - 1, 0)] + "…"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def has_controls(text: str) -> bool:
    r"""Whether a text has control characters, line separators, direction marks or lone surrogates.

    Args:
        text: any text.

    >>> has_controls("Krankenhaus Köln, Nord"), has_controls("Ulm\r\n"), has_controls("\ud800")
    (False, True, True)
    """
    return _CONTROLS.search(text) is not None


def listed(texts: Sequence[str], most: int = 10) -> str:
    """The first of some texts, and how many others there are.

    Args:
        texts: any texts.
        most: how many are listed.

    >>> listed(["Ulm", "Bonn", "Kiel", "Jena"], most=2)
    'Ulm, Bonn and 2 more'
    """
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")
