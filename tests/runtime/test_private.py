"""Private runs: the bound on what one client can move, the noise, and deployed runs that equal simulated ones."""

import dataclasses
import functools
import json

import equinox as eqx
import jax
import numpy as np
import pytest

import fedstrata as fs
from cases import CASES, START, task_of
from fedstrata.clock import domain
from fedstrata.data.federation import Federation, Split
from fedstrata.placement import placements
from fedstrata.runtime.checkpoint import Checkpoints
from fedstrata.runtime.conductor import Conductor
from fedstrata.runtime.rehearsal import Memory, Traffic, advance, in_process, rehearsal
from fedstrata.runtime.run import prepare
from fedstrata.runtime.site import Site
from fedstrata.transport.letters import Letter, pack
from fedstrata.transport.secure_sum import MaskedSum, SecureSumError

CLIP = 0.05
ROUNDS = 2
TIGHT = fs.Privacy(CLIP, noise=0.0)
LOUD = fs.Privacy(CLIP, noise=0.5)


def algorithm(name):
    found = CASES[name].algorithm
    return dataclasses.replace(found, inner_rounds=2, terms=3) if name == "FedNest" else found  # fewer exchanges


@functools.cache
def agreed(name, **options):
    """The terms of a run as its server and its sites have them: those who share them share what is compiled."""
    task = task_of(algorithm(name))
    conductor, sites, _ = rehearsal(
        task.problem, algorithm(name), task.federation, params=START, batch_size=3, **options
    )
    return conductor.terms, conductor.names, [site.terms for site in sites]


def deployed(name, noise_key=None, secure=(None, [None] * 4), **options):
    """A new server, and new sites."""
    terms, names, own = agreed(name, **options)
    sites = [Site(own[i], names[i], i, Memory(), secure=secure[1][i]) for i in range(4)]
    link = in_process(sites, Traffic())
    return Conductor(terms, names, link, noise_key=noise_key, secure=secure[0]), sites


def job(name, rounds=ROUNDS, **options):
    task = task_of(algorithm(name))
    given = {"params": START, "batch_size": 3, "stationarity": False, "evaluate": (), "evaluate_every": rounds}
    return prepare(task.problem, algorithm(name), task.federation, rounds=rounds, **{**given, **options})


def simulated(name, rounds=ROUNDS, **options):
    this = job(name, rounds, **options)
    carry, _, own = this.begin()
    carry = this.advance(carry, 0, 1, own)[0] if own else carry
    return jax.tree.map(lambda a: a[0], this.solutions(this.advance(carry, int(bool(own)), rounds)[0])).tree


def disturbed(terms):
    """A site's terms with other data in them, a thousand times as large."""
    draw = np.random.default_rng(3)
    noise = lambda a: draw.normal(size=a.shape) * 1e3 if np.issubdtype(a.dtype, np.floating) else a
    examples = lambda t: [split.examples for split in t.world.flat.values()]
    return eqx.tree_at(examples, terms, jax.tree.map(lambda a: jax.numpy.asarray(noise(a)), examples(terms)))


def transcript(conductor, rounds):
    """All calls and replies of a run, exchange by exchange."""
    said, link = [], conductor.link

    def spy(calls):
        said.append((dict(calls), replies := dict(link(calls))))
        return replies

    conductor.link = spy
    advance(conductor, rounds)
    return said


def averaged(state, arrays):
    """The arrays of a message that are merged by a mean, as one vector."""
    places = placements(state)
    of = lambda name: places[name.replace("[", ".").partition(".")[0]]
    kept = [np.ravel(a) for name, a in sorted(arrays.items()) if of(name).up and of(name).merge == "mean"]
    return np.concatenate(kept) if kept else np.zeros(0)


# Several exchanges and repetitions (FedNest), parts of fields (Levelwise…), several means in one message (Scaffold,
# FedCanon), starts of their own (FedDRSCGD), and starts that are merged (AdaMFCGD, FedMinMax).
MEANS = [
    *("FedAvg", "Scaffold", "FedNest", "FedCanon", "LevelwiseDRSCGD", "FedDRSCGD", "AdaMFCGD"),
    *("LevelwiseFedNest", "FedMinMax"),
]


@pytest.mark.parametrize("name", MEANS)
def test_no_client_moves_a_mean_by_more_than_its_weight_times_the_clip(name):
    """Every answer lies in a ball round what all were told, whatever the client's data are: here, huge ones.

    The centre is found here from the calls alone: a client's data have no part in it.
    """
    state = algorithm(name).State
    conductor, neighbours = deployed(name, privacy=TIGHT)[0], deployed(name, privacy=TIGHT)[1]
    neighbours[2] = Site(disturbed(neighbours[2].terms), neighbours[2].name, 2, Memory())
    blank = pack({f: v for f, v in conductor.setting.template._asdict().items() if placements(state)[f].up})[0]
    told, largest, moved = dict(blank), 0.0, 0.0
    for calls, replies in transcript(conductor, ROUNDS):
        some = next(iter(calls.values()))
        told = {**(blank if some.stage.exchange == 0 else told), **some.arrays}
        weight = 1 / len(calls)
        for i, call in calls.items():
            other = neighbours[i].answer(Letter.decode(call.encode()))  # of the neighbour, told the same
            mine, theirs = averaged(state, replies[i].arrays), averaged(state, other.arrays)
            centre = averaged(state, {n: told[n] if n in told else whole(told, n) for n in other.arrays})
            for vector in (mine, theirs):
                assert weight * np.linalg.norm(vector - centre) <= weight * CLIP * (1 + 1e-9)
                largest = max(largest, np.linalg.norm(vector - centre))
            if i == 2:
                moved = max(moved, np.linalg.norm(mine - theirs))
            else:
                np.testing.assert_array_equal(mine, theirs)
    assert largest > CLIP * (1 - 1e-9)  # the bound was needed
    assert moved > 0.1 * CLIP  # and the neighbour is another one


def whole(told, name):
    """A part of a field, which is sent as h.1…, from the field's own arrays, h[1]…"""
    field, number, rest = name.split(".", 2)
    return told[f"{field}[{number}].{rest}"]


@pytest.mark.parametrize("name", ["Scaffold", "FedNest", "AdaMFCGD", "FedDRSCGD"])
def test_sites_that_exchange_letters_follow_the_private_simulation(name):
    """With the simulation's noise, in a cohort of three, so that clients come and go."""
    key = domain(jax.random.key(0), "privacy")
    conductor, _ = deployed(name, privacy=LOUD, cohort=3, noise_key=key)
    here, there = conductor.solution(advance(conductor, 3)).tree, simulated(name, 3, privacy=LOUD, cohort=3)
    np.testing.assert_allclose(here, there, rtol=1e-12, atol=1e-13)
    other, _ = deployed(name, privacy=LOUD, cohort=3, noise_key=jax.random.key(7))
    assert np.linalg.norm(other.solution(advance(other, 3)).tree - there) > 1e-4


def test_a_wide_clip_without_noise_changes_nothing():
    wide = simulated("Scaffold", cohort=3, privacy=fs.Privacy(1e6, noise=0.0))
    np.testing.assert_allclose(wide, simulated("Scaffold", cohort=3), rtol=1e-13)


def test_the_noise_of_a_run_is_as_declared_and_new_in_every_round():
    """Of clients that do not move, weighted by size: the largest weight is what counts."""
    task = task_of(algorithm("FedAvg"))
    counts = np.asarray(task.federation["train"].counts)
    assert counts.max() > counts.min()
    std = LOUD.noise * LOUD.clip * counts.max() / counts.sum()
    given = {"params": START, "weights": "size", "privacy": LOUD, "seeds": 600, "evaluate": (), "stationarity": False}
    this = prepare(task.problem, fs.FedAvg(1e-14, 1), task.federation, rounds=2, **given)
    before, points = this.begin()[0], [START]
    for round in range(2):
        before = this.advance(before, round, round + 1)[0]
        points.append(np.asarray(this.solutions(before).tree))
    steps = np.stack([(points[1] - points[0]).ravel(), (points[2] - points[1]).ravel()])
    np.testing.assert_allclose(steps.std(axis=1), std, rtol=5 / np.sqrt(2 * steps.shape[1]))
    assert abs(np.corrcoef(steps)[0, 1]) < 5 / np.sqrt(steps.shape[1])


def test_a_private_run_is_the_same_wherever_its_clients_are():
    plain, streamed, spread = (
        simulated("FedAvg", privacy=LOUD, cohort=3, **how) for how in ({}, {"stream": True}, {"mesh": 2})
    )
    np.testing.assert_allclose(streamed, plain, rtol=1e-11)
    np.testing.assert_allclose(spread, plain, rtol=1e-11)


def test_the_cost_is_that_of_the_client_that_came_most_often():
    given = fs.cohort.Given([[0, 1], [1, 2], [1, -1], [3, 2]])
    spent = job("AdaMFCGD", 4, privacy=LOUD, cohort=given).spent(4)
    assert spent.exchanges == 1 + 3  # what is merged at the start, and client 1's three rounds
    assert spent._replace(exchanges=8).epsilon > spent.epsilon > spent._replace(exchanges=2).epsilon
    assert job("Scaffold").spent(2) is None
    task = task_of(algorithm("FedAvg"))
    result = fs.run(task.problem, algorithm("FedAvg"), task.federation, rounds=3, params=START, privacy=LOUD)
    assert result.privacy == (LOUD.noise, LOUD.delta, 3)


def test_runs_that_cannot_be_private_are_refused_before_they_start():
    for start in (job, deployed):
        with pytest.raises(ValueError, match="FedX1 sends rows of single clients"):
            start("FedX1", privacy=LOUD)
        with pytest.raises(TypeError, match=r"privacy=1.0 is not a Privacy"):
            start("FedAvg", privacy=1.0)


def test_two_servers_add_different_noise_although_all_know_the_seed():
    seeds = domain(jax.random.key(0), "privacy")
    ends = [
        advance(deployed("Scaffold", privacy=LOUD, noise_key=key)[0], 1).shared.x.tree for key in (None, None, seeds)
    ]
    assert min(np.linalg.norm(ends[i] - ends[j]) for i, j in ((0, 1), (0, 2), (1, 2))) > 1e-4


class Killed(Exception):
    pass


def test_a_round_that_is_run_again_counts_again_and_draws_again(tmp_path):
    """The server dies in the middle of round 1, after three merges of it, and a new one goes on from its files."""
    plain, _ = deployed("FedNest", privacy=LOUD, cohort=3)
    heard = []

    def link(calls, dies=()):
        call = next(iter(calls.values()))
        heard.append((call.stage[:2], call.arrays))
        if call.stage[:2] == dies:
            raise Killed
        return plain.link(calls)

    store = Checkpoints(tmp_path)
    dying = Conductor(plain.terms, plain.names, functools.partial(link, dies=(1, 3)))
    assert dying.load(store) is None
    now = dying.begin()
    dying.save(store, now)
    now = dying.round(now)
    dying.save(store, now)
    a_round = dying.privacy().exchanges
    assert a_round == 2 * 2 + 3 + 2  # inner gradients and steps, the series, and the outer ones
    with pytest.raises(Killed):
        dying.round(now)
    again = Conductor(plain.terms, plain.names, link)
    again.round(again.load(store))
    assert again.privacy().exchanges == 2 * a_round + 3
    kept = json.loads((tmp_path / "privacy.json").read_text())["exchanges"]
    assert max(kept.values()) == 2 * a_round + 3
    first, second = [arrays for stage, arrays in heard if stage == (1, 1)]  # what the first merge of the round gave
    assert {*first} == {*second} == {"q.tree"}
    assert np.linalg.norm(first["q.tree"] - second["q.tree"]) > 1e-4


def hidden(bits=40):
    return {"secure": MaskedSum.dealt(4, bits=bits)}


@pytest.mark.parametrize("name", ["FedAvg", "Scaffold", "FedNest", "AdaMFCGD"])
def test_masked_sums_give_the_same_run_to_their_resolution(name):
    """Private ones, too, in a cohort of three: before round 0 all four begin, and are summed up."""
    key = domain(jax.random.key(0), "privacy")
    given = {} if name == "FedAvg" else {"privacy": LOUD, "cohort": 3, "noise_key": key}
    plain, fine, coarse = (
        advance(deployed(name, **given, **more)[0], ROUNDS).shared for more in ({}, hidden(), hidden(bits=14))
    )
    distance = lambda a: max(jax.tree.leaves(jax.tree.map(lambda a, b: float(np.abs(a - b).max()), a, plain)))
    assert distance(fine) < 2.0**-40 * 1000
    assert 2.0**-40 * 1000 < distance(coarse) < 2.0**-14 * 1000  # the fixed point is what makes the difference


def test_the_server_sees_no_single_value():
    """The same run twice, under other secrets: whole numbers that have nothing to do with each other or the values."""
    open_, one, two = (transcript(deployed("Scaffold", **more)[0], 1) for more in ({}, hidden(), hidden()))
    for (_, plain), (_, first), (_, second) in zip(open_[1:], one[1:], two[1:], strict=True):
        for i, reply in plain.items():
            assert {a.dtype for a in first[i].arrays.values()} == {np.dtype(np.uint64)}
            for name, value in reply.arrays.items():
                a, b = (r[i].arrays[name].view(np.int64) / 2.0**40 for r in (first, second))
                assert np.all(np.abs(a - value / 4) > 1e-3)
                assert np.all(np.abs(a - b) > 1e-3)


def test_a_masked_sum_without_a_site_fails_clearly_and_the_round_can_be_run_again():
    conductor, _ = deployed("Scaffold", **hidden())
    silent = lambda calls: {i: r for i, r in conductor.link(calls).items() if i != 2 or calls[i].stage.round < 1}
    lossy = Conductor(conductor.terms, conductor.names, silent, quorum=0.5, secure=conductor.secure)
    now = advance(lossy, 1)
    with pytest.raises(SecureSumError, match=r"sites \[2\] are missing.*repeat the round"):
        lossy.round(now)
    whole = advance(conductor, ROUNDS, now)
    plain = advance(deployed("Scaffold")[0], ROUNDS)
    np.testing.assert_allclose(whole.shared.x.tree, plain.shared.x.tree, rtol=1e-9)


def test_masked_messages_have_eight_bytes_a_number():
    task, single = task_of(algorithm("FedAvg")), lambda a: np.asarray(a, np.float32)
    splits = {n: Split(jax.tree.map(single, s.examples), s.offsets) for n, s in task.federation.splits.items()}
    small, up = Federation(splits, task.federation.names), []
    for more in ({}, hidden()):
        given = {"params": single(START), "batch_size": 3, **more}
        conductor, _, traffic = rehearsal(task.problem, algorithm("FedAvg"), small, **given)
        assert advance(conductor, 1).shared.x.tree.dtype == np.float32
        up.append(traffic.up)
    assert up == [4 * START.size * 4, 4 * START.size * 8]


def test_rows_are_no_sums():
    with pytest.raises(ValueError, match="which a secure sum does not hide"):
        deployed("FedX1", **hidden())
