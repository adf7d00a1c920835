"""The interface proven on toy algorithms: phases, pools, gathered rows, per-example memory, starts, visibility."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from references import least_squares, local_sgd
from toys import LateStart, Looks, MergedStart, OwnStarts, Repeated, Rows, Scores, TwoPhase, Visits

import fedstrata as fs
from fedstrata import Averaged, Broadcast, Gathered, Local, Server, Vector
from fedstrata.core.placement import NotVisible

TASK = least_squares()
N = TASK.federation.clients
# Toys that add up numbers do not minimise anything.
WORSENS = pytest.mark.filterwarnings("ignore:.* got worse:fedstrata.simulate.result.DivergenceWarning")


def go(algorithm, rounds=3, batch_size="all", task=TASK, **options):
    return fs.run(
        task.problem, algorithm, task.federation, rounds=rounds, batch_size=batch_size, params=np.zeros(3), **options
    )


def test_phases_pass_what_one_merged_to_the_next():
    x = np.zeros(3)
    for _ in range(3):
        own = [TASK.gradient(i, x) for i in range(N)]
        mean = np.mean(own, axis=0)
        x = np.mean([local_sgd(lambda w, i=i: TASK.gradient(i, w), x, 0.1, 3, mean - own[i]) for i in range(N)], axis=0)
    np.testing.assert_allclose(go(TwoPhase(0.1)).solution(), x, rtol=1e-12)


def test_phases_send_each_field_once_where_it_is_needed():
    entries = [(e.phase, e.field, e.direction) for e in go(TwoPhase(0.1)).ledger.entries]
    assert entries == [(0, "x", "down"), (0, "g", "up"), (1, "g", "down"), (1, "x", "up")]


def test_a_field_that_was_not_received_cannot_be_read():
    class Early(TwoPhase):
        def first(self, oracle, start, state):
            return super().first(oracle, start, state._replace(x=state.x + start.g))

    with pytest.raises(NotVisible, match="have not received the field 'g'"):
        go(Early(0.1))


@pytest.mark.parametrize("limit", [0, 1, 4])
def test_repeats_with_a_mask(limit):
    x = np.zeros(3)
    for _ in range(2 * limit):
        x = x - 0.1 * np.mean([TASK.gradient(i, x) for i in range(N)], axis=0)
    result = go(Repeated(0.1, times=4, limit=limit), rounds=2)
    np.testing.assert_allclose(result.solution(), x, rtol=1e-12, atol=1e-15)
    np.testing.assert_array_equal(result.local["seen"][0], np.full(N, 2.0 * limit))


def test_epochs_of_begin_end_and_fresh_phases_are_their_own():
    """The gradient of a linear loss at one-hot examples shows which were drawn: each once in as many rounds."""
    size = 12
    federation = fs.Federation.from_clients([{"x": np.eye(size)}])
    problem = fs.Average(lambda w, e: w @ e["x"])
    seen = fs.run(
        problem, Looks(), federation, rounds=size, batch_size=1, sampling="epochs", params=np.zeros(size)
    ).local
    for calls, field in ((1, "begin"), (1, "step"), (1, "end"), (2, "fresh")):
        np.testing.assert_array_equal(np.ravel(seen[field].tree), np.full(size, float(calls)), err_msg=field)
    assert np.ravel(seen["met"])[0] < size  # of 36 calls, independent ones meet 3 times on average


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
@pytest.mark.parametrize("history", [1, 2, 3])
def test_pools_hold_the_last_rounds_of_the_cohort_and_first_the_starts_of_all(history, rounds):
    """Rows are indices' targets under Replay, so the union that clients see can be rebuilt by hand."""
    steps, batch = 2, 2
    rng = np.random.default_rng(1)
    counts = TASK.federation["train"].counts
    index = np.stack([rng.integers(0, counts[i], (rounds, steps, batch)) for i in range(N)], axis=2)
    cohorts = [[0, 2], [1, 2], [3, -1], [0, 1]]
    result = go(
        Scores(history=history, local_steps=steps, batch=batch),
        rounds=rounds,
        batch_size=fs.Replay({"batch": index}),
        cohort=fs.participation.Given(cohorts),
        evaluate_every=1,
    )
    pushed = [[100.0 + i for i in range(N) for _ in range(steps * batch)]]  # merge at init: all clients
    for r, members in enumerate(cohorts[: rounds - 1]):
        rows = [TASK.federation["train"].shard(i)["y"][index[r, s, i]] for i in members if i >= 0 for s in range(steps)]
        pushed.append(list(np.concatenate(rows)))
    seen = [v for rows in pushed[-history:] for v in rows]
    np.testing.assert_allclose(result.state.mean, np.mean(seen), rtol=1e-12)
    assert result.state.count == len(seen)
    per_client = steps * batch * 8
    assert result.ledger.total("up") == per_client + 8 * (3 + 2)
    pooled = next(e for e in result.ledger.entries if (e.field, e.direction) == ("pool", "down"))
    assert (pooled.bytes, pooled.rejoining) == (2 * per_client, 2 * per_client * history if history > 1 else None)


def test_pools_of_different_histories_are_refused_with_a_cohort():
    class Two(Scores):
        class State(NamedTuple):
            x: fs.Averaged[fs.Vector]
            pool: fs.Pooled[fs.Pool]
            other: fs.Pooled[fs.Pool]
            mean: fs.Averaged[Any]
            count: fs.Averaged[Any]

        def init_server(self, problem, x0):
            pool = lambda history: fs.Pool.empty(jnp.zeros((), x0.dtype), 4, history)
            return self.State(x=x0, pool=pool(1), other=pool(2), mean=0.0, count=0.0)

    with pytest.raises(ValueError, match=r"Two: with a cohort all pools need one history, not .*'pool': 1, 'other': 2"):
        go(Two(), cohort=2)


def test_gathered_rows_reach_the_server_with_their_ids():
    x, longest = np.zeros(3), -1
    for members in [[3, 1], [0, 2], [2, 1]]:
        rows = [TASK.gradient(i, x) for i in members]
        which = int(np.argmax([g @ g for g in rows]))
        x, longest = x - 0.1 * rows[which], members[which]
    result = go(Rows(0.1), cohort=fs.participation.Given([[3, 1], [0, 2], [2, 1]]))
    np.testing.assert_allclose(result.solution(), x, rtol=1e-12)
    assert result.state.longest == longest


def test_per_example_memory_is_ragged_and_survives_absence():
    rounds, steps, batch = 3, 3, 2
    rng = np.random.default_rng(0)
    split = TASK.federation["train"]
    # Without repetition within a step: two equal positions in one write would count once.
    draw = lambda i: np.stack([[rng.permutation(split.counts[i])[:batch] for _ in range(steps)] for _ in range(rounds)])
    index = np.stack([draw(i) for i in range(N)], axis=2)
    cohorts = [[0, 1], [1, 3], [1, 0]]
    result = go(Visits(), batch_size=fs.Replay({"batch": index}), cohort=fs.participation.Given(cohorts))
    expected = np.zeros(split.size)
    for r, members in enumerate(cohorts):
        for i in members:
            for s in range(steps):
                expected[split.offsets[i] + index[r, s, i]] += 1
    np.testing.assert_array_equal(result.local["visits"].rows[0], expected)
    np.testing.assert_array_equal(result.local["target"].rows[0], split.examples["y"])


@WORSENS
def test_clients_start_from_their_own_values_until_the_first_merge():
    means = np.array([TASK.federation["train"].shard(i)["y"].mean() for i in range(N)])
    result = go(OwnStarts(), rounds=3)
    np.testing.assert_allclose(result.local["first"][0], means + 2 * means.mean(), rtol=1e-12)
    np.testing.assert_allclose(result.solution(), np.full(3, 3 * means.mean()), rtol=1e-12)


@WORSENS
def test_merge_at_init_then_server_start():
    mean = np.mean([TASK.federation["train"].shard(i)["y"].mean() for i in range(N)])
    result = go(MergedStart(), rounds=3)
    np.testing.assert_allclose(result.local["first"][0], np.full(N, 3 * (mean + 1)), rtol=1e-12)


def test_server_start_needs_no_init_client():
    np.testing.assert_array_equal(go(LateStart(), rounds=1).solution(), np.full(3, 7.0))


class Peeking(fs.Algorithm):
    local_steps: int = 1

    class State(NamedTuple):
        x: Averaged[Vector]
        secret: Server[Vector]
        own: Local[Vector]
        rows: Gathered[Vector]

    def init_server(self, problem, x0):
        return self.State(x=x0, secret=x0, own=x0, rows=x0)

    def local_step(self, oracle: fs.SmoothOracle, start, state):
        return state

    def solution(self, problem, state):
        return state.x


def test_each_side_is_refused_what_it_cannot_see():
    class ClientReadsServer(Peeking):
        def local_step(self, oracle, start, state):
            return state._replace(x=state.x + state.secret)

    class ClientReadsGathered(Peeking):
        def local_step(self, oracle, start, state):
            return state._replace(x=state.x + start.rows)

    class ClientWritesServer(Peeking):
        def local_step(self, oracle, start, state):
            return state._replace(secret=state.x)

    class ServerReadsLocal(Peeking):
        def server_step(self, problem, start, merged, cohort):
            return merged._replace(x=merged.own * 2)

    class ServerWritesLocal(Peeking):
        def server_step(self, problem, start, merged, cohort):
            return merged._replace(own=merged.x)

    class SolutionReadsLocal(Peeking):
        def solution(self, problem, state):
            return state.own + 0

    for kind, words in [
        (ClientReadsServer, "client cannot read the Server field 'secret'"),
        (ClientReadsGathered, "client cannot read the Gathered field 'rows'"),
        (ClientWritesServer, "Server field 'secret', nor write it"),
        (ServerReadsLocal, "server cannot read the Local field 'own'"),
        (ServerWritesLocal, "server cannot write the Local field 'own'"),
        (SolutionReadsLocal, "server cannot read the Local field 'own'"),
    ]:
        with pytest.raises(NotVisible, match=words):
            go(kind())
    go(Peeking(), rounds=1)  # the honest one runs


def test_a_field_keeps_its_shape_dtype_and_structure():
    class Grows(Peeking):
        def local_step(self, oracle, start, state):
            return state._replace(x=Vector(jnp.zeros(4)))

    class Narrows(Peeking):
        def local_step(self, oracle, start, state):
            return state._replace(own=Vector(state.x.tree.astype(jnp.float32)))

    class Forgets(Peeking):
        def local_step(self, oracle, start, state):
            return state.x

    for kind, words in [(Grows, "changed field 'x'"), (Narrows, "changed field 'own'"), (Forgets, "must return a")]:
        with pytest.raises(TypeError, match=words):
            go(kind())


def test_counts_cannot_be_averaged():
    class Counts(fs.Algorithm):
        local_steps: int = 1

        class State(NamedTuple):
            x: Broadcast[Vector]
            n: Averaged[int]

        def init_server(self, problem, x0):
            return self.State(x=x0, n=jnp.array(0))

        def local_step(self, oracle: fs.SmoothOracle, start, state):
            return state

        def solution(self, problem, state):
            return state.x

    with pytest.raises(TypeError, match="cannot be averaged"):
        go(Counts())


class Counted(LateStart):
    """Remembers how many clients came, as a server's author would guess its name."""

    class State(NamedTuple):
        x: fs.Averaged[fs.Vector]
        came: fs.Server[Any]

    merge_at_init = False

    def init_server(self, problem, x0):
        return self.State(x=x0, came=0.0)

    def server_step(self, problem, start, merged, cohort):
        return merged._replace(x=merged.x + 1 / cohort.count, came=start.came + cohort.count)


def test_a_cohort_counts_the_clients_that_are_present():
    schedule = [[0, 1, 2], [3, -1, 1], [-1, -1, 2]]
    result = go(Counted(), cohort=fs.participation.Given(schedule))
    present = [sum(i >= 0 for i in row) for row in schedule]
    assert float(result.state.came.item()) == sum(present)
    np.testing.assert_allclose(result.solution(), np.full(3, sum(1 / n for n in present)), rtol=1e-12)
