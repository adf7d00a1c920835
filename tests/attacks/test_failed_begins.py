"""A run that could not begin begins again under its name, once a site is corrected; but not once a number has left."""

import json

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from attackers import RUN, VICTIM, Attacker, averaging, begin_call, log_of
from cases import CASES, START, task_of
from deployments import OPTIONS, simulated
from grids import NAME, ROUNDS, SITES, deployment, load, solution

import fedstrata as fs
from fedstrata.deploy import site_folder
from fedstrata.deploy.flower import server_app
from fedstrata.deploy.flower.deployment import Deployment
from fedstrata.deploy.messages import Message, Stage
from fedstrata.deploy.policy import Policy
from fedstrata.deploy.server import QuorumError
from fedstrata.deploy.site import Site
from fedstrata.deploy.state_files import DamagedFile

CHANGED = "the terms of run 'first' have changed since it began here"


def wrong(settings):
    """Data of site-2 with a row too few; those of the others are right."""
    found = load(settings)
    if settings["number"] != 2:
        return found
    return fs.Federation.from_clients([{name: a[1:] for name, a in found["train"].examples.items()}])


@pytest.mark.parametrize("restarted", ["the corrected site", "all sites"])
def test_a_site_that_was_corrected_joins_a_run_that_could_not_begin(grid, tmp_path, restarted):
    least = load({"number": 2})["train"].size
    Policy(rows_at_least=least).keep_in(tmp_path / "site-2")
    grid.leave("site-2")
    grid.join(tmp_path / "site-2", 2, made=deployment(load=wrong))
    with pytest.raises(QuorumError, match=rf"the run cannot begin: 2 of 3 .* wants at least {least}: a mean over few"):
        server_app.serve(deployment(), grid, RUN, tmp_path / "out")
    assert not (tmp_path / "out" / "sites.json").exists()
    for number in (2,) if restarted == "the corrected site" else range(SITES):
        grid.leave(f"site-{number}")
        grid.join(tmp_path / f"site-{number}", number)
    server_app.serve(deployment(), grid, RUN, tmp_path / "out")
    np.testing.assert_allclose(solution(tmp_path / "out"), simulated(NAME, ROUNDS).solution(), rtol=1e-12)


@pytest.fixture
def attacker(tmp_path):
    """The server of a run that the site has begun."""
    found = Attacker.alone(tmp_path, averaging())
    assert found.sends(begin_call()).arrays == {}
    yield found
    found.victim()[0].close()


def others(attacker, number=0):
    """Other terms of the same run: those of a server with another folder."""
    return attacker.terms._replace(origin=f"folder {number}")


def first_round():
    return Message(RUN, Stage(0, 0), VICTIM, {"x.tree": np.zeros(3)}, Stage(-1, 0))


def test_a_site_prepares_its_start_again_under_other_terms(attacker, tmp_path, worked):
    """Also for a server that does not ask for it: one that resumes."""
    for number in range(3):
        terms = others(attacker, number)
        for _ in range(2):
            attacker.sends(begin_call(), terms=terms)
    worked.clear()
    np.testing.assert_allclose(attacker.sends(first_round()).arrays["x.tree"], [1.25, 1.75, 2.5])
    assert [stage[:2] for _, stage in worked] == [(-1, 0), (0, 0)]
    with pytest.raises(ValueError, match=f"{CHANGED}: the server's folder"):
        attacker.sends(begin_call(), terms=others(attacker))


def test_a_reply_that_did_not_leave_is_not_kept_for_other_terms(attacker, tmp_path, worked):
    Policy(bytes=attacker.victim()[0].guard.journal.answered(RUN).bytes + 100).keep_in(tmp_path)
    with pytest.raises(ValueError, match=r"more than the [\d,]+ that its policy allows"):
        attacker.evaluates(round=0)
    Policy().keep_in(tmp_path)
    assert attacker.evaluates(round=0, terms=others(attacker)).arrays
    assert [stage[:2] for _, stage in worked] == [(0, -2), (-1, 0), (0, -2)]


ANSWERS = {
    "a round": lambda attacker: attacker.sends(first_round()),
    "an evaluation": lambda attacker: attacker.evaluates(round=0),
}


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("what", ANSWERS)
def test_after_an_answer_with_numbers_the_terms_stay(attacker, tmp_path, what, restarted, worked):
    """Rows of another site that change in between would give other means of the same rows."""
    assert ANSWERS[what](attacker).arrays
    if restarted:
        attacker.victim()[0].close()
        attacker.victim = Attacker.alone(tmp_path, averaging()).victim
    worked.clear()
    for terms in (others(attacker), attacker.with_site("made up 1", counts={"train": 9})):
        with pytest.raises(ValueError, match=CHANGED):
            attacker.sends(begin_call(), terms=terms)
    assert worked == []


@pytest.mark.parametrize("name", ["FedMinMax", "FedX2"])
def test_after_a_start_that_sends_fields_the_terms_stay(name, tmp_path, worked):
    """The group shares of FedMinMax are numbers of the site's rows; those of FedX are rows."""
    task, method = task_of(CASES[name].algorithm), CASES[name].algorithm
    Policy(fields=("*",), rows_at_least=1).keep_in(tmp_path)
    made = Deployment(task.problem, method, lambda settings: task.federation.select([1]), 1, 3, {"params": START})
    attacker = Attacker.alone(tmp_path, made)
    assert attacker.sends(begin_call()).arrays
    worked.clear()
    with pytest.raises(ValueError, match=f"{CHANGED}: the server's folder"):
        attacker.sends(begin_call(), terms=others(attacker))
    assert worked == []
    attacker.victim()[0].close()


def made_of(name):
    """A deployment of this method, and the task that it runs on."""
    task, method = task_of(CASES[name].algorithm), CASES[name].algorithm
    load = lambda settings: task.federation.select([settings["number"]])
    return Deployment(task.problem, method, load, ROUNDS, SITES, {**OPTIONS, "seed": 5}, deadline=0.5)


@pytest.mark.parametrize("name", ["FedMinMax", "AdaMFCGD"])
def test_a_run_whose_sites_have_sent_their_start_begins_again_once_a_silent_site_is_back(name, grid, tmp_path):
    """They take no other folder of the server any more: this one keeps its text."""
    made = made_of(name)
    for number in range(SITES):
        Policy(fields=("*",), rows_at_least=1).keep_in(tmp_path / f"site-{number}")
        grid.leave(f"site-{number}")
        grid.join(tmp_path / f"site-{number}", number, made=made)
    grid.on_message = lambda kind, site, answer: None if (kind, site) == ("query.begin0", "site-2") else answer()
    with pytest.raises(QuorumError, match="the run cannot begin: 2 of 3"):
        server_app.serve(made, grid, RUN, tmp_path / "out")
    grid.on_message = lambda kind, site, answer: answer()
    server_app.serve(made._replace(deadline=20.0), grid, RUN, tmp_path / "out")
    np.testing.assert_allclose(solution(tmp_path / "out"), simulated(name, ROUNDS).solution(), rtol=1e-12)


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("file", ["settings.json", "terms.json"])
def test_a_site_whose_disk_was_full_when_a_run_began_joins_it_later(file, restarted, grid, tmp_path, monkeypatch):
    """Its log has the terms, and its folder does not: nothing has left, so it takes the next ones."""
    real = site_folder.write_text

    def full(path, text):
        if "site-2" in str(path) and path.name == file:
            raise DamagedFile(f"cannot write {path}: No space left on device")
        real(path, text)

    monkeypatch.setattr(site_folder, "write_text", full)
    with pytest.raises(QuorumError, match="No space left on device"):
        server_app.serve(deployment(deadline=1.0), grid, RUN, tmp_path / "out")
    monkeypatch.setattr(site_folder, "write_text", real)
    (tmp_path / "out" / "origin.json").unlink()  # also those of a server that has lost its folder
    if restarted:
        grid.leave("site-2")
        grid.join(tmp_path / "site-2", 2)
    server_app.serve(deployment(), grid, RUN, tmp_path / "out")
    np.testing.assert_allclose(solution(tmp_path / "out"), simulated(NAME, ROUNDS).solution(), rtol=1e-12)


@pytest.mark.parametrize("first", [None, 2.0])
def test_a_run_that_could_not_begin_may_begin_with_other_noise(first, tmp_path):
    """Nothing has been released yet, neither with the old noise nor without any."""
    noisy = lambda noise: {} if noise is None else {"privacy": fs.Privacy(clip=1.0, noise=noise)}
    old = Attacker.alone(tmp_path, averaging(**noisy(first)))
    old.sends(begin_call())
    old.victim()[0].close()
    new = Attacker.alone(tmp_path, averaging(**noisy(1.0)))
    terms = others(new)
    new.sends(begin_call(), terms=terms)
    assert new.sends(first_round(), terms=terms).arrays
    assert json.loads((tmp_path / "runs" / RUN / "privacy.json").read_text())["noise"] == 1.0
    new.victim()[0].close()
    other = Attacker.alone(tmp_path, averaging(**noisy(3.0)))
    with pytest.raises(ValueError, match="settings of run 'first' have changed"):
        other.sends(begin_call(), terms=terms)
    other.victim()[0].close()


def fails(*given):
    raise DamagedFile("crash")


@pytest.mark.parametrize("crash", ["after the log", "after the terms"])
def test_a_site_that_crashes_while_terms_are_replaced_prepares_its_start_again(attacker, tmp_path, worked, crash):
    """Whichever of the two servers goes on: what was prepared under the terms of the other one is gone."""
    found = attacker.victim()[0]
    with pytest.MonkeyPatch.context() as patch:
        where = (site_folder, "write_text") if crash == "after the log" else (Site, "answer")
        patch.setattr(*where, fails)
        with pytest.raises(DamagedFile, match="crash"):
            attacker.sends(first_round(), terms=others(attacker))
    found.close()
    attacker.victim = Attacker.alone(tmp_path, averaging()).victim
    worked.clear()
    assert attacker.sends(first_round()).arrays
    assert [stage[:2] for _, stage in worked] == [(-1, 0), (0, 0)]


def test_a_run_begins_anew_a_limited_number_of_times(attacker, tmp_path, monkeypatch, worked):
    """Each time is a line of the log. The last terms hold."""
    monkeypatch.setattr(site_folder, "MOST_ATTEMPTS", 3)
    for number in range(2):
        attacker.sends(begin_call(), terms=others(attacker, number))
    worked.clear()
    for number in range(2, 5):
        with pytest.raises(ValueError, match="run 'first' has begun 3 times, without a round; start a new run"):
            attacker.sends(begin_call(), terms=others(attacker, number))
    assert worked == []
    assert sum(line["kind"] == "terms" for line in log_of(tmp_path)) == 3
    attacker.sends(begin_call(), terms=others(attacker, 1))
    assert attacker.sends(first_round(), terms=others(attacker, 1)).arrays


@pytest.mark.parametrize("asked", [True, False])
def test_a_site_with_a_new_log_may_begin_a_run_again(attacker, tmp_path, worked, asked):
    """Its owner has moved the old one away. It prepares its start for the new terms, asked or not."""
    attacker.victim()[0].close()
    (tmp_path / "log.jsonl").rename(tmp_path / "old.jsonl")
    attacker.victim = Attacker.alone(tmp_path, averaging()).victim
    worked.clear()
    if asked:
        attacker.sends(begin_call(), terms=others(attacker))
    assert attacker.sends(first_round(), terms=others(attacker)).arrays
    assert [stage[:2] for _, stage in worked] == [(-1, 0), (0, 0)]
    attacker.victim()[0].close()
