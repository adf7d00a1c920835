"""Exchanges of parts of a field, phases that count as a given local step, and advice of a problem."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from layouts import prepare
from references import LeastSquares, least_squares

import fedstrata as fs
from fedstrata import Averaged, Local, Phase, Vector, real
from fedstrata.core.placement import field_of, part, with_parts
from fedstrata.problems.base import SmoothOracle

# Toys that add up numbers do not minimise anything.
pytestmark = pytest.mark.filterwarnings("ignore:.* got worse:fedstrata.simulate.result.DivergenceWarning")
TASK: LeastSquares = least_squares()
N = TASK.federation.clients


class Halves(fs.Algorithm):
    """x sums up targets; h.1 is agreed on before h.0, each on the sample of a step that the walk has made already."""

    gain: float = real(1.0)
    local_steps: int = 3
    walk_looks: bool = True

    class State(NamedTuple):
        x: Averaged[Vector]
        h: Averaged[tuple[Vector, Vector]]
        times: Local[Any]  # clock.step of the last exchange

    def init_server(self, problem, x0):
        return self.State(x=x0, h=(x0.zeros(), x0.zeros()), times=0.0)

    def walk(self, oracle: SmoothOracle, start, state):
        return state._replace(x=state.x + target(oracle) if self.walk_looks else state.x + 1)

    def upper(self, oracle: SmoothOracle, start, state):
        return state._replace(h=(state.h[0] + 100, state.x + self.gain * target(oracle)))

    def lower(self, oracle: SmoothOracle, start, state):
        times = oracle.clock.step.astype(float) + 0.5 * oracle.clock.local_step.astype(float)
        return state._replace(h=(state.h[0] + state.h[1] + target(oracle), state.h[1] + 1000), times=times)

    def phases(self, problem):
        return [
            Phase(self.walk, self.local_steps, sends=("x",), streams=None if self.walk_looks else ()),
            Phase(self.upper, sends=("h.1",), first=2),
            Phase(self.lower, sends=("h.0",), first=1, streams=("batch",)),
        ]

    def solution(self, problem, state):
        return state.x


def target(oracle):
    return jnp.mean(oracle.sample("batch").examples["y"])


def go(algorithm, rounds=2, **options):
    counts = TASK.federation["train"].counts
    rng = np.random.default_rng(0)
    index = np.stack([rng.integers(0, counts[i], (rounds, 3, 2)) for i in range(N)], axis=2)
    given = {"params": np.zeros(1), "batch_size": fs.Replay({"batch": index}), "stationarity": False, **options}
    problem = given.pop("problem", fs.Average(lambda w, e: jnp.sum(w) * e["y"]))
    y = lambda r, s, i: np.mean(TASK.federation["train"].shard(i)["y"][index[r, s, i]])
    return fs.run(problem, algorithm, TASK.federation, rounds=rounds, **given), y


@pytest.mark.parametrize("execution", ["vmap", "map"])
def test_parts_are_merged_alone_and_samples_are_those_of_the_step(execution):
    result, y = go(Halves(gain=lambda step: 1.0 + step.astype(float)), execution=execution)
    x = h0 = h1 = 0.0
    for r in range(2):
        x = np.mean([x + sum(y(r, s, i) for s in range(3)) for i in range(N)])
        own = [h0 + 100] * N  # what a client made of h.0 while it worked on h.1 stays with it, and is not sent
        h1 = np.mean([x + (1.0 + 3 * r + 2) * y(r, 2, i) for i in range(N)])
        h0 = np.mean([own[i] + h1 + y(r, 1, i) for i in range(N)])
    np.testing.assert_allclose(result.solution(), [x], rtol=1e-12)
    np.testing.assert_allclose(result.state.h[0].tree[0], [h0], rtol=1e-12)
    np.testing.assert_allclose(result.state.h[1].tree[0], [h1], rtol=1e-12)  # without the 1000 that was never sent
    np.testing.assert_array_equal(result.local["times"][0], np.full(N, 3 * 1 + 1 + 0.5))


@pytest.mark.parametrize(("looks", "steps"), [(True, 3), (False, 2)])
def test_a_sample_that_phases_share_counts_once(looks, steps):
    result, _ = go(Halves(walk_looks=looks))
    assert result.history.last("samples") == 2 * steps * 2 * N


def test_messages_hold_parts():
    result, _ = go(Halves())
    found = [(e.phase, e.field, e.direction, e.bytes) for e in result.ledger.entries]
    assert found == [
        (0, "x", "down", 8),
        (0, "h", "down", 16),
        (0, "x", "up", 8),
        (1, "x", "down", 8),
        (1, "h.1", "up", 8),
        (2, "h.1", "down", 8),
        (2, "h.0", "up", 8),
    ]


def test_paths():
    state = Halves.State(x=1, h=(2, 3), times=4)  # pyright: ignore[reportArgumentType]
    assert [field_of(p) for p in ("x", "h.1")] == ["x", "h"]
    assert [part(state, p) for p in ("x", "h", "h.0", "h.1")] == [1, (2, 3), 2, 3]
    assert with_parts(state, {"h.1": 7, "x": 5}) == Halves.State(x=5, h=(2, 7), times=4)  # pyright: ignore
    assert with_parts(state, {"h": (0, 0), "h.0": 9}).h == (9, 0)


@pytest.mark.parametrize(
    ("sends", "match"),
    [
        (("x", "g.0"), "unknown field in sends of phase 0 of .*'g'"),
        (("x", "times.0"), "'times.0', but a Local field does not go that way"),
        (("x",), "no phase sends the Averaged field 'h'"),
    ],
)
def test_impossible_parts_are_refused(sends, match):
    class Wrong(Halves):
        def phases(self, problem):
            return [Phase(self.walk, self.local_steps, sends=sends)]

    with pytest.raises(ValueError, match=match):
        go(Wrong())


class Told(fs.Average):
    """A problem that `bind` gives a size, with advice for a diverged run."""

    size: int = 0

    def bind(self, x, federation, rule=None):
        return Told(self.loss, size=x.size * federation.clients)

    def advice(self):
        return f"take a smaller step than 1/{self.size}"


def test_a_problem_is_bound_before_the_algorithm_sees_it():
    seen = []

    class Looking(fs.FedSGD):
        def check(self, problem):
            seen.append(problem.size)

        def init_server(self, problem, x0):
            assert problem.size == 3 * N
            return super().init_server(problem, x0)

    options = {"rounds": 1, "params": np.zeros(3), "batch_size": "all", "execution": "vmap"}
    problem = Told(TASK.problem.loss)
    job = prepare(problem, Looking(0.1), TASK.federation, **options)
    assert seen == [3 * N]
    assert job.context.problem.size == 3 * N
    assert problem.size == 0


def test_a_diverged_run_reports_the_advice_of_the_problem():
    problem = Told(lambda w, e: jnp.sum(jnp.sqrt(w)) * e["y"] ** 2)
    options = {"params": np.full(1, 0.1), "batch_size": "all", "stationarity": False}
    with pytest.warns(fs.DivergenceWarning, match=f"take a smaller step than 1/{N}$"):
        fs.run(problem, fs.FedAvg(1.0, 3), TASK.federation, rounds=5, **options)
