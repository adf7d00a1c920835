"""Papers by key, from `papers.bib`: beside the package where it was installed, in `docs` in a checkout."""

import re
from functools import cache
from pathlib import Path

_ACCENTS = {r"\"u": "ü", r"\"o": "ö", r"\"a": "ä", r"\v{c}": "č", r"\'y": "ý", r"\'e": "é", r"\'a": "á", r"\v{r}": "ř"}


def citation(key: str) -> str | None:
    """A citation in one line, or None if the key or the file does not exist.

    Args:
        key: of the paper.
    """
    entry = entries().get(key)
    if entry is None:
        return None
    names = [name.split(",")[0].strip() for name in entry.get("author", "").split(" and ")]
    authors = (
        names[0] + " et al." if len(names) > 3 else " and ".join([", ".join(names[:-1]), names[-1]][len(names) < 2 :])
    )
    arxiv = f"arXiv:{entry['eprint']}" if "eprint" in entry else ""
    place = entry.get("booktitle") or entry.get("journal") or arxiv
    return f"{authors} ({entry.get('year', 'n.d.')}). {entry.get('title', '')}." + (f" {place}." if place else "")


def link(key: str) -> str | None:
    entry = entries().get(key, {})
    if "doi" in entry:
        return f"https://doi.org/{entry['doi']}"
    return f"https://arxiv.org/abs/{entry['eprint']}" if "eprint" in entry else None


@cache
def entries() -> dict[str, dict[str, str]]:
    """Every entry of the file, its fields without LaTeX; empty if there is no file."""
    package = Path(__file__).resolve().parents[1]
    places = [package / "papers.bib", package.parents[1] / "docs" / "papers.bib"]
    path = next((place for place in places if place.is_file()), None)
    return {} if path is None else parse(path.read_text(encoding="utf-8"))


def parse(text: str) -> dict[str, dict[str, str]]:
    r"""A BibTeX file whose fields have a line each, in braces.

    >>> parse("@misc{a2020,\n  author = {K{\\\"u}hn, A.},\n  year = {2020}\n}\n")
    {'a2020': {'author': 'Kühn, A.', 'year': '2020'}}

    Args:
        text: the file.
    """
    out = {}
    for key, body in re.findall(r"^@\w+\{([\w:-]+),\n(.*?)^\}", text, flags=re.DOTALL | re.MULTILINE):
        fields = re.findall(r"^\s*(\w+)\s*=\s*\{(.*)\},?\s*$", body, flags=re.MULTILINE)
        out[key] = {name.lower(): _plain(value) for name, value in fields}
    return out


def _plain(text: str) -> str:
    for accent, letter in _ACCENTS.items():
        text = text.replace(accent, letter)
    return re.sub(r"[{}]", "", text).replace("--", "–")
