"""Private runs: the bound on one client's influence, the noise, and deployed runs that equal simulated ones."""

import dataclasses
import functools
import io
import json
import os
import random

import equinox as eqx
import jax
import numpy as np
import pytest
from cases import CASES, START, task_of

import fedstrata as fs
from fedstrata.base.clock import domain
from fedstrata.base.gaussian import floor_gaussian
from fedstrata.core.grid import Grid
from fedstrata.core.placement import placements
from fedstrata.data.federation import Federation
from fedstrata.data.split import Split
from fedstrata.deploy.in_process import Traffic, advance, in_process_link, in_process_run
from fedstrata.deploy.messages import Message, Stage, pack
from fedstrata.deploy.privacy_accountant import PrivacyAccountant
from fedstrata.deploy.secure_sum import MaskedSum, SecureSumError
from fedstrata.deploy.server import QuorumError, Server, ServerState
from fedstrata.deploy.site import Site
from fedstrata.deploy.site_store import DiskStore, MemoryStore
from fedstrata.engine.checkpoint import Checkpoints
from fedstrata.engine.privacy import Spent
from fedstrata.simulate.options import RunOptions
from fedstrata.simulate.run import prepare

CLIP = 0.05
ROUNDS = 2
TIGHT = fs.Privacy(CLIP, noise=0.0)
LOUD = fs.Privacy(CLIP, noise=0.5)
LOCAL = fs.Privacy(CLIP, noise=0.5, where="sites")


def algorithm(name):
    found = CASES[name].algorithm
    return dataclasses.replace(found, inner_rounds=2, terms=3) if name == "FedNest" else found  # fewer exchanges


@functools.cache
def agreed(name, **options):
    """The agreement of a run, at the server and at its sites, cached: runs that share it share compiled programs."""
    task = task_of(algorithm(name))
    server, sites, _ = in_process_run(
        task.problem, algorithm(name), task.federation, params=START, batch_size=3, **options
    )
    return server.agreement, server.names, [site.agreement for site in sites]


def deployed(name, noise_key=None, secure=(None, [None] * 4), **options):
    """A new server, and new sites."""
    agreement, names, at_sites = agreed(name, **options)
    sites = [Site(at_sites[i], names[i], i, MemoryStore(), secure=secure[1][i], noise_key=noise_key) for i in range(4)]
    link = in_process_link(sites, Traffic())
    return Server(agreement, names, link, noise_key=noise_key, secure=secure[0]), sites


def executable(name, rounds=ROUNDS, **options):
    task = task_of(algorithm(name))
    given = {"params": START, "batch_size": 3, "stationarity": False, "evaluate": (), "evaluate_every": rounds}
    return prepare(task.problem, algorithm(name), task.federation, RunOptions(rounds=rounds, **{**given, **options}))


def simulated(name, rounds=ROUNDS, **options):
    this = executable(name, rounds, **options)
    carry, _, starts = this.begin()
    carry = this.advance(carry, 0, 1, starts)[0] if starts else carry
    return jax.tree.map(lambda a: a[0], this.solutions(this.advance(carry, int(bool(starts)), rounds)[0])).tree


def disturbed(agreement):
    """A site's agreement with other data, a thousand times as large."""
    draw = np.random.default_rng(3)
    noise = lambda a: draw.normal(size=a.shape) * 1e3 if np.issubdtype(a.dtype, np.floating) else a
    examples = lambda a: [split.examples for split in a.context.data.values()]
    return eqx.tree_at(examples, agreement, jax.tree.map(lambda a: jax.numpy.asarray(noise(a)), examples(agreement)))


def transcript(server, rounds):
    """All calls and replies of a run, exchange by exchange."""
    heard, link = [], server.caller.link

    def spy(calls):
        heard.append((dict(calls), replies := dict(link(calls))))
        return replies

    server.caller.link = spy
    advance(server, rounds)
    return heard


def averaged(state, arrays):
    """The arrays of a message that are merged by a mean, as one vector."""
    places = placements(state)
    of = lambda name: places[name.replace("[", ".").partition(".")[0]]
    kept = [np.ravel(a) for name, a in sorted(arrays.items()) if of(name).up and of(name).merge == "mean"]
    return np.concatenate(kept) if kept else np.zeros(0)


# Several exchanges and repetitions (FedNest), parts of fields (Levelwise…), several means in one message (SCAFFOLD,
# FedCanon), starts that differ by site (FedDRSCGD), and starts that are merged (AdaMFCGD, FedMinMax).
MEANS = [
    *("FedAvg", "SCAFFOLD", "FedNest", "FedCanon", "LevelwiseDRSCGD", "FedDRSCGD", "AdaMFCGD"),
    *("LevelwiseFedNest", "FedMinMax"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", MEANS)
def test_no_client_moves_a_mean_by_more_than_its_weight_times_the_clip(name):
    """Every reply lies in a ball round what all sites received, whatever the data: here, huge ones.

    The centre is computed from the calls alone, so it does not depend on a client's data.
    """
    state = algorithm(name).State
    server, neighbours = deployed(name, privacy=TIGHT)[0], deployed(name, privacy=TIGHT)[1]
    neighbours[2] = Site(disturbed(neighbours[2].agreement), neighbours[2].name, 2, MemoryStore())
    blank = pack({f: v for f, v in server.context.template._asdict().items() if placements(state)[f].up})[0]
    received, largest, moved = dict(blank), 0.0, 0.0
    for calls, replies in transcript(server, ROUNDS):
        some = next(iter(calls.values()))
        received = {**(blank if some.stage.exchange == 0 else received), **some.arrays}
        weight = 1 / len(calls)
        for i, call in calls.items():
            other = neighbours[i].answer(Message.decode(call.encode()))  # the neighbour's reply to the same call
            mine, theirs = averaged(state, replies[i].arrays), averaged(state, other.arrays)
            centre = averaged(state, {n: received[n] if n in received else whole(received, n) for n in other.arrays})
            for vector in (mine, theirs):
                assert weight * np.linalg.norm(vector - centre) <= weight * CLIP * (1 + 1e-9)
                largest = max(largest, np.linalg.norm(vector - centre))
            if i == 2:
                moved = max(moved, np.linalg.norm(mine - theirs))
            else:
                np.testing.assert_array_equal(mine, theirs)
    assert largest > CLIP * (1 - 1e-9)  # the bound was needed
    assert moved > 0.1 * CLIP  # and the neighbour is another one


def whole(received, name):
    """A part of a field, which is sent as h.1…, from the field's own arrays, h[1]…"""
    field, number, rest = name.split(".", 2)
    return received[f"{field}[{number}].{rest}"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SCAFFOLD", "FedNest", "AdaMFCGD", "FedDRSCGD"])
def test_a_deployed_private_run_equals_the_simulated_one(name):
    """With the simulation's noise, in a cohort of three, so that clients come and go."""
    key = domain(jax.random.key(0), "privacy")
    server, _ = deployed(name, privacy=LOUD, cohort=3, noise_key=key)
    here, there = server.solution(advance(server, 3)).tree, simulated(name, 3, privacy=LOUD, cohort=3)
    np.testing.assert_allclose(here, there, rtol=1e-12, atol=1e-13)
    other, _ = deployed(name, privacy=LOUD, cohort=3, noise_key=jax.random.key(7))
    assert np.linalg.norm(other.solution(advance(other, 3)).tree - there) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SCAFFOLD", "FedNest", "AdaMFCGD", "FedDRSCGD"])
def test_a_deployed_run_with_noise_of_sites_equals_the_simulated_one(name):
    key = domain(jax.random.key(0), "privacy")
    server, _ = deployed(name, privacy=LOCAL, cohort=3, noise_key=key)
    here, there = server.solution(advance(server, 3)).tree, simulated(name, 3, privacy=LOCAL, cohort=3)
    np.testing.assert_allclose(here, there, rtol=1e-12, atol=1e-13)
    assert np.linalg.norm(there - simulated(name, 3, privacy=LOUD, cohort=3)) > 1e-4


def test_a_wide_clip_without_noise_changes_nothing():
    wide = simulated("SCAFFOLD", cohort=3, privacy=fs.Privacy(1e6, noise=0.0))
    np.testing.assert_allclose(wide, simulated("SCAFFOLD", cohort=3), rtol=1e-13)


@pytest.mark.parametrize("privacy", [LOUD, LOCAL], ids=lambda p: p.where)
def test_the_noise_of_a_run_is_as_declared_and_independent_in_every_round(privacy):
    """Clients that do not move, weighted by size: the largest weight scales the server's noise, all that of sites."""
    task = task_of(algorithm("FedAvg"))
    counts = np.asarray(task.federation["train"].counts)
    assert counts.max() > counts.min()
    scale = counts.max() if privacy.where == "server" else np.sqrt(np.sum(counts**2))
    std = privacy.noise * privacy.clip * scale / counts.sum()
    given = {"params": START, "weights": "size", "privacy": privacy, "seeds": 600}
    this = prepare(
        task.problem,
        fs.FedAvg(1e-14, 1),
        task.federation,
        RunOptions(rounds=2, evaluate=(), stationarity=False, **given),
    )
    before, points = this.begin()[0], [START]
    for round in range(2):
        before = this.advance(before, round, round + 1)[0]
        points.append(np.asarray(this.solutions(before).tree))
    steps = np.stack([(points[1] - points[0]).ravel(), (points[2] - points[1]).ravel()])
    np.testing.assert_allclose(steps.std(axis=1), std, rtol=5 / np.sqrt(2 * steps.shape[1]))
    assert abs(np.corrcoef(steps)[0, 1]) < 5 / np.sqrt(steps.shape[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FedAvg", "AdaMFCGD"])  # the second merges starts, in batches if out of core
@pytest.mark.parametrize("privacy", [LOUD, LOCAL], ids=lambda p: p.where)
def test_a_private_run_is_the_same_out_of_core_and_on_a_mesh(name, privacy):
    plain, streamed, spread = (
        simulated(name, privacy=privacy, cohort=3, **how) for how in ({}, {"stream": True}, {"mesh": 2})
    )
    np.testing.assert_allclose(streamed, plain, rtol=1e-11)
    np.testing.assert_allclose(spread, plain, rtol=1e-11)


def test_the_privacy_spent_is_that_of_the_client_with_the_most_rounds():
    given = fs.participation.Given([[0, 1], [1, 2], [1, -1], [3, 2]])
    spent = executable("AdaMFCGD", 4, privacy=LOUD, cohort=given).spent(4)
    assert spent.exchanges == 1 + 3  # what is merged at the start, and client 1's three rounds
    assert spent._replace(exchanges=8).epsilon > spent.epsilon > spent._replace(exchanges=2).epsilon
    assert executable("SCAFFOLD").spent(2) is None
    task = task_of(algorithm("FedAvg"))
    result = fs.run(task.problem, algorithm("FedAvg"), task.federation, rounds=3, params=START, privacy=LOUD)
    assert result.privacy == Spent(LOUD.noise, LOUD.delta, 3)


def test_runs_that_cannot_be_private_are_refused_before_they_start():
    for start in (executable, deployed):
        with pytest.raises(ValueError, match="FedX1 sends rows of single clients"):
            start("FedX1", privacy=LOUD)
        with pytest.raises(TypeError, match=r"privacy=1.0 is not a Privacy"):
            start("FedAvg", privacy=1.0)


def test_two_servers_add_different_noise_although_the_seed_is_the_same():
    seeds = domain(jax.random.key(0), "privacy")
    ends = [
        advance(deployed("SCAFFOLD", privacy=LOUD, noise_key=key)[0], 1).shared.x.tree for key in (None, None, seeds)
    ]
    assert min(np.linalg.norm(ends[i] - ends[j]) for i, j in ((0, 1), (0, 2), (1, 2))) > 1e-4


def system_bytes(monkeypatch, count=2**20):
    """Replace the operating system's generator by a list of bytes; returns them, and how many were read each time."""
    given, sizes = np.random.default_rng(1).bytes(count), []

    def read(size):
        start = sum(sizes)
        assert start + size <= len(given)
        sizes.append(size)
        return given[start : start + size]

    for module, name in ((os, "urandom"), (random, "_urandom")):  # `secrets` has the second one
        monkeypatch.setattr(module, name, read)
    return given, sizes


def test_the_noise_of_a_server_is_samples_and_no_key(monkeypatch):
    """A key of 64 bits could be searched for; 128 bits of the operating system stand behind every number."""
    accountant, grid, stage = PrivacyAccountant(LOUD), Grid.of(0.5, 4, 2000), Stage(0, 0)
    one, two = (np.asarray(accountant.noise_for(stage, ["a"], True, grid)) for _ in range(2))
    assert one.dtype == np.int32
    assert one.size == 2000
    assert np.mean(one == two) < 0.01
    np.testing.assert_allclose(np.std(one) / 2**grid.bits, 1, rtol=5 / np.sqrt(2 * 2000))
    given, sizes = system_bytes(monkeypatch)
    found = np.asarray(accountant.noise_for(stage, ["a"], True, grid))
    assert sum(sizes) >= 16 * 2000
    stream = io.BytesIO(given)
    np.testing.assert_array_equal(found, floor_gaussian(grid.bits, 2000, stream.read))  # of these bytes alone
    stream = io.BytesIO(given[: 16 * 1000] + bytes(255 - byte for byte in given[16 * 1000 :]))
    other = floor_gaussian(grid.bits, 2000, stream.read)
    same = found == other
    assert same[:900].all()  # some proposals are refused, so that 900 numbers take fewer than 16,000 bytes
    assert np.mean(same[1000:]) < 0.01  # every number depends on bytes that no earlier one has used
    assert accountant.counts == {"a": 3}


def test_sites_add_noise_to_their_replies_and_the_server_adds_none():
    clean = transcript(deployed("FedAvg", privacy=TIGHT)[0], 1)
    server, sites = deployed("FedAvg", privacy=LOCAL)
    _, replies = transcript(server, 1)[-1]
    noises = [replies[i].arrays["x.tree"] - clean[-1][1][i].arrays["x.tree"] for i in range(4)]
    assert min(np.linalg.norm(noise) for noise in noises) > 0.1 * LOCAL.noise * CLIP
    assert min(np.linalg.norm(noises[i] - noises[j]) for i in range(4) for j in range(i)) > 0.1 * LOCAL.noise * CLIP
    again = Server(
        server.agreement, server.names, lambda calls: {i: replies[i]._replace(stage=c.stage) for i, c in calls.items()}
    )
    start = ServerState(0, server.begin().shared, dict.fromkeys(range(4), Stage(-1, -1)))
    mean = np.mean([replies[i].arrays["x.tree"] for i in range(4)], axis=0)
    np.testing.assert_allclose(again.round(start).shared.x.tree, mean, rtol=1e-13)
    assert [site.privacy().exchanges for site in sites] == [1] * 4


def test_replies_with_noise_of_sites_count_at_the_server_although_their_round_is_repeated():
    """Every one of them has other noise, and the server has seen it."""
    server, sites = deployed("FedAvg", privacy=LOCAL)
    now, link = server.begin(), server.caller.link
    server.caller.link = lambda calls: {i: reply for i, reply in link(calls).items() if i != 2}
    for _ in range(3):
        with pytest.raises(QuorumError):
            server.round(now)
    server.caller.link = link
    server.round(now)
    counts = [server.accountant.counts[name] for name in server.names]
    assert counts == [4, 4, 1, 4]  # three replies of one site were lost on their way
    assert [site.privacy().exchanges for site in sites] == [4] * 4
    assert server.privacy().exchanges == 4


def test_a_repeated_call_draws_new_noise_which_the_site_counts_and_remembers(tmp_path):
    server, sites = deployed("FedAvg", privacy=LOCAL)
    heard = transcript(server, 1)
    agreement, name = sites[1].agreement, sites[1].name
    calls = [Message.decode(calls[1].encode()) for calls, _ in heard]
    site = Site(agreement, name, 1, DiskStore(tmp_path, name))
    replies = [site.answer(call) for call in (*calls, calls[-1])]
    assert np.linalg.norm(replies[-1].arrays["x.tree"] - replies[-2].arrays["x.tree"]) > 0.1 * LOCAL.noise * CLIP
    assert site.privacy().exchanges == 2  # nothing is released before round 0
    kept = json.loads((tmp_path / "privacy.json").read_text())
    assert len(kept.pop("sha256")) == 64
    expected = {"exchanges": {name: 2}, "noise": 0.5, "delta": 1e-5, "where": "sites", "unprotected": []}
    assert kept == expected
    resumed = Site(agreement, name, 1, DiskStore(tmp_path, name))
    resumed.answer(calls[-1])
    assert resumed.privacy().exchanges == 3
    assert deployed("FedAvg")[1][0].privacy() is None


def test_sites_count_the_releases_that_the_server_adds_noise_to(tmp_path):
    """A server that has lost its folder tells too little; every site still knows how often it was part of a mean."""
    first, sites = deployed("FedAvg", privacy=LOUD)
    advance(first, 2)
    again = Server(first.agreement, first.names, first.caller.link)
    advance(again, 3)
    assert again.privacy().exchanges == 3
    assert [site.privacy().exchanges for site in sites] == [5] * len(sites)


def test_privacy_is_not_counted_with_other_noise_than_was_added(tmp_path):
    first, _ = deployed("FedAvg", privacy=LOUD)
    store = Checkpoints(tmp_path)
    first.load(store)
    first.save(store, advance(first, 2))
    quiet, _ = deployed("FedAvg", privacy=dataclasses.replace(LOUD, noise=2 * LOUD.noise))
    with pytest.raises(ValueError, match=r"noise=.*, and this run has .*; resume it as it was"):
        quiet.load(store)


def test_releases_before_the_file_is_known_are_added_to_what_it_has(tmp_path):
    store = Checkpoints(tmp_path)
    for total in (2, 4):
        server, _ = deployed("FedAvg", privacy=LOUD)
        server.save(store, advance(server, 2))
        assert json.loads((tmp_path / "privacy.json").read_text())["exchanges"] == dict.fromkeys(server.names, total)


def test_a_model_too_large_for_the_grid_is_refused_before_it_runs():
    for start in (executable, deployed):
        with pytest.raises(ValueError, match="use less noise, a smaller cohort, or a smaller model"):
            start("FedAvg", privacy=fs.Privacy(CLIP, noise=1e7))


class Killed(Exception):
    pass


@pytest.mark.slow
def test_a_repeated_round_counts_again_and_draws_new_noise(tmp_path):
    """The server crashes in round 1, after three merges, and a new one resumes from its files."""
    plain, _ = deployed("FedNest", privacy=LOUD, cohort=3)
    heard = []

    def link(calls, dies=()):
        call = next(iter(calls.values()))
        heard.append((call.stage[:2], call.arrays))
        if call.stage[:2] == dies:
            raise Killed
        return plain.caller.link(calls)

    store = Checkpoints(tmp_path)
    dying = Server(plain.agreement, plain.names, functools.partial(link, dies=(1, 3)))
    assert dying.load(store) is None
    now = dying.begin()
    dying.save(store, now)
    now = dying.round(now)
    dying.save(store, now)
    a_round = dying.privacy().exchanges
    assert a_round == 2 * 2 + 3 + 2  # inner gradients and steps, the series, and the outer ones
    with pytest.raises(Killed):
        dying.round(now)
    again = Server(plain.agreement, plain.names, link)
    again.round(again.load(store))
    assert again.privacy().exchanges == 2 * a_round + 3
    kept = json.loads((tmp_path / "privacy.json").read_text())["exchanges"]
    assert max(kept.values()) == 2 * a_round + 3
    first, second = [arrays for stage, arrays in heard if stage == (1, 1)]  # what the first merge of the round gave
    assert {*first} == {*second} == {"q.tree"}
    assert np.linalg.norm(first["q.tree"] - second["q.tree"]) > 1e-4


def hidden(bits=40):
    return {"secure": MaskedSum.dealt(4, bits=bits)}


def distance(one, other):
    return max(jax.tree.leaves(jax.tree.map(lambda a, b: float(np.abs(a - b).max()), one, other)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FedAvg", "SCAFFOLD", "FedNest", "AdaMFCGD"])
def test_a_run_with_masked_sums_is_the_same_to_their_resolution(name):
    plain, fine, coarse = (
        advance(deployed(name, **more)[0], ROUNDS).shared for more in ({}, hidden(), hidden(bits=14))
    )
    assert distance(fine, plain) < 2.0**-40 * 1000
    assert 2.0**-40 * 1000 < distance(coarse, plain) < 2.0**-14 * 1000  # the fixed-point resolution explains it


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SCAFFOLD", "FedNest", "AdaMFCGD"])
def test_a_private_run_with_masked_sums_is_the_same_to_a_step_of_the_grid(name):
    """In a cohort of three; before round 0 the starts of all four are summed. A mean is rounded to a step only once."""
    given = {"privacy": LOUD, "cohort": 3, "noise_key": domain(jax.random.key(0), "privacy")}
    plain, masked = (advance(deployed(name, **given, **more)[0], ROUNDS).shared for more in ({}, hidden()))
    grid = Grid.of(LOUD.noise, 3, START.size)
    assert distance(masked, plain) < 100 * CLIP / 3 / grid.bound
    assert grid.bound > 2**20


def test_a_secure_sum_must_be_finer_than_the_grid_and_cannot_be_combined_with_noise_of_sites():
    with pytest.raises(ValueError, match=r"14 bits is coarser than the grid.*use at least \d\d bits"):
        deployed("SCAFFOLD", privacy=LOUD, **hidden(bits=14))
    with pytest.raises(ValueError, match=r'where="sites"\) cannot be combined with a secure sum yet'):
        deployed("SCAFFOLD", privacy=dataclasses.replace(LOUD, where="sites"), **hidden())


class Recovering(MaskedSum):
    """As a backend that recovers from drop-outs; without masks, so that this file can."""

    def conceal(self, stage, call, peers, arrays):
        return {name: self._fixed(name, array, len(peers)) for name, array in arrays.items()}

    def reveal(self, stage, peers, parts):
        return super().reveal(stage, list(parts), parts)


def test_a_sum_of_light_sites_that_is_coarser_than_the_grid_is_refused_before_any_noise():
    """With equal weights 25 bits do. A site with nine tenths of all weight has dropped out: the rest is magnified."""
    task, privacy = task_of(algorithm("FedAvg")), fs.Privacy(1.0, noise=1.0)

    def few(split):  # the last three clients have a row each
        n = split.size
        return Split(split.examples, np.array([0, n - 3, n - 2, n - 1, n]))

    federation = Federation({name: few(split) for name, split in task.federation.splits.items()})
    assert federation["train"].size > 27
    given = {"params": START, "batch_size": 3, "weights": "size", "privacy": privacy}
    for bits, refused in ((25, True), (40, False)):
        secure, at_sites = Recovering(bits=bits), [Recovering(i, bits=bits) for i in range(4)]
        server, _, _ = in_process_run(task.problem, algorithm("FedAvg"), federation, secure=(secure, at_sites), **given)
        usual = server.caller.link
        silent = lambda calls, usual=usual: {i: r for i, r in usual(calls).items() if i != 0}
        now = server.begin()
        lossy = Server(server.agreement, server.names, silent, quorum=0.5, secure=secure)
        if refused:
            with pytest.raises(SecureSumError, match="25 bits are coarser than the grid"):
                lossy.round(now)
            assert lossy.accountant.counts == {}
        else:
            assert lossy.round(now).round == 1
        assert server.round(now).round == 1  # with all sites, 25 bits are enough


def test_the_server_sees_no_single_value():
    """The same run twice, with different secrets: integers that resemble neither each other nor the values."""
    open_, one, two = (transcript(deployed("SCAFFOLD", **more)[0], 1) for more in ({}, hidden(), hidden()))
    for (_, plain), (_, first), (_, second) in zip(open_[1:], one[1:], two[1:], strict=True):
        for i, reply in plain.items():
            assert {a.dtype for a in first[i].arrays.values()} == {np.dtype(np.uint64)}
            for name, value in reply.arrays.items():
                a, b = (r[i].arrays[name].view(np.int64) / 2.0**40 for r in (first, second))
                assert np.all(np.abs(a - value / 4) > 1e-3)
                assert np.all(np.abs(a - b) > 1e-3)


def test_a_masked_sum_without_a_site_fails_and_the_round_can_be_repeated():
    server, _ = deployed("SCAFFOLD", **hidden())
    silent = lambda calls: {i: r for i, r in server.caller.link(calls).items() if i != 2 or calls[i].stage.round < 1}
    lossy = Server(server.agreement, server.names, silent, quorum=0.5, secure=server.secure)
    now = advance(lossy, 1)
    with pytest.raises(SecureSumError, match=r"sites \[2\] are missing.*repeat the round"):
        lossy.round(now)
    whole = advance(server, ROUNDS, now)
    plain = advance(deployed("SCAFFOLD")[0], ROUNDS)
    np.testing.assert_allclose(whole.shared.x.tree, plain.shared.x.tree, rtol=1e-9)


def test_masked_messages_have_eight_bytes_a_number():
    task, single = task_of(algorithm("FedAvg")), lambda a: np.asarray(a, np.float32)
    splits = {n: Split(jax.tree.map(single, s.examples), s.offsets) for n, s in task.federation.splits.items()}
    small, up = Federation(splits, task.federation.names), []
    for more in ({}, hidden()):
        given = {"params": single(START), "batch_size": 3, **more}
        server, _, traffic = in_process_run(task.problem, algorithm("FedAvg"), small, **given)
        assert advance(server, 1).shared.x.tree.dtype == np.float32
        up.append(traffic.up)
    assert up == [4 * START.size * 4, 4 * START.size * 8]


@pytest.mark.parametrize("privacy", [None, LOUD, LOCAL])
def test_a_site_that_misses_a_round_of_a_run_in_single_precision_does_not_end_it(privacy):
    task, single = task_of(algorithm("FedAvg")), lambda a: np.asarray(a, np.float32)
    splits = {n: Split(jax.tree.map(single, s.examples), s.offsets) for n, s in task.federation.splits.items()}
    small = Federation(splits, task.federation.names)
    given = {"params": single(START), "batch_size": 3, "privacy": privacy}
    whole, _, _ = in_process_run(task.problem, algorithm("FedAvg"), small, **given)
    lossy = lambda calls: {i: r for i, r in whole.caller.link(calls).items() if i != 2 or calls[i].stage.round < 1}
    server = Server(whole.agreement, whole.names, lossy, quorum=0.5)
    assert advance(server, 2).shared.x.tree.dtype == np.float32


def test_a_secure_sum_refuses_rows():
    with pytest.raises(ValueError, match="which a secure sum does not hide"):
        deployed("FedX1", **hidden())
