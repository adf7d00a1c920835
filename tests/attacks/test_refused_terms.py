"""A server that lies about a run: about a site's own data, about other sites, or about what was agreed before."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from attackers import VICTIM, Attacker, averaging, begin_call, call_of, limit, log_of
from grids import ROUNDS, deployment

from fedstrata.deploy import guard
from fedstrata.deploy.policy import Policy, Refused
from fedstrata.deploy.terms import Terms

SHAPES = {"train": {"x": ("float64", [4]), "y": ("float64", [])}}


def claims(**changes):
    return lambda a: a.with_site(VICTIM, **changes)


def of_another(**changes):
    return lambda a: a.with_site("site-2", **changes)


def sites(change):
    return lambda a: a.terms._replace(sites=tuple(change(a.terms.sites)))


LIES = {  # about the site itself, in a new run
    "fewer rows": (claims(counts={"train": 1}), "its rows: split 'train' had 1"),
    "more rows": (claims(counts={"train": 10**6}), "its rows: split 'train' had 1000000"),
    "no rows": (claims(counts={"train": 0}), "its rows"),
    "other columns": (claims(shapes=SHAPES), "its columns: in split 'train', column 'x'"),
    "other values": (claims(data="0" * 32), "its values"),
    "no hash of its values": (claims(data=""), "its values"),
    "another key": (claims(key="k"), "its key"),
    "no key": (claims(key=""), "its key"),
    "another version of the library": (claims(versions={"fedstrata": "0.0.1"}), "its version of"),
    "no versions": (claims(versions={}), "its version of"),
    "another name": (claims(site="site-9"), "lists site-1 0 times among its sites"),
    "twice": (sites(lambda s: (*s, s[1])), "lists site-1 2 times among its sites"),
    "without it": (sites(lambda s: (s[0], s[2])), "lists site-1 0 times among its sites"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_site_refuses_a_run_that_contradicts_what_it_knows_of_itself(attacker, refuses, lie):
    propose, why = LIES[lie]
    refuses(lambda: attacker.sends(begin_call("new"), terms=propose(attacker)._replace(run="new")), why)


TOO_FEW = {
    "two sites": (sites(lambda s: s[:2]), 2),
    "one site": (sites(lambda s: s[1:2]), 1),
    "one key twice": (lambda a: a.with_site("site-2", key=a.terms.sites[0].key), 2),
    "its own key twice": (lambda a: a.with_site("site-2", key=a.own.key), 2),
    "all others with its key": (sites(lambda s: [one._replace(key=s[1].key) for one in s]), 1),
    "others without keys": (sites(lambda s: [one if one.site == VICTIM else one._replace(key="") for one in s]), 1),
}


@pytest.mark.parametrize("trick", TOO_FEW)
def test_a_site_refuses_runs_of_fewer_sites_than_its_policy_counted_by_keys(attacker, refuses, trick):
    propose, found = TOO_FEW[trick]
    why = f"{VICTIM} takes part in runs of at least 3 sites, and 'new' has {found} with different keys; its owner may"
    refuses(lambda: attacker.sends(begin_call("new"), terms=propose(attacker)._replace(run="new")), why)


def test_a_site_refuses_other_sites_than_the_approved_app_names(attacker, begun, refuses):
    """Its owner has read these names, and may have asked the other sites."""
    begun.start(made=deployment(sites=("site-0", "site-1", "site-2")))
    invented = attacker.with_site("site-2", site="made up")._replace(run="new")
    why = "the app names the sites site-0, site-1, site-2, and run 'new' has made up, site-0, site-1; give the run"
    refuses(lambda: attacker.sends(begin_call("new"), terms=invented), why)
    attacker.sends(begin_call("new"), terms=attacker.terms._replace(run="new"))


def test_a_site_reserves_no_memory_for_rows_that_another_one_claims(attacker, refuses):
    """Programs of a run have the size of its largest site: a claim of 2³¹ rows would take tens of GB at all others."""
    large = of_another(counts={"train": 2_000_000_000})(attacker)._replace(run="new")
    refuses(lambda: attacker.sends(begin_call("new"), terms=large), "site-2 reports 2,000,000,000, for which memory")


def test_a_site_reserves_no_batches_for_rows_that_another_one_claims(tmp_path, monkeypatch, worked):
    """Whose examples are large: 1,000,000 rows of 24 bytes, all in one batch, at a site of 40 MB."""
    monkeypatch.setattr(guard, "machine_memory", lambda: 40e6)

    def attacker(name, *rows, claim=None, **options):
        (tmp_path / name).mkdir()
        found = Attacker.alone(tmp_path / name, averaging(*rows, **options))
        if claim:
            found.terms = found.with_site("made up 1", counts={"train": claim})
        return found

    refused = attacker("refused", claim=1_000_000, batch_size="all")
    with pytest.raises(
        Refused, match=r"made up 1 reports 1,000,000 rows of a split, .* would be reserved here, .* batch_size"
    ):
        refused.sends(begin_call())
    assert worked == []
    assert [line["verdict"] for line in log_of(tmp_path / "refused") if "verdict" in line] == ["refused"]
    small = attacker("small", claim=1_000_000, batch_size=4)
    small.sends(begin_call())
    own = attacker("own", np.ones((1_000_000, 3)), batch_size="all")
    own.sends(begin_call())  # its own rows are its own affair
    assert [stage.round for _, stage in worked] == [-1, -1]
    for made in (refused, small, own):
        made.victim()[0].close()


def test_a_site_refuses_a_run_whose_calls_may_be_too_large(attacker, begun, refuses, worked):
    limit(begun, call_bytes=2_000_000)
    new = attacker.terms._replace(run="new")
    refuses(
        lambda: attacker.sends(begin_call("new"), terms=new), "receives calls of at most 2,000,000 bytes, and 'new'"
    )
    limit(begun, call_bytes=2_200_000)  # two headers of a MiB, and a few numbers
    attacker.sends(begin_call("new"), terms=new)


CHANGES = {  # in the middle of a run, with everything else as it was
    "another site's rows": (of_another(counts={"train": 10**6}), "of site-2, its rows"),
    "another site's columns": (of_another(shapes=SHAPES), "of site-2, its columns"),
    "another site's key": (of_another(key="k"), "of site-2, its key"),
    "another site's values": (of_another(data="0" * 32), "of site-2, its values"),
    "another site's versions": (of_another(versions={"jax": "0"}), "of site-2, its version of"),
    "another site's name": (of_another(site="site-9"), "of site-2, its name"),
    "its own rows": (claims(counts={"train": 1}), "of site-1, its rows"),
    "the order": (sites(reversed), "of site-0, its name"),
    "the server's folder": (lambda a: a.terms._replace(origin="0" * 32), "the server's folder of the run is another"),
    "a site more": (sites(lambda s: (*s, s[2]._replace(site="site-3", key="k"))), "3 sites then, 4 now"),
    "a site less": (sites(lambda s: s[:2]), "3 sites then, 2 now"),
}


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_site_refuses_terms_that_change_within_a_run(attacker, begun, refuses, worked, change, restarted):
    if not restarted:
        attacker.sends(call_of(x=0.5))
        worked.clear()
    propose, why = CHANGES[change]
    refuses(lambda: attacker.sends(call_of(), terms=propose(attacker)), f"have changed since it began here: {why}")


OTHERS = {
    "of another run": ({"terms": lambda t: t._replace(run="another")}, "came with the terms of run 'another'"),
    "of other code": (
        {"terms": lambda t: t._replace(program="2")},
        "site-1 runs version 1 of the app, and the server 2",
    ),
    "a hash of others": (
        {"digest": lambda t: t._replace(program="2").digest()},
        "other terms of run 'first' than this",
    ),
    "a hash of a part": ({"digest": lambda t: t.digest()[:8]}, "other terms of run 'first' than this"),
    "no text": ({"digest": lambda t: 5}, "other terms of run 'first' than this"),
    "none": ({"else": lambda t: ""}, "other terms of run 'first' than this"),
    "bytes": ({"terms": lambda t: b"{}"}, "must be a text"),
    "no JSON": ({"terms": lambda t: "{" * 10_000}, "not readable JSON"),
    "no entries": ({"terms": lambda t: "{}"}, "have another form"),
    "a text that forges a line": ({"terms": lambda t: t._replace(program="1\nINFO: all is well")}, "printable text"),
    "rounds as a text": ({"terms": lambda t: t._replace(rounds="3")}, "rounds must be a whole number"),
    "rounds below none": ({"terms": lambda t: t._replace(rounds=-1)}, "rounds must be a whole number"),
    "a folder that is a number": ({"terms": lambda t: t._replace(origin=5)}, "origin must be a short printable text"),
    "a folder that forges a line": ({"terms": lambda t: t._replace(origin="1\nINFO")}, "printable text"),
    "a long folder": ({"terms": lambda t: t._replace(origin="0" * 1000)}, "origin must be a short printable text"),
    "rounds that wrap": ({"terms": lambda t: t._replace(rounds=2**32 + 3)}, "rounds must be a whole number"),
}


@pytest.mark.parametrize("terms", OTHERS)
def test_a_site_refuses_a_call_with_other_terms(attacker, refuses, terms):
    about, why = OTHERS[terms]
    refuses(lambda: attacker.sends(call_of(), **{k: of(attacker.terms) for k, of in about.items()}), why)


def test_a_site_refuses_a_call_of_a_run_without_terms(attacker, refuses):
    for about in ({"digest": attacker.terms.digest()}, {"digest": attacker.terms._replace(run="new").digest()}):
        refuses(
            lambda about=about: attacker.sends(begin_call("new"), **about), "site-1 has not begun run 'new'; its state"
        )


def test_a_site_takes_part_in_runs_of_the_names_in_its_policy(attacker, begun, refuses):
    limit(begun, runs=("first", "study-*"))
    new = attacker.terms._replace(run="thief")
    why = r"site-1 takes part in runs of other names \(first, study-\*\); its owner may add 'thief'"
    refuses(lambda: attacker.sends(begin_call("thief"), terms=new), why)
    attacker.sends(begin_call("study-2"), terms=attacker.terms._replace(run="study-2"))


@pytest.mark.parametrize(
    ("pattern", "runs", "others"),
    [
        ("study-*", {"study-", "study-1", "study-*"}, {"study", "a study-1"}),
        ("*", {"", "study"}, set()),
        ("a*c*", {"abc", "acc", "abcd"}, {"ab", "bac"}),
        ("[ab]", {"[ab]"}, {"a", "b"}),
        ("a.?", {"a.?"}, {"a.b", "abc", "a."}),
    ],
)
def test_only_a_star_stands_for_other_names_of_runs(pattern, runs, others):
    policy = Policy(runs=(pattern,))
    assert all(map(policy.allows_run, runs))
    assert not any(map(policy.allows_run, others))


def test_a_site_takes_part_in_as_many_runs_as_its_policy_allows(attacker, begun, refuses, worked, expected):
    """Under every name a server may ask as often as a run needs."""
    limit(begun, runs_at_most=2)
    attacker.sends(begin_call("second"), terms=attacker.terms._replace(run="second"))
    worked.clear()
    third = attacker.terms._replace(run="third")
    refuses(lambda: attacker.sends(begin_call("third"), terms=third), "in 2 runs; its owner may raise runs_at_most")
    begun.start()
    refuses(lambda: attacker.sends(begin_call("third"), terms=third), "in 2 runs; its owner may raise runs_at_most")
    assert begun.finishes(expected)


POLICIES = {
    "sites_at_least": (4, "at least 4 sites"),
    "rows_at_least": (100, "rows of split 'train', and its policy wants at least 100: a mean over few rows"),
    "rows_at_most": (1, "with at most 1 rows of a split"),
    "runs": (("other",), "runs of other names"),
    "rounds": (ROUNDS - 1, f"allows {ROUNDS - 1} rounds"),
    "evaluations": (1, "allows 1 evaluations"),
    "parameters": (5, "answers 5 different calls in a run, and 'first' needs 6; its owner may raise parameters"),
    "bytes": (10, "lets 10 bytes leave"),
    "noise_at_least": (0.5, r"noise of at least 0.5 × the clip .*, and 'first' has less"),
    "fields": (("x",), "SCAFFOLD sends the field 'dc'"),
}


@pytest.mark.parametrize("entry", POLICIES)
def test_a_policy_that_becomes_stricter_holds_from_the_next_call(attacker, begun, refuses, worked, expected, entry):
    attacker.sends(call_of(x=0.5))
    worked.clear()
    value, why = POLICIES[entry]
    limit(begun, **{entry: value})
    refuses(lambda: attacker.sends(call_of(x=0.6)), why)
    limit(begun)
    assert begun.finishes(expected)


def test_a_longer_run_is_accepted_and_shorter_terms_do_not_shorten_it(attacker, begun):
    longer, shorter = attacker.terms._replace(rounds=7), attacker.terms._replace(rounds=1)
    for terms in (longer, shorter):
        attacker.sends(call_of(5, after=(0, 0)), terms=terms)
    begun.start()
    attacker.sends(call_of(6, after=(0, 0)), terms=shorter)
    agreed = [line["wanted"][0] for line in log_of(begun.victim) if line["kind"] == "terms"]
    assert agreed == [ROUNDS, 7]


def test_a_site_with_new_code_tells_the_server_that_has_the_old(attacker, begun, refuses, expected):
    """The owner approves new code, and the server still sends hashes of the old terms."""
    begun.start()
    worker = begun.grid.workers[str(begun.victim)]
    worker.code = "2"
    old = {"digest": attacker.terms.digest()}
    refuses(
        lambda: attacker.sends(call_of(), **old), "runs version 2 of the app, and run 'first' has version 1; resume"
    )
    worker.code = "1"
    assert begun.finishes(expected)


def test_what_a_site_agrees_to_is_what_it_keeps_and_writes_down(attacker, begun):
    kept = Terms.decode((begun.victim / "runs" / "first" / "terms.json").read_text())
    assert kept == attacker.terms
    line = next(line for line in log_of(begun.victim) if line["kind"] == "terms")
    assert (line["message"], line["sites"], line["wanted"]) == (attacker.terms.digest(), 3, [ROUNDS, 2])
