"""A deployed run with faults, in one process: missing and invalid replies and crashes never change the state."""

import dataclasses

import jax
import numpy as np
import pytest
from cases import CASES, START, task_of

import fedstrata as fs
from fedstrata.deploy.agreement import with_data
from fedstrata.deploy.in_process import Traffic, advance, in_process_link, in_process_run
from fedstrata.deploy.messages import Message, Stage
from fedstrata.deploy.server import QuorumError, Server
from fedstrata.deploy.site import Site
from fedstrata.deploy.site_store import DiskStore, MemoryStore, SiteStoreError
from fedstrata.engine.checkpoint import CheckpointError, Checkpoints
from fedstrata.simulate.options import RunOptions
from fedstrata.simulate.run import prepare

ROUNDS = 4
# One of each kind of state: Local fields, a pool with per-example memory, several exchanges a round, site starts.
KINDS = ["SCAFFOLD", "FedX2", "FedNest", "FedDRSCGD"]


def algorithm(name):
    found = CASES[name].algorithm
    return dataclasses.replace(found, inner_rounds=2, terms=2) if name == "FedNest" else found  # fewer exchanges


def deployed(name, **options):
    """The server and the sites of a run; the sites are named client 0 to client 3."""
    task = task_of(algorithm(name))
    return in_process_run(task.problem, algorithm(name), task.federation, params=START, batch_size=3, **options)


def assert_close(a, b, rtol):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol / 10), a, b)


def wrapped(server: Server, fault, quorum=0.5):
    """The same run over a link with a fault: fault(call, reply) is what arrives; reports are kept."""
    reports, link = [], server.caller.link

    def faulty(calls):
        return {i: fault(calls[i], reply) for i, reply in link(calls).items()}

    return Server(server.agreement, server.names, faulty, quorum=quorum, on_report=reports.append), reports


def silent(call, reply):
    """The third site does not answer in round 1."""
    return "no answer" if (call.site, call.stage.round) == ("client 2", 1) else reply


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_site_that_is_absent_is_an_empty_slot_of_the_cohort(name):
    server, reports = wrapped(deployed(name)[0], silent)
    now = advance(server, ROUNDS)
    everyone = [[0, 1, 2, 3]] * ROUNDS
    everyone[1] = [0, 1, -1, 3]
    task, options = task_of(algorithm(name)), {"batch_size": 3, "params": START, "stationarity": False}
    given = RunOptions(rounds=ROUNDS, cohort=fs.participation.Given(everyone), **options)
    this = prepare(task.problem, algorithm(name), task.federation, given)
    carry, _, starts = this.begin()
    carry = this.advance(carry, 0, 1, starts)[0] if starts else this.advance(carry, 0, 1)[0]
    carry = this.advance(carry, 1, ROUNDS)[0]
    simulated = jax.tree.map(lambda a: a[0], this.solutions(carry))
    assert_close(server.solution(now), simulated, 1e-12)
    assert next(r.missing for r in reports if r.missing) == {"client 2": "no answer"}
    assert now.after[2].round == ROUNDS - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SCAFFOLD", "TrackedBiO"])
def test_the_share_of_a_cohort_of_unequal_sites_equals_the_simulated_one(name):
    """Weighted by size, two of four sites in a round, and one of them absent in round 1."""
    schedule = [[0, 1], [2, 3], [1, 3], [0, 2]]
    method = algorithm(name)
    task, options = task_of(method), {"params": START, "batch_size": 3, "weights": "size"}
    given = fs.participation.Given(schedule)
    plain, _, _ = in_process_run(task.problem, method, task.federation, cohort=given, **options)
    server, reports = wrapped(plain, silent)
    now = advance(server, ROUNDS)
    assert any(report.missing for report in reports)
    schedule[1] = [-1, 3]
    given = fs.participation.Given(schedule)
    result = fs.run(task.problem, method, task.federation, rounds=ROUNDS, cohort=given, stationarity=False, **options)
    assert_close(server.solution(now).tree, result.solution(), 1e-12)


def test_weights_are_refused_for_a_pairwise_problem():
    task = task_of(algorithm("FedX2"))
    with pytest.raises(ValueError, match="weighs its clients itself"):
        in_process_run(task.problem, algorithm("FedX2"), task.federation, params=START, weights="size")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FedX2", "AdaMFCGD", "FedMinMax"])
def test_sites_of_later_cohorts_send_their_starts_too(name, tmp_path):
    """The first pool, of all sites, lasts for two rounds; a server that restarts between them still has it."""
    method = dataclasses.replace(algorithm(name), history=2) if name == "FedX2" else algorithm(name)
    task, store = task_of(method), Checkpoints(tmp_path)
    given = {"params": START, "batch_size": 3, "cohort": fs.participation.Given([[0, 1], [2, 0], [3, 1], [1, 2]])}
    server, _, _ = in_process_run(task.problem, method, task.federation, **given)
    now = advance(server, 1)
    assert (set(now.pools) == {"first", "second"}) == (name == "FedX2")
    server.save(store, now)
    now = advance(server, ROUNDS, server.load(store))
    assert not now.pools
    result = fs.run(task.problem, method, task.federation, rounds=ROUNDS, stationarity=False, **given)
    assert_close(server.solution(now).tree, result.solution(), 1e-11)


def spoilt(field_change):
    """The third site's replies in round 1 with one array changed."""

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
    "the reply is for": lambda call, reply: (
        reply._replace(stage=Stage(0, 0)) if (call.site, call.stage.round) == ("client 2", 1) else reply
    ),
    "missing": lambda call, reply: (
        reply._replace(arrays={}) if (call.site, call.stage.round) == ("client 2", 1) else reply
    ),
}


@pytest.mark.parametrize("why", WRONG)
def test_an_invalid_reply_counts_as_missing_and_is_reported(why, caplog):
    good = wrapped(deployed("SCAFFOLD")[0], silent)[0]
    bad, reports = wrapped(deployed("SCAFFOLD")[0], WRONG[why])
    assert_close(advance(bad, ROUNDS).shared, advance(good, ROUNDS).shared, 0)
    (missing,) = [r.missing for r in reports if r.missing]
    assert why in missing["client 2"]
    assert "client 2" in caplog.text


def test_too_few_replies_leave_the_state_unchanged():
    server, _, _ = deployed("SCAFFOLD")
    strict = wrapped(server, silent, quorum=1.0)[0]
    now = advance(strict, 1)
    with pytest.raises(QuorumError, match="3 sites replied, and 4 must"):
        strict.round(now)
    assert_close(advance(server, ROUNDS, now).shared, advance(deployed("SCAFFOLD")[0], ROUNDS).shared, 0)


class Killed(Exception):
    pass


DEATHS = {1, 3, 6, 10, 15, 21, 28}  # exchanges, at growing intervals: some round must finish


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dies", ["server", "site"])
def test_a_run_is_bit_identical_after_a_crash_at_any_stage(name, dies, tmp_path):
    """After each crash only files are left."""
    undisturbed = advance(deployed(name)[0], ROUNDS)
    store, deaths, exchanges, now = Checkpoints(tmp_path / "server"), 0, 0, None
    while now is None or now.round < ROUNDS:
        plain, sites, _ = deployed(name)
        for site in sites:
            site.store = DiskStore(tmp_path / site.name, site.name)

        def deadly(calls, link=plain.caller.link):
            nonlocal exchanges
            exchanges += 1
            if exchanges in DEATHS:  # after all sites have worked, or one of them
                link(calls if dies == "server" else {min(calls): calls[min(calls)]})
                raise Killed
            return link(calls)

        server = Server(plain.agreement, plain.names, deadly)
        try:
            now = server.load(store) or server.begin()
            server.save(store, now)
            while now.round < ROUNDS:
                now = server.round(now)
                server.save(store, now)
        except Killed:
            deaths, now = deaths + 1, None
    assert deaths > 1
    assert_close(now.shared, undisturbed.shared, 0)


def lacking():
    """Three sites with both classes and one with positives only, in training and test."""
    draw = np.random.default_rng(4)
    x, y = draw.normal(size=(4, 7, 3)), draw.integers(0, 2, (4, 7))
    y[3], y[:3, 0], y[:3, 1] = 1, 0, 1
    parts = [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]
    return fs.Federation.from_clients(parts, classes=2, test=[*parts[1:], {"x": x[0, :0], "y": y[0, :0]}]).by_label()


@pytest.mark.parametrize("method", [fs.CODASCA(0.1, 3, server_step_size=0.9), fs.FedX2(0.05, 2)])
def test_a_site_without_rows_of_a_split_runs_as_in_the_simulator(method):
    """Its data as over a network: not padded to those of the largest site."""
    federation, options = lacking(), {"params": START, "batch_size": 3}
    problem = fs.Pairwise(lambda w, e: w @ e["x"], fs.pair_losses.Square())
    padded, _, _ = in_process_run(problem, method, federation, **options)
    data = [federation.select([i]) for i in range(4)]
    assert data[3]["negatives"].size == 0
    sites = [
        Site(with_data(padded.agreement, own), name, i, MemoryStore(), data=own)
        for i, (name, own) in enumerate(zip(padded.names, data, strict=True))
    ]
    bare = Server(padded.agreement, padded.names, in_process_link(sites, Traffic()))
    ends = [advance(server, 3) for server in (bare, padded)]
    assert_close(ends[0].shared, ends[1].shared, 1e-13)
    result = fs.run(problem, method, federation, rounds=3, stationarity=False, **options)
    assert_close(bare.solution(ends[0]).tree, result.solution(), 1e-12)
    found, expected = bare.evaluate(ends[0]), padded.evaluate(ends[1])
    assert not found.missing
    assert found.rows == expected.rows
    assert found.rows["client 3"]["test"] == 0
    for name, mean in expected.means.items():
        np.testing.assert_allclose(found.means[name], mean, rtol=1e-12)


def test_a_site_refuses_calls_for_others_and_keeps_its_state(tmp_path):
    _, (site, *_), _ = deployed("SCAFFOLD")
    site.store = DiskStore(tmp_path, site.name)
    site.answer(Message("in process", Stage(-1, 0), "client 0", {}))
    before = site.store.stages()
    for call, why in [
        (Message("another", Stage(0, 0), "client 0", {}), "run 'another'"),
        (Message("in process", Stage(0, 0), "client 1", {}), "for 'client 1'"),
        (Message("in process", Stage(0, 0), "client 0", {"x.tree": np.zeros(9)}, Stage(-1, 0)), "message"),
    ]:
        with pytest.raises(ValueError, match=why):
            site.answer(call)
    assert site.store.stages() == before


def test_a_store_reports_a_missing_stage_damage_and_a_full_disk(tmp_path, monkeypatch):
    store = DiskStore(tmp_path / "site", "Ulm")
    store.write(Stage(0, 0), {"c": np.arange(3.0)})
    np.testing.assert_array_equal(store.read(Stage(0, 0))["c"], np.arange(3.0))
    assert (tmp_path / "site").stat().st_mode & 0o077 == 0
    with pytest.raises(SiteStoreError, match=r"Ulm: the server resumes from stage \(1, 0\).*stored: \(0, 0\)"):
        store.read(Stage(1, 0))
    path = tmp_path / "site" / "0_0.state"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(SiteStoreError, match="damaged"):
        store.read(Stage(0, 0))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(SiteStoreError, match=r"No space left.*has not changed"):
        store.write(Stage(0, 1), {"c": np.zeros(3)})
    assert store.stages() == [(0, 0)]


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    server, _, _ = deployed("SCAFFOLD")
    store = Checkpoints(tmp_path)
    server.save(store, server.begin())
    other = deployed("SCAFFOLD", run="another")[0]
    with pytest.raises(CheckpointError, match="holds run 'in process', and this is 'another'"):
        other.load(store)


def test_a_run_needs_as_many_names_as_sites_and_a_share_as_quorum():
    server, _, _ = deployed("SCAFFOLD")
    with pytest.raises(ValueError, match="needs as many different names"):
        Server(server.agreement, ("a", "a", "b", "c"), server.caller.link)
    with pytest.raises(ValueError, match="quorum=0"):
        Server(server.agreement, server.names, server.caller.link, quorum=0)
