"""Deployments that could never run: refused before their server waits for sites. And runs of cohorts of sites."""

import contextlib
import itertools
import logging
import os
import re
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from deployments import OPTIONS, simulated
from grids import NAME, ROUNDS, SITES, deployment, grid, hurry, solution

import fedstrata as fs
from fedstrata.deploy.flower import roster, server_app
from fedstrata.deploy.flower.run_lock import read_status
from fedstrata.deploy.server import QuorumError
from fedstrata.engine.checkpoint import CheckpointError, Checkpoints

__all__ = ["grid", "hurry"]  # fixtures


@pytest.mark.parametrize("cohort", [2, fs.participation.Given([[0, 2], [1, 2], [2, 0]])], ids=["number", "schedule"])
def test_a_run_with_cohorts_begins_and_equals_the_simulated_one(grid, tmp_path, cohort):
    """Every site is checked before others come: a cohort of two cannot be drawn from it alone."""
    made = deployment(options={**deployment().options, "cohort": cohort})
    for node in list(grid.nodes):
        grid.nodes.pop(node)
    for number in range(SITES):
        grid.join(tmp_path / f"site-{number}", number, made=made)
    server_app.serve(made, grid, "first", tmp_path / "out")
    expected = simulated(NAME, ROUNDS, cohort=cohort).solution()
    np.testing.assert_allclose(solution(tmp_path / "out"), expected, rtol=1e-12)


def options(**changes):
    return {"options": {**OPTIONS, **changes}}


BFLOAT16 = fs.models.Linear(3, 1)
WRONG = {
    "an option that does not exist": (options(batchsize=3), "option of the deployment 'batchsize'.*batch_size"),
    "a seed that is none": (options(seed="five"), "seed"),
    "too large a cohort": (options(cohort=4), "a cohort of 4 clients cannot be drawn from 3"),
    "a schedule with too many sites": (options(cohort=fs.participation.Given([[0, 3]])), "names client 3"),
    "no sites": ({"sites": 0}, "sites=0; give a number >= 1, or a tuple"),
    "a name that is no tuple": ({"sites": "site-0"}, "sites='site-0'; give a number >= 1, or a tuple"),
    "a name given twice": ({"sites": ("a", "a")}, "a tuple of different names"),
    "no rounds": ({"rounds": 0}, "rounds=0; give a whole number >= 1"),
    "half a round": ({"rounds": 2.5}, "rounds=2.5; give a whole number >= 1"),
    "evaluations that never come": ({"evaluate_every": 0}, "evaluate_every=0"),
    "a quorum above one": ({"quorum": 2.0}, "quorum=2.0; give a share"),
    "a quorum that is none": ({"quorum": float("nan")}, "quorum=nan; give a share"),
    "no time": ({"deadline": 0.0}, "deadline=0.0; give seconds > 0"),
    "scores that are no tuple": ({"scores": "test"}, "give a tuple of splits: scores=.'test',."),
    "a model that cannot be saved": (
        {
            "problem": fs.Average(fs.losses.Classification(BFLOAT16)),
            "algorithm": fs.FedAvg(0.1),
            **options(params={"weight": jnp.zeros((3, 1), jnp.bfloat16), "bias": jnp.zeros(1, jnp.bfloat16)}),
        },
        "cannot store .*bfloat16.*; convert the parameters to float32 first",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_deployment_that_could_never_run_is_refused_at_once(what, tmp_path):
    changes, why = WRONG[what]
    with pytest.raises((ValueError, TypeError), match=why):
        server_app.serve(deployment(**changes), None, "first", tmp_path / "out")  # no grid is asked for anything
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("scores", "why"), [(("train",), "score"), (("test",), "split of the sites.*'test'")])
def test_scores_that_the_problem_or_the_sites_do_not_have_are_refused_before_the_first_round(
    grid, tmp_path, scores, why
):
    with pytest.raises(ValueError, match=why):
        server_app.serve(deployment(scores=scores), grid, "first", tmp_path / "out")
    assert not (tmp_path / "out" / "sites.json").exists()
    server_app.serve(deployment(), grid, "first", tmp_path / "out")
    assert solution(tmp_path / "out").size


def test_a_full_disk_at_the_server_names_the_command_that_resumes(tmp_path, monkeypatch):
    store = Checkpoints(tmp_path, "`fedstrata deploy run` with the same --name")
    monkeypatch.setattr(
        "fedstrata.engine.checkpoint.replacing", lambda path: (_ for _ in ()).throw(OSError(28, "full"))
    )
    with pytest.raises(CheckpointError, match=r"make room and resume .`fedstrata deploy run` with the same --name."):
        store.save(1, {"x": np.zeros(2)}, {})


@pytest.fixture
def command(grid, tmp_path, monkeypatch):
    """A function that runs the server app as Flower starts it for `deploy run`; it returns the run's status."""
    monkeypatch.setattr(server_app, "code_of", lambda where: "0 1")
    monkeypatch.setattr(server_app, "_log_to", lambda folder: None)
    mask, out = os.umask(0o077), tmp_path / "out"

    def run(made=None, why="", **options):
        monkeypatch.setattr(server_app, "resolve", lambda where: made or deployment())
        given = SimpleNamespace(run_config={"run": "first", "folder": str(out), **options})
        with pytest.raises(BaseException, match=why) if why else contextlib.nullcontext():
            server_app.server_app("task:deployment")(grid, given)
        return read_status(out / "first")

    yield run
    os.umask(mask)


def test_a_stopped_run_resumes_with_the_rounds_of_its_last_command(grid, command):
    """Not with those of the app, with which it would have finished already."""
    calls = itertools.count()

    def stopped(kind, site, answer):
        if next(calls) == SITES * (2 + ROUNDS + 1):  # summaries, beginnings, and a round more than the app has
            raise KeyboardInterrupt("stopped")
        return answer()

    grid.on_message = stopped
    found = command(rounds=ROUNDS + 2, why="stopped")
    assert (found["state"], found["round"]) == ("failed", ROUNDS + 1)
    grid.on_message = lambda kind, site, answer: answer()
    assert command(rounds=1, why="rounds already, and 1 are wanted")["state"] == "failed"  # and this does not count
    found = command()
    assert (found["state"], found["round"], found["rounds"]) == ("finished", ROUNDS + 2, ROUNDS + 2)
    assert command(rounds=ROUNDS + 3)["round"] == ROUNDS + 3
    assert command()["round"] == ROUNDS + 3


def test_a_finished_run_that_is_not_resumed_stays_finished_and_tells_why(command):
    """With fewer rounds than it has, or with other settings."""
    before = command()
    assert before["state"] == "finished"
    seed = deployment(options={**deployment().options, "seed": 6})
    for made, options, why in (
        (None, {"rounds": 2}, "the run has 3 rounds already, and 2 are wanted"),
        (seed, {}, "seed: saved 5, now 6"),
    ):
        found = command(made, why, **options)
        assert {n: found[n] for n in ("state", "round", "sites")} == {n: before[n] for n in ("state", "round", "sites")}
        assert found["why"].startswith("it was not resumed: ")
        assert why in found["why"]
    assert command()["why"] is None


def test_a_site_that_a_run_waits_for_is_named_with_the_reason(grid, tmp_path, monkeypatch, caplog):
    """It came back without its state folder."""
    caplog.set_level("INFO", logger="fedstrata")
    monkeypatch.setattr(roster, "NEWS", 0.0)
    server_app.serve(deployment(rounds=1), grid, "first", tmp_path / "out")
    grid.leave("site-1")
    grid.join(tmp_path / "another folder", 1)
    with pytest.raises(QuorumError):
        server_app.serve(deployment(deadline=3.0), grid, "first", tmp_path / "out")
    assert re.search(
        "the run waits for site-1; another site has the name 'site-1', or .* its state folder", caplog.text
    )


def test_the_server_keeps_a_log_of_its_own_that_no_ctrl_c_of_a_reader_ends(tmp_path, capsys):
    log, mask = logging.getLogger("fedstrata"), os.umask(0o077)
    before = log.handlers, log.propagate, log.level
    try:
        server_app._log_to(tmp_path)
        log.info("all sites replied")
        log.handlers[1].close()
    finally:
        (log.handlers, log.propagate), _ = before[:2], log.setLevel(before[2])
        os.umask(mask)
    assert "all sites replied" in capsys.readouterr().out
    assert (tmp_path / "server.log").read_text().endswith(" all sites replied\n")
    assert (tmp_path / "server.log").stat().st_mode & 0o077 == 0
