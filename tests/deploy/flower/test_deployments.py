"""Deployments that could never run: refused before their server waits for sites. And runs of cohorts of sites."""

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from deployments import OPTIONS, simulated
from grids import NAME, ROUNDS, SITES, deployment, grid, hurry, solution

import fedstrata as fs
from fedstrata.deploy.flower import server_app
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
