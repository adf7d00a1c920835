"""Every file of a server's run folder, damaged: the run goes on to the right result, or says which file to restore."""

import dataclasses
import shutil

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from attackers import RUN
from cases import CASES
from damages import DAMAGES, damage
from grids import NAME, SITES, TASK, missing

import fedstrata as fs
from fedstrata.deploy.flower.run_lock import RunningError, only_server, read_status, reported
from fedstrata.deploy.in_process import in_process_run
from fedstrata.deploy.messages import Stage
from fedstrata.deploy.privacy_accountant import PrivacyAccountant
from fedstrata.deploy.server import QuorumError
from fedstrata.deploy.state_files import DamagedFile
from fedstrata.engine.checkpoint import CheckpointError, Checkpoints

pytestmark = [  # of threads that read a damaged checkpoint
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


def out(begun):
    return begun.folder / "out" / RUN


def checkpoint_files(begun):
    newest = sorted((out(begun) / "checkpoints").glob("round-*"))[-1]
    return sorted(path for path in newest.rglob("*") if path.is_file())


slow = lambda how: pytest.param(how, marks=pytest.mark.slow)


@pytest.mark.parametrize("how", ["flipped in the middle", *map(slow, ["empty", "deleted", "random bytes", "a folder"])])
@pytest.mark.parametrize("number", range(10))
def test_a_damaged_checkpoint_is_not_needed_or_the_one_before_serves(begun, expected, number, how):
    """The round between them is repeated, to the same numbers."""
    files = checkpoint_files(begun)
    damage(files[round(number / 9 * (len(files) - 1))], how)
    np.testing.assert_allclose(begun.serve(), expected, rtol=1e-12)
    assert missing(out(begun)) == {}


@pytest.mark.parametrize("how", ["cut off", "random bytes"])
def test_without_any_good_checkpoint_the_server_says_so(begun, how):
    for path in (out(begun) / "checkpoints").rglob("*"):
        if path.is_file():
            damage(path, how)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .*checkpoints can be read .*; delete it to start again"
    ):
        begun.serve()


def test_a_run_whose_checkpoints_were_deleted_begins_again_to_the_same_result(begun, expected):
    """Sites keep what they had, and answer as they did."""
    shutil.rmtree(out(begun) / "checkpoints")
    assert begun.finishes(expected)


def named(error, name):
    """A refusal of one line, which names the file and what to do."""
    assert name in str(error)
    assert "\n" not in str(error)
    assert any(remedy in str(error) for remedy in ("restore it", "start a new run", "move away"))
    return True


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_list_of_sites_is_refused_by_its_name(begun, expected, how):
    restore = damage(out(begun) / "sites.json", how)
    with pytest.raises(CheckpointError) as error:
        begun.serve()
    assert named(error.value, "sites.json")
    restore()
    assert begun.finishes(expected)


@pytest.mark.parametrize("step_size", [0.1, 0.2])
def test_without_any_file_of_the_run_a_server_is_refused_by_the_sites(begun, step_size):
    """It would begin anew; with the same settings or others, which it cannot compare."""
    shutil.rmtree(out(begun))
    begun.changes = {"algorithm": dataclasses.replace(CASES[NAME].algorithm, step_size=step_size), "deadline": 0.5}
    begun.restart()
    with pytest.raises(QuorumError):
        begun.serve()
    assert "the server's folder of the run is another one" in missing(out(begun))[-1, "site-0"]


@pytest.mark.parametrize("how", [how for how in DAMAGES if how != "a folder"])
def test_a_damaged_status_is_written_anew(begun, how):
    """It is for whoever asks, and the run does not need it."""
    damage(out(begun) / "status.json", how)
    with reported(out(begun), run=RUN):
        assert read_status(out(begun))["state"] == "waiting"
    assert read_status(out(begun))["state"] == "finished"


def second(folder):
    with only_server(folder, {}, 0.0):
        pass


NO_FILE = ("a folder", "a link", "a link to nothing")


@pytest.mark.parametrize("how", [how for how in DAMAGES if how not in NO_FILE])
def test_a_damaged_lock_still_admits_one_server(tmp_path, how):
    second(tmp_path)
    damage(tmp_path / "server.lock", how)
    with only_server(tmp_path, {}), pytest.raises(RunningError, match="has a server already"):
        second(tmp_path)


@pytest.mark.parametrize("how", NO_FILE)
def test_something_else_in_place_of_the_lock_or_the_status_is_named(tmp_path, how):
    second(tmp_path)
    damage(tmp_path / "server.lock", how)
    with pytest.raises(DamagedFile, match=r"server\.lock cannot be opened: .*; move away what is there"):
        second(tmp_path)
    (tmp_path / "status.json").mkdir()
    with pytest.raises(DamagedFile, match=r"cannot write .*status\.json"), reported(tmp_path):
        pass


@pytest.fixture(scope="module")
def private():
    """A server of a private run that adds noise, over sites in this process."""
    options = {"params": np.zeros(3), "batch_size": 3, "privacy": fs.Privacy(clip=1.0, noise=2.0)}
    return in_process_run(TASK.problem, CASES[NAME].algorithm, TASK.federation.select(range(SITES)), **options)[0]


def renew(server):
    """As if its process had been started again."""
    server.accountant = PrivacyAccountant(server.context.privacy)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_server_that_does_not_know_how_much_privacy_is_spent_does_not_resume(private, tmp_path, how):
    """The checkpoint has an older count: a round that was repeated since is not in it."""
    store = Checkpoints(tmp_path)
    renew(private)
    assert private.load(store) is None
    private.accountant.counts = {"client 0": 1}
    private.save(store, private.begin())
    release = Stage(0, 0), ["client 0"], True, None
    for _ in range(6):
        private.accountant.noise_for(*release)
    restore = damage(tmp_path / "privacy.json", how)
    renew(private)
    with pytest.raises(DamagedFile, match=r"privacy.json .* restore it from a copy, or start a new run"):
        private.load(store)
    restore()
    renew(private)
    private.load(store)
    assert private.privacy().exchanges == 7
