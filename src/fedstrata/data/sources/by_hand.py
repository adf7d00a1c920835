"""Pictures whose files may not be redistributed or are too large: users add them by hand, and they are not checked.

Files are searched like the others, in $FEDSTRATA_DATA/NAME and in the cache. Their checksums are unknown.
"""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.data.sources import store
from fedstrata.data.sources.dataset import Dataset, Source
from fedstrata.data.sources.images import examples_of

FILES = {
    "cifar100": (
        "cifar-100-binary.tar.gz",
        "the official archive, binary version, from https://www.cs.toronto.edu/~kriz/cifar.html",
    ),
    "chestmnist": ("chestmnist.npz", "the official 28 x 28 file of MedMNIST v2, from https://medmnist.com"),
    "chexpert": (
        "consolidation.npz",
        "made by hand from CheXpert, available from https://stanfordmlgroup.github.io/competitions/chexpert after an "
        "agreement: uint8 arrays train_images, val_images and test_images of one size, and 0/1 arrays train_labels, "
        "val_labels and test_labels (Consolidation; the last 1,000 training pictures are val, the official validation "
        "set is test)",
    ),
}
MASS = 4  # the column of ChestMNIST's fourteen findings


def find(name: str) -> Path | None:
    """The path of the file of such a data set, or None."""
    folders = [folder for folder in (store.shared(), store.cache()) if folder is not None]
    paths = [folder / name / FILES[name][0] for folder in folders]
    return next((path for path in paths if path.is_file()), None)


def needed(name: str) -> Path:
    """The path of the file of such a data set; without it, an error with its origin and the folder for it."""
    path = find(name)
    if path is None:
        file, what = FILES[name]
        place = store.shared() or "$FEDSTRATA_DATA (not set)"
        raise FileNotFoundError(
            f"{name}: data absent, and it cannot be downloaded for you. Put {file} ({what}) into {place}/{name} or "
            f"{store.cache() / name}."
        )
    return path


def status(name: str) -> store.Status:
    """The status of such a file; its checksum is unknown."""
    path = find(name)
    found = ("missing", 0) if path is None else (str(path), path.stat().st_size)
    return store.Status(name, FILES[name][0], *found, "unchecked")


def _read(name: str) -> bytes:
    return needed(name).read_bytes()


def cifar100(flat: bool = False) -> Dataset:
    """60,000 pictures of a hundred classes, 32 x 32 x 3.

    Args:
        flat: whether to flatten each picture.
    """
    with tarfile.open(fileobj=io.BytesIO(_read("cifar100"))) as archive:
        parts = [_records(archive, f"cifar-100-binary/{part}.bin") for part in ("train", "test")]
    train, test = (examples_of(images, labels, flat) for images, labels in parts)
    return Dataset(train, test, classes=100)


def _records(archive: tarfile.TarFile, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Two bytes of labels, coarse and fine, and then 32 x 32 bytes of red, of green and of blue."""
    member = archive.extractfile(name)
    if member is None:
        raise ValueError(f"cifar100: there is no {name} in the archive")
    rows = np.frombuffer(member.read(), np.uint8).reshape(-1, 2 + 3072)
    return rows[:, 2:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), rows[:, 1]


def chestmnist(flat: bool = False) -> Dataset:
    """112,120 chest X-rays, 28 x 28; label 1 where a mass was found.

    Args:
        flat: whether to flatten each picture.
    """
    return _stored("chestmnist", flat, MASS)


def chexpert(flat: bool = False) -> Dataset:
    """Chest X-rays; label 1 where a consolidation was found.

    Args:
        flat: whether to flatten each picture.
    """
    return _stored("chexpert", flat, 0)


def _stored(name: str, flat: bool, column: int) -> Dataset:
    with np.load(io.BytesIO(_read(name)), allow_pickle=False) as stored:
        label: Any = lambda part: stored[f"{part}_labels"].reshape(len(stored[f"{part}_labels"]), -1)[:, column]
        part = {p: examples_of(stored[f"{p}_images"], label(p), flat) for p in ("train", "val", "test")}
    return Dataset(part["train"], part["test"], classes=2, valid=part["val"])


SOURCES = (
    Source("cifar100", "a hundred kinds of objects, 32 x 32 x 3", "Krizhevsky (2009)", "none stated", cifar100),
    Source("chestmnist", "chest X-rays with or without a mass, 28 x 28", "MedMNIST v2", "CC BY 4.0", chestmnist),
    Source("chexpert", "chest X-rays with or without a consolidation", "Irvin et al. (2019)", "research use", chexpert),
)
