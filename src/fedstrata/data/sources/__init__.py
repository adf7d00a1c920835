"""Data sets by name. Nothing is read, downloaded or hashed before `load`."""

import inspect
from typing import Any

from fedstrata.data.sources import bundled, by_hand, clinical, credit, finance, images, libsvm, store
from fedstrata.data.sources.dataset import Dataset, Source
from fedstrata.errors import unknown

__all__ = ["Dataset", "Source", "available", "load", "status", "where"]


def available() -> dict[str, Source]:
    """Every known data set.

    >>> available()["heart_disease"].title
    'heart disease, four hospitals'
    """
    modules = (bundled, by_hand, clinical, credit, finance, images, libsvm)
    found = [source for module in modules for source in module.SOURCES]
    return {source.name: source for source in sorted(found, key=lambda source: source.name)}


def status(name: str | None = None, *, verify: bool = False) -> list[store.Status]:
    """One row per file of a data set, or of all: those with an address or a checksum, and those to be put by hand."""
    rows = [*store.status(verify=verify), *map(by_hand.status, by_hand.FILES)]
    return [row for row in rows if name in (None, row.source)]


def where(name: str) -> str:
    """Where the files of a data set are, in words.

    >>> where("iris")
    'built in'
    """
    rows = status(name)
    here = sum(row.where != "missing" for row in rows)
    if not rows:
        return "built in"
    if here == len(rows):
        return "here"
    return "to be put by hand" if name in by_hand.FILES else f"{here} of {len(rows)} here" if here else "not here"


def load(name: str, /, **options: Any) -> Dataset:
    """The arrays of a data set; options are those of its loader, e.g. `load("mnist", flat=True)`.

    >>> load("iris").train["x"].shape
    (150, 4)
    """
    known = available()
    if name not in known:
        raise unknown("data set", name, known)
    accepted = list(inspect.signature(known[name].load).parameters)
    for option in options:
        if option not in accepted:
            raise unknown(f"option of data set {name!r}:", option, accepted)
    return known[name].load(**options)
