"""Numbers beyond 32 bits: rows of a split, examples of a round, positions in epochs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import least_squares

import fedstrata as fs
from fedstrata.base.clock import Clock
from fedstrata.data.sampling import Draw, Epochs, Whole, WithReplacement
from fedstrata.deploy.data_summary import DataSummary

TASK = least_squares(seed=5)
N = TASK.federation.clients


class Many(WithReplacement):
    """Draws one example, and counts as 2**30."""

    def rows(self, capacity):
        return 2**30


class ManyOfEach(Whole):
    """Counts 2**18 examples a step for every one of a client."""

    def seen(self, local_step, count):
        return count * 2**18


def run(rule, steps, rounds=3, **options):
    given = {"batch_size": rule, "params": np.zeros(3), "evaluate_every": 1, "execution": "vmap", **options}
    return fs.run(TASK.problem, fs.FedAvg(0.001, steps), TASK.federation, rounds=rounds, **given)


@pytest.mark.parametrize("stream", [False, True])
def test_examples_of_a_round_are_counted_beyond_32_bits(stream):
    samples = run(Many(1), steps=3, stream=stream).history["samples"][0]
    np.testing.assert_array_equal(samples, np.arange(4) * N * 3 * 2**30)
    samples = run(Many(1), steps=3, stream=stream, cohort=2).history["samples"][0]
    np.testing.assert_array_equal(samples, np.arange(4) * 2 * 3 * 2**30)
    rows = int(TASK.federation["train"].size)
    samples = run(ManyOfEach(), steps=1024, rounds=2, stream=stream).history["samples"][0]
    assert rows * 2**18 * 1024 > 2**31
    np.testing.assert_array_equal(samples, np.arange(3) * rows * 2**18 * 1024)


def test_a_round_of_more_than_can_be_counted_is_refused():
    counts, batch = TASK.federation["train"].counts, 2**29
    epochs = (2**31 - batch - 1) // int(counts.max())
    drawn = min(3 * batch * N, epochs * int(counts.sum()))
    with pytest.raises(ValueError, match=f"a round may draw {drawn:,} examples, more than are counted"):
        run(Epochs(batch, per_round=epochs), steps=3)
    with pytest.raises(ValueError, match=r"per_round=.* examples of client . pass 2\*\*31"):
        run(Epochs(batch, per_round=epochs + 1), steps=3)
    assert run(Epochs(1, per_round=epochs), steps=3, rounds=1).history.last("samples") == 3 * N


def test_runs_of_too_many_steps_are_refused():
    with pytest.raises(ValueError, match="local steps are numbered in 32 bits"):
        run(WithReplacement(1), steps=1024, rounds=2**21)
    Epochs(2**20).check_length(2**20, 2**5, capacity=2**11 - 1)
    with pytest.raises(ValueError, match="on a client of 2,048 examples pass 2"):
        Epochs(2**20).check_length(2**20, 2**5, capacity=2**11)


def test_a_split_whose_rows_cannot_be_numbered_is_refused_before_it_is_read():
    """A view of a single number: it would need gigabytes if anything copied it."""
    rows = np.broadcast_to(np.zeros((), np.float32), (2**31,))
    huge = fs.Federation.from_offsets({"x": rows}, [0, 2**30, 2**31])
    problem = fs.Average(lambda w, e: w[0] * e["x"])
    words = "has 2,147,483,648 rows, and programs number at most 2,147,418,112; leave some out"
    for stream in (False, True):
        with pytest.raises(ValueError, match=f"split 'train' {words}"):
            fs.run(problem, fs.FedAvg(0.1), huge, rounds=1, params=np.zeros(1, np.float32), stream=stream)
    with pytest.raises(ValueError, match=words):
        fs.full_data(huge)
    with pytest.raises(ValueError, match=f"Ulm, split 'train' {words}"):
        DataSummary.of("Ulm", fs.Federation.from_offsets({"x": rows}, [0, 2**31]))


@pytest.mark.parametrize("first", [0, 3 * 10**6, 3 * (2**29 // 3)])
def test_epochs_continue_beyond_32_bits(first):
    """Batches of 1,000 from 1,500 examples: three steps are two epochs, wherever they begin."""
    key = jax.random.key(0)
    draw = jax.jit(lambda s: Epochs(1000).draw(Draw(key, key, Clock.at(s, 1, 0), 0, "batch", 0), jnp.int32(1500), 2000))
    drawn = np.concatenate([draw(first + step)[0] for step in range(3)]).reshape(2, 1500)
    np.testing.assert_array_equal(np.sort(drawn, axis=1), np.tile(np.arange(1500), (2, 1)))
    assert not np.array_equal(drawn[0], drawn[1])
    later = np.concatenate([draw(first + 2**32 // 1000 // 3 * 3 + step)[0] for step in range(3)])
    assert not np.array_equal(drawn.ravel(), later)
