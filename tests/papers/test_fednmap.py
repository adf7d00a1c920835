"""FedNMap: verdicts of its figures follow from what the runs give."""

import numpy as np
import pytest
from fedstrata_papers.fednmap import mobile, shallow

from fedstrata.experiments.reproduction import Desk, Outcome
from fedstrata.report import History


def history(level: float, seeds: int = 4, **columns: float) -> History:
    """Stationarity that falls to about `level`, a little different for every seed."""
    rng = np.random.default_rng(int(1e9 * level) % 2**31)
    rounds = np.broadcast_to(np.arange(51.0), (seeds, 51))
    noise = 1 + 0.05 * rng.normal(size=(seeds, 51))
    falling = np.sqrt(level * noise + np.exp(-rounds))
    constant = {name: np.full((seeds, 51), value) for name, value in columns.items()}
    return History({"seed": list(range(seeds))}, {"round": rounds, "stationarity": falling, **constant})


class Pretend(Desk):
    """A desk whose runs come from a formula, so that the verdicts are known."""

    def __init__(self, folder, formula, scale="small"):
        super().__init__(folder, scale, quiet=True)
        self.formula = formula

    def run(self, name, build, data, algorithm, **options):
        return self.formula(type(algorithm).__name__, data["clients"], algorithm)


def verdicts(outcome: Outcome) -> list[str]:
    assert all(path.stat().st_size > 10_000 for path in outcome.files)
    return [claim.verdict for claim in outcome.claims]


def test_figure_2_judges_by_paired_intervals(tmp_path):
    def good(name, n, a):
        return history((1 if name == "FedNMap" else 2) / (n * a.local_steps))

    assert verdicts(shallow.figure_2(Pretend(tmp_path, good))) == ["holds"] * 3
    alike = lambda name, n, a: history(0.01)
    assert verdicts(shallow.figure_2(Pretend(tmp_path, alike))) == ["does not hold"] * 3


@pytest.mark.parametrize("figure", [shallow.figure_3, shallow.figure_4])
def test_figures_3_and_4_find_the_slope(figure, tmp_path):
    outcome = figure(Pretend(tmp_path, lambda name, n, a: history((n * a.local_steps) ** -0.75)))
    assert verdicts(outcome) == ["holds", "holds"]
    assert abs(float(outcome.claims[1].ours.split()[0]) + 0.75) < 0.05
    outcome = figure(Pretend(tmp_path, lambda name, n, a: history((n * a.local_steps) ** -0.25)))
    assert verdicts(outcome) == ["holds", "does not hold"]


def test_figure_6_wants_more_sparsity_and_less_loss(tmp_path):
    best = lambda name, n, a: history(1.0, hoyer=0.9 - 0.1 * (name != "FedNMap"), loss=1.0 + (name != "FedNMap"))
    assert verdicts(mobile.figure_6(Pretend(tmp_path, best))) == ["not tested"]  # too small to tell
    assert verdicts(mobile.figure_6(Pretend(tmp_path, best, "full"))) == ["holds"]
    mixed = lambda name, n, a: history(1.0, hoyer=0.9 - 0.1 * (name != "FedNMap"), loss=2.0 - (name != "FedNMap"))
    assert verdicts(mobile.figure_6(Pretend(tmp_path, mixed, "full"))) == ["holds in part"]


def test_figure_5_draws_and_judges(tmp_path, monkeypatch):
    monkeypatch.setattr(shallow, "_smoothness", lambda: 2.0)  # it needs the pictures themselves
    outcome = shallow.figure_5(Pretend(tmp_path, lambda name, n, a: history(1 / a.local_steps)))
    assert verdicts(outcome)[0] == "holds"
