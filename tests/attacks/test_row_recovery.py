"""A server that wants the rows of a site.

It claims fewer rows than the site has: if the site believed it, it would average over those, and differences would be
rows. And what remains: the server knows which rows are in a batch.
"""

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from attackers import RUN, VICTIM, Attacker, averaging, begin_call, files_in, log_of

import fedstrata as fs
from fedstrata.base.clock import Clock, domain
from fedstrata.deploy.agreement import with_data
from fedstrata.deploy.data_summary import DataSummary
from fedstrata.deploy.flower.deployment import agree_on
from fedstrata.deploy.messages import Message, Stage
from fedstrata.deploy.policy import Policy
from fedstrata.deploy.site import Site
from fedstrata.deploy.site_store import MemoryStore
from fedstrata.engine.client import Client
from fedstrata.engine.layout import FlatSplit

ROWS = np.random.default_rng(7).normal(size=(6, 3))
MADE = averaging(ROWS)
DATA = MADE.load({})
CALL = Message(RUN, Stage(0, 0), VICTIM, {"x.tree": np.zeros(3)}, Stage(-1, 0))


def recovered(mean):
    """The rows, from a function that gives the mean of the first rows, as many as are claimed."""
    sums = [claimed * mean(claimed) for claimed in range(len(ROWS) + 1)]
    return np.diff(sums, axis=0)


def mean_in(reply):
    """The site goes half the way from 0 to its mean."""
    return 2 * reply.arrays["x.tree"]


def believing(agreement):
    """The agreement with the site's data as a site had it that believed the server's counts."""
    rows, bare = jnp.asarray(ROWS), agreement.context.data["train"]
    split = FlatSplit({"x": rows}, jnp.zeros(1, jnp.int32), jnp.array([len(rows)], jnp.int32), bare.capacity)
    return agreement._replace(context=agreement.context.with_data({"train": split}))


def claimed_agreement(rows):
    summaries = [
        DataSummary.of(VICTIM, DATA)._replace(site=name, counts={"train": rows}) for name in (VICTIM, "b", "c")
    ]
    return agree_on(MADE, RUN, summaries)


def test_a_site_that_believes_the_server_reveals_every_row():
    """The attack itself, which shows that the tests below would notice it."""

    def mean(claimed):
        if claimed == 0:
            return np.zeros(3)
        site = Site(believing(claimed_agreement(claimed)), VICTIM, 0, MemoryStore())
        site.answer(begin_call())
        return mean_in(site.answer(CALL))

    np.testing.assert_allclose(recovered(mean), ROWS, atol=1e-12)


@pytest.mark.parametrize("claimed", [1, len(ROWS) - 1])
def test_an_agreement_on_fewer_rows_than_there_are_takes_no_data(claimed):
    why = f"'train' has {len(ROWS)} rows, and no site of run 'first' has more than {claimed} .*; agree again"
    with pytest.raises(ValueError, match=why):
        with_data(claimed_agreement(claimed), DATA)


@pytest.fixture
def attacker(tmp_path):
    found = Attacker.alone(tmp_path, MADE)
    yield found
    found.victim()[0].close()


@pytest.mark.parametrize("liar", ["of this site alone", "of all sites"])
def test_a_worker_computes_nothing_for_other_counts_than_its_own(attacker, tmp_path, worked, liar):
    found, before = [], files_in(tmp_path)

    def mean(claimed):
        terms = attacker.with_site(VICTIM, counts={"train": claimed})
        if liar == "of all sites":
            terms = terms._replace(sites=tuple(site._replace(counts={"train": claimed}) for site in terms.sites))
        for call in (begin_call(), CALL):
            with pytest.raises(
                ValueError, match=rf"'train' had {claimed}, and has {len(ROWS)} now; if the site"
            ) as error:
                attacker.sends(call, terms=terms)
            found.append(str(error.value))
        return np.full(3, np.nan)

    assert np.isnan(recovered(lambda claimed: mean(claimed) if claimed < len(ROWS) else ROWS.mean(0))).all()
    assert len(found) == 2 * len(ROWS)
    assert worked == []
    assert files_in(tmp_path) == before
    refused = [line["why"] for line in log_of(tmp_path) if line["kind"] == "refused"]
    assert [why[:150] for why in refused] == [why[:150] for why in found]


def test_what_is_claimed_of_other_sites_does_not_change_what_a_site_averages(attacker, worked):
    """They may lie about themselves, and the server about them: every mean is that of all rows of this site."""
    for number, rows in enumerate((1, 2, len(ROWS), 50)):
        run, counts = f"run-{number}", {"train": rows}
        sites = tuple(one if one.site == VICTIM else one._replace(counts=counts) for one in attacker.terms.sites)
        terms = attacker.terms._replace(run=run, sites=sites)
        attacker.sends(begin_call(run), terms=terms)
        reply = attacker.sends(CALL._replace(run=run), terms=terms)
        np.testing.assert_allclose(mean_in(reply), ROWS.mean(0), rtol=1e-12)
    assert len(worked) == 2 * 4


def test_a_site_with_a_new_row_does_not_reveal_it_in_the_run_that_has_begun(attacker, tmp_path, worked):
    """The mean before and after would give it away; the site comes back with one row more."""
    attacker.sends(begin_call())
    attacker.sends(CALL)
    worked.clear()
    attacker.victim()[0].close()
    more = averaging(np.concatenate([ROWS, [[1.0, 2.0, 3.0]]]))
    again = Attacker.alone(tmp_path, MADE._replace(load=more.load))
    for terms, why in ((attacker.terms, "had 6, and has 7 now"), (again.terms, "of site-1, its rows")):
        with pytest.raises(ValueError, match=why):
            again.sends(CALL, terms=terms)
    assert worked == []
    again.victim()[0].close()


def drawn_rows(made, terms, rounds):
    """By round, the share of each of a site's rows in its batch, which follows from what every party knows."""
    agreement, rows = agree_on(made, RUN, terms.sites), terms.sites[0].counts["train"]
    numbers = fs.Federation.from_clients([{"x": np.arange(rows)[:, None] * np.ones(3)}])
    context = with_data(agreement, numbers).context
    shares = np.zeros((rounds, rows))
    for round in range(rounds):
        client = Client.of(context.data, jnp.int32(0), jnp.int32(0), domain(agreement.key, "sample"), round)
        clock, shard = Clock.at(round, 1, jnp.int32(0)), client.shard(context.data)
        drawn = context.problem.draws(shard, client.key, context.sampler, clock, client.id, client.lasting_key, None)
        np.add.at(shares[round], np.asarray(drawn["batch"][0]), 1 / len(drawn["batch"][0]))
    return shares


@pytest.mark.parametrize("noise", [None, 1.0])
def test_batches_reveal_rows_unless_the_site_adds_noise(tmp_path, noise):
    """What `security.md` says that a server can do. Twelve rows in batches of four, in eighteen honest rounds."""
    rows, rounds = np.random.default_rng(7).normal(size=(12, 3)), 18
    privacy = {} if noise is None else {"privacy": fs.Privacy(clip=1.0, noise=noise, where="sites")}
    made = averaging(rows, batch_size=4, **privacy)._replace(rounds=rounds)
    attacker, means, before = Attacker.alone(tmp_path, made), [], Stage(-1, 0)
    attacker.sends(begin_call())
    for round in range(rounds):
        stage = Stage(round, 0)
        means.append(mean_in(attacker.sends(Message(RUN, stage, VICTIM, {"x.tree": np.zeros(3)}, before))))
        before = stage
    attacker.victim()[0].close()
    found = np.linalg.lstsq(drawn_rows(made, attacker.terms, rounds), np.array(means), rcond=None)[0]
    errors = np.abs(found - rows).max(axis=1)  # of every row, the largest error of a number
    assert errors.max() < 1e-6 if noise is None else np.median(errors) > 2


def test_a_site_may_want_noise_of_its_own_and_takes_part_in_no_run_without_it(tmp_path, worked):
    Policy(noise_at_least=1.0).keep_in(tmp_path)
    private = lambda noise, where: fs.Privacy(clip=1.0, noise=noise, where=where)
    apps = {None: False, private(1.0, "server"): False, private(0.9, "sites"): False, private(1.0, "sites"): True}
    for privacy, enough in apps.items():
        attacker = Attacker.alone(tmp_path, averaging(ROWS, privacy=privacy))
        if not enough:
            with pytest.raises(
                ValueError, match=r"site-1 .* noise of at least 1 × the clip .* has less: the app needs"
            ):
                attacker.sends(begin_call())
            assert worked == []
        else:
            attacker.sends(begin_call())
        attacker.victim()[0].close()
