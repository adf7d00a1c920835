"""Two servers that have runs of one name with the same sites, and a server whose folder was lost: one run goes on."""

import json
import shutil

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from deployments import OPTIONS, simulated
from grids import NAME, ROUNDS, SITES, deployment, solution

import fedstrata as fs
from fedstrata.deploy.flower import server_app
from fedstrata.deploy.server import QuorumError

RUN = "first"
ANOTHER = "the server's folder of the run is another one: two servers have runs of this name, or it was lost; start a"


def outcome(grid, folder, made):
    """Why a server ended before the end of its run; nothing if it did not."""
    try:
        server_app.serve(made, grid, RUN, folder)
    except QuorumError as error:
        return str(error)
    return ""


def interrupted(grid, folder, other, made, kind, site):
    """The outcomes of a server, and of another one that begins after this site's first answer to such a call."""
    found = {}

    def come(asked, name, answer):
        reply = answer()
        if (asked, name) == (kind, site) and "the other" not in found:
            found["the other"] = "it is running"
            found["the other"] = outcome(grid, other, made)
        return reply

    grid.on_message = come
    return {"the one": outcome(grid, folder, made), **found}


def spent(folder):
    """The releases that a server has counted."""
    return json.loads((folder / "evaluations.jsonl").read_text().splitlines()[-1])["privacy"]["exchanges"]


# By when the other one begins: before the first number has left, and after.
WINS = {("query.begin0", "site-2"): "the other", ("train.phase0", "site-2"): "the one"}


@pytest.mark.parametrize(("kind", "site"), WINS)
def test_of_two_private_runs_of_one_name_one_goes_on_and_all_count_alike(kind, site, grid, tmp_path):
    private = {**OPTIONS, "seed": 5, "privacy": fs.Privacy(clip=1.0, noise=2.0)}
    made = deployment(rounds=2, deadline=3.0, options=private)
    for worker, _ in grid.nodes.values():
        worker.deployment = made
    found = interrupted(grid, tmp_path / "the one", tmp_path / "the other", made, kind, site)
    winner = WINS[kind, site]
    assert [name for name, why in found.items() if not why] == [winner]
    assert ANOTHER in found.pop("the other") or "works under other terms of run 'first'" in found["the one"]
    assert spent(tmp_path / winner) == 2
    for number in range(SITES):
        counts = json.loads((tmp_path / f"site-{number}" / "runs" / RUN / "privacy.json").read_text())["exchanges"]
        assert counts == {f"site-{number}": 2}


@pytest.fixture(scope="module")
def expected():
    return simulated(NAME, ROUNDS).solution()


def test_a_server_whose_sites_another_one_has_begun_with_is_resumed(grid, tmp_path, expected):
    """One site has answered its first round, and two have begun the other server's run since."""
    found = interrupted(grid, tmp_path / "one", tmp_path / "other", deployment(deadline=3.0), "train.phase0", "site-0")
    assert f"site-0: the terms of run 'first' have changed since it began here: {ANOTHER}" in found["the other"]
    assert "the server works under other terms of run 'first' than this site agreed to; resume" in found["the one"]
    grid.on_message = lambda kind, site, answer: answer()
    server_app.serve(deployment(), grid, RUN, tmp_path / "one")
    np.testing.assert_allclose(solution(tmp_path / "one"), expected, rtol=1e-12)
    assert outcome(grid, tmp_path / "other", deployment(deadline=3.0)) != ""


@pytest.mark.parametrize("restarted", [False, True])
def test_a_server_that_has_lost_its_folder_cannot_run_the_rounds_again(grid, tmp_path, expected, restarted):
    """It would release them a second time. With the folder, the run goes on."""
    server_app.serve(deployment(rounds=1), grid, RUN, tmp_path / "out")
    shutil.move(tmp_path / "out", tmp_path / "away")
    if restarted:
        rejoin(grid, tmp_path)
    why = outcome(grid, tmp_path / "out", deployment(deadline=3.0))
    assert why.startswith("the run cannot begin: 0 of 3 sites")
    assert ANOTHER in why
    server_app.serve(deployment(), grid, RUN, tmp_path / "away")
    np.testing.assert_allclose(solution(tmp_path / "away"), expected, rtol=1e-12)


def rejoin(grid, folder, made=None):
    """Start all workers again."""
    for number in range(SITES):
        grid.leave(f"site-{number}")
        grid.join(folder / f"site-{number}", number, made=made)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_server_that_lost_its_folder_before_the_first_round_begins_again(grid, tmp_path, expected, restarted):
    grid.on_message = lambda kind, site, answer: None if kind.startswith("train") else answer()
    assert "round 0, phase 0: 0 sites replied" in outcome(grid, tmp_path / "out", deployment(deadline=0.3))
    grid.on_message = lambda kind, site, answer: answer()
    shutil.rmtree(tmp_path / "out")
    if restarted:
        rejoin(grid, tmp_path)
    server_app.serve(deployment(), grid, RUN, tmp_path / "out")
    np.testing.assert_allclose(solution(tmp_path / "out"), expected, rtol=1e-12)


def test_every_folder_of_a_run_has_a_text_of_its_own_which_a_resumed_run_keeps(grid, tmp_path):
    origin = lambda folder: json.loads((folder / "sites.json").read_text())["origin"]
    server_app.serve(deployment(rounds=1), grid, RUN, tmp_path / "one")
    server_app.serve(deployment(rounds=1), grid, "second", tmp_path / "two")
    first = origin(tmp_path / "one")
    assert len(first) == len(origin(tmp_path / "two")) == 32
    assert first != origin(tmp_path / "two")
    server_app.serve(deployment(rounds=2), grid, RUN, tmp_path / "one")
    assert origin(tmp_path / "one") == first
