"""What `fedstrata deploy check` shows of a site's policy: its limits in plain words, or why it would refuse the app."""

import itertools
import json

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from deployments import write_app

from fedstrata.cli.main import main
from fedstrata.deploy import site_log
from fedstrata.deploy.data_summary import DataSummary
from fedstrata.deploy.flower.config import SiteConfig
from fedstrata.deploy.flower.deployment import resolve
from fedstrata.deploy.flower.preflight import check
from fedstrata.deploy.policy import Policy
from fedstrata.deploy.site_log import SiteLog
from fedstrata.deploy.site_store import run_folder
from fedstrata.deploy.terms import Terms

PACKAGES = (f"checked_{number}" for number in itertools.count())  # Python imports a package only once
NOISY = 'fs.Privacy(clip=1.0, noise=0.5, where="sites")'


def site_file(folder, policy):
    """A site's file with a table [policy], for a server that is not there."""
    path = folder / "north.toml"
    about = 'site = "north"\nserver = "127.0.0.1:9"\ninsecure = true\n[settings]\nnumber = 0\n[policy]\n'
    path.write_text(about + policy)
    path.chmod(0o600)
    return path


def found_of(tmp_path, policy, name="SCAFFOLD", rounds=20, **app):
    """The finding about a policy, for an app that runs this method."""
    package = next(PACKAGES)
    home = write_app(tmp_path, package, name, rounds, **app)
    site = SiteConfig.read(site_file(tmp_path, policy))
    return next(one for one in check(site, home, f"{package}.task:deployment") if one.what == "policy")


OWN = """
runs = ["spring-*", "autumn"]
runs_at_most = 7
sites_at_least = 2
rows_at_least = 3
rows_at_most = 4_321
rounds = 2_345
evaluations = 56
parameters = 78_910
fields = ["means", "scores"]
bytes = 250_000_000
noise_at_least = 0.25
"""
WORDS = (
    "runs of the names spring-*, autumn, in at most 7",
    "at least 2 sites with different keys, each of at most 4,321 rows",
    "if this site has at least 3 rows of every split",
    "at most 2,345 rounds and 56 evaluations in a run",
    "at most 78,910 different calls in a run",
    "may leave this site: fields that are merged by a mean and scores, 250 MB in a run",
    "noise that this site adds to its replies: at least 0.25 × the clip",
)


def test_every_limit_of_a_policy_is_shown_in_plain_words(tmp_path):
    good, found = found_of(tmp_path, OWN, options=f'"privacy": {NOISY}')[1:]
    assert good, found
    assert found.split("; ") == Policy.of(SiteConfig.read(tmp_path / "north.toml").policy._asdict(), "").words()
    for words in WORDS:
        assert words in found


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("", "fields that are merged by a mean, 1,000 MB"),
        ("", "runs of any name, in at most 20"),
        ("", "as many different calls as it needs, a quarter more"),
        ("", "replies: none, unless the app sets it"),
        ('fields = ["*"]', "may leave this site: every field that the method sends"),
        ("fields = ['dx', 'dc']", "may leave this site: dx and dc,"),
        ("bytes = 400_000", "merged by a mean, 0.4 MB in a run"),
        ("bytes = 12_345", "merged by a mean, 0.012345 MB in a run"),
        ("call_bytes = 2_500_000", "receives calls of at most 2.5 MB"),
    ],
)
def test_the_defaults_and_other_fields_are_shown_in_plain_words(tmp_path, policy, words):
    good, found = found_of(tmp_path, policy)[1:]
    assert good, found
    assert words in found


# By what is wrong: a policy and an app that it would refuse; a policy and an app that it allows; and what is told.
REFUSED = {
    "sites": (
        ("sites_at_least = 4", {}),
        ("sites_at_least = 3", {}),
        "runs of at least 4 sites, and 'this app' has 3 with different keys; its owner may lower sites_at_least",
    ),
    "rows": (
        ("rows_at_least = 10", {}),
        ("rows_at_least = 9", {}),
        "rows of split 'train', and its policy wants at least 10",
    ),
    "rounds": (
        ("rounds = 19", {}),
        ("rounds = 20", {}),
        "allows 19 rounds in a run, and 'this app' wants 20; its owner may raise rounds",
    ),
    "fields": (
        ("", {"name": "FedX2"}),
        ("fields = ['*']", {"name": "FedX2"}),
        "(rows that the server sees one by one), which north does not allow; its owner may add",
    ),
    "one field": (
        ("fields = ['dx']", {}),
        ("fields = ['dx', 'dc']", {}),
        "the field 'dc' (merged by a mean), which north does not allow; its owner may add 'dc' to fields",
    ),
    "parameters": (
        ("parameters = 22", {}),
        ("parameters = 23", {}),
        "answers 22 different calls in a run, and 'this app' needs 23; its owner may raise parameters",
    ),
    "bytes": (
        ("bytes = 100", {}),
        ("bytes = 100_000", {}),
        "lets 100 bytes leave in a run",
    ),
    "no noise": (
        ("noise_at_least = 0.5", {}),
        ("noise_at_least = 0.5", {"options": f'"privacy": {NOISY}'}),
        "adds noise of at least 0.5 × the clip to its replies, and 'this app' has less",
    ),
    "less noise": (
        ("noise_at_least = 0.51", {"options": f'"privacy": {NOISY}'}),
        ("noise_at_least = 0.5", {"options": f'"privacy": {NOISY}'}),
        "noise of at least 0.51 × the clip",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_policy_that_would_refuse_the_app_is_a_mistake(tmp_path, what):
    (policy, app), (enough, other), words = REFUSED[what]
    good, found = found_of(tmp_path, policy, **app)[1:]
    assert not good
    assert found.startswith("it would refuse this app: north ") or "which north does not allow" in found
    assert words in found
    good, found = found_of(tmp_path, enough, **other)[1:]
    assert good, found


def finding(tmp_path, what, policy="", change=lambda text: text, **app):
    """What a check finds out in the end, with a change of the app's file."""
    package = next(PACKAGES)
    home = write_app(tmp_path, package, "SCAFFOLD", 2, **app)
    task = home / package / "task.py"
    task.write_text(change(task.read_text()))
    site = SiteConfig.read(site_file(tmp_path, policy))
    return next(one for one in check(site, home, f"{package}.task:deployment") if one.what == what)


def logged(tmp_path, *runs):
    """The site's state with the log of these runs."""
    home = tmp_path / "state"
    home.mkdir(mode=0o700, exist_ok=True)
    log = SiteLog(home / site_log.FILE, "north")
    for run in runs:
        log.add("terms", run=run, message="0", wanted=[3, 1], settings="0")
    log.close()
    return home / site_log.FILE


def test_a_group_of_few_rows_is_found_before_a_run(tmp_path):
    """FedMinMax on groups by the sign of a column: no site has five rows of each."""
    good, found = found_of(tmp_path, "fields = ['*']", name="FedMinMax")[1:]
    assert not good
    assert found.startswith("it would refuse this app: north has fewer than 5 rows of a group in split 'train'")
    good, found = found_of(tmp_path, "fields = ['*']\nrows_at_least = 1", name="FedMinMax")[1:]
    assert good, found


@pytest.mark.parametrize("names", [("north", "east", "west"), ("east", "south", "west")])
def test_an_app_that_names_other_sites_is_a_mistake(tmp_path, names):
    named = lambda text: text + f"deployment = deployment._replace(sites={names!r})\n"
    _, good, found = finding(tmp_path, "policy", change=named)
    assert good == ("north" in names)
    if not good:
        assert found == "the app names the sites east, south, west, and this one is north"


def test_a_site_that_has_taken_part_in_as_many_runs_as_it_may_is_told_so(tmp_path):
    logged(tmp_path, "spring", "spring", "summer")
    _, good, found = finding(tmp_path, "policy", "runs_at_most = 2")
    assert not good
    assert found == "it would refuse a new run: 2 have begun here; the site's owner may raise runs_at_most"
    _, good, found = finding(tmp_path, "policy", "runs_at_most = 3")
    assert good, found


@pytest.mark.parametrize("how", ["a changed line", "a line left out", "noise", "none", "empty", "a line being written"])
def test_a_damaged_log_is_found_before_a_run(tmp_path, how):
    path = logged(tmp_path, "spring", "summer")
    lines = path.read_bytes().splitlines(keepends=True)
    changes = {
        "a changed line": lines[0].replace(b"spring", b"winter") + lines[1],
        "a line left out": lines[1],
        "noise": b"\0\1\n",
        "none": b"".join(lines),
        "empty": b"",
        "a line being written": b"".join(lines) + b'{"n":',
    }
    path.write_bytes(changes[how])
    _, good, found = finding(tmp_path, "state")
    assert good == (how in ("none", "empty", "a line being written")), found
    assert ("its log is whole" if good else "line 1 of ") in found
    assert good or "was changed, moved or left out; find out who did it" in found


def test_a_site_without_a_log_has_a_good_state(tmp_path):
    assert finding(tmp_path, "state")[1:] == (True, "writable, by its owner alone")


def test_the_names_of_runs_are_not_compared(tmp_path):
    """The check does not know the name of the run that will come; the words show what the site allows."""
    good, found = found_of(tmp_path, "runs = ['spring']")[1:]
    assert good
    assert "runs of the names spring," in found


@pytest.mark.parametrize(("policy", "good"), [("sites_at_least = 3", True), ("sites_at_least = 4", False)])
def test_the_command_shows_the_policy(tmp_path, capsys, policy, good):
    home = write_app(tmp_path, next(PACKAGES), "SCAFFOLD", 2)
    main(["deploy", "check", str(site_file(tmp_path, policy)), "--app", str(home), "--json"])
    rows = {row["what"]: row for row in json.loads(capsys.readouterr().out)["findings"]}
    assert rows["policy"]["good"] is good
    told = "takes part in runs of any name" if good else "it would refuse this app: "
    assert rows["policy"]["found"].startswith(told)
    assert main(["deploy", "check", str(site_file(tmp_path, policy)), "--app", str(home)]) == 1  # there is no server
    assert told in capsys.readouterr().out


def test_a_policy_without_readable_data_is_shown_and_not_compared(tmp_path):
    path = site_file(tmp_path, "sites_at_least = 9")
    path.write_text(path.read_text().replace("number = 0", ""))
    package = next(PACKAGES)
    home = write_app(tmp_path, package, "SCAFFOLD", 2)
    found = {one.what: one for one in check(SiteConfig.read(path), home, f"{package}.task:deployment")}
    assert not found["data"].good
    assert found["policy"].good
    assert "at least 9 sites" in found["policy"].found


def test_data_that_changed_since_a_run_began_here_are_told(tmp_path):
    """The run would refuse this site, and `check` would say that all is well."""
    package = next(PACKAGES)
    home, where = write_app(tmp_path, package, "SCAFFOLD", 20), f"{package}.task:deployment"
    site = SiteConfig.read(site_file(tmp_path, ""))
    found = lambda: next(one for one in check(site, home, where) if one.what == "data")
    assert found().good
    data = resolve(where).load(site.node_config)
    own = DataSummary.of("north", data, secret=bytes(32))
    (tmp_path / "state" / "secret").write_text(bytes(32).hex())
    for run, summary in (("spring", own), ("autumn", own._replace(data="0" * 64))):
        folder = tmp_path / "state" / "runs" / run_folder(run)
        folder.mkdir(parents=True)
        (folder / "terms.json").write_text(Terms(run, (summary,), "1", 20, 2).encode())
    assert found().good
    assert found().found.endswith("; not as they were when autumn began here: resumed, such a run refuses this site")


def test_an_app_that_could_never_run_is_not_ready(tmp_path):
    package = next(PACKAGES)
    home = write_app(tmp_path, package, "SCAFFOLD", 20, quorum=1.5)
    site = SiteConfig.read(site_file(tmp_path, ""))
    found = {one.what: one for one in check(site, home, f"{package}.task:deployment")}
    assert not found["data"].good
    assert "quorum=1.5; give a share of the sites" in found["data"].found
