"""Data sets by name. Nothing is read, downloaded or hashed before `load`."""

import inspect
from typing import Any

from fedstrata.data.sources import bundled, by_hand, clinical, credit, finance, images, libsvm
from fedstrata.data.sources.dataset import Dataset, Source
from fedstrata.errors import unknown

__all__ = ["Dataset", "Source", "available", "load"]


def available() -> dict[str, Source]:
    """Every known data set.

    >>> available()["heart_disease"].title
    'heart disease, four hospitals'
    """
    modules = (bundled, by_hand, clinical, credit, finance, images, libsvm)
    found = [source for module in modules for source in module.SOURCES]
    return {source.name: source for source in sorted(found, key=lambda source: source.name)}


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
