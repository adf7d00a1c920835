"""Files whose numbers nobody would miss: the count of spent privacy, a policy, who a site is. Every byte counts."""

import shutil

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from attackers import RUN, VICTIM, Attacker, averaging, begin_call, limit, log_of
from damages import DAMAGES, damage, flipped

import fedstrata as fs
from fedstrata.deploy.journal import Journal
from fedstrata.deploy.messages import Message, Stage
from fedstrata.deploy.policy import Policy
from fedstrata.deploy.privacy_accountant import PrivacyAccountant
from fedstrata.deploy.site_folder import Identity, RunRecord
from fedstrata.deploy.site_log import SiteLog
from fedstrata.deploy.state_files import DamagedFile
from fedstrata.deploy.terms import Terms

PRIVACY = fs.Privacy(clip=1.0, noise=1.0, where="sites")
CALL = Message(RUN, Stage(0, 0), VICTIM, {"x.tree": np.zeros(3)}, Stage(-1, 0))


@pytest.fixture
def noisy(tmp_path):
    """A site that has answered one call with noise of its own, and whose worker has ended."""
    attacker = Attacker.alone(tmp_path, averaging(privacy=PRIVACY))
    for call in (begin_call(), CALL):
        attacker.sends(call)
    attacker.victim()[0].close()
    return attacker


def again(folder):
    return Attacker.alone(folder, averaging(privacy=PRIVACY))


@pytest.mark.parametrize("how", DAMAGES)
def test_a_site_that_does_not_know_how_much_privacy_it_has_spent_answers_nothing(noisy, tmp_path, how):
    """A count that begins at 0 again would claim more privacy than there is."""
    restore = damage(tmp_path / "runs" / RUN / "privacy.json", how)
    attacker = again(tmp_path)
    for call in (CALL, begin_call()):
        with pytest.raises(DamagedFile, match=r"privacy.json .* restore it from a copy, or start a new run"):
            attacker.sends(call, terms=noisy.terms)
    assert log_of(tmp_path)[-1]["verdict"] == "refused"
    restore()
    attacker.sends(CALL, terms=noisy.terms)
    assert attacker.victim()[0].sites[RUN][1].privacy().exchanges == 2
    attacker.victim()[0].close()


@pytest.mark.parametrize("where", ["sites", "server"])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_count_that_is_lower_than_the_releases_in_the_log_is_not_believed(tmp_path, where, sealed):
    """An older copy of the file, or one that somebody wrote: the log knows how many replies with means have left."""
    made = lambda: Attacker.alone(tmp_path, averaging(privacy=fs.Privacy(clip=1.0, noise=1.0, where=where)))
    first, path = made(), tmp_path / "runs" / RUN / "privacy.json"
    first.sends(begin_call())
    copies = []
    for x in range(3):
        first.sends(CALL._replace(arrays={"x.tree": np.full(3, float(x))}))
        copies.append(path.read_text())
    first.victim()[0].close()
    path.write_text(copies[1] if sealed else '{"exchanges": {}}')
    second = made()
    with pytest.raises(DamagedFile, match=r"privacy.json counts . releases of site-1, whose log has 3; without it"):
        second.sends(CALL, terms=first.terms)
    path.write_text(copies[-1])
    second.sends(CALL, terms=first.terms)
    assert second.victim()[0].sites[RUN][1].privacy().exchanges == 4
    second.victim()[0].close()


@pytest.mark.parametrize("where", ["sites", "server"])
def test_a_count_without_repeated_replies_is_not_believed_where_the_server_adds_noise(tmp_path, where):
    """It may release the same reply again, with other noise. Noise of the site itself would be the same."""
    made = lambda: Attacker.alone(tmp_path, averaging(privacy=fs.Privacy(clip=1.0, noise=1.0, where=where)))
    first, path = made(), tmp_path / "runs" / RUN / "privacy.json"
    first.sends(begin_call())
    first.sends(CALL)
    once = path.read_text()
    for _ in range(4):
        first.sends(CALL)
    last = first.victim()[0].sites[RUN][1].privacy().exchanges
    assert last == (5 if where == "server" else 1)
    first.victim()[0].close()
    path.write_text(once)
    second = made()
    if where == "server":
        with pytest.raises(DamagedFile, match=r"privacy.json counts 1 releases of site-1, whose log has 5"):
            second.sends(CALL, terms=first.terms)
    else:
        second.sends(CALL, terms=first.terms)
    second.victim()[0].close()


def test_a_site_whose_folder_of_a_run_was_removed_does_not_count_from_zero(noisy, tmp_path):
    shutil.rmtree(tmp_path / "runs" / RUN)
    attacker = again(tmp_path)
    with pytest.raises(DamagedFile, match=r"privacy.json is missing; without it the privacy spent is unknown"):
        attacker.sends(begin_call(), terms=noisy.terms)
    attacker.victim()[0].close()


def test_a_count_that_begins_is_on_the_disk_before_the_first_release(tmp_path):
    accountant = PrivacyAccountant(PRIVACY)
    accountant.keep_in(tmp_path)
    assert (tmp_path / "privacy.json").exists()
    assert PrivacyAccountant(PRIVACY).keep_in(tmp_path, begun=True) is None


def each_flip(path):
    """The file with one bit changed, byte by byte."""
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(flipped(data, place / len(data)))
        yield place
    path.write_bytes(data)


def outcome(read):
    try:
        return read()
    except DamagedFile as error:
        return error


def assert_right_or_named(path, read, most=0):
    """Every flip is found, or changes nothing; at most so many change nothing."""
    right, unnoticed = read(), 0
    for place in each_flip(path):
        found = outcome(read)
        if isinstance(found, DamagedFile):
            assert path.name in str(found)
            assert "\n" not in str(found)
        else:
            assert found == right, place
            unnoticed += 1
    assert unnoticed <= most
    assert read() == right


def test_every_flipped_byte_of_a_count_is_found(tmp_path):
    accountant = PrivacyAccountant(PRIVACY)
    accountant.counts = {"Ulm": 17, "Aalen": 4}
    accountant.keep_in(tmp_path)

    def read():
        found = PrivacyAccountant(PRIVACY)
        found.keep_in(tmp_path, begun=True)
        return found.counts

    assert read() == {"Ulm": 17, "Aalen": 4}
    assert_right_or_named(tmp_path / "privacy.json", read, most=20)  # spaces, and the name of the hash


def test_every_flipped_byte_of_a_policy_is_found(tmp_path):
    Policy(rounds=12, fields=("means", "first")).keep_in(tmp_path)
    assert_right_or_named(tmp_path / "policy.json", lambda: Policy.kept_in(tmp_path), most=60)  # spaces


@pytest.mark.parametrize("name", ["mark", "secret"])
def test_every_flipped_byte_of_a_sites_identity_is_found(begun, name):
    log = SiteLog(begun.victim / "log.jsonl", VICTIM)
    journal = Journal(log)
    read = lambda: vars(Identity(begun.victim, VICTIM, journal))
    assert_right_or_named(begun.victim / name, read)
    log.close()


def test_every_flipped_byte_of_the_terms_is_found(begun):
    """Another number of rows of another site would change the weights."""
    log = SiteLog(begun.victim / "log.jsonl", VICTIM)
    journal = Journal(log)
    read = lambda: RunRecord(begun.victim, RUN, VICTIM, journal).terms(None)
    assert isinstance(read(), Terms)
    assert_right_or_named(begun.victim / "runs" / RUN / "terms.json", read, most=3)  # rounds and evaluations are logged
    log.close()


def test_a_policy_that_is_gone_does_not_become_the_defaults(attacker, begun):
    """They may allow more; the owner of this site wants ten sites."""
    limit(begun, sites_at_least=10)
    with pytest.raises(ValueError, match="at least 10 sites"):
        attacker.evaluates()
    for _ in range(2):
        (begun.victim / "policy.json").unlink(missing_ok=True)
        with pytest.raises(DamagedFile, match=r"policy.json is missing; start the site again .`fedstrata deploy"):
            attacker.evaluates()
        begun.start()
    limit(begun)
    assert attacker.evaluates().arrays


def test_a_policy_by_hand_needs_no_hash(tmp_path):
    (tmp_path / "policy.json").write_text('{"sites_at_least": 5}')
    assert Policy.kept_in(tmp_path) == Policy(sites_at_least=5)
    for wrong in ('{"sites_at_least": "5"}', '{"sites": 5}', '{"rounds": 0}', '{"fields": "x"}', '{"bytes": true}'):
        (tmp_path / "policy.json").write_text(wrong)
        with pytest.raises(DamagedFile, match=r"policy.json.*start the site again"):
            Policy.kept_in(tmp_path)
