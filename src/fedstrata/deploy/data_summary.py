"""What a site reports of its data before a run: sizes, shapes, and what identifies them. No example, no value."""

import functools
import hmac
import importlib.metadata
import math
import platform
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedstrata import __version__
from fedstrata.base import strict_json
from fedstrata.base.errors import unknown
from fedstrata.base.text import LONGEST_NAME, check_plain_name, one_line
from fedstrata.data.federation import Federation
from fedstrata.data.validation import numbered
from fedstrata.engine.codec import DTYPES

Shapes = dict[str, tuple[str, list[int]]]  # by column: dtype and shape of one example

# Limits on a summary that another party sent. They are far above what a site needs.
MOST_SPLITS, MOST_COLUMNS, MOST_DIMENSIONS = 64, 1024, 16
LARGEST_EXAMPLE = 2**31  # bytes


class DataSummary(NamedTuple):
    """Sizes and shapes of one site's data, by split. It travels as JSON, its fields in this order."""

    site: str
    counts: dict[str, int]
    shapes: dict[str, Shapes]
    data: str = ""  # changes when a value changes; computed with a secret of the site, so it confirms no guess
    key: str = ""  # a hash of the site's public key; in a run without keys, of its state folder's mark
    versions: Mapping[str, str] = {}

    @classmethod
    def of(cls, site: str, data: Federation, *, secret: bytes = b"", key: str = "") -> "DataSummary":
        """The summary of a site's data.

        Args:
            site: its name.
            data: a federation of one client, the site.
            secret: of the site, for the hash of the data; without one there is no hash.
            key: the hash of the site's public key.
        """
        if data.clients != 1:
            raise ValueError(f"{site}: a site is one client, and its data have {data.clients}; load this site's alone")
        counts, shapes = {}, {}
        for name, split in data.splits.items():
            if not isinstance(split.examples, Mapping) or not all(hasattr(a, "dtype") for a in split.examples.values()):
                raise ValueError(f"{site}, split {name!r}: examples must be a dictionary of arrays")
            numbered(split.size, f"{site}, split {name!r}")
            counts[name] = int(split.size)
            shapes[name] = {c: (str(a.dtype), list(a.shape[1:])) for c, a in sorted(split.examples.items())}
            for column, (dtype, _) in shapes[name].items():
                if dtype not in DTYPES:
                    raise unknown(f"type of {site}, split {name!r}, column {column!r}:", dtype, DTYPES)
        values = hmac.new(secret, data.fingerprint().encode(), sha256).hexdigest()[:32] if secret else ""
        return cls(site, counts, shapes, values, key, versions() if secret else {})

    @classmethod
    def decode(cls, text: str) -> "DataSummary":
        """The summary in a text that another party sent.

        Raises:
            ValueError: it is malformed.
        """
        return cls.checked(strict_json.loads(text, objects=MOST_SPLITS + 3))

    @classmethod
    def checked(cls, row: Any) -> "DataSummary":
        """The summary in these JSON values; a ValueError if they are malformed."""
        if not isinstance(row, list) or len(row) != len(cls._fields):
            raise ValueError("a data summary of another form: do the site and the server have the same release?")
        site, counts, shapes, data, key, about = row
        for what, text in (("site", site), ("data", data), ("key", key)):
            _name(what, text, least=int(what == "site"))
        check_plain_name("site", site)
        for name, value in _mapping("versions", about, MOST_SPLITS).items():
            _name(f"version of {name!r}", value)
        rows = _mapping("counts", counts, MOST_SPLITS)
        columns = _mapping("shapes", shapes, MOST_SPLITS)
        if rows.keys() != columns.keys() or "train" not in rows:
            raise ValueError('counts and shapes must have the same splits, with "train"')
        for split, count in rows.items():
            numbered(_whole(f"rows of split {split!r}", count), f"{site}, split {split!r}")
        if sum(len(value) for value in columns.values() if isinstance(value, dict)) > MOST_COLUMNS:
            raise ValueError(f"more than {MOST_COLUMNS} columns in all splits together")
        found = {split: _columns(split, value) for split, value in columns.items()}
        return cls(site, dict(rows), found, data, key, dict(about))

    def difference(self, now: "DataSummary") -> str:
        """What has changed between this summary and a later one, in words; empty if nothing has."""
        if self.site != now.site:
            return f"its name: {self.site!r} then, {now.site!r} now"
        if self.shapes != now.shapes:
            return f"its columns: {differing_shapes(self._replace(site='then'), now._replace(site='now'))}"
        for split, rows in now.counts.items():
            if rows != self.counts.get(split):
                return f"its rows: split {split!r} had {self.counts.get(split)}, and has {rows} now"
        if list(self.counts) != list(now.counts):  # evaluations name splits by their place
            return f"the order of its splits: {', '.join(self.counts)} then, {', '.join(now.counts)} now"
        if self.data != now.data:
            return "its values (the numbers of rows are the same)"
        if self.key != now.key:
            return "its key"
        for name in sorted({*self.versions, *now.versions}):
            then, later = self.versions.get(name, "none"), now.versions.get(name, "none")
            if then != later:
                return f"its version of {name}: {then} then, {later} now"
        return ""


def versions() -> dict[str, str]:
    """What the numbers of this process depend on, besides data and code."""
    found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy", "equinox", "optax")}
    python = ".".join(platform.python_version_tuple()[:2])
    precision = "64-bit" if jax.numpy.zeros(()).dtype.itemsize == 8 else "32-bit"
    return {"fedstrata": library(), **found, "python": python, "floats": precision, "device": jax.default_backend()}


@functools.cache
def library() -> str:
    """The version of this library, and a hash of its sources: those of a checkout change while its version stays."""
    root, digest = Path(__file__).parents[1], sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root).as_posix()}\0".encode() + sha256(file.read_bytes()).digest())
    return f"{__version__} ({digest.hexdigest()[:8]})"


def differing_shapes(a: DataSummary, b: DataSummary) -> str:
    """Where the shapes of two sites differ first, in words."""
    for split in sorted({*a.shapes, *b.shapes}):
        of_a, of_b = a.shapes.get(split), b.shapes.get(split)
        if of_a is None or of_b is None:
            return f"only {(a if of_b is None else b).site} has a split {split!r}"
        for column in sorted({*of_a, *of_b}):
            if of_a.get(column) != of_b.get(column):
                return f"in split {split!r}, column {column!r} is {of_b.get(column)} and not {of_a.get(column)}"
    return "nothing"


def _name(what: str, text: Any, least: int = 0) -> None:
    if not isinstance(text, str) or not least <= len(text) <= LONGEST_NAME or not text.isprintable():
        raise ValueError(f"{what} must be a text of at most {LONGEST_NAME} printable characters")


def _mapping(what: str, value: Any, most: int) -> Mapping[str, Any]:
    if not isinstance(value, dict) or len(value) > most:
        raise ValueError(f"{what} must be a dictionary of at most {most} entries")
    for name in value:
        _name(f"a name in {what}", name)
    return value


def _whole(what: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{what} must be a whole number ≥ 0")
    return value


def _columns(split: str, value: Any) -> Shapes:
    found: Shapes = {}
    for column, about in _mapping(f"columns of split {split!r}", value, MOST_COLUMNS).items():
        if not isinstance(about, list | tuple) or len(about) != 2 or not isinstance(about[1], list):
            raise ValueError(f"split {split!r}, column {column!r}: not a type and a shape")
        dtype, shape = about
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise unknown(f"type of split {split!r}, column {column!r}:", one_line(dtype, 40), DTYPES)
        if len(shape) > MOST_DIMENSIONS:
            raise ValueError(f"split {split!r}, column {column!r}: more than {MOST_DIMENSIONS} dimensions")
        for size in shape:
            if _whole(f"shape of split {split!r}, column {column!r}", size) > LARGEST_EXAMPLE:
                raise ValueError(f"split {split!r}, column {column!r}: an example is too large")
        if math.prod(max(size, 1) for size in shape) * DTYPES[dtype].itemsize > LARGEST_EXAMPLE:
            raise ValueError(f"split {split!r}, column {column!r}: an example is larger than {LARGEST_EXAMPLE} bytes")
        found[column] = (dtype, list(shape))
    return found
