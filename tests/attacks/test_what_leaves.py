"""What may leave a site: fields, bytes and scores that its owner allows, whatever the server and its app ask for."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from attackers import Attacker, begin_call, call_of, limit, log_of
from cases import CASES, START, task_of
from grids import ROUNDS

import fedstrata as fs
from fedstrata.deploy.flower.deployment import Deployment
from fedstrata.deploy.policy import Policy


def ranking(**changes):
    """FedX2 sends the scores of single examples: they are pooled, not averaged."""
    method = CASES["FedX2"].algorithm
    task = task_of(method)
    made = Deployment(task.problem, method, lambda settings: task.federation.select([1]), 1, 3, {"params": START})
    return made._replace(**changes)


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        (("means",), "'first' .rows that the server sees one by one."),
        (("means", "first"), "'second' .rows that the server sees one by one."),
        (("first", "second"), "'g' .merged by a mean."),
        ((), "'first' .rows that the server sees one by one."),
        (("FIRST", "means"), "'first'"),
    ],
)
def test_a_site_refuses_a_method_that_sends_fields_which_its_policy_does_not_name(tmp_path, worked, fields, refused):
    Policy(fields=fields).keep_in(tmp_path)
    attacker = Attacker.alone(tmp_path, ranking())
    with pytest.raises(
        ValueError, match=f"FedX2 sends the field {refused}.* which site-1 does not allow; its owner may"
    ):
        attacker.sends(begin_call())
    assert worked == []
    assert not (tmp_path / "runs").exists()
    assert log_of(tmp_path)[-1]["verdict"] == "refused"
    attacker.victim()[0].close()


@pytest.mark.parametrize("fields", [("means", "first", "second"), ("*",), ("x", "g", "first", "second")])
def test_a_site_sends_rows_where_its_policy_names_them(tmp_path, fields):
    Policy(fields=fields).keep_in(tmp_path)
    attacker = Attacker.alone(tmp_path, ranking())
    sent = attacker.sends(begin_call())
    assert {name.partition(".")[0].partition("[")[0] for name in sent.arrays} >= {"first", "second"}
    attacker.victim()[0].close()


def classifying(**more):
    """A model of two classes, with one output: its scores are those of single examples."""
    rng = np.random.default_rng(3)
    data = fs.Federation.from_clients([{"x": rng.normal(size=(5, 3)), "y": np.array([0, 1, 1, 0, 1])}])
    problem = fs.Average(fs.losses.Classification(lambda w, x: w @ x))
    return Deployment(problem, fs.FedAvg(0.1), lambda settings: data, 1, 3, {"params": START}, **more)


@pytest.mark.parametrize(("tells", "leaves"), [(None, False), ("measures", False), ("scores", True)])
def test_scores_of_rows_leave_only_where_the_site_itself_says_so(tmp_path, tells, leaves):
    attacker = Attacker.alone(tmp_path, classifying(scores=("train",)), **({} if tells is None else {"tells": tells}))
    about = {"terms": attacker.terms, "tells": "scores", "settings": "tells=scores"}  # a server cannot choose it
    sent = attacker.evaluates(scores=(0,), **about).arrays
    assert any(name.startswith(("said.scores", "said.labels")) for name in sent) == leaves
    assert bool(sent["said.withheld"]) != leaves
    assert ({"said.scores", "said.labels"} <= log_of(tmp_path)[-1]["fields"].keys()) == leaves
    attacker.victim()[0].close()


def test_scores_that_the_approved_app_does_not_request_do_not_leave(tmp_path):
    """Scores of a linear model at a few points would be the rows themselves."""
    attacker = Attacker.alone(tmp_path, classifying(), tells="scores")
    with pytest.raises(ValueError, match="the app does not request scores of split 'train', and the server does"):
        attacker.evaluates(scores=(0,))
    assert not any(name.startswith("said.scores") for name in attacker.evaluates().arrays)
    attacker.victim()[0].close()


@pytest.mark.parametrize("tells", ["nothing", "everything"])
def test_nothing_leaves_in_an_evaluation_where_the_site_says_so(tmp_path, tells):
    attacker = Attacker.alone(tmp_path, classifying(), tells=tells)
    with pytest.raises(ValueError, match=r"site-1 sends no measures; to allow it, the site sets tells=|unknown"):
        attacker.evaluates()
    assert log_of(tmp_path)[-1]["verdict"] == "refused"
    attacker.victim()[0].close()


def ask_both(attacker, asked):
    """One call, another one, the first again, and so on."""
    for x in [0.0, 1.0] * 20:
        attacker.sends(call_of(x=x))
        asked.append(x)


def test_no_more_bytes_leave_than_the_policy_allows_however_often_a_call_is_repeated(attacker, begun, expected):
    sent = sum(line["bytes"] for line in log_of(begun.victim) if line["kind"] == "answer")
    limit(begun, bytes=sent + 2000)
    asked = []
    with pytest.raises(ValueError, match=r"has sent .* bytes in run 'first', .* allows; its owner may raise bytes"):
        ask_both(attacker, asked)
    assert 2 < len(asked) < 40
    left = sum(line["bytes"] for line in log_of(begun.victim) if line["kind"] == "answer")
    assert sent < left <= sent + 2000
    limit(begun)
    assert begun.finishes(expected)


def test_nothing_is_computed_for_a_reply_that_would_be_too_many_bytes(attacker, begun, refuses):
    sent = sum(line["bytes"] for line in log_of(begun.victim) if line["kind"] == "answer")
    limit(begun, bytes=sent + 2 * 3 * 8 - 1)
    for x in (1.0, 2.0):
        refuses(lambda x=x: attacker.sends(call_of(x=x)), "with this reply it would be more than the .* raise bytes")


def test_a_run_that_would_send_too_many_bytes_is_refused_before_any_work(attacker, begun, refuses):
    """Two vectors of three numbers in every round."""
    limit(begun, bytes=ROUNDS * 2 * 3 * 8 - 1)
    refuses(lambda: attacker.sends(call_of()), "lets 143 bytes leave in a run, and 'first' would send 144; its owner")
