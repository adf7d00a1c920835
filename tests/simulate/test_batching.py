"""Runs are settings × seeds: shared out over threads and back, and batched so that a seed draws once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import prepare
from references import least_squares
from toys import Visits

import fedstrata as fs
from fedstrata.simulate.batching import Groups, over_runs, threads_for


@pytest.mark.parametrize(("settings", "seeds", "threads"), [(4, 3, 2), (1, 6, 3), (3, 2, 2), (6, 1, 3)])
def test_what_is_cut_is_joined_again(settings, seeds, threads):
    runs = jnp.arange(settings * seeds)
    groups = Groups(settings, seeds, threads)
    parts = groups.cut({"runs": runs, "pairs": jnp.stack([runs, -runs], 1)})
    assert len(parts) == threads
    for part in parts:  # every group is itself a grid of settings × seeds
        grid = np.asarray(part["runs"]).reshape(-1, groups.seeds_each)
        assert np.all(np.diff(grid, axis=1) == 1)
        assert np.all(grid % seeds == grid[0] % seeds)
    joined = groups.join(parts)
    np.testing.assert_array_equal(joined["runs"], runs)
    np.testing.assert_array_equal(joined["pairs"][:, 1], -runs)


def test_threads_are_as_many_as_share_runs_evenly(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert [threads_for(*grid) for grid in ((1, 1), (1, 10), (3, 4), (5, 7), (2, 3))] == [1, 2, 4, 1, 3]


def test_a_seed_draws_once_for_all_settings():
    values, keys = jnp.repeat(jnp.arange(4.0), 3), jnp.tile(jnp.stack([jax.random.key(s) for s in (1, 2, 3)]), 4)
    states = jnp.arange(12.0)
    shapes = []

    def one(value, key, state):
        drawn = jax.random.normal(key, (5,))
        jax.debug.callback(lambda drawn: shapes.append(drawn.shape), drawn)  # as often as it is computed
        return value + jnp.sum(drawn) + state

    found = jax.jit(lambda *given: over_runs(one, 3, given[0], (given[1],), (given[2],)))(values, keys, states)
    jax.effects_barrier()
    assert len(shapes) == 3
    alone = [v + jnp.sum(jax.random.normal(k, (5,))) + s for v, k, s in zip(values, keys, states, strict=True)]
    np.testing.assert_allclose(found, alone, rtol=1e-12)


def test_tiny_programs_leave_out_what_xla_does_for_large_ones():
    """The names of XLA's passes are its own: should they change, a tiny program would be as any other."""
    problem = fs.Average(lambda w, e: (w @ e["x"] - e["y"]) ** 2)

    def job(size):
        x = np.ones((40, size), np.float32)
        federation = fs.Federation.from_offsets({"x": x, "y": x[:, 0]}, np.arange(9) * 5)
        return prepare(problem, fs.FedAvg(0.1, 2), federation, rounds=2, batch_size=1, params=x[0])

    tiny = job(100)
    assert tiny.tiny
    assert not job(2000).tiny
    assert "reduce-window" not in tiny.programs(tiny.begin()[0])[0]


@pytest.mark.slow
def test_an_algorithm_without_reals_takes_several_seeds():
    task = least_squares(seed=5)
    options = {"rounds": 2, "params": np.zeros(3), "batch_size": 2}
    several, one = (fs.run(task.problem, Visits(), task.federation, seeds=s, **options) for s in (3, [2]))
    visits = lambda result: np.asarray(result.local["visits"].rows)
    np.testing.assert_array_equal(visits(several)[2], visits(one)[0])
    assert not np.array_equal(visits(several)[0], visits(several)[1])
