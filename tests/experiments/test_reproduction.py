"""Reproductions: runs are kept and not repeated, and claims are written down."""

import dataclasses
import json

import numpy as np
import pytest
from references import composite

import fedstrata as fs
from fedstrata.experiments import reproductions
from fedstrata.experiments.base import Setup
from fedstrata.experiments.reproduction import Claim, Desk, Outcome, Reproduction
from fedstrata.experiments.reproduction.drawing import Line, Panel, draw
from fedstrata.experiments.reproduction.statistics import interval, slope

TASK = composite()


def build(clients: int) -> Setup:
    return Setup(TASK.problem, TASK.federation.select(range(clients)))


def test_a_finished_run_is_not_run_again(tmp_path):
    built = []

    def counted(clients: int) -> Setup:
        built.append(clients)
        return build(clients)

    options = {"rounds": 3, "batch_size": "all", "params": np.zeros(3)}
    run = lambda step, clients: Desk(tmp_path, quiet=True).run(
        "name", counted, {"clients": clients}, fs.FedNMap(step, 2), **options
    )
    first = run(0.1, 4)
    desk = Desk(tmp_path, quiet=True)
    desk.run("name", counted, {"clients": 4}, fs.FedNMap(0.1, 2), **options)
    assert desk.cost()["samples"] == 3 * 2 * TASK.federation["train"].size  # rounds, steps, whole shards
    assert run(0.1, 4) == first
    assert built == [4]
    assert run(0.05, 4) != first  # another step is another run
    run(0.05, 3)  # and so are other data
    assert built == [4, 4, 3]


def test_claims_and_files_are_written_down(tmp_path):
    def figure(desk: Desk) -> Outcome:
        return Outcome([Claim(7, "it is fast", "it is | slow", "does not hold")], [desk.folder / "f.png"])

    paper = Reproduction("p", "A paper", "huang2026", {7: figure}, {"small": "nothing", "full": "much"})
    found = paper.reproduce(out=tmp_path)
    folder = tmp_path / "p" / "small"
    assert found["cost"] == {"runs": 0, "seconds": 0.0, "samples": 0.0}
    assert found["files"] == [str(folder / "f.png"), str(folder / "claims.md")]
    assert json.loads((folder / "claims.json").read_text()) == found["claims"]
    table = (folder / "claims.md").read_text()
    assert "does not hold" in table
    assert r"it is \| slow" in table  # a bar must not cut the cell
    with pytest.raises(ValueError, match="did you mean full"):
        paper.reproduce(out=tmp_path, scale="ful")
    with pytest.raises(ValueError, match="figure of p"):
        paper.reproduce(out=tmp_path, figure=8)


def test_every_figure_has_a_function_with_a_docstring():
    for paper in reproductions().values():
        assert all(figure.__doc__ for figure in paper.figures.values())
        assert dataclasses.is_dataclass(paper)


def test_a_panel_of_a_diverged_run_still_draws(tmp_path):
    values = np.array([[1.0, 0.1, np.nan], [1.0, 0.2, np.nan]])
    path = draw([Panel("t", {"a": Line(np.arange(3.0), values)})], "title", tmp_path / "p.png")
    assert path.stat().st_size > 5_000


def test_an_interval_covers_the_mean_at_its_level():
    rng = np.random.default_rng(0)
    inside = [low <= 3.0 <= high for _, low, high in (interval(rng.normal(3.0, 2.0, 6)) for _ in range(2000))]
    assert abs(np.mean(inside) - 0.95) < 4 * np.sqrt(0.05 * 0.95 / 2000)
    assert np.isnan(interval(np.array([1.0]))[1:]).all()
    np.testing.assert_allclose(slope(np.array([1.0, 2.0, 4.0]), np.array([[3.0, 5.0, 9.0]])), [2.0])
