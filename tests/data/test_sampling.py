"""Samplers: draws are in the shard and as frequent as theory states, and exactly the examples of the mask count."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from fedstrata.base.clock import BEGIN, END, Clock
from fedstrata.data.sampling import Balanced, Draw, Epochs, Replay, Whole, WithReplacement, sampler
from fedstrata.data.shard import Sample, View

SAMPLERS = [WithReplacement(3), Epochs(3), Epochs(3, per_round=2), Whole()]


def at(round=0, local_step=0, steps=4, client=0, name="batch", number=0, seed=0) -> Draw:
    """A draw as the round makes it: keys folded from (seed, round, client) and from (seed, client)."""
    base = jax.random.key(seed)
    key = jax.random.fold_in(jax.random.fold_in(base, round), client)
    lasting = jax.random.fold_in(jax.random.fold_in(base, 2**31 - 1), client)
    return Draw(key, lasting, Clock.at(round, steps, local_step), jnp.int32(client), name, number)


@eqx.filter_jit
def _over_steps(rule, count, capacity, r, s, steps, client):
    one = lambda r, s: rule.draw(at(r, s, steps, client), count, capacity)
    return jax.vmap(jax.vmap(one, in_axes=(None, 0)), in_axes=(0, None))(r, s)


def over_steps(rule, count, capacity, rounds, steps, client=0):
    """Positions and masks of every step: (rounds, steps, rows)."""
    r, s = jnp.arange(rounds, dtype=jnp.int32), jnp.arange(steps, dtype=jnp.int32)
    index, mask = _over_steps(rule, jnp.int32(count), capacity, r, s, steps, client)
    return np.asarray(index), None if mask is None else np.asarray(mask)


@pytest.mark.parametrize("rule", SAMPLERS, ids=repr)
def test_a_draw_has_its_rows_and_stays_in_the_shard(rule):
    for count in (3, 5, 8):
        index, mask = over_steps(rule, count, 8, rounds=3, steps=4)
        assert index.shape == (3, 4, rule.rows(8))
        assert index.dtype == np.int32
        counted = index if mask is None else index[mask]
        assert counted.min() >= 0
        assert counted.max() < count


@pytest.mark.parametrize("rule", SAMPLERS[:3], ids=repr)
def test_draws_differ_between_steps_rounds_clients_streams_and_seeds_and_repeat_otherwise(rule):
    draw = jax.jit(lambda r, s, c, n, seed: rule.draw(at(r, s, 4, c, number=n, seed=seed), jnp.int32(1000), 1000)[0])
    places = np.vstack([np.zeros(5, np.int32), np.eye(5, dtype=np.int32)])
    assert len({tuple(draw(*place).tolist()) for place in places}) == len(places)
    assert draw(*places[3]).tolist() == draw(*places[3]).tolist()


def test_with_replacement_is_uniform_and_independent():
    index, mask = over_steps(WithReplacement(8), 7, 9, rounds=100, steps=25)
    assert mask is None
    assert chisquare(np.bincount(index.ravel(), minlength=7)).pvalue > 1e-4
    pairs = index[..., 0] * 7 + index[..., 1]  # repetition included
    assert chisquare(np.bincount(pairs.ravel(), minlength=49)).pvalue > 1e-4


@pytest.mark.parametrize("count", [3, 7, 10])
def test_an_epoch_has_every_example_once_and_is_then_reshuffled(count):
    """The epoch continues over rounds: steps × batch need not divide the count."""
    index, mask = over_steps(Epochs(3), count, 10, rounds=10, steps=4)
    epochs = index.ravel()[: index.size // count * count].reshape(-1, count)
    assert mask is None
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(count), (len(epochs), 1)))
    assert len({tuple(e) for e in epochs}) > min(len(epochs), np.prod(np.arange(1, count + 1))) // 3


@pytest.mark.parametrize("local_step", [BEGIN, END])
def test_begin_and_end_of_a_round_have_separate_epochs(local_step):
    """One batch a round, every example once before any comes twice, and none of the batches that the steps draw."""
    count, rounds, steps = 12, 40, 4
    draw = jax.jit(lambda r, s: Epochs(3).draw(at(r, s, steps), jnp.int32(count), count)[0])
    own = np.stack([draw(r, local_step) for r in range(rounds)])
    epochs = own.reshape(-1, count)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(count), (len(epochs), 1)))
    drawn, _ = over_steps(Epochs(3), count, count, rounds, steps)
    # Independent batches of 3 out of 12 in order coincide once in 1,320.
    same = np.all(drawn.reshape(rounds * steps, 1, 3) == own, axis=2)
    assert same.mean() < 10 / 1320
    other = np.stack([draw(r, BEGIN + END - local_step) for r in range(rounds)])
    assert not np.any(np.all(own[:10] == other[:10], axis=1))


@pytest.mark.parametrize("local_step", [BEGIN, END])
def test_begin_and_end_of_whole_rounds_have_separate_shuffles(local_step):
    rule, count = Epochs(4, per_round=2), jnp.int32(3)
    draws = jax.jit(lambda local_step: jax.vmap(lambda r: rule.draw(at(r, local_step), count, 5))(jnp.arange(200)))
    index, mask = (np.asarray(part) for part in draws(jnp.int32(local_step)))
    assert np.array_equal(np.sort(index[:, :3], axis=1), np.tile(np.arange(3), (200, 1)))  # one whole epoch first
    np.testing.assert_array_equal(mask, np.ones((200, 4), bool))  # two epochs of three hold a batch of four
    assert chisquare(np.bincount(index[:, 0], minlength=3)).pvalue > 1e-4
    step = np.asarray(draws(jnp.int32(0))[0])
    assert 200 / 6 - 25 < np.sum(np.all(step[:, :3] == index[:, :3], axis=1)) < 200 / 6 + 25  # as chance has it


def test_the_place_in_an_epoch_is_uniform():
    index, _ = over_steps(Epochs(5), 5, 5, rounds=2000, steps=1)
    for place in range(5):
        assert chisquare(np.bincount(index[:, 0, place], minlength=5)).pvalue > 1e-4


@pytest.mark.parametrize(("count", "epochs"), [(5, 1), (5, 2), (8, 2), (6, 3)])
def test_per_round_epochs_count_every_example_that_often_and_then_idle(count, epochs):
    rule, capacity = Epochs(3, per_round=epochs), 8
    steps = rule.steps(np.array([count, capacity]))
    assert steps == -(-epochs * capacity // 3)  # enough for the largest client
    index, mask = over_steps(rule, count, capacity, rounds=4, steps=steps)
    for round in range(4):
        counted = index[round][mask[round]]
        np.testing.assert_array_equal(np.bincount(counted, minlength=count), np.full(count, epochs))
    assert len({tuple(index[r].ravel()) for r in range(4)}) == 4  # every round shuffles anew
    seen = [int(rule.seen(jnp.int32(s), jnp.int32(count))) for s in range(steps)]
    np.testing.assert_array_equal(mask.sum(axis=2), np.tile(seen, (4, 1)))
    assert rule.may_idle
    assert not Epochs(3).may_idle


def test_epochs_refuse_a_shard_smaller_than_the_batch_by_name():
    names = ["Oslo", "Bergen", "Tromsø"]
    Epochs(4).check(np.array([4, 9]), names.__getitem__)
    with pytest.raises(
        ValueError, match=r"batch_size=4 .* shard of Bergen \(2 examples; 2 such clients\).*<= 2"
    ) as error:
        Epochs(4).check(np.array([8, 2, 3]), names.__getitem__)
    assert 'sampling="replacement"' in str(error.value)


def test_whole_takes_the_shard_in_order():
    index, mask = Whole().draw(at(), jnp.int32(3), 5)
    np.testing.assert_array_equal(index, np.arange(5))
    np.testing.assert_array_equal(mask, [True, True, True, False, False])
    assert int(Whole().seen(jnp.int32(0), jnp.int32(3))) == 3


def test_a_view_and_a_sample_see_one_client_only():
    rng = np.random.default_rng(0)
    rows = {"x": rng.normal(size=(10, 2)), "y": np.arange(10)}
    view = View(jax.tree.map(jnp.asarray, rows), jnp.int32(4), jnp.int32(3), 5)
    index, mask = Whole().draw(at(), view.count, view.capacity)
    sample = Sample(view.take(index), mask, index)
    assert set(np.asarray(sample.examples["y"]).tolist()) == {4, 5, 6}  # padding repeats the client's own last row
    np.testing.assert_allclose(sample.mean(sample.examples["x"]), rows["x"][4:7].mean(axis=0), rtol=1e-12)
    poisoned = jnp.where(mask, 1.0, 1e300)
    assert float(sample.mean(poisoned)) == 1.0
    alike = Sample(view.take(jnp.array([2, 0], jnp.int32)), None, jnp.array([2, 0], jnp.int32))
    np.testing.assert_allclose(alike.mean(alike.examples["x"]), rows["x"][[6, 4]].mean(axis=0), rtol=1e-12)
    nothing = Sample(sample.examples, jnp.zeros(5, bool), index)
    assert float(nothing.mean(jnp.ones(5))) == 0.0


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_replay_gives_what_it_was_given(dtype):
    table = np.random.default_rng(0).integers(0, 6, (2, 3, 4, 5)).astype(dtype)
    rule = Replay({"batch": table, "other": table[..., :2]})
    for place in np.ndindex(2, 3, 4):
        r, s, c = place
        index, mask = rule.draw(at(r, s, 3, c), jnp.int32(6), 6)
        np.testing.assert_array_equal(index, table[place])
        assert mask is None
    assert rule.rows(6) == 5
    view = View(jnp.arange(20), jnp.int32(2), jnp.int32(6), 6)
    np.testing.assert_array_equal(view.take(index), 2 + table[place])
    with pytest.raises(ValueError, match=r"unknown stream in Replay 'bath'; did you mean batch\? Known: batch, other"):
        rule.draw(at(name="bath"), jnp.int32(6), 6)


START, COUNT = np.array([0, 2, 3]), np.array([2, 1, 6])
OWNER = np.repeat([0, 1, 2], COUNT)


def balanced(by_size, whole, batch_size=4):
    return Balanced(batch_size, jnp.asarray(START, jnp.int32), jnp.asarray(COUNT, jnp.int32), by_size, whole)


@pytest.mark.parametrize("by_size", [False, True])
def test_balanced_draws_an_example_with_its_share_of_the_objective(by_size):
    """p_i / n_i: 1/9 for every row by size, else 1/(3 n_i) for a row of client i."""
    index, mask = over_steps(balanced(by_size, False), 9, 9, rounds=100, steps=25)
    share = np.full(9, 1 / 9) if by_size else 1 / (3 * COUNT[OWNER])
    assert mask is None
    assert chisquare(np.bincount(index.ravel(), minlength=9), share * index.size).pvalue > 1e-4


@pytest.mark.parametrize("by_size", [False, True])
def test_balanced_whole_is_the_federated_mean(by_size):
    index, weight = balanced(by_size, True).draw(at(), jnp.int32(9), 9)
    values = np.random.default_rng(1).normal(size=9)
    means = np.array([values[i == OWNER].mean() for i in range(3)])
    expected = values.mean() if by_size else means.mean()
    np.testing.assert_allclose(Sample(None, weight, index).mean(jnp.asarray(values)), expected, rtol=1e-12)
    assert (balanced(by_size, True).rows(9), balanced(by_size, False).rows(9)) == (9, 4)


def test_sampler_by_name():
    assert sampler("all") == Whole()
    assert sampler(np.int64(4)) == WithReplacement(4)
    assert sampler(4, "epochs") == Epochs(4)
    rule = Epochs(2, per_round=3)
    assert sampler(rule) is rule
    with pytest.raises(ValueError, match=r"unknown sampling 'epoch'; did you mean epochs\?"):
        sampler(4, "epoch")


@pytest.mark.parametrize("bad", [0, -1, 2.5, True, None, "every"])
def test_sampler_refuses_other_batch_sizes(bad):
    with pytest.raises(ValueError, match=f'batch_size={bad!r} must be a whole number >= 1, "all", or a Sampler'):
        sampler(bad)


@pytest.mark.parametrize("make", [lambda: WithReplacement(0), lambda: Epochs(-1), lambda: Epochs(4, per_round=0)])
def test_a_sampler_made_directly_is_checked_too(make):
    with pytest.raises(ValueError, match=r"batch_size|per_round"):
        make()


@pytest.mark.parametrize("counts", [[6, 6], [6, 4, 6]])
def test_replay_refuses_clients_and_positions_that_do_not_exist(counts):
    """Out of range, look-ups are clamped: a test that uses Replay would read other examples than it names."""
    table = np.full((1, 1, 3, 2), 5)
    with pytest.raises(ValueError, match="Replay"):
        Replay({"batch": table}).check(np.array(counts), str)
