"""A server with approved code that asks a site for more than the run needs: more calls, other stages, other numbers."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from attackers import RUN, VICTIM, begin_call, call_of, limit, log_of
from grids import ROUNDS

from fedstrata.base.text import LONGEST_NAME
from fedstrata.deploy import guard, journal
from fedstrata.deploy.messages import EVALUATE, Message, Stage, proof


def asks(attacker, points):
    """Ask at one point after the other."""
    for x in points:
        attacker.sends(call_of(x=float(x)))


STAGES = {
    "an earlier round than the first": Stage(-2, 0),
    "no beginning": Stage(-1, 5),
    "a beginning with a phase": Stage(-1, 0, 1),
    "a negative exchange": Stage(1, -1),
    "an exchange too many": Stage(1, 1),
    "a huge exchange": Stage(1, 2**31 - 1),
    "another phase": Stage(1, 0, 1),
    "a negative phase": Stage(1, 0, -1),
    "a repetition too many": Stage(1, 0, 0, 1),
    "a negative repetition": Stage(1, 0, 0, -1),
    "an evaluation before the first round": Stage(-1, EVALUATE),
    "an evaluation with a phase": Stage(1, EVALUATE, 3),
    "an evaluation with a repetition": Stage(1, EVALUATE, 0, 7),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_site_refuses_a_stage_that_no_run_has(attacker, refuses, stage):
    refuses(lambda: attacker.sends(call_of(stage=STAGES[stage], after=None)), f"{VICTIM}: SCAFFOLD has no stage")


@pytest.mark.parametrize("after", [(1, 0), (2, 0), (0, -2), (-2, 0), (-1, -1)])
def test_a_site_refuses_a_stage_that_comes_after_itself_or_after_none(attacker, refuses, after):
    refuses(lambda: attacker.sends(call_of(after=after)), r"SCAFFOLD has no stage \(1, 0, 0, 0\) after")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("field", ["x", "c"])
def test_a_site_refuses_numbers_that_are_not_finite(attacker, refuses, bad, field):
    """One of them makes every number that leaves depend on one row alone, or on none."""
    refuses(lambda: attacker.sends(call_of(**{field: np.array([0.0, bad, 0.0])})), f"{field}.tree has values .* finite")


@pytest.mark.parametrize("arrays", [{"x": np.zeros(2)}, {"c": np.zeros(3, np.float32)}, {"z": np.zeros(3)}])
def test_a_site_refuses_other_arrays_than_those_of_the_method(attacker, begun, arrays):
    with pytest.raises(ValueError, match="message: "):
        attacker.sends(call_of(**arrays))
    assert log_of(begun.victim)[-1]["verdict"] == "refused"


@pytest.mark.parametrize("round", [ROUNDS, ROUNDS + 1, 2**31 - 1])
def test_a_site_refuses_rounds_beyond_the_terms(attacker, refuses, round):
    refuses(lambda: attacker.sends(call_of(round)), f"has {ROUNDS} rounds by its terms, .* needs new terms")


def test_a_site_refuses_rounds_beyond_its_policy(attacker, begun, refuses):
    limit(begun, rounds=ROUNDS)
    longer = attacker.terms._replace(rounds=ROUNDS + 1)
    why = f"{VICTIM} allows {ROUNDS} rounds in a run, and 'first' wants {ROUNDS + 1}; its owner may raise rounds"
    refuses(lambda: attacker.sends(call_of(), terms=longer), why)


def test_a_site_refuses_evaluations_beyond_its_policy(attacker, begun, expected, worked):
    """The honest run needs one more; it comes first, and a repeated evaluation is not another one."""
    limit(begun, evaluations=2)
    first = attacker.evaluates(1.0)
    attacker.evaluates(2.0)
    for x in (3.0, 4.0):
        with pytest.raises(ValueError, match=r"2 evaluations .* as many as its policy allows; .* raise evaluations"):
            attacker.evaluates(x)
    assert len(worked) == 2
    assert attacker.evaluates(1.0).encode() == first.encode()
    limit(begun, evaluations=1)
    with pytest.raises(ValueError, match="allows 1 evaluations in a run, and 'first' wants 2"):
        attacker.evaluates(1.0)


def test_a_site_refuses_evaluations_beyond_the_terms(attacker, begun, worked):
    """And a quarter more, and ten: a run that is extended is evaluated at every end."""
    limit(begun, parameters=100)
    most = 3 + guard.MOST_REPEATS
    for x in range(most):
        attacker.evaluates(x)
    with pytest.raises(ValueError, match=rf"{most} evaluations in run 'first', whose terms have 2; more of them need"):
        attacker.evaluates(most)
    assert len(worked) == most
    attacker.evaluates(most, terms=attacker.terms._replace(evaluations=5))


def test_a_site_refuses_many_points_at_one_stage(attacker, begun, worked):
    """By default a run may ask as often as it needs, and a quarter more. This one has the beginning, and one round."""
    limit(begun, parameters=8)
    with pytest.raises(ValueError, match=r"has answered 8 different calls .* allows 8; its owner may raise parameters"):
        asks(attacker, range(100))
    assert len(worked) == 8 - 2
    attacker.sends(call_of(x=0.0))  # the first of them again: the server may have lost the reply


def test_without_a_limit_of_its_own_a_site_answers_what_the_run_needs_and_a_quarter_more(attacker, worked):
    needed = 1 + ROUNDS + 2  # the beginning, the rounds, and the evaluations
    with pytest.raises(ValueError, match="different calls"):
        asks(attacker, range(100))
    assert needed <= len(worked) <= 1.25 * needed + 12


def test_a_site_refuses_calls_that_are_repeated_without_end(attacker, begun, worked, monkeypatch):
    monkeypatch.setattr(guard, "MOST_REPEATS", 3)
    limit(begun, parameters=6)
    with pytest.raises(ValueError, match="has answered 18 calls in run 'first', most of them repeated"):
        asks(attacker, [0, 1] * 50)
    assert len(worked) == 3 * 6 - 2


def test_a_restarted_site_remembers_what_it_has_answered(attacker, begun):
    limit(begun, parameters=6)
    asks(attacker, range(4))
    begun.start()
    with pytest.raises(ValueError, match="has answered 6 different calls"):
        attacker.sends(call_of(x=5.0))


NAMES = ["../x", "/etc/passwd", "..", ".hidden", "C:\\runs", "a\0b", "a\nb", "a\u202eb", "x" * 129, "x" * 10_000, ""]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_whose_name_is_a_path_leaves_nothing_behind(attacker, begun, refuses, name, monkeypatch):
    """Both as the name of a call, and as that in the terms."""
    outside = sorted(begun.folder.iterdir())
    for run in {RUN, name}:
        call = begin_call(run) if run == RUN else begin_call()._replace(run=name)
        try:
            body = call.encode()
        except ValueError:  # the sender refuses it; the attacker does not
            stand_in = "b" * min(len(name), LONGEST_NAME)
            body = begin_call(stand_in).encode().replace(stand_in.encode(), name.encode(), 1)
        refuses(lambda body=body: attacker.sends(body, terms=attacker.terms._replace(run=name)), "name|message|header")
    assert sorted(begun.folder.iterdir()) == outside
    assert [path.name for path in (begun.victim / "runs").iterdir()] == [RUN]


def test_an_honest_run_continues_after_many_attacks(attacker, begun, expected):
    attacks = [call_of(stage=stage, after=None) for stage in STAGES.values()]
    attacks += [
        call_of(ROUNDS),
        call_of(x=np.nan),
        call_of(z=np.zeros(3)),
        call_of(run="other"),
        call_of(site="site-2"),
    ]
    for call in attacks:
        with pytest.raises(ValueError):
            attacker.sends(call)
    attacker.sends(call_of(x=7.0))  # this one is answered, and the server does not continue from it
    assert begun.finishes(expected)


def refused(begun):
    """The runs of refused calls in the log, with their counts."""
    return [(line["run"], line["count"]) for line in log_of(begun.victim) if line["kind"] == "refused"]


def test_a_flood_of_refusals_does_not_fill_the_disk_and_stays_visible(attacker, begun, monkeypatch):
    """Under many names; the last line tells how many there were. A run that has begun has a count of its own."""
    monkeypatch.setattr(journal, "MOST_LINES", 20)
    for number in range(80):
        with pytest.raises(ValueError):
            attacker.sends(call_of(run=f"run {number} " + "x" * 100 * (number % 2)))
        if number == 40:
            begun.start()
    assert [count for _, count in refused(begun)] == [*range(1, 21), 32, 64]
    for _ in range(40):
        with pytest.raises(ValueError):
            attacker.sends(call_of(ROUNDS))
    assert [count for run, count in refused(begun) if run == RUN] == [*range(1, 21), 32]
    attacker.evaluates()
    assert log_of(begun.victim)[-1]["kind"] == "answer"


def test_a_flood_of_requests_for_a_summary_does_not_fill_the_disk(attacker, begun, monkeypatch):
    monkeypatch.setattr(journal, "MOST_LINES", 20)
    worker, settings = attacker.victim()
    for _ in range(70):
        worker.answer({"kind": "query.survey", "settings": settings, "about": {}}, b"")
    counts = [line["count"] for line in log_of(begun.victim) if line["kind"] == "summary"]
    assert counts == [*range(1, 21), 32, 64]


def test_a_message_that_is_none_is_refused_and_written_down(attacker, refuses):
    for body in (b"", b"FSL1", b"\xff" * 100, Message(RUN, Stage(0, 0), VICTIM, {}).encode()[:-1]):
        refuses(lambda body=body: attacker.sends(body), "message")


@pytest.mark.parametrize("known", ["nothing", "the terms", "a proof of another call", "the mark of another site"])
def test_a_registered_node_that_calls_a_site_in_the_servers_name_is_refused(begun, attacker, refuses, expected, known):
    """Flower delivers it. A second call for a stage would move the state from which the honest run continues."""
    about = {"nothing": {}, "the terms": {"terms": attacker.terms.encode()}}.get(known, {"terms": attacker.terms})
    forged = call_of(round=1, x=7.0)
    if known == "a proof of another call":
        about["proof"] = proof(attacker.mark, {"terms": attacker.terms.encode()}, call_of(round=1, x=6.0).encode())
    attacker.mark = (begun.folder / "site-0" / "mark").read_text() if known == "the mark of another site" else "0" * 32
    refuses(lambda: attacker.sends(forged, **(about or {"digest": ""})), "does not have the proof")
    assert begun.finishes(expected)


def test_with_the_mark_the_same_call_would_be_answered(attacker, worked):
    """So the test above refuses it for its proof alone."""
    assert attacker.sends(call_of(round=1, x=7.0)).arrays
    assert worked == [("site-1", (1, 0, 0, 0))]
