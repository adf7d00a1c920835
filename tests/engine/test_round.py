"""How a round is laid out in a program changes its speed, not its result."""

import numpy as np
import pytest
from references import least_squares, nested

import fedstrata as fs
from fedstrata.engine import client


class Limit(int):
    """A number that records whether a program was traced with it: cached programs could be old ones."""

    asked = False

    def __ge__(self, size):
        self.asked = True
        return int(self) >= size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "method", "sampling"),
    [
        (least_squares(), fs.SCAFFOLD(0.05, 3), "epochs"),
        (nested("global"), fs.FedDRSCGD(0.02, 0.2, 3), "replacement"),
    ],
    ids=["average", "nested"],
)
def test_looking_up_a_round_at_once_changes_nothing(task, method, sampling, monkeypatch):
    def run(at_once, explosion):
        limit = Limit(at_once)
        monkeypatch.setattr(client, "AT_ONCE", limit)
        options = {"rounds": 4, "params": np.ones(3), "batch_size": 2, "sampling": sampling, "cohort": 3}
        options |= {"explosion": explosion, "stationarity": False}  # a different value needs a different program
        result = fs.run(task.problem, method, task.federation, progress=False, **options)
        assert limit.asked
        return result

    together, apart = run(2**30, 1e7), run(0, 1e8)
    np.testing.assert_allclose(together.solution(), apart.solution(), rtol=1e-12)
    assert not np.allclose(together.solution(), np.ones(3))
