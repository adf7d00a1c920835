"""What a run waits for, as `fedstrata deploy status` shows it; and a site that is back beside its old node."""

import time

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from grids import SITES, deployment, grid, hurry, solution

from fedstrata.deploy.flower import roster, server_app
from fedstrata.deploy.flower.roster import Roster
from fedstrata.deploy.flower.run_lock import read_status
from fedstrata.engine.checkpoint import CheckpointError

__all__ = ["grid", "hurry"]  # fixtures


@pytest.fixture
def told(monkeypatch):
    """What is written to the status, entry by entry."""
    found, write = [], server_app.write_status
    monkeypatch.setattr(
        server_app, "write_status", lambda folder, **state: found.append(state) or write(folder, **state)
    )
    monkeypatch.setattr(roster, "PROGRESS", -1.0)
    monkeypatch.setattr(roster, "NEWS", 0.0)
    return found


def test_the_status_tells_what_a_new_run_waits_for(grid, tmp_path, told):
    grid.until = time.monotonic() + 3
    with pytest.raises(AssertionError):
        server_app.serve(deployment(rounds=1, sites=SITES + 1), grid, "first", tmp_path / "out")
    assert any(f"{SITES} of {SITES + 1} sites are connected" in state["why"] for state in told)
    grid.until = time.monotonic() + 60
    server_app.serve(deployment(rounds=1), grid, "first", tmp_path / "out")
    assert read_status(tmp_path / "out")["why"] is None


def test_the_status_tells_which_sites_a_resumed_run_waits_for(grid, tmp_path, told):
    server_app.serve(deployment(rounds=1), grid, "first", tmp_path / "out")
    gone = next(number for number, (_, settings) in grid.nodes.items() if settings["site"] == "site-1")
    del grid.nodes[gone]
    with pytest.raises(Exception, match="2 sites replied"):
        server_app.serve(deployment(rounds=2, deadline=2.0), grid, "first", tmp_path / "out")
    assert {"why": "the run waits for site-1"} in told


def test_code_that_no_site_has_accepted_does_not_keep_the_old_code_from_resuming(grid, tmp_path):
    folder = tmp_path / "out"
    server_app.serve(deployment(rounds=1), grid, "first", folder, program="1")
    with pytest.raises(Exception, match="0 sites replied"):
        server_app.serve(deployment(rounds=2, deadline=5.0), grid, "first", folder, program="2", new_code=True)
    server_app.serve(deployment(rounds=2), grid, "first", folder, program="1")
    assert solution(folder) is not None
    with pytest.raises(CheckpointError, match="the app's code: saved '1', now '2'"):
        server_app.serve(deployment(rounds=3), grid, "first", folder, program="2")


def test_a_restored_site_is_called_while_its_old_node_is_still_listed(grid, tmp_path):
    """Flower lists a node that has gone for up to 20 s."""
    first = Roster(grid)
    begun = first.gather(SITES)
    number = next(n for n, (_, settings) in grid.nodes.items() if settings["site"] == "site-1")
    old, _ = grid.nodes[number]
    again = Roster(grid, dict(first.marks), begun)
    before = old.own
    old.data, old.own = old.data, before._replace(data="0" * 32)  # another value
    while "site-1" not in again.changed:
        again.look(["site-1"])
    old.guard.log.close()
    old.guard = None
    grid.join(tmp_path / "site-1", 1)
    while "site-1" not in again.nodes:
        again.look(["site-1"])
    assert number in grid.nodes
    assert "site-1" not in again.changed
