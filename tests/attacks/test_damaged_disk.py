"""Every file of a site's state folder, damaged in every way: the right numbers, or a refusal that names the file."""

import shutil

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from attackers import RUN, Attacker, Begun, call_of, files_in, limit, log_of
from damages import DAMAGES, PIPE, damage

from fedstrata.deploy.policy import Refused
from fedstrata.deploy.site_log import SiteLogError
from fedstrata.deploy.site_store import DiskStore, SiteStoreError
from fedstrata.deploy.state_files import DamagedFile

FILES = {
    "terms": f"runs/{RUN}/terms.json",
    "settings": f"runs/{RUN}/settings.json",
    "last stage": f"runs/{RUN}/0_0.state",
    "older stage": f"runs/{RUN}/-1_0.state",
    "log": "log.jsonl",
    "policy": "policy.json",
    "mark": "mark",
    "secret": "secret",
}
# Damages with which the site answers: what is lost is not needed, or the log and the server have it, too.
ALL = {*DAMAGES, PIPE}
HARMLESS = {
    "settings": ALL - {"a folder"},
    "older stage": ALL,
    "log": {"deleted", "empty", "cut off", "without its last byte"},  # begins anew, or with the line that was torn
}
HARMLESS_WITH_TERMS = {**HARMLESS, "terms": ALL - {"a folder"}}
OURS = (DamagedFile, SiteStoreError, SiteLogError, Refused)
REMEDIES = ("restore it", "restore the folder", "start the site again", "move the file away", "move away what is there")


@pytest.fixture(scope="module")
def right(begun_once, tmp_path_factory):
    """The reply of the undamaged site."""
    folder = tmp_path_factory.mktemp("right")
    shutil.copytree(begun_once, folder, dirs_exist_ok=True)
    made = Begun(folder)
    reply = Attacker.of(made).sends(call_of(x=0.5)).encode()
    made.close()
    return reply


@pytest.fixture
def stopped(attacker, begun):
    """The site has a policy of its own, and its worker has ended."""
    limit(begun)
    attacker.evaluates()
    begun.start()
    return begun


def is_clear(error, path):
    """A refusal of one line, which names the file and what to do."""
    text = str(error)
    assert path.name in text or f"{path.parent} (stored" in text
    assert any(remedy in text for remedy in REMEDIES), text
    assert "\n" not in text
    assert len(text) < 500
    return True


@pytest.mark.parametrize("how", [*DAMAGES, PIPE])
@pytest.mark.parametrize(("file", "resumed"), [*((file, False) for file in FILES), ("terms", True), ("mark", True)])
def test_a_site_with_a_damaged_file_answers_right_or_says_what_to_do(
    attacker, stopped, right, worked, file, how, resumed
):
    """An error of another kind fails the test. A server that resumes sends its terms again."""
    path = stopped.victim / FILES[file]
    restore = damage(path, how)
    about = {"terms": attacker.terms} if resumed else {"digest": attacker.terms.digest()}
    send = lambda: attacker.sends(call_of(x=0.5), **about).encode()
    if how in (HARMLESS_WITH_TERMS if resumed else HARMLESS).get(file, ()):
        assert send() == right
        return
    worked.clear()
    before = files_in(stopped.victim) if how != "a folder" else None
    with pytest.raises(OURS) as error:
        send()
    assert is_clear(error.value, path)
    assert file == "last stage" or worked == []
    assert before is None or files_in(stopped.victim) == before
    if file != "log":
        assert log_of(stopped.victim)[-1]["verdict"] == "refused"
    stopped.start()
    restore()
    assert send() == right


@pytest.mark.parametrize("file", FILES)
def test_the_honest_run_continues_once_a_file_is_restored(attacker, stopped, expected, file):
    restore = damage(stopped.victim / FILES[file], "random bytes")
    if "random bytes" not in HARMLESS.get(file, ()):
        with pytest.raises(OURS):
            attacker.sends(call_of(), digest=attacker.terms.digest())
    stopped.start()
    restore()
    stopped.start()
    assert stopped.finishes(expected)


def test_what_a_crash_leaves_behind_does_not_stop_a_site(attacker, stopped, right):
    """Files that were being written, and files of somebody else."""
    home = stopped.victim / "runs" / RUN
    for name in (".1_0.state.ab_12.state", "a_b.state", "1_2_3.state", "_.state", "99999999999999999999_0.state", "x"):
        (home / name).write_bytes(b"part")
    (home / "7_0.state").mkdir()
    assert attacker.sends(call_of(x=0.5)).encode() == right
    assert DiskStore(home, "").stages() == [(-1, 0), (0, 0), (1, 0), (7, 0)][1:]


def test_a_folder_in_place_of_the_next_stage_is_named(attacker, stopped, right):
    """The state has not changed, and the site answers once the folder is gone."""
    home = stopped.victim / "runs" / RUN
    (home / "1_0.state" / "inside").mkdir(parents=True)
    with pytest.raises(SiteStoreError, match=r"cannot write .*1_0.state: Is a directory; its state has not changed"):
        attacker.sends(call_of(x=0.5))
    shutil.rmtree(home / "1_0.state")
    assert attacker.sends(call_of(x=0.5)).encode() == right


def test_another_stage_under_the_name_of_the_last_one_is_found_by_its_link(attacker, stopped):
    home = stopped.victim / "runs" / RUN
    (home / "0_0.state").unlink()
    (home / "0_0.state").symlink_to(home / "-1_0.state")
    with pytest.raises(SiteStoreError, match=r"0_0.state is a link; restore it from a copy, or start a new run"):
        attacker.sends(call_of())


def test_files_of_a_state_folder_are_for_their_owner_only(stopped):
    for path in stopped.victim.rglob("*"):
        if path.is_file() and not path.name.endswith(".state"):  # those are in a folder for the owner only
            assert path.stat().st_mode & 0o077 == 0, path
    assert (stopped.victim / "runs" / RUN).stat().st_mode & 0o077 == 0
