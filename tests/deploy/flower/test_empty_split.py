"""A site without rows of one split takes part in a run over a grid in this process, and over Flower."""

import json

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from cases import CASES
from deployments import OPTIONS, federation, finished, programs_or_skip, simulated, started, write_app
from grids import NAME, ROUNDS, SITES, TASK, Grid, deployment, hurry, missing, solution

import fedstrata as fs
from fedstrata.deploy.flower import server_app

__all__ = ["hurry"]  # a fixture


def test_a_site_without_rows_of_a_split_takes_part_and_is_not_counted_there(tmp_path, hurry):
    """Means over test rows are those of the sites that have some; the solution is the simulated one."""
    train = [TASK.federation["train"].shard(i) for i in range(SITES)]
    test = [{name: column[:rows] for name, column in train[i].items()} for i, rows in enumerate((6, 0, 5))]
    federation = fs.Federation.from_clients(train, test=test)
    made = deployment(load=lambda settings: federation.select([settings["number"]]))
    grid = Grid()
    for number in range(SITES):
        grid.join(tmp_path / f"site-{number}", number, made=made)
    server_app.serve(made, grid, "first", tmp_path / "out")
    assert missing(tmp_path / "out") == {}
    expected = fs.run(
        TASK.problem, CASES[NAME].algorithm, federation, rounds=ROUNDS, seeds=[5], stationarity=False, **OPTIONS
    )
    np.testing.assert_allclose(solution(tmp_path / "out"), expected.solution(), rtol=1e-12)
    found = json.loads((tmp_path / "out" / "evaluations.jsonl").read_text())
    assert {site: rows["test"] for site, rows in found["rows"].items()} == {"site-0": 6, "site-1": 0, "site-2": 5}
    for worker in grid.workers.values():
        worker.close()


@pytest.mark.slow
def test_a_site_without_rows_of_a_split_takes_part_over_real_flower(tmp_path):
    programs_or_skip()
    app = write_app(tmp_path, "emptyapp", NAME, ROUNDS)
    task = app / "emptyapp" / "task.py"
    load = "    found = data_of(task, settings)\n"
    load += '    rows = found["train"].examples\n'
    load += '    some = {n: c[: 0 if settings["number"] == 1 else 5] for n, c in rows.items()}\n'
    load += "    return fs.Federation.from_clients([rows], test=[some])\n"
    task.write_text(task.read_text().replace("    return data_of(task, settings)\n", load))
    with federation(tmp_path, app) as flower:
        found = finished(started(flower, tmp_path / "out"), tmp_path / "out" / "first")
    np.testing.assert_allclose(found, simulated(NAME, ROUNDS).solution(), rtol=1e-12)
    row = json.loads((tmp_path / "out" / "first" / "evaluations.jsonl").read_text().splitlines()[-1])
    assert [row["rows"][f"site-{i}"]["test"] for i in range(SITES)] == [5, 0, 5]
