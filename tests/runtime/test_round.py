"""How a round is laid out in a program changes its speed, not its result."""

import jax
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.runtime import round as rounds
from references import least_squares, nested


@pytest.mark.parametrize(
    ("task", "method", "sampling"),
    [
        (least_squares(), fs.Scaffold(0.05, 3), "epochs"),
        (nested("global"), fs.FedDRSCGD(0.02, 0.2, 3), "replacement"),
    ],
    ids=["average", "nested"],
)
def test_looking_up_a_round_at_once_changes_nothing(task, method, sampling, monkeypatch):
    def run(at_once):
        jax.clear_caches()  # the limit is not part of what a program is known by
        monkeypatch.setattr(rounds, "AT_ONCE", at_once)
        options = {"rounds": 4, "params": np.ones(3), "batch_size": 2, "sampling": sampling, "cohort": 3}
        return fs.run(task.problem, method, task.federation, progress=False, **options)

    together, apart = run(2**30), run(0)
    np.testing.assert_allclose(together.solution(), apart.solution(), rtol=1e-12)
    assert not np.allclose(together.solution(), np.ones(3))
