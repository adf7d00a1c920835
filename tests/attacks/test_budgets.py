"""How much a site answers in a run: different calls and replies, evaluations, bytes, stages on its disk, memory."""

import contextlib

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

import jax
from attackers import RUN, VICTIM, Attacker, averaging, begin_call, log_of
from cases import START, task_of
from deployments import method

import fedstrata as fs
from fedstrata.core.memory import Pool
from fedstrata.core.placement import part
from fedstrata.deploy import guard
from fedstrata.deploy import site as sites
from fedstrata.deploy.flower import worker as workers
from fedstrata.deploy.flower.deployment import Deployment
from fedstrata.deploy.messages import Message, Stage, pack
from fedstrata.deploy.policy import Policy, Refused
from fedstrata.deploy.site_store import DiskStore

ROWS = np.random.default_rng(0).normal(size=(6, 3))


@pytest.fixture
def alone(tmp_path):
    """A function that makes the attacker of one site, after the beginning of a run."""
    made = []

    def make(deployment, **settings):
        made.append(Attacker.alone(tmp_path, deployment, **settings))
        return made[-1]

    yield make
    for found in made:
        found.victim()[0].close()


def round_call(round, x=0.0, before=(-1, 0), run=RUN):
    return Message(run, Stage(round, 0), VICTIM, {"x.tree": np.full(3, float(x))}, Stage(*before))


def of_two_exchanges(alone, folder, parameters):
    """The attacker of a run with two exchanges a round, and a function that sends the calls of one at a point.

    The second exchange replies from what the first has left at the site, which another point changes.
    """
    found = method("CompositionalFedNest")
    task = task_of(found)
    options = {"params": START, "batch_size": 3}
    Policy(parameters=parameters, rows_at_least=1).keep_in(folder)
    attacker = alone(Deployment(task.problem, found, lambda settings: task.federation.select([1]), 3, 3, options))
    attacker.sends(begin_call())
    context = attacker.victim()[0].sites[RUN][1].context

    def asks(phase, x):
        full = lambda path: jax.tree.map(lambda a: np.full(a.shape, x, a.dtype), part(context.template, path))
        arrays = pack({path: full(path) for path in context.exchanges[phase].receives})[0]
        return attacker.sends(Message(RUN, Stage(0, phase, phase), VICTIM, arrays, Stage(-1, 0)))

    return attacker, asks


def test_the_same_calls_in_another_order_get_a_bounded_number_of_different_replies(alone, tmp_path):
    least, replies = 1 + 3 * 2 + 2, {b""}
    attacker, asks = of_two_exchanges(alone, tmp_path, least)

    def asks_on():
        for i in range(1000):  # with the beginning and the other exchange, fewer calls than are allowed
            for reply in (asks(0, 0.1 + i % 6 * 0.01), asks(1, 0.3)):
                replies.add(b"".join(array.tobytes() for array in reply.arrays.values()))

    why = f"has sent {least} different replies in run 'first', and its policy allows {least}; its owner may raise"
    with pytest.raises(Refused, match=why):
        asks_on()
    assert len(replies) == least
    done = attacker.victim()[0].guard.journal.answered(RUN)
    assert len(done.calls) < len(done.replies) == least
    attacker.sends(begin_call())  # what has left may leave again


def test_terms_that_say_the_same_in_another_way_allow_no_further_call(alone, tmp_path):
    """A version that is missing counts as none. Every extension of a run allows one evaluation more."""
    attacker = alone(averaging(ROWS))
    attacker.sends(begin_call())
    many = lambda: [attacker.sends(round_call(0, i)) for i in range(1000)]
    with pytest.raises(Refused, match="different calls in run 'first'"):
        many()
    versions, before = dict(attacker.own.versions), len(log_of(tmp_path))
    for i in range(6):
        other = attacker.with_site("made up 0", versions={**versions, f"made up {i}": "none"})
        with pytest.raises(Refused, match="have changed since it began here: they are written in another way"):
            attacker.sends(round_call(0, 5000 + i), terms=other)
    assert {line["kind"] for line in log_of(tmp_path)[before:]} == {"refused"}
    longer = attacker.terms._replace(rounds=attacker.terms.rounds + 1)
    attacker.sends(round_call(0, 9000), terms=longer)


def test_pools_of_a_size_that_the_run_does_not_have_are_refused_before_they_are_compiled(alone, tmp_path, monkeypatch):
    """Each size would be another program, which stays in memory."""
    found = method("FedX2")
    task = task_of(found)
    Policy(rows_at_least=1, fields=("*",)).keep_in(tmp_path)
    options = {"params": START, "batch_size": 3}
    attacker = alone(Deployment(task.problem, found, lambda settings: task.federation.select([1]), 3, 3, options))
    attacker.sends(begin_call())
    context, run, work = attacker.victim()[0].sites[RUN][1].context, [], sites._work
    monkeypatch.setattr(sites, "_work", lambda *given, **more: (run.append(given), work(*given, **more))[1])

    def call(writers):
        arrays, pools = {}, {}
        for path in context.exchanges[0].receives:
            value = part(context.template, path)
            if isinstance(value, Pool):
                pools[path] = [i % 3 for i in range(writers)]
                rows = writers * value.capacity
                value = jax.tree.map(lambda a, n=rows: np.zeros((n, *a.shape[1:]), a.dtype), value.rows)
            arrays |= pack({path: jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), value)})[0]
        return Message(RUN, Stage(0, 0), VICTIM, arrays, Stage(-1, 0), pools or None)

    for writers in (0, 1, 2, 4, 5, 30):
        with pytest.raises(ValueError, match=f"rows of {writers} writers in '(first|second)'; in this run there are 3"):
            attacker.sends(call(writers))
    assert not run
    attacker.sends(call(3))
    assert len(run) == 1


def test_a_site_does_not_compute_without_end_what_it_does_not_send(alone, tmp_path, worked, monkeypatch):
    """Known calls whose replies differ each time, since other calls come in between."""
    monkeypatch.setattr(guard, "MOST_REPEATS", 2)
    least = 1 + 3 * 2 + 2
    _, asks = of_two_exchanges(alone, tmp_path, least)
    for i in range(200):
        with contextlib.suppress(Refused):
            asks(0, 0.1 + i % 5 * 0.01)
        with contextlib.suppress(Refused):
            asks(1, 0.3)
    assert len(worked) <= 2 * least
    with pytest.raises(Refused, match=f"has answered {2 * least} calls in run 'first', most of them repeated"):
        asks(1, 0.3)


def test_a_site_that_answers_fewer_calls_than_a_run_needs_says_so_before_the_first(alone, tmp_path, worked):
    needed = 1 + 3 + averaging().evaluations
    attacker = alone(averaging())
    Policy(parameters=needed - 1).keep_in(tmp_path)
    why = f"site-1 answers {needed - 1} different calls in a run, and 'first' needs {needed}; its owner may raise para"
    with pytest.raises(Refused, match=why):
        attacker.sends(begin_call())
    assert worked == []
    Policy(parameters=needed).keep_in(tmp_path)
    attacker.sends(begin_call())
    for round in range(3):
        attacker.sends(round_call(round, round, (round - 1, 0)))
    for round in range(averaging().evaluations):
        attacker.evaluates(round=round + 1)


def test_a_server_that_calls_late_rounds_first_does_not_fill_the_disk(alone, tmp_path):
    attacker = alone(averaging(ROWS)._replace(rounds=1000))
    attacker.sends(begin_call())
    for round in range(100, 0, -1):
        attacker.sends(round_call(round))
    store = DiskStore(tmp_path / "runs" / RUN, VICTIM)
    assert len(store.stages()) <= 6
    assert {(-1, 0), (1, 0)} <= set(store.stages())


def test_a_run_that_is_extended_by_one_round_many_times_keeps_its_evaluations(alone):
    """At every end there is one; the terms have those of one run from the first round to the last."""
    attacker, rounds = alone(averaging(ROWS)._replace(rounds=1)), range(1, 60)
    attacker.sends(begin_call())
    for round in rounds:
        made = averaging(ROWS)._replace(rounds=round)
        terms = attacker.terms._replace(rounds=round, evaluations=made.evaluations)
        attacker.sends(round_call(round - 1, round, (round - 2, 0)), terms=terms)
        attacker.evaluates(round, round=round, terms=terms)
    done = attacker.victim()[0].guard.journal.answered(RUN)
    assert len(done.evaluations) == len(rounds)
    assert len(done.calls) == 1 + 2 * len(rounds)


def test_terms_that_change_before_the_first_round_allow_no_more_calls(alone, worked):
    """Only a run that is extended has one more evaluation each time."""
    attacker = alone(averaging(ROWS))
    for number in range(20):
        attacker.sends(begin_call(), terms=attacker.terms._replace(origin=str(number)))
    worked.clear()
    terms = attacker.terms._replace(origin="19")
    evaluate_all = lambda: [attacker.evaluates(x, terms=terms) for x in range(100)]
    with pytest.raises(Refused, match=r"has answered \d+ evaluations in run 'first', whose terms have 2"):
        evaluate_all()
    assert len(worked) == 3 + 10


@pytest.fixture
def scoring(alone):
    """A site of 500 rows that sends scores, after an evaluation of a few measures."""
    rng = np.random.default_rng(3)
    data = fs.Federation.from_clients([{"x": rng.normal(size=(500, 3)), "y": rng.integers(0, 2, 500)}])
    problem = fs.Average(fs.losses.Classification(lambda w, x: w @ x))
    made = Deployment(problem, fs.FedAvg(0.1), lambda settings: data, 3, 3, {"params": START}, scores=("train",))
    attacker = alone(made, tells="scores")
    attacker.sends(begin_call())
    attacker.evaluates(0.0)
    return attacker


def test_after_scores_that_were_too_large_measures_still_leave(scoring, tmp_path, worked):
    """And nothing is computed again for the large ones."""
    done = scoring.victim()[0].guard.journal.answered(RUN).bytes
    Policy(bytes=done + 2000).keep_in(tmp_path)
    for x in (1.0, 2.0, 3.0):
        with pytest.raises(Refused, match=r"more than the [\d,]+ that its policy allows"):
            scoring.evaluates(x, scores=(0,))
    assert len(worked) == 1
    assert scoring.evaluates(1.0).arrays
    with pytest.raises(Refused, match=r"more than the [\d,]+ that its policy allows"):
        scoring.evaluates(4.0, scores=(0,))
    assert len(worked) == 2
    Policy(bytes=done + 100_000).keep_in(tmp_path)
    assert sum(array.nbytes for array in scoring.evaluates(1.0, scores=(0,)).arrays.values()) > 2000


def test_with_noise_of_the_site_a_repeated_evaluation_is_not_a_new_one(alone, tmp_path):
    """No noise is added to it, so that it has the same reply; the server may have lost the first."""
    noisy = averaging(ROWS, privacy=fs.Privacy(clip=1.0, noise=1.0, where="sites"))
    attacker = alone(noisy, tells="measures")
    Policy(evaluations=2).keep_in(tmp_path)
    attacker.sends(begin_call())
    first = attacker.evaluates(1.0)
    attacker.evaluates(2.0)
    assert attacker.evaluates(1.0).encode() == first.encode()
    assert len(attacker.victim()[0].guard.journal.answered(RUN).evaluations) == 2
    with pytest.raises(Refused, match="has answered 2 evaluations"):
        attacker.evaluates(3.0)


def test_a_worker_holds_few_runs_in_memory_and_the_others_continue(alone, monkeypatch):
    """With their terms from the disk: the server sends no more than a hash of them."""
    attacker = alone(averaging(ROWS))
    worker, names = attacker.victim()[0], [f"run-{number}" for number in range(5)]
    terms = {run: attacker.terms._replace(run=run) for run in names}
    half, held = ROWS.mean(0) / 2, []

    def asks(round, before):
        for run in names:
            about = {"digest": terms[run].digest()} if round else {"terms": terms[run]}
            reply = attacker.sends(round_call(round, round, before, run), **about)
            np.testing.assert_allclose(reply.arrays["x.tree"], round / 2 + half, rtol=1e-12)
            held.append(list(worker.sites))

    for run in names:
        attacker.sends(begin_call(run), terms=terms[run])
    for round in range(3):
        asks(round, (round - 1, 0))
    assert max(map(len, held)) == workers.MOST_RUNS
    assert all(runs[-1] == run for runs, run in zip(held, 3 * names, strict=True))
