"""One of three sites sends malformed data summaries. It is named, left out and asked again."""

import json
from importlib.metadata import version

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from attacked_runs import BAD, calls, check_lines, check_log, forging, gathered, honest, reasons, served
from deployments import simulated
from forgeries import CONTENTS, DISAGREEING, EXCUSES, HARMLESS, LOST, NASTY, SUMMARIES, UNREADABLE
from grids import NAME, PATIENCE, TASK, deployment

from fedstrata.deploy.flower import server_app
from fedstrata.deploy.flower.client_app import record
from fedstrata.deploy.server import QuorumError

LEFT_OUT = "has no valid data summary and is left out: "
INVALID = {**SUMMARIES, **CONTENTS, **EXCUSES}


@pytest.fixture(scope="module")
def expected():
    return simulated(NAME, 1).solution()


@pytest.mark.parametrize("name", INVALID)
def test_a_malformed_summary_leaves_its_node_out_until_a_valid_one_comes(name, grid, caplog):
    done = forging(grid, INVALID[name], "query.survey", times=2)
    assert gathered(grid) == honest()
    assert done["query.survey"] == 2
    (told,) = [line for line in caplog.messages if LEFT_OUT in line]  # once, although it was sent twice
    node = next(number for number, (_, settings) in grid.nodes.items() if settings["site"] == BAD)
    assert told.startswith(f"node {node} ")
    check_log(caplog)
    assert [calls(grid, site, "query") for site in ("site-0", BAD, "site-2")] == [1, 3, 1]


@pytest.mark.parametrize("name", [*LOST, *UNREADABLE])
def test_a_summary_that_is_lost_is_requested_again(name, grid, caplog):
    done = forging(grid, {**LOST, **UNREADABLE}[name], "query.survey", times=2)
    assert gathered(grid) == honest()
    assert done["query.survey"] == 2
    check_log(caplog)


@pytest.mark.parametrize("name", DISAGREEING)
def test_a_run_does_not_begin_with_summaries_that_contradict_each_other(name, grid):
    done = forging(grid, DISAGREEING[name], "query.survey", times=3)
    assert gathered(grid) == honest()
    assert done["query.survey"] == 3


@pytest.mark.parametrize("name", HARMLESS)
def test_a_summary_that_is_unusual_and_harmless_is_accepted(name, grid, caplog):
    forging(grid, HARMLESS[name], "query.survey")
    assert gathered(grid) == honest()
    assert caplog.messages == []


@pytest.mark.parametrize("name", ["a pickle", "a count: 2^31 + 9", "a name: a newline", "a text that forges a line"])
def test_a_run_after_malformed_summaries_equals_the_simulated_one(name, grid, tmp_path, expected, caplog):
    forging(grid, INVALID[name], "query.survey", times=2)
    np.testing.assert_allclose(served(grid, tmp_path / "out", rounds=1), expected, rtol=1e-12)
    assert reasons(tmp_path / "out") == []
    check_lines(tmp_path / "out", caplog)


@pytest.mark.parametrize("name", ["no summary", "a count: 2^63", "KeyError", "no token"])
def test_a_site_that_comes_back_and_sends_malformed_summaries_is_missing(name, grid, tmp_path, caplog):
    """Its node is lost in the first round. The run goes on without it, and asks it now and then."""

    def leave(kind, site, answer):
        if kind == "train.phase0" and site == BAD:
            grid.leave(BAD)
            grid.join(tmp_path / BAD, 1)
            forging(grid, {**INVALID, **UNREADABLE, **LOST}[name], "query.survey")
            return None
        return answer()

    grid.on_message = leave
    served(grid, tmp_path / "out", rounds=2, quorum=0.6, deadline=0.5)
    assert len(reasons(tmp_path / "out")) == 3
    assert 1 < calls(grid, BAD, "query.survey") < 30
    check_lines(tmp_path / "out", caplog)


def test_a_site_that_comes_back_with_other_data_is_refused_until_it_is_restored(grid, tmp_path, expected, caplog):
    """In mid-run, in the server's first life: its data, key and versions are those with which the run began."""
    other = deployment(load=lambda settings: TASK.federation.select([3]))

    def leave(kind, site, answer):
        if kind == "train.phase0" and site == BAD and not hasattr(grid, "left"):
            grid.left = grid.leave(BAD)
            grid.join(tmp_path / BAD, 1, made=other)
            return None
        return answer()

    grid.on_message = leave
    with pytest.raises(QuorumError, match="site-1 has changed since the run began: its rows: split 'train' had"):
        server_app.serve(deployment(rounds=1), grid, "first", tmp_path / "out")
    assert any(
        "it is refused: restore it and start the site again, or start a new run" in line for line in caplog.messages
    )
    grid.leave(BAD)
    grid.join(tmp_path / BAD, 1)
    np.testing.assert_allclose(served(grid, tmp_path / "out", rounds=1), expected, rtol=1e-12)


CHANGED = {
    "data": "its values (the numbers of rows are the same); ",
    "key": "its key; ",
    "jax": f"its version of jax: {version('jax')} then, 0.0.1 now; ",
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_summary_with_another_hash_key_or_version_is_refused_in_mid_run(what, grid, tmp_path):
    forgeries = []

    def forged(about, body):
        rows = json.loads(about["survey"])
        rows[3], rows[4] = "0" * 32 if what == "data" else rows[3], "mine" if what == "key" else rows[4]
        rows[5]["jax"] = "0.0.1" if what == "jax" else rows[5]["jax"]
        forgeries.append(len(grid.asked))
        return {**about, "survey": json.dumps(rows)}, body

    def leave(kind, site, answer):
        if kind == "train.phase0" and site == BAD:
            grid.leave(BAD)
            grid.join(tmp_path / BAD, 1)
            grid.on_message = lambda kind, site, answer: (
                forged(*answer()) if (kind, site) == ("query.survey", BAD) else answer()
            )
            return None
        return answer()

    grid.on_message = leave
    # Nobody waits for the site: the deadline is far beyond the time after which the grid ends a server.
    served(grid, tmp_path / "out", rounds=1, quorum=0.6, deadline=10 * PATIENCE)
    told = reasons(tmp_path / "out")
    assert len(told) == 2  # the round, and the evaluation
    for why in told:
        assert why.startswith(f"{BAD} has changed since the run began: {CHANGED[what]}it is refused: ")
    assert forgeries
    after = [kind for kind, site in grid.asked[forgeries[0] :] if site == BAD]
    assert set(after) <= {"query.survey"}  # its new node gets no call of the run
    assert calls(grid, BAD, "train") == 1  # the one with which its first node was lost


def test_texts_of_a_site_are_one_line_wherever_they_appear(grid, tmp_path, caplog):
    """The reason why it does not answer is in the log, in reports.jsonl, in status.json and in evaluations.jsonl."""
    forging(grid, lambda about, body: EXCUSES["a text that forges a line"](about, body), ("train", "evaluate"))
    served(grid, tmp_path / "out", rounds=1, quorum=0.6)
    check_lines(tmp_path / "out", caplog)
    assert NASTY not in caplog.text
    text = r"x\r\nround 9, phase 0: 3 replied\x1b[2K\x1b]0;owned\x07\u202e\u2028round 9, phase 0: 3 replied\x00"
    shown = f'reported "{text}"'
    assert reasons(tmp_path / "out") == [shown] * 2
    assert shown in caplog.text
    assert json.loads((tmp_path / "out" / "status.json").read_text())["sites"][BAD]["why_missing"] == shown
    assert json.loads((tmp_path / "out" / "evaluations.jsonl").read_text())["missing"] == {BAD: shown}


def test_a_site_cannot_speak_in_the_words_of_the_server(grid, tmp_path, caplog):
    """Its own words are quoted, also where they have quotes."""
    words = (
        'no answer in time"; site-2: quarantined after 3 malformed replies, another site has its name: unregister it'
    )
    forging(grid, lambda about, body: record({**about, "error": words}, b""), ("train", "evaluate"))
    served(grid, tmp_path / "out", rounds=1, quorum=0.6)
    quoted = words.replace('"', "'")
    assert reasons(tmp_path / "out") == [f'reported "{quoted}"'] * 2
    assert f'{BAD}: reported "{quoted}"' in caplog.text
