"""Data sets by name. Nothing is read, downloaded or hashed before `load`."""

import inspect
from typing import Any

from fedstrata.base.errors import unknown
from fedstrata.base.plugins import plugins_of
from fedstrata.data.sources import bundled, by_hand, clinical, credit, finance, images, libsvm, store
from fedstrata.data.sources.dataset import Dataset, Source

__all__ = ["Dataset", "Source", "available", "load", "missing", "status", "where"]


def available() -> dict[str, Source]:
    """Every data set by name: the library's, and those of installed packages (entry points `fedstrata.data`).

    An entry point refers to a `Source`, or to a module with some in `SOURCES`. Where names are the same, the
    library's counts.

    >>> available()["heart_disease"].title
    'heart disease, four hospitals'
    """
    modules = (bundled, by_hand, clinical, credit, finance, images, libsvm)
    ours = [source for module in modules for source in module.SOURCES]
    found = {source.name: source for source in (*plugins_of("fedstrata.data", Source, "SOURCE"), *ours)}
    return dict(sorted(found.items()))


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


def missing(name: str) -> bool:
    """Whether files of a data set have to be fetched, or put by hand, before it can be loaded.

    >>> missing("iris")
    False

    Args:
        name: the data set.
    """
    return any(row.where == "missing" for row in status(name))


def load(name: str, /, **options: Any) -> Dataset:
    """The arrays of a data set.

    Args:
        name: one of `fs.data.available()`.
        **options: those of its loader, e.g. `load("mnist", flat=True)`.

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
