"""Docstrings of Google's style as data: summary, paragraphs, bullets, and sections such as `Args:`."""

import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple


class Docstring(NamedTuple):
    """The parts of a docstring. Lines are joined, and the text itself is left as it is."""

    summary: str
    paragraphs: tuple[str, ...]
    bullets: tuple[str, ...]  # those outside sections
    sections: dict[str, tuple[str, ...]]  # by title; their lines, without the common indent

    def arguments(self) -> dict[str, str]:
        """The text of each name in `Args:`; `a, b: text` describes both."""
        found: dict[str, str] = {}
        for entry in _entries(self.sections.get("Args", ())):
            names, colon, text = entry.partition(":")
            if colon:
                found |= {name.strip().lstrip("*"): text.strip() for name in names.split(",")}
        return found

    def items(self, title: str) -> list[str]:
        """The bullets of a section; a section without bullets is one item.

        Args:
            title: the section's title, without the colon.
        """
        return [entry.removeprefix("- ") for entry in _entries(self.sections.get(title, ()), "- ")]

    def starting(self, words: str) -> str:
        """The first paragraph that starts with these words, or nothing.

        Args:
            words: the beginning.
        """
        return next((paragraph for paragraph in self.paragraphs if paragraph.startswith(words)), "")


def read(source: Any) -> Docstring:
    r"""The parts of a docstring.

    >>> parts = read("Add.\n\nMore words\nhere.\n\nArgs:\n    a: the first,\n        a number.\n    b: the second.\n")
    >>> parts.summary, parts.paragraphs, parts.arguments()
    ('Add.', ('More words here.',), {'a': 'the first, a number.', 'b': 'the second.'})

    Args:
        source: a text, or what has the docstring. An inherited one does not count.
    """
    text = source if isinstance(source, str) else getattr(source, "__dict__", {}).get("__doc__")
    lines = inspect.cleandoc(text or "").splitlines()
    summary, blocks, sections = "", [], {}
    at = 0
    while at < len(lines):
        if _is_title(lines, at):
            end = next((i for i in range(at + 1, len(lines)) if lines[i] and not lines[i].startswith(" ")), len(lines))
            inside = inspect.cleandoc("\n" + "\n".join(lines[at + 1 : end])).splitlines()
            sections[lines[at].rstrip(":")] = tuple(inside)
        else:
            end = next((i for i in range(at, len(lines)) if not lines[i].strip() or _is_title(lines, i)), len(lines))
            blocks.append(lines[at:end])
            end += end < len(lines) and not lines[end].strip()
        at = max(end, at + 1)
    blocks = [block for block in blocks if block]
    if blocks:
        summary = _joined(blocks[0])
    bullets = [point for block in blocks[1:] if block[0].startswith("- ") for point in _entries(block)]
    plain = [_joined(block) for block in blocks[1:] if not block[0].startswith("- ")]
    return Docstring(summary, tuple(plain), tuple(bullet.removeprefix("- ") for bullet in bullets), sections)


def _is_title(lines: list[str], at: int) -> bool:
    """A line at the margin that ends in a colon, after an empty line and before an indented one."""
    line = lines[at]
    if not line.endswith(":") or line.startswith((" ", "- ")) or (at > 0 and lines[at - 1].strip()):
        return False
    return at + 1 < len(lines) and lines[at + 1].startswith("    ")


def _entries(lines: Iterable[str], mark: str = "") -> list[str]:
    """Lines at the margin, each with the indented ones that continue it; with a mark only lines that start with it."""
    out: list[list[str]] = []
    for line in lines:
        begins = bool(line.strip()) and not line.startswith(" ") and (line.startswith(mark) or not out)
        if begins:
            out.append([line])
        elif out:
            out[-1].append(line)
    return [_joined(entry) for entry in out]


def _joined(lines: Iterable[str]) -> str:
    return " ".join(" ".join(lines).split())
