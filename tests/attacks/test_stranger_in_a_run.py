"""A registered stranger, another node with a valid key, joins during a run, or before it is resumed."""

import json

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from attacked_runs import BAD, calls, check_lines, forging, reasons, served
from deployments import simulated
from grids import NAME, deployment, grid, hurry
from strangers import add_stranger, after_polls, summary_of

from fedstrata.deploy.flower import server_app
from fedstrata.deploy.flower.client_app import record
from fedstrata.deploy.messages import Message

__all__ = ["grid", "hurry"]  # fixtures

FORGERIES = (None, "no summary", "a text of 10 MB", "no token", "KeyError")  # None: a valid summary


@pytest.fixture(scope="module")
def expected():
    return simulated(NAME, 2).solution()


class Killed(BaseException):
    """The server ends."""


def test_a_stranger_that_joins_in_mid_run_is_not_asked_while_no_site_is_missing(grid, tmp_path, expected):
    def come(kind, site, answer):
        if kind == "query.begin0" and site == BAD:
            add_stranger(grid)
        return answer()

    grid.on_message = come
    np.testing.assert_allclose(served(grid, tmp_path / "out", rounds=2), expected, rtol=1e-12)
    assert calls(grid, "stranger", "") == 0


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_stranger_does_not_take_the_place_of_a_site_that_is_missing(forgery, grid, tmp_path, expected, caplog):
    """The site's node is lost in the first round, and comes back later. A second stranger has its name."""

    def lose(kind, site, answer):
        if kind == "train.phase0" and site == BAD and not hasattr(grid, "lost"):
            grid.lost = grid.leave(BAD), add_stranger(grid, forgery), grid.enter("thief", summary_of(BAD, number=1))
            after_polls(grid, 20, lambda: grid.join(tmp_path / BAD, 1))
            return None
        return answer()

    grid.on_message = lose
    np.testing.assert_allclose(served(grid, tmp_path / "out", rounds=2), expected, rtol=1e-12)
    assert {kind for kind, site in grid.asked if site in ("stranger", "thief")} == {"query.survey"}
    assert reasons(tmp_path / "out") == []
    check_lines(tmp_path / "out", caplog)


def test_a_stranger_with_the_name_of_a_missing_site_is_told_in_the_report(grid, tmp_path, caplog):
    def lose(kind, site, answer):
        if kind == "train.phase0" and site == BAD:
            grid.leave(BAD)
            grid.enter("thief", summary_of(BAD, number=1))
            return None
        return answer()

    grid.on_message = lose
    served(grid, tmp_path / "out", rounds=2, quorum=0.6, deadline=0.3)
    found = reasons(tmp_path / "out")
    assert len(found) == 3
    assert all(why.startswith("another site has the name 'site-1'") for why in found)
    assert sum(line.startswith("another site has the name 'site-1'") for line in caplog.messages) == 1
    assert calls(grid, "thief", ("train", "evaluate")) == 0


@pytest.mark.parametrize("name", ["thief", BAD])
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_stranger_that_joins_before_a_restart_does_not_lose_the_run(forgery, name, grid, tmp_path, expected, caplog):
    def die(kind, site, answer):
        if kind == "evaluate":
            raise Killed
        return answer()

    grid.on_message = die
    with pytest.raises(Killed):
        server_app.serve(deployment(rounds=1), grid, "first", tmp_path / "out")
    grid.on_message = lambda kind, site, answer: answer()
    sites = grid.nodes
    grid.nodes = {}
    add_stranger(grid, forgery)
    grid.enter("thief", summary_of(name))
    grid.nodes |= sites  # the strangers answer first
    np.testing.assert_allclose(served(grid, tmp_path / "out", rounds=2), expected, rtol=1e-12)
    assert {kind for kind, site in grid.asked if site in ("stranger", "thief")} == {"query.survey"}
    check_lines(tmp_path / "out", caplog)


@pytest.mark.parametrize("token", [None, "0" * 32, 7])
@pytest.mark.parametrize("kind", ["query.survey", "query.begin0", "train.phase0", "evaluate"])
def test_a_stranger_that_replies_in_place_of_a_site_is_not_believed(kind, token, grid, tmp_path, expected):
    """It does not know the token of the call. What it sends is well-formed, and wrong."""

    def forged(about, body):
        about = {n: v for n, v in {**about, "call": token}.items() if v is not None}
        if kind == "query.survey":
            return record({**about, **summary_of(BAD)({})}, b"")
        reply = Message.decode(body)
        wrong = {name: np.ones_like(array) for name, array in reply.arrays.items()}
        return record(about, reply._replace(arrays=wrong).encode())

    done = forging(grid, forged, kind, times=1)
    np.testing.assert_allclose(served(grid, tmp_path / "out", rounds=2), expected, rtol=1e-12)
    assert done[kind] == 1
    assert reasons(tmp_path / "out") == []
    evaluated = json.loads((tmp_path / "out" / "evaluations.jsonl").read_text())
    objective = simulated(NAME, 2).history.last("objective")[0]
    np.testing.assert_allclose(evaluated["objective"], objective, rtol=1e-12)
