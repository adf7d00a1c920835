"""Texts from a peer, made safe for a line of a log or an error."""

import re
import unicodedata
from collections.abc import Sequence

# Controls, line and paragraph separators, marks and overrides of the writing direction, lone surrogates.
_CONTROLS = re.compile("[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")

# Letters without a shape, and marks that choose or join shapes: they are printable, and nobody sees them.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
LONGEST_NAME = 128  # characters of the name of a site, a run or a column


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


def check_plain_name(what: str, name: str) -> None:
    r"""Refuse a name with unseen or compatibility characters, or that looks like several entries of a list.

    Letters of different alphabets that look alike are not compared.

    Args:
        what: it names, for the error.
        name: any text.

    >>> check_plain_name("site", "Krankenhaus Köln-Nord (2)")
    >>> check_plain_name("site", "north\u200b")
    Traceback (most recent call last):
    ValueError: the name of a site must not have characters that cannot be seen, as in 'north\u200b'
    """
    wrong = ""
    if not 0 < len(name) <= LONGEST_NAME:
        wrong = f"be empty, or longer than {LONGEST_NAME} characters"
    elif name != name.strip() or "  " in name:
        wrong = "begin or end with a space, or have several in a row"
    elif not name.isprintable() or _UNSEEN.search(name):
        wrong = "have characters that cannot be seen"
    elif name != unicodedata.normalize("NFKC", name):
        wrong = f"have characters that look like others: write {unicodedata.normalize('NFKC', name)!r}"
    elif set(name) & set(",:;"):
        wrong = "have a comma, a colon or a semicolon"
    if wrong:
        raise ValueError(f"the name of a {what} must not {wrong}, as in {name[:LONGEST_NAME]!a}")


def listed(texts: Sequence[str], most: int = 10) -> str:
    """The first of some texts, and how many others there are.

    Args:
        texts: any texts.
        most: how many are listed.

    >>> listed(["Ulm", "Bonn", "Kiel", "Jena"], most=2)
    'Ulm, Bonn and 2 more'
    """
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")
