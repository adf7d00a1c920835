"""A site without rows of one split takes part in a run over a grid in this process, and over Flower."""

import json
import textwrap

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from cases import CASES, task_of
from deployments import OPTIONS, federation, finished, programs_or_skip, simulated, started, write_app
from grids import NAME, ROUNDS, SITES, TASK, Grid, deployment, hurry, missing, solution

import fedstrata as fs
from fedstrata.deploy.flower import server_app
from fedstrata.deploy.flower.config import SiteConfig
from fedstrata.deploy.flower.preflight import check
from fedstrata.deploy.policy import Policy

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


RANKED = "CODASCA"  # draws from the splits "positives" and "negatives"
LABELS = """
    import numpy as np

    shards = [task.federation["train"].shard(i) for i in range(3)]
    shards[1]["label"] = np.ones_like(shards[1]["label"])
    found = fs.Federation.from_clients(shards).by_label(label="label")
"""
FEW = Policy(rows_at_least=1, parameters=1000, fields=("*",))


def ranked():
    """Three sites; the second has no negatives."""
    given = {"task": task_of(CASES[RANKED].algorithm), "fs": fs}
    exec(textwrap.dedent(LABELS), given)
    assert list(given["found"]["negatives"].counts > 0) == [True, False, True]
    return given["found"]


def simulated_ranks(problem):
    algorithm = CASES[RANKED].algorithm
    found = fs.run(problem, algorithm, ranked(), rounds=ROUNDS, seeds=[5], stationarity=False, **OPTIONS)
    return found.solution()


def test_a_site_with_one_kind_of_labels_takes_part_in_a_pairwise_run(tmp_path, hurry):
    """The site alone, and the server before other sites have come, see a split without any rows."""
    problem, whole, grid = task_of(CASES[RANKED].algorithm).problem, ranked(), Grid()
    load = lambda settings: whole.select([settings["number"]])
    made = deployment(problem=problem, algorithm=CASES[RANKED].algorithm, load=load)
    for number in range(SITES):
        folder = tmp_path / f"site-{number}"
        folder.mkdir()
        FEW.keep_in(folder)
        grid.join(folder, number, made=made)
    server_app.serve(made, grid, "first", tmp_path / "out")
    assert missing(tmp_path / "out") == {}
    np.testing.assert_allclose(solution(tmp_path / "out"), simulated_ranks(problem), rtol=1e-12)
    for worker in grid.workers.values():
        worker.close()


def test_a_client_that_lacks_a_split_runs_with_others_and_not_alone():
    """Also in a simulation: there is nothing to compare its positives with."""
    alone, task = ranked().select([1]), task_of(CASES[RANKED].algorithm)
    with pytest.raises(ValueError, match="has no examples in split 'negatives'"):
        fs.run(task.problem, CASES[RANKED].algorithm, alone, rounds=1, **OPTIONS)


def write_ranked(folder, package):
    """An app whose second site has no negatives."""
    app = write_app(folder, package, RANKED, ROUNDS)
    task = app / package / "task.py"
    load = LABELS + '    return found.select([settings["number"]])\n'
    task.write_text(task.read_text().replace("    return data_of(task, settings)\n", load))
    return app


def test_a_site_with_one_kind_of_labels_is_found_ready(tmp_path):
    app, file = write_ranked(tmp_path, "rankedcheck"), tmp_path / "site.toml"
    about = 'site = "site-1"\nserver = "127.0.0.1:9"\ninsecure = true\n[settings]\nnumber = 1\n[policy]\n'
    file.write_text(about + 'rows_at_least = 1\nfields = ["*"]\n')
    file.chmod(0o600)
    found = {one.what: one for one in check(SiteConfig.read(file), app, "rankedcheck.task:deployment")}
    assert "negatives: 0 rows" in found["data"].found
    for what in ("data", "policy", "one round", "disk"):
        assert found[what].good, found[what]
    assert found["one round"].found.startswith("not run: without rows of split 'negatives'")


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


@pytest.mark.slow
def test_a_site_with_one_kind_of_labels_takes_part_in_a_pairwise_run_over_real_flower(tmp_path):
    programs_or_skip()
    app = write_ranked(tmp_path, "rankedapp")
    with federation(tmp_path, app, policy=FEW) as flower:
        found = finished(started(flower, tmp_path / "out"), tmp_path / "out" / "first")
    np.testing.assert_allclose(found, simulated_ranks(task_of(CASES[RANKED].algorithm).problem), rtol=1e-12)
