"""A site, the settings or the server of a run change while it goes on: the right result, or a refusal that says why."""

import json
import os
import re
import signal
import subprocess

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from deployments import exchanges_in, federation, needs_full, programs_or_skip, simulated, write_app
from operators import alter, deploy, paused, restart, rewritten, running, solution, stop, write_server_file

import fedstrata as fs
from fedstrata.engine.privacy import epsilon

pytestmark = pytest.mark.slow

ROUNDS = 3
PRIVACY = "fs.Privacy(clip=0.01, noise=2.0)"


@pytest.fixture(scope="module")
def flower(tmp_path_factory):
    programs_or_skip()
    folder = tmp_path_factory.mktemp("changes")
    with federation(folder, write_app(folder, "changes", "SCAFFOLD", ROUNDS)) as found:
        write_server_file(found)
        yield found


@pytest.fixture(scope="module")
def first(flower):
    """What the command of a finished run said, and its folder."""
    code, said = deploy(flower, "run")
    assert code == 0, said
    return said, flower.app / "out" / "first"


@pytest.fixture(scope="module")
def undisturbed(first, flower):
    """The solution of the first run, to which nothing happens."""
    return solution(flower, "first")["params"]


def test_a_finished_run_says_where_its_result_is(first, undisturbed):
    said, folder = first
    assert f"parameters:  {folder / 'solution.npz'}" in said
    np.testing.assert_allclose(undisturbed, simulated("SCAFFOLD", ROUNDS).solution(), rtol=1e-12)


def test_a_run_is_not_continued_with_other_settings(first, flower):
    """Its sites have approved the new code, and the operator says that it computes the same."""
    folder = first[1]
    kept = {path: path.read_bytes() for path in folder.glob("*.*") if path.suffix in (".npz", ".jsonl")}
    with rewritten(flower, ROUNDS, changes="step_size=0.2"):
        code, said = deploy(flower, "run", "--new-code")
    reason = said.splitlines()[-1]
    assert code == 1
    assert "SCAFFOLD.step_size: saved 0.1, now 0.2" in reason
    assert "another --name" in reason
    assert kept
    assert all(path.read_bytes() == content for path, content in kept.items())


CHANGES = [
    pytest.param({"data": 1e-9}, "its values", id="data"),
    pytest.param({"versions": {"jax": "0.0.1"}}, "its version of jax: ", id="library", marks=needs_full),
]


@pytest.mark.parametrize(("change", "told"), CHANGES)
def test_a_site_that_has_changed_is_refused_until_it_is_as_it_was(flower, undisturbed, request, change, told):
    name = request.node.callspec.id
    command = running(flower, name)
    with paused(flower.worker("site-0")):  # the run must not end before the change
        alter(flower, "site-1", **change)
        os.kill(flower.worker("site-1"), signal.SIGKILL)
    code, said = command.ended()
    reason = said.splitlines()[-1]
    assert code == 1
    assert "site-1" in reason
    assert told in reason
    alter(flower, "site-1")
    restart(flower, "site-1")
    code, said = deploy(flower, "run", "--name", name)
    assert code == 0, said
    np.testing.assert_array_equal(solution(flower, name)["params"], undisturbed)


def test_a_second_server_is_refused_and_privacy_is_counted_once(flower):
    out = flower.app / "out"
    with rewritten(flower, ROUNDS, "FedAvg", options=f'"privacy": {PRIVACY}'):
        command = running(flower, "private")
        with paused(flower.worker("site-0")):  # the first server waits
            code, said = deploy(flower, "run", "--name", "private")
            assert code != 0
            assert "is running already" in said
            log = flower.home / "second.log"
            with log.open("w") as file:  # without the check of the command
                flower.run(file, run="private", folder=str(out)).wait(60)
            assert "run 'private' has a server already" in log.read_text()
        code, said = command.ended()
    assert code == 0, said
    stages = [tuple(json.loads(line)["stage"]) for line in exchanges_in(out / "private")]
    assert len(set(stages)) == len(stages) >= ROUNDS
    told = json.loads((out / "private" / "evaluations.jsonl").read_text().splitlines()[-1])["privacy"]
    noise = fs.Privacy(clip=0.01, noise=2.0)
    assert told["exchanges"] == ROUNDS
    assert told["epsilon"] == pytest.approx(epsilon(noise.noise, ROUNDS, noise.delta), rel=1e-9)


@needs_full
def test_clocks_that_are_ten_minutes_wrong_are_corrected(flower, undisturbed):
    wrong = {"site-0": (600, "ahead of"), "site-1": (-600, "behind")}
    for site, (seconds, _) in wrong.items():
        alter(flower, site, clock=seconds)
        stop(flower, site)
        said = flower_alone(flower, site)
        assert "SuperNode terminated" in said  # the server does not let it in, and it ends
        assert "SuperNode ID" not in said
        flower.start_site(site)
    code, said = deploy(flower, "run", "--name", "clocks")
    for site in wrong:
        alter(flower, site)
        restart(flower, site)
    assert code == 0, said
    np.testing.assert_array_equal(solution(flower, "clocks")["params"], undisturbed)
    for site, (seconds, word) in wrong.items():
        told = re.search(rf"clock is (\d+) s {word}", flower.log(site, 10_000))
        assert abs(int(told[1]) - abs(seconds)) < 60  # the server's time is as old as its response


def flower_alone(flower, name):
    """The log of a site's SuperNode as Flower has it, until it ends."""
    site, log = flower.sites[name], flower.home / f"{name}-alone.log"
    words = [*flower.prefix, "flower-supernode", *site.command()[4:]]
    with log.open("w") as file:  # and no pipe, which its helper would keep open
        subprocess.run(words, env={**site.environment(), **flower.extra}, stdout=file, stderr=file, timeout=60)
    return log.read_text()
