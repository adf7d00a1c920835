"""A site falls silent: its network loses everything, or its processes stop. Nothing is closed, and nobody says so."""

import contextlib
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from deployments import SITES, exchanges_in, federation, needs_full, programs_or_skip, simulated, wait_until, write_app
from operators import deploy, paused, rewritten, running, solution, write_server_file

import fedstrata as fs

pytestmark = pytest.mark.slow

ROUNDS, DEADLINE = 3, 15.0


@pytest.fixture(scope="module")
def flower(tmp_path_factory):
    programs_or_skip()
    folder = tmp_path_factory.mktemp("silence")
    app = write_app(folder, "silence", "SCAFFOLD", ROUNDS, deadline=DEADLINE)
    with federation(folder, app, relayed="site-2") as found:
        write_server_file(found)
        yield found


@pytest.fixture(scope="module")
def undisturbed(flower):
    """The solution of a run over the same sites to which nothing happens. It equals the simulated one."""
    with rewritten(flower, ROUNDS, deadline=180):
        code, said = deploy(flower, "run", "--name", "undisturbed")
    assert code == 0, said
    found = solution(flower, "undisturbed")["params"]
    np.testing.assert_allclose(found, simulated("SCAFFOLD", ROUNDS).solution(), rtol=1e-12)
    return found


def processes(flower, name):
    """The processes without which a site is silent, or the relay before site-2."""
    if name == "relay":
        return [flower.processes[name].pid]
    group, members = flower.processes[name].pid, []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            if os.getpgid(int(path.name)) == group:
                members.append(int(path.name))
    return [*members, flower.worker(name)]


def test_a_stopped_site_misses_a_round_and_comes_back(flower):
    with rewritten(flower, ROUNDS, quorum=0.6, deadline=DEADLINE):
        command = running(flower, "absent")
        rows = lambda: [json.loads(line) for line in exchanges_in(flower.app / "out" / "absent")]
        with paused(*processes(flower, "site-1")):
            wait_until(lambda: any("site-1" in row["missing"] for row in rows()), command.log, command.process)
        code, said = command.ended()
    assert code == 0, said
    rounds = [row["received"] for row in rows() if 0 <= row["stage"][0] < ROUNDS]
    present = [[i if f"site-{i}" in received else -1 for i in range(SITES)] for received in rounds]
    assert len(present) == ROUNDS
    assert [0, -1, 2] in present
    assert present[-1] == [0, 1, 2]
    assert "missing:     site-1" in said
    np.testing.assert_allclose(
        solution(flower, "absent")["params"],
        simulated("SCAFFOLD", ROUNDS, cohort=fs.participation.Given(present)).solution(),
        rtol=1e-12,
    )


@needs_full
@pytest.mark.parametrize(("silent", "site"), [("relay", "site-2"), ("site-1", "site-1")])
def test_a_site_that_is_silent_beyond_the_deadline_is_named_and_the_run_resumes(flower, undisturbed, silent, site):
    command = running(flower, f"long-{silent}")
    with paused(*processes(flower, silent)):
        code, said = command.ended()
    assert code == 1
    assert f"{site}: no answer" in said.splitlines()[-1]
    code, said = deploy(flower, "run", "--name", f"long-{silent}")
    assert code == 0, said
    np.testing.assert_array_equal(solution(flower, f"long-{silent}")["params"], undisturbed)


@needs_full
def test_a_network_that_is_silent_for_less_than_the_deadline_only_delays_a_run(flower, undisturbed):
    """For more than a minute: a request and a handshake of Flower's SuperNode wait for half a minute each."""
    with rewritten(flower, ROUNDS, deadline=180):
        command = running(flower, "short")
        with paused(*processes(flower, "relay")):
            time.sleep(65)
        code, said = command.ended()
    assert code == 0, said
    np.testing.assert_array_equal(solution(flower, "short")["params"], undisturbed)
