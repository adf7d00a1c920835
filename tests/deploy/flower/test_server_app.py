"""The server and the workers over a grid in this process that loses messages, nodes and folders on purpose."""

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from cases import CASES
from deployments import OPTIONS, simulated
from grids import NAME, ROUNDS, SITES, TASK, deployment, grid, hurry, missing, solution

import fedstrata as fs
from fedstrata.deploy.flower import server_app
from fedstrata.deploy.flower.roster import Roster
from fedstrata.deploy.policy import Policy
from fedstrata.deploy.server import QuorumError
from fedstrata.engine.checkpoint import CheckpointError
from fedstrata.engine.privacy import epsilon

__all__ = ["grid", "hurry"]  # fixtures


def waits(grid, sites):
    """What keeps a run from beginning, once all nodes have replied."""
    roster = Roster(grid)
    while len(roster.nodes) < SITES:
        roster.look()
    return roster._wanted(sites)


@pytest.fixture(scope="module")
def expected():
    return simulated(NAME, ROUNDS).solution()


def test_a_run_equals_the_simulated_one(grid, tmp_path, expected):
    server_app.serve(deployment(), grid, "first", tmp_path / "out")
    np.testing.assert_allclose(solution(tmp_path / "out"), expected, rtol=1e-12)
    assert missing(tmp_path / "out") == {}
    found = json.loads((tmp_path / "out" / "evaluations.jsonl").read_text())
    np.testing.assert_allclose(found["objective"], simulated(NAME, ROUNDS).history.last("objective")[0], rtol=1e-12)


def test_a_lost_call_is_sent_again_and_a_lost_reply_costs_no_work(grid, tmp_path, expected, monkeypatch):
    seen, worked = [], []
    from fedstrata.deploy.flower import worker as workers

    monkeypatch.setattr(
        workers.Site, "answer", _counted(workers.Site.answer, lambda site, call: worked.append((site.name, call.stage)))
    )

    def lose(kind, site, answer):
        seen.append((kind, site))
        times = seen.count((kind, site))
        if kind == "train.phase0" and site == "site-0" and times == 1:
            return None  # the call is lost
        found = answer()
        return None if kind == "train.phase0" and site == "site-1" and times == 1 else found  # the reply is lost

    grid.on_message = lose
    server_app.serve(deployment(), grid, "first", tmp_path / "out")
    np.testing.assert_allclose(solution(tmp_path / "out"), expected, rtol=1e-12)
    assert len(worked) == len(set(worked)) == SITES * (1 + ROUNDS + 1)  # the beginning, the rounds, and an evaluation


def _counted(function, note):
    def wrapped(self, call):
        note(self, call)
        return function(self, call)

    return wrapped


def test_a_node_that_returns_with_another_number_is_the_same_site(grid, tmp_path, expected):
    def leave(kind, site, answer):
        if kind == "train.phase0" and site == "site-1" and not hasattr(grid, "left"):
            grid.left = next(node for node, (_, settings) in grid.nodes.items() if settings["site"] == site)
            del grid.nodes[grid.left]
            grid.join(tmp_path / "site-1", 1)
            return None
        return answer()

    grid.on_message = leave
    server_app.serve(deployment(), grid, "first", tmp_path / "out")
    np.testing.assert_allclose(solution(tmp_path / "out"), expected, rtol=1e-12)


@pytest.mark.parametrize("sites", [SITES - 1, SITES + 1])
def test_a_run_is_not_resumed_with_another_number_of_sites(grid, tmp_path, expected, sites):
    """It has those with which it began, whoever else is connected."""
    server_app.serve(deployment(rounds=1), grid, "first", tmp_path / "out")
    grid.asked.clear()
    why = rf"the run in .*out has {SITES} sites, and now {sites} are wanted"
    with pytest.raises(CheckpointError, match=why):
        server_app.serve(deployment(sites=sites), grid, "first", tmp_path / "out")
    assert grid.asked == []
    server_app.serve(deployment(), grid, "first", tmp_path / "out")
    np.testing.assert_allclose(solution(tmp_path / "out"), expected, rtol=1e-12)


def test_a_run_that_began_with_fewer_sites_than_the_app_has_is_resumed_with_them(grid, tmp_path):
    """`deploy run --sites 2` began it, and `deploy run` alone resumes it."""
    grid.leave("site-2")
    for number in range(2):
        Policy(sites_at_least=2).keep_in(tmp_path / f"site-{number}")
    asked = lambda **settings: server_app._as_wanted(deployment(), settings, tmp_path / "out")
    assert asked(sites=2, rounds=1) == deployment(sites=2, rounds=1)
    server_app.serve(asked(sites=2, rounds=1), grid, "first", tmp_path / "out")
    assert asked() == deployment(sites=2)
    server_app.serve(asked(), grid, "first", tmp_path / "out")
    with pytest.raises(CheckpointError, match="has 2 sites, and now 3 are wanted: resume it with as many"):
        server_app.serve(asked(sites=3), grid, "first", tmp_path / "out")


def test_a_run_with_two_sites_of_one_name_does_not_begin(grid, tmp_path):
    grid.join(tmp_path / "other", 3, "site-1")
    assert "the run waits" in waits(grid, 4)
    assert "another site has the name 'site-1'" in waits(grid, 4)


def test_a_node_that_joins_while_no_site_is_missing_is_not_asked(grid, tmp_path, expected):
    asked = []

    def come(kind, site, answer):
        asked.extend([site] * (kind == "query.survey"))
        if kind == "train.phase0" and not hasattr(grid, "stranger"):
            grid.stranger = grid.join(tmp_path / "other", 3, "site-1")
        return answer()

    grid.on_message = come
    server_app.serve(deployment(), grid, "first", tmp_path / "out")
    np.testing.assert_allclose(solution(tmp_path / "out"), expected, rtol=1e-12)
    assert sorted(asked) == ["site-0", "site-1", "site-2"]


def test_a_site_without_its_folder_is_named_and_resumes_with_it(grid, tmp_path, expected):
    server_app.serve(deployment(rounds=1), grid, "first", tmp_path / "out")
    shutil.move(tmp_path / "site-1", tmp_path / "away")
    old = next(node for node, (_, settings) in grid.nodes.items() if settings["number"] == 1)
    del grid.nodes[old]
    grid.join(tmp_path / "site-1", 1)
    with pytest.raises(QuorumError):
        server_app.serve(deployment(deadline=0.2), grid, "first", tmp_path / "out")
    assert "restore the folder" in missing(tmp_path / "out")[1, "site-1"]
    grid.nodes.popitem()
    shutil.rmtree(tmp_path / "site-1")
    shutil.move(tmp_path / "away", tmp_path / "site-1")
    grid.join(tmp_path / "site-1", 1)
    server_app.serve(deployment(), grid, "first", tmp_path / "out")
    np.testing.assert_allclose(solution(tmp_path / "out"), expected, rtol=1e-12)


def test_a_full_disk_at_a_site_is_reported_and_the_run_continues(grid, tmp_path, expected, monkeypatch):
    """A round without a quorum is repeated; by then the disk has room."""
    from fedstrata.deploy import site_store

    real, full = site_store.replacing, []

    def replacing(path):
        if "site-2" in str(path) and Path(path).name == "1_0.state" and not full:
            full.append(path)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path)

    monkeypatch.setattr(site_store, "replacing", replacing)
    server_app.serve(deployment(), grid, "first", tmp_path / "out")
    np.testing.assert_allclose(solution(tmp_path / "out"), expected, rtol=1e-12)
    assert "No space left" in missing(tmp_path / "out")[1, "site-2"]


def test_a_private_run_reports_the_privacy_spent(grid, tmp_path):
    """Every round of SCAFFOLD is one release; the noise is not the simulated one, whose seed all sites have."""
    private = deployment(options={**OPTIONS, "seed": 5, "privacy": fs.Privacy(clip=1.0, noise=2.0)})
    for worker, _ in grid.nodes.values():
        worker.deployment = private
    server_app.serve(private, grid, "first", tmp_path / "out")
    found = json.loads((tmp_path / "out" / "evaluations.jsonl").read_text())["privacy"]
    assert found["exchanges"] == ROUNDS
    assert found["epsilon"] == pytest.approx(epsilon(2.0, ROUNDS, 1e-5))
    simulation = fs.run(
        TASK.problem, CASES[NAME].algorithm, TASK.federation.select(range(SITES)), rounds=ROUNDS, seeds=[5],
        stationarity=False, privacy=fs.Privacy(clip=1.0, noise=2.0), **OPTIONS,
    )  # fmt: skip
    assert np.linalg.norm(solution(tmp_path / "out") - simulation.solution()) > 1e-3


def test_more_sites_than_expected_are_named(grid, tmp_path):
    assert "3 sites are connected, but 2 were expected" in waits(grid, 2)


def test_named_sites_do_not_wait_for_others(grid, tmp_path):
    assert [summary.site for summary in Roster(grid).gather(("site-2", "site-0"))] == ["site-0", "site-2"]


def test_different_versions_of_sites_are_told_when_a_run_begins(grid, tmp_path, caplog):
    """Their numbers may differ in the last digits. A run that has begun admits no change of versions."""
    roster = Roster(grid)
    summaries = roster.gather(SITES)
    server_app._compare_versions(summaries)
    assert caplog.messages == []
    other = summaries[1]._replace(versions={**summaries[1].versions, "jax": "0.1"})
    server_app._compare_versions([summaries[0], other, summaries[2]])
    (line,) = caplog.messages
    assert line.startswith("sites have different versions of jax: site-0 ")
    assert "site-1 0.1" in line
