"""The trap of local pairs: a reading that is clean inside every site, and offset between sites."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedstrata.data.federation import Federation


def offset_sites(seed: int = 0, patients: int = 300, sites: int = 2, offset: float = 6.0) -> "Federation":
    """Sites whose patients (half of them ill, y = 1) have two readings.

    The first, "laboratory", is almost free of noise, but every site's device shows `offset` more than that of the site
    before: inside a site it ranks nearly all pairs correctly, across sites the offset decides. The second, "clinic", is
    noisy and calibrated equally everywhere; ranking by it alone gives an AUC of 0.93.

    A method that compares only patients of one site relies on the laboratory. With two sites this ranks three of the
    four kinds of pairs correctly, but the ill at the lower site below the healthy at the other: an AUC of 0.75.

    >>> offset_sites(patients=10)["train"].counts.tolist()
    [10, 10]

    Args:
        seed: the seed of the readings.
        patients: of each site.
        sites: how many.
        offset: the difference between the laboratory readings of a site and of the site before.
    """
    import numpy as np

    from fedstrata.data import Federation

    if patients < 2 or sites < 1:
        raise ValueError(f"offset_sites: patients={patients} must be at least 2, sites={sites} at least 1")
    rng = np.random.default_rng(seed)
    parts = []
    for site in range(sites):
        ill = np.arange(patients) % 2
        laboratory = 2.0 * ill + 0.5 * rng.normal(size=patients) + offset * (site - (sites - 1) / 2)
        clinic = 2.1 * ill + rng.normal(size=patients)
        parts.append({"x": np.column_stack([laboratory, clinic]), "y": ill})
    names = [f"site {site + 1}" for site in range(sites)]
    return Federation.from_clients(parts, names=names, classes=2, features=("laboratory", "clinic"))
