"""Crashes of every process: the result is bit-identical to that of an undisturbed run. And sites that send garbage."""

import os
import random
import signal
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from deployments import (
    FULL,
    SITES,
    exchanges_in,
    federation,
    finished,
    needs_full,
    programs_or_skip,
    simulated,
    started,
    wait_until,
    write_app,
)

import fedstrata as fs
from fedstrata.deploy.flower.keys import server_keys, site_keys

pytestmark = pytest.mark.slow

ROUNDS = 3
# The same for all processes of one test run, and another in the next; the name of a failed test has it.
ANY = zlib.crc32(os.environ.get("PYTEST_XDIST_TESTRUNUID", str(time.time())).encode()) % 1000
SEEDS = range(10) if FULL else [ANY]

# The second site replies in round 1 with bytes, a wrong shape, or numbers that are not finite; later it is correct.
GARBAGE = """
    import os

    import numpy as np

    from fedstrata.deploy.flower import client_app
    from fedstrata.deploy.messages import Message


    class Liar(client_app.Handover):
        def __call__(self, message, context):
            reply = super().__call__(message, context)
            about, body = client_app.opened(reply.content)
            if context.node_config["number"] != 1 or message.metadata.group_id != "1" or not body:
                return reply
            sent = Message.decode(body)
            first = next(iter(sent.arrays))
            put = lambda array: sent._replace(arrays={{**sent.arrays, first: array}}).encode()
            wrong = {{
                "bytes": lambda: os.urandom(200),
                "shape": lambda: put(np.zeros(7)),
                "infinite": lambda: put(sent.arrays[first] + np.inf),
                "round": lambda: sent._replace(stage=sent.stage._replace(round=0)).encode(),
            }}
            body = wrong[context.run_config["folder"].rpartition("-")[2]]()
            return client_app.Message(client_app.record(about, body), reply_to=message)


    app = Liar("{package}.task:deployment")
"""


@pytest.fixture(scope="module")
def flower(tmp_path_factory):
    programs_or_skip()
    folder = tmp_path_factory.mktemp("faults")
    with federation(folder, write_app(folder, "faults", "SCAFFOLD", ROUNDS)) as found:
        add_stranger(found, folder)
        yield found


def add_stranger(flower, folder):
    """A site with an unregistered key, which tries to connect while the other tests run."""
    private, _ = site_keys(folder / "stranger", "stranger")
    port = flower.sites["site-0"].port + 1000
    found = flower.sites["site-0"]._replace(site="stranger", state="stranger", key=str(private), port=port)
    flower.sites["stranger"] = found
    flower.start_site("stranger")


@pytest.fixture(scope="module")
def undisturbed(flower, tmp_path_factory):
    """The solution of a run over the same sites to which nothing happens. It equals the simulated one."""
    folder = tmp_path_factory.mktemp("undisturbed")
    found = finished(started(flower, folder, "undisturbed"), folder / "undisturbed")
    np.testing.assert_allclose(found, simulated("SCAFFOLD", ROUNDS).solution(), rtol=1e-12)
    return found


def processes(flower, program):
    """Ids of the processes of this federation that run a program."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
        except OSError:
            continue
        if program.encode() in command and str(flower.home).encode() in environment:
            found.append(int(entry.name))
    return found


def results(folder):
    """Where a run of this folder keeps its results. Every run has another name: a site takes each name once."""
    return folder / folder.name


def begun(flower, folder, seed):
    """A run that has finished a number of exchanges, drawn from the seed; and a site, drawn likewise."""
    draw = random.Random(seed)
    exchanges = draw.randrange(1, ROUNDS + 1)
    process = started(flower, folder, folder.name)
    wait_until(lambda: len(exchanges_in(results(folder))) >= exchanges, folder / "run.log", process)
    time.sleep(2 * draw.random())
    return process, f"site-{draw.randrange(SITES)}"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_worker(flower, tmp_path, undisturbed, seed):
    process, name = begun(flower, tmp_path, seed)
    os.kill(flower.worker(name), signal.SIGKILL)
    np.testing.assert_array_equal(finished(process, results(tmp_path)), undisturbed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_node(flower, tmp_path, undisturbed, seed):
    process, name = begun(flower, tmp_path, seed)
    flower.kill(name)
    time.sleep(random.Random(seed).random())
    flower.start_site(name)
    np.testing.assert_array_equal(finished(process, results(tmp_path)), undisturbed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_server_app(flower, tmp_path, undisturbed, seed):
    process, _ = begun(flower, tmp_path, seed)
    for number in processes(flower, "flwr-serverapp"):
        os.kill(number, signal.SIGKILL)
    process.kill()
    process.wait()
    np.testing.assert_array_equal(finished(started(flower, tmp_path, tmp_path.name), results(tmp_path)), undisturbed)
    once = 1 + ROUNDS + 1  # the beginning, the rounds, and an evaluation
    assert len(exchanges_in(results(tmp_path))) <= once + 1  # at most the interrupted exchange was repeated


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_superlink(flower, tmp_path, undisturbed, seed):
    process, _ = begun(flower, tmp_path, seed)
    flower.kill("superlink")
    for number in processes(flower, "flwr-serverapp"):
        os.kill(number, signal.SIGKILL)
    process.kill()
    process.wait()
    flower.start_link()
    np.testing.assert_array_equal(finished(started(flower, tmp_path, tmp_path.name), results(tmp_path)), undisturbed)


@pytest.mark.parametrize("kind", ["bytes", "shape", "infinite", "round"] if FULL else ["shape"])
def test_a_site_that_sends_garbage(tmp_path, flower, kind):
    from fedstrata.deploy.flower.approval import approve

    app, flower.app = flower.app, write_app(tmp_path, "garbage", "SCAFFOLD", ROUNDS, GARBAGE, quorum=0.6)
    approve(flower.app, flower.home / "approved.txt")
    kept = tmp_path / f"out-{kind}"
    found = finished(started(flower, kept, kept.name), results(kept))
    flower.app = app
    without = fs.participation.Given([[0, 1, 2], [0, -1, 2], [0, 1, 2]])
    np.testing.assert_allclose(found, simulated("SCAFFOLD", ROUNDS, cohort=without).solution(), rtol=1e-12)
    reported = [line for line in exchanges_in(results(kept)) if '"missing": {}' not in line]
    assert len(reported) == 1
    assert "site-1" in reported[0]
    assert '"stage": [1,' in reported[0]


def test_a_site_with_an_unregistered_key_is_rejected(flower):
    assert flower.processes["stranger"].wait(60) != 0
    assert "the server rejects this site" in flower.log("stranger", 1000)
    assert not (flower.home / "stranger" / "worker.lock").exists()  # it never received a message


def test_a_site_rejects_a_server_with_another_certificate(flower, tmp_path):
    other = server_keys(tmp_path / "other", ["127.0.0.1"], days=1)[0]
    flower.sites["careful"] = flower.sites["site-0"]._replace(
        state="careful", authority=str(other), port=flower.sites["site-0"].port + 1000
    )
    flower.start_site("careful")
    log = flower.home / "careful.log"
    wait_until(lambda: "CERTIFICATE_VERIFY_FAILED" in log.read_text(), log)
    flower.kill("careful")
    del flower.sites["careful"]


@needs_full
def test_a_second_site_with_the_same_name_is_refused(flower, tmp_path, undisturbed):
    """It has a different registered key, and another state folder. It is asked because another site is missing."""
    private, public = site_keys(tmp_path / "keys", "twin")
    flower.register(public)
    port = flower.sites["site-0"].port + 2000
    flower.sites["twin"] = flower.sites["site-0"]._replace(state="twin", key=str(private), port=port)
    process, _ = begun(flower, tmp_path, 0)
    flower.kill("site-1")
    flower.start_site("twin")
    log = tmp_path / "run.log"
    try:
        wait_until(lambda: "another site has the name 'site-0'" in log.read_text(), log, process)
    finally:
        flower.start_site("site-1")
    np.testing.assert_array_equal(finished(process, results(tmp_path)), undisturbed)
    flower.kill("twin")


@needs_full
def test_a_slow_site_is_waited_for(flower, tmp_path, undisturbed):
    process, name = begun(flower, tmp_path, 0)
    os.kill(flower.worker(name), signal.SIGSTOP)
    time.sleep(40)
    os.kill(flower.worker(name), signal.SIGCONT)
    np.testing.assert_array_equal(finished(process, results(tmp_path)), undisturbed)
