"""A deployed run under faults, in one process: what is absent, wrong or killed never reaches the state."""

import dataclasses

import jax
import numpy as np
import pytest

import fedstrata as fs
from cases import CASES, START, task_of
from fedstrata.runtime.checkpoint import CheckpointError, Checkpoints
from fedstrata.runtime.conductor import Conductor, QuorumError
from fedstrata.runtime.rehearsal import advance, rehearsal
from fedstrata.runtime.run import prepare
from fedstrata.runtime.shelf import Folder, ShelfError
from fedstrata.transport.letters import Letter, Stage

ROUNDS = 4
# One of each kind of state: own fields, a pool with per-example memory, several exchanges a round, starts of its own.
KINDS = ["Scaffold", "FedX2", "FedNest", "FedDRSCGD"]


def algorithm(name):
    found = CASES[name].algorithm
    return dataclasses.replace(found, inner_rounds=2, terms=2) if name == "FedNest" else found  # fewer exchanges


def deployed(name, **options):
    """The server and the sites of a run, which are called client 0 to client 3."""
    task = task_of(algorithm(name))
    return rehearsal(task.problem, algorithm(name), task.federation, params=START, batch_size=3, **options)


def assert_close(a, b, rtol):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol / 10), a, b)


def wrapped(conductor: Conductor, fault, quorum=0.5):
    """The same run over a link with a fault: fault(call, reply) is what arrives; reports are kept."""
    reports, link = [], conductor.link

    def faulty(calls):
        return {i: fault(calls[i], reply) for i, reply in link(calls).items()}

    return Conductor(conductor.terms, conductor.names, faulty, quorum, reports.append), reports


def silent(call, reply):
    """The third site does not answer in round 1."""
    return "no answer" if (call.site, call.stage.round) == ("client 2", 1) else reply


@pytest.mark.parametrize("name", KINDS)
def test_a_site_that_is_absent_is_an_empty_slot_of_the_cohort(name):
    conductor, reports = wrapped(deployed(name)[0], silent)
    now = advance(conductor, ROUNDS)
    everyone = [[0, 1, 2, 3]] * ROUNDS
    everyone[1] = [0, 1, -1, 3]
    task, options = task_of(algorithm(name)), {"batch_size": 3, "params": START, "stationarity": False}
    given = fs.cohort.Given(everyone)
    this = prepare(task.problem, algorithm(name), task.federation, rounds=ROUNDS, cohort=given, **options)
    carry, _, own = this.begin()
    carry = this.advance(carry, 0, 1, own)[0] if own else this.advance(carry, 0, 1)[0]
    carry = this.advance(carry, 1, ROUNDS)[0]
    simulated = jax.tree.map(lambda a: a[0], this.solutions(carry))
    assert_close(conductor.solution(now), simulated, 1e-12)
    assert next(r.missing for r in reports if r.missing) == {"client 2": "no answer"}
    assert now.after[2].round == ROUNDS - 1


@pytest.mark.parametrize("name", ["Scaffold", "TrackedBiO"])
def test_the_share_of_a_cohort_of_unequal_sites_is_the_simulators(name):
    """Weighed by size, two of four a round, and one of them absent in round 1."""
    schedule = [[0, 1], [2, 3], [1, 3], [0, 2]]
    task, method, options = (
        task_of(algorithm(name)),
        algorithm(name),
        {"params": START, "batch_size": 3, "weights": "size"},
    )
    plain, _, _ = rehearsal(task.problem, method, task.federation, cohort=fs.cohort.Given(schedule), **options)
    conductor, reports = wrapped(plain, silent)
    now = advance(conductor, ROUNDS)
    assert any(report.missing for report in reports)
    schedule[1] = [-1, 3]
    given = fs.cohort.Given(schedule)
    result = fs.run(task.problem, method, task.federation, rounds=ROUNDS, cohort=given, stationarity=False, **options)
    assert_close(conductor.solution(now).tree, result.solution(), 1e-12)


def test_a_pairwise_problem_weighs_its_sites_itself():
    task = task_of(algorithm("FedX2"))
    with pytest.raises(ValueError, match="weighs its clients itself"):
        rehearsal(task.problem, algorithm("FedX2"), task.federation, params=START, weights="size")


@pytest.mark.parametrize("name", ["FedX2", "AdaMFCGD", "FedMinMax"])
def test_sites_that_wait_for_a_later_cohort_send_their_starts_too(name, tmp_path):
    """The first pool, of all sites, outlasts two rounds; the server that is restarted between them still has it."""
    method = dataclasses.replace(algorithm(name), history=2) if name == "FedX2" else algorithm(name)
    task, store = task_of(method), Checkpoints(tmp_path)
    given = {"params": START, "batch_size": 3, "cohort": fs.cohort.Given([[0, 1], [2, 0], [3, 1], [1, 2]])}
    conductor, _, _ = rehearsal(task.problem, method, task.federation, **given)
    now = advance(conductor, 1)
    assert (set(now.pools) == {"first", "second"}) == (name == "FedX2")
    conductor.save(store, now)
    now = advance(conductor, ROUNDS, conductor.load(store))
    assert not now.pools
    result = fs.run(task.problem, method, task.federation, rounds=ROUNDS, stationarity=False, **given)
    assert_close(conductor.solution(now).tree, result.solution(), 1e-11)


def spoilt(field_change):
    """The third site's answers of round 1 with one array changed."""

    def fault(call, reply):
        if (call.site, call.stage.round) != ("client 2", 1):
            return reply
        name = next(iter(reply.arrays))
        return reply._replace(arrays={**reply.arrays, name: field_change(reply.arrays[name])})

    return fault


WRONG = {
    "not finite": spoilt(lambda a: np.full_like(a, np.nan)),
    "expected": spoilt(lambda a: a.astype(np.float32)),
    "message": spoilt(lambda a: a[None]),
    "the answer is about": lambda call, reply: (
        reply._replace(stage=Stage(0, 0)) if (call.site, call.stage.round) == ("client 2", 1) else reply
    ),
    "missing": lambda call, reply: (
        reply._replace(arrays={}) if (call.site, call.stage.round) == ("client 2", 1) else reply
    ),
}


@pytest.mark.parametrize("why", WRONG)
def test_a_wrong_answer_counts_as_none_and_is_named(why, caplog):
    good = wrapped(deployed("Scaffold")[0], silent)[0]
    bad, reports = wrapped(deployed("Scaffold")[0], WRONG[why])
    assert_close(advance(bad, ROUNDS).shared, advance(good, ROUNDS).shared, 0)
    (missing,) = [r.missing for r in reports if r.missing]
    assert why in missing["client 2"]
    assert "client 2" in caplog.text


def test_too_few_answers_leave_the_run_as_it_was():
    conductor, _, _ = deployed("Scaffold")
    strict = wrapped(conductor, silent, quorum=1.0)[0]
    now = advance(strict, 1)
    with pytest.raises(QuorumError, match="3 sites answered, and 4 must"):
        strict.round(now)
    assert_close(advance(conductor, ROUNDS, now).shared, advance(deployed("Scaffold")[0], ROUNDS).shared, 0)


class Killed(Exception):
    pass


DEATHS = {1, 3, 6, 10, 15, 21, 28}  # exchanges, at ever longer intervals: some round must come to its end


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dies", ["server", "site"])
def test_whoever_is_killed_at_any_stage_comes_back_to_the_same_end(name, dies, tmp_path):
    """Everything but files is thrown away after every stage at which somebody dies."""
    undisturbed = advance(deployed(name)[0], ROUNDS)
    store, deaths, exchanges, now = Checkpoints(tmp_path / "server"), 0, 0, None
    while now is None or now.round < ROUNDS:
        plain, sites, _ = deployed(name)
        for site in sites:
            site.shelf = Folder(tmp_path / site.name, site.name)

        def deadly(calls, link=plain.link):
            nonlocal exchanges
            exchanges += 1
            if exchanges in DEATHS:  # after all sites have done their part, or one of them
                link(calls if dies == "server" else {min(calls): calls[min(calls)]})
                raise Killed
            return link(calls)

        conductor = Conductor(plain.terms, plain.names, deadly)
        try:
            now = conductor.load(store) or conductor.begin()
            conductor.save(store, now)
            while now.round < ROUNDS:
                now = conductor.round(now)
                conductor.save(store, now)
        except Killed:
            deaths, now = deaths + 1, None
    assert deaths > 1
    assert_close(now.shared, undisturbed.shared, 0)


def test_a_site_refuses_what_is_not_its_own_and_remembers_nothing_of_it(tmp_path):
    _, (site, *_), _ = deployed("Scaffold")
    site.shelf = Folder(tmp_path, site.name)
    site.answer(Letter("rehearsal", Stage(-1, 0), "client 0", {}))
    before = site.shelf.stages()
    for call, why in [
        (Letter("another", Stage(0, 0), "client 0", {}), "run 'another'"),
        (Letter("rehearsal", Stage(0, 0), "client 1", {}), "for 'client 1'"),
        (Letter("rehearsal", Stage(0, 0), "client 0", {"x.tree": np.zeros(9)}, Stage(-1, 0)), "message"),
    ]:
        with pytest.raises(ValueError, match=why):
            site.answer(call)
    assert site.shelf.stages() == before


def test_a_shelf_says_what_is_missing_damaged_or_full(tmp_path, monkeypatch):
    shelf = Folder(tmp_path / "site", "Ulm")
    shelf.write(Stage(0, 0), {"c": np.arange(3.0)})
    np.testing.assert_array_equal(shelf.read(Stage(0, 0))["c"], np.arange(3.0))
    assert (tmp_path / "site").stat().st_mode & 0o077 == 0
    with pytest.raises(ShelfError, match=r"Ulm: the server goes on from its stage \(1, 0\).*there: \(0, 0\)"):
        shelf.read(Stage(1, 0))
    path = tmp_path / "site" / "0_0.state"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ShelfError, match="damaged"):
        shelf.read(Stage(0, 0))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(ShelfError, match=r"No space left.*as it was before"):
        shelf.write(Stage(0, 1), {"c": np.zeros(3)})
    assert shelf.stages() == [(0, 0)]


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    conductor, _, _ = deployed("Scaffold")
    store = Checkpoints(tmp_path)
    conductor.save(store, conductor.begin())
    other = deployed("Scaffold", run="another")[0]
    with pytest.raises(CheckpointError, match="holds run 'rehearsal', and this is 'another'"):
        other.load(store)


def test_a_run_needs_as_many_names_as_sites_and_a_share_as_quorum():
    conductor, _, _ = deployed("Scaffold")
    with pytest.raises(ValueError, match="needs as many different names"):
        Conductor(conductor.terms, ("a", "a", "b", "c"), conductor.link)
    with pytest.raises(ValueError, match="quorum=0"):
        Conductor(conductor.terms, conductor.names, conductor.link, 0)
