"""One of three sites sends well-formed replies with numbers that are not finite, or absurd."""

import json
import os
import subprocess
import sys
from pathlib import Path

import cases
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from attacked_runs import (
    BAD,
    calls,
    check_lines,
    forging,
    joined,
    on_bytes,
    reasons,
    result_without_it,
    served,
    solution,
)
from cases import CASES, START, task_of
from deployments import simulated
from grids import NAME, SITES, deployment

import fedstrata as fs
from fedstrata.deploy import server
from fedstrata.deploy.flower import server_app
from fedstrata.deploy.flower.client_app import opened
from fedstrata.deploy.in_process import in_process_run
from fedstrata.deploy.magnitudes import check_magnitudes, largest, no_longer_finite
from fedstrata.deploy.messages import Message, NotFinite
from fedstrata.deploy.server import DivergedError, QuorumError

ROUNDS = 4
UNUSABLE = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "1e300": 1e300, "-1.8e308": -np.finfo(np.float64).max}


def filled(value):
    """A forgery: one number of every array is this one."""

    def forged(body):
        reply = Message.decode(body)
        arrays = {name: np.array(array) for name, array in reply.arrays.items()}
        for array in arrays.values():
            array.reshape(-1)[:1] = value
        return reply._replace(arrays=arrays).encode()

    return on_bytes(forged)


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    return result_without_it(tmp_path_factory.mktemp("silent"), ROUNDS)


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_numbers_leave_their_site_out_of_the_round(name, grid, tmp_path, without, caplog):
    """It is named, and called again: an honest site may send such numbers if the run diverges."""
    forging(grid, filled(UNUSABLE[name]), "train")
    found = served(grid, tmp_path / "out", rounds=ROUNDS, quorum=0.6)
    np.testing.assert_allclose(found, without, rtol=1e-12)
    assert calls(grid, BAD, "train") == ROUNDS == len(reasons(tmp_path / "out"))
    for why in reasons(tmp_path / "out"):
        assert why.endswith("has values that are not finite" if "e" not in name else "whose squares are not finite")
    assert json.loads((tmp_path / "out" / "status.json").read_text())["sites"][BAD]["quarantined"] is None
    check_lines(tmp_path / "out", caplog)


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_numbers_that_come_once_change_nothing(name, grid, tmp_path):
    forging(grid, filled(UNUSABLE[name]), "train", times=1)
    np.testing.assert_allclose(served(grid, tmp_path / "out", rounds=1), simulated(NAME, 1).solution(), rtol=1e-12)
    assert len(reasons(tmp_path / "out")) == 1


def test_a_site_that_always_sends_unusable_numbers_ends_a_run_that_needs_it_and_is_named(grid, tmp_path):
    forging(grid, filled(np.nan), "train")
    with pytest.raises(QuorumError, match=r"2 sites replied, and 3 must.*site-1: .* not finite"):
        server_app.serve(deployment(rounds=1), grid, "first", tmp_path / "out")
    assert not (tmp_path / "out" / "solution.npz").exists()


def test_absurd_numbers_that_can_be_squared_count_in_the_mean(grid, tmp_path, caplog):
    """Means have no defence against them. They end no run, and the files can be read."""
    forging(grid, filled(1e150), "train")
    found = served(grid, tmp_path / "out", rounds=2, quorum=0.6)
    assert np.max(np.abs(found)) > 1e140
    evaluated = json.loads((tmp_path / "out" / "evaluations.jsonl").read_text(), parse_constant=pytest.fail)
    assert evaluated["round"] == 2
    check_lines(tmp_path / "out", caplog)


def test_a_run_that_diverges_by_itself_blames_nobody_and_saves_nothing(hurry, tmp_path):
    wild = {"algorithm": fs.SCAFFOLD(step_size=1e120, local_steps=2)}
    grid = joined(tmp_path, **wild)
    with pytest.raises(QuorumError, match=r"0 sites replied, and 3 must.*whose squares are not finite"):
        server_app.serve(deployment(rounds=9, **wild), grid, "first", tmp_path / "out")
    status = json.loads((tmp_path / "out" / "status.json").read_text())["sites"]
    assert [entry["quarantined"] for entry in status.values()] == [None] * SITES
    assert not (tmp_path / "out" / "solution.npz").exists()


ADAM = {"algorithm": CASES["FedAdam"].algorithm}


@pytest.fixture
def large(monkeypatch):
    """Numbers whose squares are not finite are accepted, so that they break the state of a method that squares them."""
    monkeypatch.setattr(server, "check_magnitudes", lambda arrays: None)


def test_a_site_that_breaks_the_servers_state_is_quarantined_and_the_round_repeated(large, hurry, tmp_path, caplog):
    grid = joined(tmp_path, **ADAM)
    forging(grid, filled(1e300), "train")
    found = served(grid, tmp_path / "out", rounds=2, quorum=0.6, **ADAM)
    assert np.max(np.abs(found)) < 10
    (told,) = [line for line in caplog.messages if "site-1 is quarantined because the merged state" in line]
    assert "site-1 up to 1.0e+300" in told
    assert calls(grid, BAD, "train") == 1
    check_lines(tmp_path / "out", caplog)


def test_a_broken_state_is_never_saved_and_the_run_resumes_from_the_one_before(large, hurry, tmp_path):
    grid = joined(tmp_path, **ADAM)

    def honest_at_first(kind, site, content):
        return filled(1e300)(*opened(content)) if calls(grid, BAD, "train") > 1 and site == BAD else content

    grid.forge = honest_at_first
    with pytest.raises(QuorumError, match=r"2 sites replied, and 3 must.*site-1: quarantined because the merged state"):
        server_app.serve(deployment(rounds=3, **ADAM), grid, "first", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "status.json").read_text())["round"] == 1
    grid.forge = lambda kind, site, content: content
    server_app.serve(deployment(rounds=3, **ADAM), grid, "first", tmp_path / "out")
    np.testing.assert_allclose(solution(tmp_path / "out"), simulated("FedAdam", 3).solution(), rtol=1e-12)


def test_a_state_that_all_sites_break_alike_ends_the_run_with_their_numbers(large, hurry, tmp_path):
    grid = joined(tmp_path, **ADAM)
    grid.forge = lambda kind, site, content: filled(1e300)(*opened(content)) if kind[:5] == "train" else content
    with pytest.raises(
        DivergedError, match=r"round 0, phase 0: .* not finite; sites sent values: site-\d up to 1.0e\+300"
    ):
        server_app.serve(deployment(rounds=3, **ADAM), grid, "first", tmp_path / "out")
    assert not (tmp_path / "out" / "solution.npz").exists()


@pytest.mark.parametrize(("where", "shown"), [("server", False), ("sites", True)])
def test_sizes_of_replies_that_have_no_noise_yet_do_not_get_out(monkeypatch, where, shown):
    """With noise of the sites, what they send may be known to all."""
    monkeypatch.setattr(server, "no_longer_finite", lambda before, after: "x")
    task = task_of(CASES["FedAvg"].algorithm)
    private = {"privacy": fs.Privacy(1.0, 2.0, where=where), "params": START}
    found, _, _ = in_process_run(task.problem, CASES["FedAvg"].algorithm, task.federation, **private)
    begun = found.begin()
    with pytest.raises(DivergedError, match="x of the merged state is not finite") as error:
        found.round(begun)
    assert ("sites sent values" in str(error.value)) == shown


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_sizes_are_found_in_every_precision(dtype):
    array = np.array([[1.0, -3.0], [2.0, 0.5]], dtype)
    assert largest({"x": array, "n": np.array([9], np.int32)}) == 3
    check_magnitudes({"x": array, "none": np.zeros((0, 3), dtype)})
    for value in (np.nan, np.inf, -np.inf):
        bad = np.array([1.0, value], dtype)
        assert largest(bad) == np.inf
        with pytest.raises(NotFinite, match="x has values that are not finite"):
            check_magnitudes({"x": bad})
        assert no_longer_finite({"x": array}, {"x": bad}) == "['x']"
        assert no_longer_finite({"x": bad}, {"x": bad}) == ""  # as at the start: it has a meaning
    if dtype != np.float16:
        words = r"^x has values whose squares are not finite$"  # and not how large they are
        with pytest.raises(NotFinite, match=words):
            check_magnitudes({"x": np.array([-float(ml_dtypes.finfo(dtype).max) / 2], dtype)})


GROUPS = """
import jax

jax.config.update("jax_enable_x64", True)
from cases import CASES, START, task_of

from fedstrata.deploy.agreement import agree
from fedstrata.deploy.data_summary import DataSummary


def peak():
    status = open("/proc/self/status").read()
    return 1000 * int(status.partition("VmHWM:")[2].split()[0])


algorithm = CASES["FCFL"].algorithm
task = task_of(algorithm)
own = DataSummary.of("site-0", task.federation.select([0]))
agree("", task.problem, algorithm, [own], params=START, batch_size=3)
before = peak()
many = own._replace(counts={"train": ROWS})
agree("", task.problem, algorithm, [many], params=START, batch_size=3)
wide = many._replace(shapes={"train": {**own.shapes["train"], "wide": ("float64", [2**28])}})  # one row: 2 GB
assert callable(task.problem.group)
agree("", task.problem, algorithm, [wide], params=START, batch_size=3)
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_a_summary_of_many_or_wide_rows_takes_no_memory_where_groups_are_computed():
    """In a process of its own: an earlier test may have reached a higher peak than this one."""
    rows = 3 * 10**7
    path = os.pathsep.join([str(Path(cases.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    given = {**os.environ, "PYTHONPATH": path}
    words = [sys.executable, "-c", GROUPS.replace("ROWS", str(rows))]
    found = subprocess.run(words, env=given, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) < 100e6  # one number of 4 bytes for every row would be 120 MB
