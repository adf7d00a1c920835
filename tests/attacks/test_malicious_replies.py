"""One of three sites sends malformed replies: to the start, in a round, to an evaluation. No reply ends the run."""

import json

import httpx
import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from attacked_runs import BAD, calls, check_lines, forging, on_bytes, reasons, result_without_it, served
from deployments import simulated
from forged_messages import EVALUATIONS, MESSAGES, ODD_MEASURES
from forgeries import CONTENTS, EXCUSES, HARMLESS, LOST, UNREADABLE
from grids import NAME, deployment

from fedstrata.deploy.flower import server_app
from fedstrata.deploy.link import MOST_MALFORMED
from fedstrata.deploy.server import QuorumError

ROUNDS = 4  # of runs in which a site never sends a valid reply
REPLIES = {**CONTENTS, **{name: on_bytes(forgery) for name, forgery in MESSAGES.items()}}
KINDS = ("query.begin", "train", "evaluate")
SOME = (
    "no content",
    "a pickle",
    "an error that is a long list",
    "noise",
    "a flat shape",
    "other names",
    "another round",
)


@pytest.fixture(scope="module")
def expected():
    return simulated(NAME, 1).solution()


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    return result_without_it(tmp_path_factory.mktemp("silent"), ROUNDS)


@pytest.mark.parametrize("name", REPLIES)
def test_a_malformed_reply_is_named_and_its_round_repeated(name, grid, tmp_path, expected, caplog):
    """Three malformed replies: to the start, in the first round, and to the evaluation."""
    done = forging(grid, REPLIES[name], KINDS, times=1)
    np.testing.assert_allclose(served(grid, tmp_path / "out", rounds=1), expected, rtol=1e-12)
    assert dict(done) == {"query.begin0": 1, "train.phase0": 1, "evaluate": 1}
    found = reasons(tmp_path / "out")
    assert [why.startswith("malformed reply: ") for why in found] == [True] * 3
    if name.startswith("an error that is"):
        assert set(found) == {"malformed reply: a reply whose error is no text"}
    check_lines(tmp_path / "out", caplog)
    status = json.loads((tmp_path / "out" / "status.json").read_text())["sites"]
    assert status[BAD]["why_missing"] == found[-1]
    assert status[BAD]["quarantined"].startswith(f"quarantined after {MOST_MALFORMED} malformed replies, the last: ")
    evaluated = json.loads((tmp_path / "out" / "evaluations.jsonl").read_text())
    assert evaluated["missing"].keys() == {BAD}
    assert evaluated["by_site"].keys() == {"site-0", "site-2"}


@pytest.mark.parametrize("name", SOME)
def test_a_site_that_always_sends_malformed_replies_is_called_three_times(name, grid, tmp_path, without, caplog):
    """The others go on without it, as if it were silent."""
    forging(grid, REPLIES[name], "train")
    found = served(grid, tmp_path / "out", rounds=ROUNDS, quorum=0.6)
    np.testing.assert_allclose(found, without, rtol=1e-12)
    assert calls(grid) == 1 + MOST_MALFORMED  # the start, and three rounds
    found = reasons(tmp_path / "out")
    assert [why.startswith("malformed reply: ") for why in found] == [True] * MOST_MALFORMED + [False] * 2
    assert all(why.startswith("quarantined after 3 malformed replies, the last: ") for why in found[-2:])
    assert sum("site-1 is quarantined after" in line for line in caplog.messages) == 1
    check_lines(tmp_path / "out", caplog)


def test_a_run_in_which_a_site_always_forges_its_start_does_not_begin(grid, tmp_path):
    """Every site must prepare its start. The error names the site, and what to do; the others are unharmed."""
    forging(grid, REPLIES["noise"], "query.begin")
    with pytest.raises(QuorumError, match=r"cannot begin: 2 of 3 sites .*site-1: malformed.*another --name"):
        server_app.serve(deployment(quorum=0.6), grid, "first", tmp_path / "out")
    assert calls(grid) == MOST_MALFORMED
    assert json.loads((tmp_path / "out" / "status.json").read_text())["sites"][BAD]["quarantined"]
    grid.forge = lambda kind, site, content: content
    served(grid, tmp_path / "out", rounds=1)


@pytest.mark.parametrize("name", EXCUSES)
def test_a_site_that_cannot_answer_is_called_again(name, grid, tmp_path, without, caplog):
    forging(grid, EXCUSES[name], "train")
    found = served(grid, tmp_path / "out", rounds=ROUNDS, quorum=0.6)
    np.testing.assert_allclose(found, without, rtol=1e-12)
    assert calls(grid, BAD, "train") == ROUNDS == len(reasons(tmp_path / "out"))
    check_lines(tmp_path / "out", caplog)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_reply_that_is_unusual_and_harmless_is_accepted(name, grid, tmp_path, expected):
    forging(grid, HARMLESS[name], KINDS)
    np.testing.assert_allclose(served(grid, tmp_path / "out", rounds=1), expected, rtol=1e-12)
    assert reasons(tmp_path / "out") == []


@pytest.mark.parametrize("name", LOST)
def test_a_reply_that_is_lost_or_not_the_sites_own_is_requested_again(name, grid, tmp_path, expected, caplog):
    done = forging(grid, LOST[name], KINDS, times=2)
    np.testing.assert_allclose(served(grid, tmp_path / "out", rounds=1), expected, rtol=1e-12)
    assert dict(done) == {"query.begin0": 2, "train.phase0": 2, "evaluate": 2}
    assert reasons(tmp_path / "out") == []
    check_lines(tmp_path / "out", caplog)


@pytest.mark.parametrize("name", LOST)
def test_a_site_whose_replies_are_always_lost_costs_no_more_than_the_deadline(name, grid, tmp_path, caplog):
    forging(grid, LOST[name], "train")
    served(grid, tmp_path / "out", rounds=1, quorum=0.6, deadline=0.5)
    (why,) = reasons(tmp_path / "out")
    assert why.startswith("no answer in time; lost ")
    assert 1 < calls(grid, BAD, "train") < 20  # waits between calls double
    check_lines(tmp_path / "out", caplog)


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_reply_that_flower_cannot_read_loses_no_other_one(name, grid, tmp_path, without, caplog):
    """All that was fetched with it is lost and sent again; from then on the site is known that sent it."""
    forging(grid, UNREADABLE[name], "train")
    found = served(grid, tmp_path / "out", rounds=ROUNDS, quorum=0.6)
    np.testing.assert_allclose(found, without, rtol=1e-12)
    found = reasons(tmp_path / "out")
    assert all(why.startswith("malformed reply: Flower cannot read its reply") for why in found[:MOST_MALFORMED])
    assert [reasons(tmp_path / "out", site) for site in ("site-0", "site-2")] == [[], []]
    assert calls(grid, BAD, "train") == 1 + MOST_MALFORMED  # the first one is nobody's
    assert calls(grid, "site-0", "train") == 1 + ROUNDS
    check_lines(tmp_path / "out", caplog)


def test_a_failing_connection_to_flowers_server_is_no_sites_fault(grid, tmp_path, expected):
    real, failures = grid.pull_messages, iter([httpx.ConnectError("refused")] * 4)

    def pull(ids):
        if ("train.phase0", BAD) in grid.asked and (error := next(failures, None)):
            raise error
        return real(ids)

    grid.pull_messages = pull
    np.testing.assert_allclose(served(grid, tmp_path / "out", rounds=1), expected, rtol=1e-12)
    assert next(failures, None) is None
    assert reasons(tmp_path / "out") == []


@pytest.mark.parametrize("name", EVALUATIONS)
def test_a_malformed_evaluation_is_left_out_of_the_means(name, grid, tmp_path, caplog):
    forging(grid, on_bytes(EVALUATIONS[name]), "evaluate")
    served(grid, tmp_path / "out", rounds=1)
    found = json.loads((tmp_path / "out" / "evaluations.jsonl").read_text())
    assert found["missing"].keys() == {BAD}
    values = [row["train/objective"] for row in found["by_site"].values()]
    np.testing.assert_allclose(found["means"]["train/objective"], np.mean(values), rtol=1e-12)
    assert found["objective"] is None
    check_lines(tmp_path / "out", caplog)


@pytest.mark.parametrize("name", ODD_MEASURES)
def test_odd_measures_are_written_as_plain_json(name, grid, tmp_path, expected, caplog):
    forging(grid, on_bytes(ODD_MEASURES[name]), "evaluate")
    np.testing.assert_allclose(served(grid, tmp_path / "out", rounds=1), expected, rtol=1e-12)
    text = (tmp_path / "out" / "evaluations.jsonl").read_text()
    found = json.loads(text, parse_constant=pytest.fail)  # NaN and Infinity are no JSON
    assert found["missing"] == {}
    assert found["by_site"].keys() == {"site-0", BAD, "site-2"}
    check_lines(tmp_path / "out", caplog)
