"""Data sets of pictures: float32 in [0, 1], of shape (height, width, channels) or flat."""

import io

import numpy as np

from fedstrata.data.sources import store
from fedstrata.data.sources.dataset import Arrays, Dataset, Source, pick


def _idx(source: str, name: str) -> np.ndarray:
    """The format of MNIST: byte 3 is the number of axes, then their lengths, then the values."""
    raw = store.read(source, name)
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3])]
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def examples_of(images: np.ndarray, labels: np.ndarray, flat: bool) -> Arrays:
    """Bytes to numbers in [0, 1]; grey pictures get a channel axis."""
    x = images.astype(np.float32) / np.float32(255)
    x = x[..., None] if x.ndim == 3 else x
    return {"x": x.reshape(len(x), -1) if flat else x, "y": labels.reshape(-1).astype(np.int32)}


def _mnist_like(source: str, flat: bool) -> Dataset:
    parts = [
        examples_of(_idx(source, f"{p}-images-idx3-ubyte.gz"), _idx(source, f"{p}-labels-idx1-ubyte.gz"), flat)
        for p in ("train", "t10k")
    ]
    return Dataset(parts[0], parts[1], classes=10)


def mnist(flat: bool = False) -> Dataset:
    """70,000 handwritten digits, 28 x 28.

    Args:
        flat: whether to flatten each picture.
    """
    return _mnist_like("mnist", flat)


def fashion_mnist(flat: bool = False) -> Dataset:
    """70,000 pieces of clothing in ten classes, 28 x 28.

    Args:
        flat: whether to flatten each picture.
    """
    return _mnist_like("fashion_mnist", flat)


def cifar10(flat: bool = False, batches: int = 5) -> Dataset:
    """60,000 pictures of ten classes (CIFAR-10), 32 x 32 x 3.

    Args:
        flat: whether to flatten each picture.
        batches: how many of the five official train batches of 10,000 pictures to load.
    """
    if isinstance(batches, bool) or not isinstance(batches, int) or not 1 <= batches <= 5:
        raise ValueError(f"cifar10: batches={batches!r} must be a whole number from 1 to 5")
    with np.load(io.BytesIO(store.read("cifar10", "labels.npz")), allow_pickle=False) as stored:
        labels = dict(stored)
    batch = lambda name: np.load(io.BytesIO(store.read("cifar10", f"{name}.npy.xz")), allow_pickle=False)
    train = [f"data_batch_{k}" for k in range(1, batches + 1)]
    images, names = np.concatenate([batch(n) for n in train]), np.concatenate([labels[n] for n in train])
    test = examples_of(batch("test_batch"), labels["test_batch"], flat)
    return Dataset(examples_of(images, names, flat), test, classes=10)


def medmnist(name: str = "pneumoniamnist", flat: bool = False) -> Dataset:
    """Medical pictures, 28 x 28, two classes.

    Args:
        name: `pneumoniamnist` (chest X-ray) or `breastmnist` (ultrasound).
        flat: whether to flatten each picture.
    """
    pick("medmnist set", name, ("pneumoniamnist", "breastmnist"))
    with np.load(io.BytesIO(store.read("medmnist", f"{name}.npz")), allow_pickle=False) as stored:
        part = {p: examples_of(stored[f"{p}_images"], stored[f"{p}_labels"], flat) for p in ("train", "val", "test")}
    return Dataset(part["train"], part["test"], classes=2, valid=part["val"])


def omniglot(size: int = 28, clients: str = "alphabet", flat: bool = False) -> Dataset:
    """32,460 drawings of 1,623 characters; 1 is ink. Train: the 30 background alphabets; test: the other 20.

    Labels of the test characters are numbered after those of the train characters.

    Args:
        size: 105 for the original size, or 28 for averages of 4 x 4 blocks of the padded original.
        clients: the natural clients: "alphabet", or "drawer" for the 20 people who drew each alphabet.
        flat: whether to flatten each picture.
    """
    if size not in (28, 105):
        raise ValueError(f"omniglot: size must be 28 or 105, got {size!r}.")
    pick("clients of omniglot", clients, ("alphabet", "drawer"))
    train, alphabet, drawer, names = _drawings("background", size, flat)
    test, *_ = _drawings("evaluation", size, flat)
    classes = int(train["y"].max()) + 1
    test["y"] += classes
    if clients == "drawer":
        alphabet = alphabet * 20 + drawer - 1
        names = tuple(f"{name}, drawer {k}" for name in names for k in range(1, 21))
    return Dataset(train, test, int(test["y"].max()) + 1, None, alphabet, names)


def _drawings(which: str, size: int, flat: bool) -> tuple[Arrays, np.ndarray, np.ndarray, tuple[str, ...]]:
    with np.load(io.BytesIO(store.read("omniglot", f"{which}.npz")), allow_pickle=False) as stored:
        packed, y = stored["ink_packed"], stored["class_id"].astype(np.int32)
        alphabet, drawer = stored["alphabet_id"].astype(np.int64), stored["drawer"].astype(np.int64)
        names = tuple(str(a) for a in stored["alphabets"])
    x = np.empty((len(packed), size, size, 1), np.float32)
    for start in range(0, len(packed), 1000):  # in pieces: unpacked, all drawings are 360 MB of bytes
        ink = np.unpackbits(packed[start : start + 1000], axis=2, count=105)
        if size == 28:
            ink = np.pad(ink, ((0, 0), (3, 4), (3, 4))).reshape(-1, 28, 4, 28, 4).mean((2, 4))
        x[start : start + 1000, ..., 0] = ink
    return {"x": x.reshape(len(x), -1) if flat else x, "y": y}, alphabet, drawer, names


SOURCES = (
    Source("mnist", "handwritten digits, 28 x 28", "LeCun, Cortes and Burges", "CC BY-SA 3.0", mnist),
    Source("fashion_mnist", "clothing, 28 x 28", "Zalando Research", "MIT", fashion_mnist),
    Source("cifar10", "ten kinds of objects, 32 x 32 x 3", "Krizhevsky (2009)", "none stated", cifar10),
    Source("medmnist", "X-ray and ultrasound pictures, 28 x 28", "MedMNIST v2", "CC BY 4.0", medmnist),
    Source("omniglot", "characters of 50 alphabets", "Lake et al. (2015)", "MIT", omniglot),
)
