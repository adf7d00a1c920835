"""Old calls, sent to a site again: the same reply, or a refusal, and nothing changes."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from attackers import RUN, VICTIM, Attacker, averaging, begin_call, call_of, files_in, log_of
from deployments import simulated
from grids import NAME, ROUNDS, missing

import fedstrata as fs
from fedstrata.deploy.messages import Message, Stage
from fedstrata.deploy.site_store import LATER, DiskStore, MemoryStore
from fedstrata.engine.privacy import epsilon


def states(folder):
    """The files of a site's fields and of its agreement."""
    return {name: found for name, found in files_in(folder).items() if name.startswith("runs")}


def test_the_same_call_at_once_gets_the_same_reply_without_work(attacker, begun, worked, expected):
    first = attacker.sends(call_of(x=0.5)).encode()
    before = states(begun.victim)
    for _ in range(3):
        assert attacker.sends(call_of(x=0.5)).encode() == first
    assert len(worked) == 1
    assert states(begun.victim) == before
    assert begun.finishes(expected)


@pytest.mark.parametrize("restarted", [False, True])
def test_the_same_call_later_gets_the_same_reply_and_changes_nothing(attacker, begun, expected, restarted):
    first = attacker.sends(call_of(x=0.5)).encode()
    before = states(begun.victim)
    attacker.evaluates(1.0)
    if restarted:
        begun.start()
    assert attacker.sends(call_of(x=0.5)).encode() == first
    assert states(begun.victim) == before
    assert begun.finishes(expected)


def heard(begun):
    """All calls that the honest server sends to the site from now on, with the replies."""
    found, worker = [], begun.grid.workers[str(begun.victim)]
    answer = worker.answer

    def noted(request, body):
        reply = answer(request, body)
        found.append((body, reply[1]))
        return reply

    worker.answer = noted
    return found


def test_every_call_of_a_run_replayed_after_its_end_is_answered_alike_or_refused_and_the_run_goes_on(attacker, begun):
    """A longer run then continues from what the site has kept."""
    calls = heard(begun)
    begun.serve()
    assert len(calls) >= ROUNDS
    begun.start()
    answered = 0
    for body, reply in (call for call in [*calls, *reversed(calls)] if call[0]):
        try:
            assert attacker.sends(body).encode() == reply
            answered += 1
        except RuntimeError as error:
            why = str(error)
            assert why.startswith(f"{VICTIM}: the server resumes from stage")
            assert why.endswith("restore the folder, or start a new run")
            assert log_of(begun.victim)[-1]["verdict"] == "refused"
    assert answered > 0
    longer = simulated(NAME, ROUNDS + 1).solution()
    np.testing.assert_allclose(begun.serve(rounds=ROUNDS + 1), longer, rtol=1e-12)
    assert missing(begun.folder / "out" / RUN) == {}


def test_the_first_call_of_a_run_replayed_later_does_not_begin_it_again(attacker, begun, expected):
    """It is delivered twice if a node dies; the second one may come after later calls."""
    attacker.sends(begin_call())
    attacker.sends(call_of(2, after=(0, 0)))
    assert begun.finishes(expected)


@pytest.mark.parametrize("make", [lambda folder: DiskStore(folder, VICTIM), lambda folder: MemoryStore()])
def test_an_old_call_deletes_no_later_stage(tmp_path, make):
    """What a site does for the first exchange of a round with three, after it has answered the third."""
    store = make(tmp_path)
    for at in ((4, 2), (5, 0), (5, 1), (5, 2)):
        store.write(Stage(*at), {"x": np.array(at)})
    store.keep({(4, 2), (5, 0), (5, -1)})
    for at in ((4, 2), (5, 0), (5, 1), (5, 2)):
        np.testing.assert_array_equal(store.read(Stage(*at))["x"], at)
    store.keep({(4, 2), (5, 2), (5, 1)})
    with pytest.raises((RuntimeError, KeyError)):
        store.read(Stage(5, 0))


@pytest.mark.parametrize("make", [lambda folder: DiskStore(folder, VICTIM), lambda folder: MemoryStore()])
def test_made_up_calls_for_late_rounds_do_not_fill_a_store(tmp_path, make):
    """Each comes after the beginning and before the last; the last few stay, and one that the run continues from."""
    store = make(tmp_path)
    store.write(Stage(-1, 0), {"x": np.zeros(1)})
    for round in range(200, 0, -1):
        store.write(Stage(round, 0), {"x": np.full(1, round)})
        store.keep({(-1, 0), (round, 0), (round, -1)})
    stored = sorted(store.stored) if isinstance(store, MemoryStore) else store.stages()
    assert stored == [(-1, 0), (1, 0), *((round, 0) for round in range(201 - LATER, 201))]


def test_an_old_stage_after_later_ones_is_refused(attacker, begun, worked, expected):
    """The site no longer has what it had before that round; it does not make it up."""
    before = states(begun.victim)
    attacker.sends(call_of(1))
    begun.serve(rounds=2)
    worked.clear()
    with pytest.raises(RuntimeError, match=r"resumes from stage \(-1, 0\) .* which is not in .*; restore the folder"):
        attacker.sends(call_of(0, after=(-1, 0)))
    assert log_of(begun.victim)[-1]["verdict"] == "refused"
    assert states(begun.victim) != before
    assert begun.finishes(expected)


OTHERS = {
    "of another run": (call_of(run="another"), "has not begun run 'another'"),
    "of another site": (call_of(site="site-2"), "this call is for 'site-2' in run 'first'"),
    "of a site with a similar name": (call_of(site="site-1 "), "this call is for 'site-1 '"),
}


@pytest.mark.parametrize("call", OTHERS)
def test_a_call_for_somebody_else_is_refused(attacker, refuses, call):
    found, why = OTHERS[call]
    refuses(lambda: attacker.sends(found, digest=attacker.terms.digest()), why)


@pytest.fixture
def noisy(tmp_path):
    """A site that adds noise to what it sends, by itself."""
    found = Attacker.alone(tmp_path, averaging(privacy=fs.Privacy(clip=1.0, noise=1.0, where="sites")))
    found.sends(begin_call())
    yield found
    found.victim()[0].close()


def ask(attacker, x):
    return attacker.sends(Message(RUN, Stage(0, 0), VICTIM, {"x.tree": np.full(3, x)}, Stage(-1, 0))).arrays["x.tree"]


def test_a_replayed_call_gets_the_same_noise_or_is_counted_again(noisy, tmp_path):
    """Different noise for the same call is one more release."""
    spent = lambda: noisy.victim()[0].sites[RUN][1].privacy()
    first = ask(noisy, 0.0)
    assert np.array_equal(ask(noisy, 0.0), first)
    assert spent().exchanges == 1
    ask(noisy, 1.0)
    assert not np.array_equal(ask(noisy, 0.0), first)
    assert spent().exchanges == 3
    assert spent().epsilon == pytest.approx(epsilon(1.0, 3, 1e-5))


def test_a_reply_that_is_sent_again_to_a_server_that_adds_noise_is_counted_again(tmp_path):
    """A server that repeats a round releases the same change with other noise; the site cannot tell that it does."""
    attacker = Attacker.alone(tmp_path, averaging(privacy=fs.Privacy(clip=1.0, noise=1.0)))
    attacker.sends(begin_call())
    for _ in range(5):
        ask(attacker, 0.0)
    assert attacker.victim()[0].sites[RUN][1].privacy().exchanges == 5
    attacker.sends(begin_call())
    attacker.sends(begin_call())
    assert attacker.victim()[0].sites[RUN][1].privacy().exchanges == 5  # nothing is released before round 0
    attacker.victim()[0].close()


def test_a_server_cannot_average_the_noise_away(noisy, tmp_path):
    """A repeated call with other noise counts like another call: the site refuses it where it would refuse that."""
    replies = []
    with pytest.raises(ValueError, match=r"has answered .* different calls .* its owner may raise parameters"):
        ask_in_turn(noisy, replies)
    needed = 1 + 3 + 2
    assert len(replies) <= 1.25 * needed + 12
    assert len({reply.tobytes() for reply in replies}) == len(replies)


def ask_in_turn(attacker, replies):
    for x in [0.0, 1.0] * 100:
        replies.append(ask(attacker, x))
