"""Histories full of random numbers."""

import numpy as np
import pytest

from fedstrata.report import History


def make(axes: dict, rounds: int = 4, clients: int = 3, seed: int = 0) -> History:
    rng = np.random.default_rng(seed)
    shape = (*(len(v) for v in axes.values()), rounds)
    columns = {
        "objective": rng.normal(size=shape),
        "round": np.broadcast_to(np.arange(rounds), shape),
        "accuracy": rng.uniform(size=shape).astype(np.float32),
        "bytes_up": rng.integers(0, 2**40, size=shape),
        "bytes_down": rng.integers(0, 2**40, size=shape),
        "seconds": rng.uniform(size=shape),
    }
    return History(axes, columns, {"client/loss": rng.normal(size=(*shape, clients))})


@pytest.fixture(scope="session")
def filled():
    return make
