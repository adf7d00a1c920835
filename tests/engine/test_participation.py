"""Cohorts against exact enumeration: which clients, in which order, how often; and what cannot be drawn."""

import dataclasses
import itertools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, START, task_of
from scipy.stats import chisquare

import fedstrata as fs
from fedstrata.engine.participation import Everyone, Given, Selection, Uniform, Weighted, selection

KEYS = 20_000
ROUND = jnp.int32(0)


def many(rule, clients, keys=KEYS):
    """A cohort for each of many keys, as a run folds them."""
    fold = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(keys))
    return np.asarray(eqx.filter_jit(jax.vmap(lambda key: rule.draw(key, ROUND, clients)))(fold))


def agrees(rows, probabilities):
    """χ² of the drawn tuples against exact probabilities; cells too rare for it are taken together."""
    found = dict.fromkeys(probabilities, 0)
    for row, times in zip(*np.unique(rows, axis=0, return_counts=True), strict=True):
        found[tuple(row.tolist())] += times  # a tuple that should not occur is a KeyError
    common = [t for t, p in probabilities.items() if p * len(rows) >= 5]
    counts, expected = [found[t] for t in common], [probabilities[t] * len(rows) for t in common]
    if len(common) < len(probabilities):
        counts, expected = [*counts, len(rows) - sum(counts)], [*expected, len(rows) - sum(expected)]
    return chisquare(counts, expected, sum_check=False).pvalue > 1e-4


def successive(weights, count):
    """The probability of every ordered draw without replacement, by the definition."""
    out = {}
    for order in itertools.permutations([i for i, w in enumerate(weights) if w > 0], count):
        left, p = sum(weights), 1.0
        for i in order:
            p, left = p * weights[i] / left, left - weights[i]
        out[order] = p
    return out


@pytest.mark.parametrize(("clients", "count"), [(2, 1), (4, 2), (5, 3), (6, 2)])
def test_uniform_makes_every_subset_equally_likely(clients, count):
    rows = np.sort(many(Uniform(count), clients), axis=1)
    subsets = list(itertools.combinations(range(clients), count))
    assert agrees(rows, dict.fromkeys(subsets, 1 / math.comb(clients, count)))


def test_uniform_of_all_is_all():
    rows = np.sort(many(Uniform(6), 6, keys=100), axis=1)
    np.testing.assert_array_equal(rows, np.tile(np.arange(6), (100, 1)))


def test_uniform_in_a_large_population_costs_only_the_cohort():
    clients, count = 10**9, 100
    rows = many(Uniform(count), clients, keys=50)
    assert all(len(set(row)) == count for row in rows.tolist())
    assert rows.min() >= 0
    assert rows.max() < clients
    work = jax.jit(lambda key: Uniform(count).draw(key, ROUND, clients)).lower(jax.random.key(0)).compile()
    memory = work.memory_analysis()
    assert memory is None or memory.temp_size_in_bytes < 10**5


@pytest.mark.parametrize(
    ("weights", "count", "ranked"),
    [
        ([1, 2, 3, 4], 1, False),
        ([1, 2, 3, 4], 2, False),
        ([1, 1, 5, 0], 3, False),
        ([0, 3, 0, 1, 2, 0], 2, False),
        ([1, 2, 300], 3, True),
        ([1, 1, 2, 700, 0], 2, True),
    ],
)
def test_weighted_is_successive_sampling_on_both_paths(weights, count, ranked):
    rule = Weighted(count, weights)
    assert rule.rank_all == ranked
    rows = many(rule, len(weights))
    assert agrees(rows, successive(weights, count))


def test_equal_weights_are_uniform():
    rows = np.sort(many(Weighted(2, np.ones(4)), 4), axis=1)
    assert agrees(rows, dict.fromkeys(itertools.combinations(range(4), 2), 1 / 6))


def test_weighted_takes_everyone_who_can_be_drawn():
    rows = np.sort(many(Weighted(3, [0, 1e-9, 1, 0, 1e9]), 5, keys=200), axis=1)
    np.testing.assert_array_equal(rows, np.tile([1, 2, 4], (200, 1)))


@pytest.mark.parametrize("word", [0, 1, 2**32 - 2, 2**32 - 1])
@pytest.mark.parametrize("weights", [[0, 3, 1, 0], [0, *np.full(3000, 0.1), 0, 0]])
def test_a_client_without_weight_is_not_drawn_by_any_word(monkeypatch, word, weights):
    monkeypatch.setattr(jax.random, "bits", lambda *_, **__: jnp.uint32(word))
    drawn = int(Weighted(1, weights).draw(jax.random.key(0), ROUND, len(weights))[0])
    assert drawn == (1 if word < 2 else len(weights) - 1 - np.argmax(np.array(weights)[::-1] > 0))


def test_everyone_is_everyone():
    np.testing.assert_array_equal(Everyone().draw(jax.random.key(0), ROUND, 5), np.arange(5))
    assert Everyone().size(5) == 5


@pytest.mark.parametrize("ids", [[[0], [1, 2], [3, 0]], [(0,), (1, 2), (3, 0)], np.array([[0, -1], [1, 2], [3, 0]])])
def test_given_follows_its_schedule_and_starts_again(ids):
    rule = Given(ids)
    rule.check(4)
    draw = jax.jit(lambda round: rule.draw(jax.random.key(0), round, 4))
    rows = [draw(jnp.int32(r)).tolist() for r in range(7)]
    assert rows == [[0, -1], [1, 2], [3, 0]] * 2 + [[0, -1]]
    assert rule.size(4) == 2


class Repeating(Selection):
    """A rule from outside, that may draw a client twice."""

    rows: Any

    def size(self, clients):
        return self.rows.shape[1]

    def draw(self, key, round, clients):
        return jnp.asarray(self.rows)[round % len(self.rows)]


TWICE = np.array([[1, 1, 1, 0], [3, -1, 0, 3], [2, 0, 1, 3], [-1, 0, -1, 0]], np.int32)
ONCE = [[1, -1, -1, 0], [3, -1, 0, -1], [2, 0, 1, 3], [-1, 0, -1, -1]]


def test_a_client_that_is_drawn_twice_takes_part_once():
    """Otherwise it has twice the weight that privacy counts, and two states of which one is lost."""
    rule = Repeating(TWICE)
    rule.check(4)
    assert not rule.full
    drawn = jax.jit(lambda round: rule.draw_once(jax.random.key(0), round, 4))
    assert [drawn(jnp.int32(r)).tolist() for r in range(4)] == ONCE


@pytest.mark.parametrize("algorithm", ["SCAFFOLD", "FedX2"])
@pytest.mark.parametrize("privacy", [None, fs.Privacy(clip=0.05, noise=0.5)], ids=["open", "private"])
def test_a_run_that_draws_clients_twice_is_one_that_draws_them_once(algorithm, privacy):
    if privacy is not None and algorithm == "FedX2":
        privacy = dataclasses.replace(privacy, accept=("first", "second"))
    case, task = CASES[algorithm], task_of(CASES[algorithm].algorithm)
    runs = [
        fs.run(
            task.problem, case.algorithm, task.federation, rounds=5, batch_size=3, params=START, cohort=rule,
            privacy=privacy, progress=False,
        )
        for rule in (Repeating(TWICE), Given(ONCE))
    ]  # fmt: skip
    for a, b in zip(*(jax.tree.leaves(run.solution()) for run in runs), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_rule_that_promises_full_slots_and_not_different_clients_is_refused():
    class Full(Repeating):
        @property
        def full(self):
            return True

    with pytest.raises(ValueError, match=r"Full.full is True.*set distinct = True"):
        Full(TWICE).check(4)


def test_a_cohort_by_name():
    assert isinstance(selection(None), Everyone)
    assert selection(3) == Uniform(3)
    assert selection(np.int64(3)).size(9) == 3
    rule = Given([[0]])
    assert selection(rule) is rule


@pytest.mark.parametrize("bad", ["half", 0.5, True, [1, 2]])
def test_another_kind_of_cohort_is_refused_with_the_remedy(bad):
    with pytest.raises(TypeError, match=r"must be None \(everyone\), a number of clients, or a rule") as error:
        selection(bad)
    assert repr(bad) in str(error.value)


@pytest.mark.parametrize(("size", "clients"), [(0, 3), (4, 3), (-1, 3)])
def test_a_cohort_that_cannot_be_drawn_is_refused(size, clients):
    with pytest.raises(ValueError, match=rf"cohort of {size} clients cannot be drawn from {clients}; choose 1 to 3"):
        selection(size).check(clients)


@pytest.mark.parametrize("weights", [[1, -1], [1, np.nan], [1, np.inf], [[1, 1]]])
def test_weights_must_be_finite_and_not_negative(weights):
    with pytest.raises(ValueError, match="one finite number >= 0 per client"):
        Weighted(1, weights)


def test_weights_must_allow_the_cohort_and_fit_the_federation():
    with pytest.raises(ValueError, match="3 clients cannot be drawn, only 2 have weight > 0"):
        Weighted(3, [1, 0, 1, 0])
    with pytest.raises(ValueError, match="3 weights were given for 4 clients"):
        Weighted(2, [1, 1, 1]).check(4)
    with pytest.raises(ValueError, match="cohort of 0 clients"):
        Weighted(0, [1, 1]).check(2)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "zero clients"),
        ([[0], []], "round 1 of the schedule has zero clients"),
        ([[0], [-1, -1]], "round 1 of the schedule has zero clients"),
        ([[0, 1], [2, 2]], "a client occurs twice"),
        ([[0, 4]], "names client 4, but ids run from 0 to 3"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(ids, words):
    with pytest.raises(ValueError, match=words):
        Given(ids).check(4)


@pytest.mark.parametrize("make", [lambda: Given([0, 1]), lambda: Given([[0.5, 1]]), lambda: Uniform(2.5).check(4)])
def test_what_is_not_whole_numbers_in_rounds_is_refused(make):
    with pytest.raises((TypeError, ValueError), match=r"Given|Uniform|cohort"):
        make()
