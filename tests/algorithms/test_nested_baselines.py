"""LocalSCGDM, SMVR, SCSC and NLASG: their rules as plain loops, identities, where each of them ends, what they send."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import nested_listings as listings
import numpy as np
import pytest
from nested_listings import START, Chain, Walk, chain, indices
from references import soft

import fedstrata as fs
from fedstrata.algorithms.nested import base
from fedstrata.algorithms.nested.base import zero_jacobians
from fedstrata.algorithms.nested.local_scgdm import LocalSCGDM
from fedstrata.algorithms.nested.nlasg import NLASG, NLASGAveraged
from fedstrata.algorithms.nested.scsc import SCSC
from fedstrata.algorithms.nested.smvr import SMVR
from fedstrata.core.vector import Vector
from fedstrata.problems.compositions import risk_averse, robust
from fedstrata.problems.nested import Nested
from fedstrata.simulate.inputs import flat_split
from fedstrata.simulate.options import RunOptions
from fedstrata.simulate.run import prepare

STEP, P, ROUNDS, BATCH = 0.05, 3, 4, 6
RADIUS, WEIGHT = 1.2, 0.3
LOCAL, BALL = LocalSCGDM(STEP, 0.3, 0.4, P), SMVR(STEP, 0.3, P, RADIUS)
THREE = [SMVR(STEP, 0.3, P), SCSC(STEP, 0.3, P), NLASG(STEP, 0.3, P)]
name = lambda algorithm: type(algorithm).__name__


def run(algorithm, task, table):
    """ROUNDS rounds; with two levels with a regulariser. Tests with the same arguments share programs."""
    what = listings.problem(task.levels, WEIGHT if task.levels == 2 else 0.0)
    options = {"params": START, "rounds": ROUNDS, "evaluate_every": ROUNDS, "stationarity": False}
    return fs.run(what, algorithm, task.federation, batch_size=fs.Replay(table), **options)


def walk(task, table):
    """The same for a listing."""
    return Walk(task, table, STEP, prox if task.levels == 2 else lambda x: x)


def prox(x):
    return soft(x, STEP * WEIGHT)


def sampled(task):
    return indices(task, ROUNDS, P, BATCH)


def whole(task):
    """Tables that look at all examples in every step."""
    assert task.examples == BATCH
    return {k: np.broadcast_to(np.arange(BATCH), v.shape) for k, v in sampled(task).items()}


def one_and_copies(task):
    """The first worker alone, and as many copies of it as there were workers."""
    first = Chain({k: v[:1] for k, v in task.data.items()})
    return first, Chain({k: np.repeat(v[:1], task.workers, axis=0) for k, v in task.data.items()})


def flat(vector):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(vector)])


# The rules.

# Levels are loops in all of them: with the fewest and with three each, and with five the one that has one level too.
RULES = {
    "LocalSCGDM": (LOCAL, lambda walk: listings.local_scgdm(walk, 0.3, 0.4), (2,)),
    "SMVR in a ball": (BALL, lambda walk: listings.smvr(walk, 0.3, RADIUS), (2,)),
    "SMVR": (THREE[0], lambda walk: listings.smvr(walk, 0.3), (1, 3, 5)),
    "SCSC": (THREE[1], lambda walk: listings.scsc(walk, 0.3), (2, 3)),
    "NLASG": (THREE[2], lambda walk: listings.nlasg(walk, 0.3), (2, 3)),
    "NLASGAveraged": (NLASGAveraged(STEP, 0.3, P), lambda walk: listings.nlasg(walk, 0.3, average_z=True), (3,)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("which", "levels"), [(which, K) for which in RULES for K in RULES[which][2]])
def test_it_follows_its_rule(which, levels):
    algorithm, listing, _ = RULES[which]
    task = chain(levels)
    table = sampled(task)
    result = run(algorithm, task, table)
    points = listing(walk(task, table))
    np.testing.assert_allclose(flat((result.state.x, result.state.h)), np.concatenate(points), rtol=1e-9, atol=1e-11)
    assert np.linalg.norm(points[0] - START) > 0.02


def test_the_rules_differ():
    """Otherwise the tests above could not distinguish them."""
    task = chain(2)
    ends = [listing(walk(task, sampled(task)))[0] for _, listing, _ in RULES.values()]
    ends.append(listings.local_scgdm(walk(task, sampled(task)), 0.4, 0.3)[0])
    assert min(np.linalg.norm(a - b) for i, a in enumerate(ends) for b in ends[:i]) > 1e-4


@pytest.mark.parametrize("algorithm", [LOCAL, *THREE], ids=name)
def test_the_first_batch_may_be_larger(algorithm):
    """Of 5,000 examples drawn, h is near the mean over all; of one it is not."""
    task = chain(2)
    what = listings.problem(2).bind(Vector(jnp.asarray(START)), task.federation)
    shard = {"train": flat_split(task.federation["train"]).view(jnp.array(0), jnp.array(task.examples))}
    mean, errors = task.value(1, 0, np.arange(task.examples), START), []
    for size in (5000, None):
        method = dataclasses.replace(algorithm, init_batch_size=size)
        view = method.init_server(what, Vector(jnp.asarray(START)))
        h = jax.jit(lambda key, method=method, view=view: method.init_client(what.oracle(shard, key, 1), view).h)
        errors.append(np.linalg.norm(flat(h(jax.random.key(2))) - mean))
    assert errors[0] < 0.05
    assert errors[1] > 0.2


# Identities.


def gradient(task, x):
    """Of the composition of the first worker's levels, on all its data."""
    points, rows = [x], np.arange(task.examples)
    for k in range(1, task.levels):
        points.append(task.value(k, 0, rows, points[-1]))
    return listings.product([task.jacobian(k, 0, rows, y) for k, y in enumerate(points, 1)])


def descent(task):
    x = START
    for _ in range(ROUNDS * P):
        x = walk(task, None).prox(x - STEP * gradient(task, x))
    return x


@pytest.mark.slow
@pytest.mark.parametrize("which", RULES)
def test_equal_workers_are_one(which):
    algorithm, listing, levels = RULES[which]
    one, copies = one_and_copies(chain(levels[-1] if levels[-1] != 5 else 3))
    table = sampled(one)
    result = run(algorithm, copies, {k: np.repeat(v, copies.workers, axis=2) for k, v in table.items()})
    np.testing.assert_allclose(result.solution(), listing(walk(one, table))[0], rtol=1e-12)


@pytest.mark.parametrize("b", [0.05, 1.0])
@pytest.mark.parametrize(("kind", "levels"), [(SMVR, 1), (SMVR, 3), (SCSC, 3), (SCSC, 2)])
def test_one_client_and_all_data_is_gradient_descent(kind, levels, b):
    """Of several clients that are all alike, which are one."""
    _, copies = one_and_copies(chain(levels))
    np.testing.assert_allclose(run(kind(STEP, b, P), copies, whole(copies)).solution(), descent(copies), rtol=1e-12)


def test_local_scgdm_is_gradient_descent_only_without_memory():
    _, copies = one_and_copies(chain(2))
    ends = [
        run(LocalSCGDM(STEP, *w, P), copies, whole(copies)).solution() for w in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.5))
    ]
    np.testing.assert_allclose(ends[0], descent(copies), rtol=1e-12)
    assert all(np.linalg.norm(x - ends[0]) > 1e-3 for x in ends[1:])


@pytest.mark.parametrize("tau", [0.3, 1.0])
def test_nlasg_is_momentum_descent_only_when_inner_levels_are_affine(tau):
    """h is then exact for any τ, and z the running mean of gradients, each one step old."""
    _, copies = one_and_copies(chain(3))
    for task, exact in ((copies.changed(B=np.zeros_like), True), (copies, False)):
        x, z = START, np.zeros_like(START)
        for _ in range(ROUNDS * P):
            x, z = x - STEP * z, (1 - tau) * z + tau * gradient(task, x)
        assert np.allclose(run(NLASG(STEP, tau, P), task, whole(task)).solution(), x, rtol=1e-12) == exact


def test_smvr_and_scsc_have_the_same_rule_for_values():
    """Without memory, or with the same Jacobians for all samples, they are one method, and otherwise they are not."""
    task = chain(3)
    _, copies = one_and_copies(task)
    known = lambda a: np.broadcast_to(a.mean(axis=1, keepdims=True), a.shape)
    values_only = copies.changed(A=known, B=np.zeros_like, w=known, t=known)
    together = {k: np.repeat(v[:, :, :1], task.workers, axis=2) for k, v in sampled(task).items()}
    for case, table, b, same in (
        (task, sampled(task), 1.0, True),
        (values_only, together, 0.2, True),
        (task, sampled(task), 0.2, False),
        (copies, together, 0.2, False),
    ):
        a, c = (run(kind(STEP, b, P), case, table).state for kind in (SMVR, SCSC))
        assert np.allclose(flat((a.x, a.h)), flat((c.x, c.h)), rtol=1e-11) == same


# Where they end: all data, clients that differ.


class Affine(NamedTuple):
    """Inner levels A_n y + b_n and an outer one ½ y'Q_n y − c_n'y: every limit solves a linear system."""

    inner: tuple  # of (A, b), each with the workers in front
    Q: np.ndarray
    c: np.ndarray

    @property
    def federation(self):
        named = {f"{what}{k}": v for k, pair in enumerate(self.inner) for what, v in zip("Ab", pair, strict=True)}
        rows = {**named, "Q": self.Q, "c": self.c}
        return fs.Federation.from_clients([{k: v[n : n + 1] for k, v in rows.items()} for n in range(len(self.c))])

    def values(self, x):
        """What each client's own inner levels make of x."""
        y = np.broadcast_to(x, self.c.shape)
        for A, b in self.inner:
            y = np.einsum("nij,nj->ni", A, y) + b
        return y

    def mean_value(self, x):
        for A, b in self.inner:
            x = A.mean(axis=0) @ x + b.mean(axis=0)
        return x

    def pull(self, v):
        """Through the mean Jacobians."""
        for A, _ in self.inner[::-1]:
            v = A.mean(axis=0).T @ v
        return v

    def slopes(self, y):
        """The outer gradient of every client at its row of y."""
        return np.einsum("nij,nj->ni", self.Q, np.broadcast_to(y, self.c.shape)) - self.c

    def gradient(self, x):
        """Of the globally coupled objective."""
        return self.pull(self.slopes(self.mean_value(x)).mean(axis=0))


@functools.cache
def affine_problem(levels):
    level = lambda k: lambda y, e: e[f"A{k}"] @ y + e[f"b{k}"]
    return Nested([*map(level, range(levels - 1)), lambda y, e: 0.5 * y @ e["Q"] @ y - e["c"] @ y])


def affine(levels=2, workers=4, d=3, seed=0):
    rng, eye = np.random.default_rng(seed), np.eye(d)
    pair = lambda: (eye + 0.4 * rng.normal(size=(workers, d, d)), rng.normal(size=(workers, d)))
    half = rng.normal(size=(workers, d, d))
    Q = eye + 0.3 * half @ half.swapaxes(1, 2)
    return Affine(tuple(pair() for _ in range(levels - 1)), Q, rng.normal(size=(workers, d)))


def root(residual, d=3):
    """Where an affine function is zero."""
    at_zero = residual(np.zeros(d))
    return np.linalg.solve(np.stack([residual(e) - at_zero for e in np.eye(d)], axis=1), -at_zero)


LONG = 6000  # rounds after which everything stands still


def end(algorithm, task):
    options = {"params": START, "rounds": LONG, "evaluate_every": LONG, "stationarity": False, "batch_size": "all"}
    what = affine_problem(len(task.inner) + 1)
    return np.asarray(fs.run(what, algorithm, task.federation, **options).solution())


def between(task, x, share):
    """The clients' values, moved this share of the way from their mean."""
    y = task.values(x)
    return y.mean(axis=0) + share * (y - y.mean(axis=0))


LIMITS = {
    # What the direction of each method settles at, if x stands still, with one local step and weight b.
    "SMVR": (SMVR, lambda task, x, b: task.pull(task.slopes(task.values(x)).mean(axis=0))),
    "SCSC": (SCSC, lambda task, x, b: task.pull(task.slopes(between(task, x, b)).mean(axis=0))),
    "NLASG": (NLASG, lambda task, x, b: task.pull(task.slopes(between(task, x, 0)).mean(axis=0))),
}


@pytest.mark.slow
@pytest.mark.parametrize(("which", "levels"), [("SMVR", 2), ("SCSC", 2), ("SCSC", 3), ("NLASG", 2), ("NLASG", 3)])
def test_their_limits_with_one_local_step(which, levels):
    kind, direction = LIMITS[which]
    task, sizes = affine(levels), []
    for b in (0.2, 0.05):
        x = end(kind(0.05, b), task)
        np.testing.assert_allclose(x, root(lambda x, b=b: direction(task, x, b)), rtol=1e-9)
        sizes.append(np.linalg.norm(task.gradient(x)))
    if which == "NLASG" and levels == 2:
        assert max(sizes) < 1e-10
    elif which == "SCSC" and levels == 2:
        assert 3 < sizes[0] / sizes[1] < 5
    else:
        assert min(sizes) > 0.05
        assert max(sizes) < 1.5 * min(sizes)


@pytest.mark.parametrize("kind", [SCSC, NLASG])
def test_with_more_local_steps_neither_of_them_reaches_a_stationary_point(kind):
    task = affine()
    sizes = [np.linalg.norm(task.gradient(end(kind(0.04 * s, 0.1 * s, 4), task))) for s in (1.0, 0.25)]
    assert min(sizes) > 0.05
    assert max(sizes) < 1.5 * min(sizes)


def local_limit(task, share):
    """Where Σ J_n' ∇F_n,2 vanishes, with each client's h this share of the way from the mean to its own value."""
    (A, _), *_ = task.inner
    return root(lambda x: np.einsum("nji,nj->i", A, task.slopes(between(task, x, share))) / len(A))


ETAS = (1.0, 0.25)


def local_end(task, eta, steps):
    """A round moves about as much for any number of steps."""
    share = eta / steps
    return end(LocalSCGDM(0.05 * share, 0.2 * share, 0.3 * share, steps), task)


@pytest.mark.parametrize("steps", [1, 4])
def test_local_scgdm_stops_at_another_point(steps):
    task = affine()
    ends, limit = [local_end(task, eta, steps) for eta in ETAS], local_limit(task, 0)
    if steps == 1:  # known exactly, for any η
        for x, eta in zip(ends, ETAS, strict=True):
            np.testing.assert_allclose(x, local_limit(task, 0.2 * eta), rtol=1e-9)
    assert 3 < np.linalg.norm(ends[0] - limit) / np.linalg.norm(ends[1] - limit) < 5
    sizes = [np.linalg.norm(task.gradient(x)) for x in (*ends, limit)]
    assert min(sizes) > 0.05
    assert max(sizes) < 1.5 * min(sizes)


@pytest.mark.parametrize("steps", [1, 4])
def test_local_scgdm_is_right_in_the_limit_when_clients_share_the_outer_level(steps):
    task = affine()
    same = lambda a: np.broadcast_to(a.mean(axis=0), a.shape)
    task = task._replace(Q=same(task.Q), c=same(task.c))
    np.testing.assert_allclose(task.gradient(local_limit(task, 0)), 0, atol=1e-12)
    far, near = (np.linalg.norm(task.gradient(local_end(task, eta, steps))) for eta in ETAS)
    assert 3 < far / near < 5


def test_smvr_is_right_when_clients_have_the_same_curvature():
    task = affine()
    task = task._replace(Q=np.broadcast_to(task.Q.mean(axis=0), task.Q.shape))
    assert np.linalg.norm(task.gradient(end(SMVR(0.05, 0.1), task))) < 1e-10


# Messages, memory, refusals.


def returns(days=6, d=100, clients=2):
    rng = np.random.default_rng(0)
    return fs.Federation.from_clients([{"r": rng.normal(size=(days, d))} for _ in range(clients)])


def sent(algorithm, problem, x, federation):
    """Numbers that go up, without a run."""
    options = RunOptions(rounds=1, params=x, batch_size=1, execution="vmap")
    return prepare(problem, algorithm, federation, options).ledger.up / 8


def test_the_messages_of_a_portfolio():
    numbers = 100 + (101 + 2) + (101 * 100 + 2 * 101 + 2)
    assert numbers == 10507
    up = lambda kind: sent(kind(1e-3, 0.5), risk_averse(), np.full(100, 0.01), returns())
    assert [up(kind) for kind in (SMVR, SCSC, NLASG, NLASGAveraged)] == [numbers, numbers, numbers, numbers + 100]


def test_the_message_of_local_scgdm():
    assert sent(LOCAL, listings.problem(2), START, chain(2).federation) == 2 * 3 + 4


def test_most_of_a_portfolios_jacobians_are_constants():
    """202 of 10,304 numbers depend on data or on the point: with x and h, 405 would tell all, one less than 406."""
    rng, found = np.random.default_rng(1), []
    mean, variance, risk = risk_averse().levels
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape))
    for _ in range(3):
        entries = [
            jax.jacrev(lambda x, r: mean(x, {"r": r}))(draw(100), draw(100)),
            jax.jacrev(lambda y, r: variance(y, {"r": r}))((draw(), draw(100)), draw(100)),
            jax.jacrev(risk)(jnp.abs(draw(2))),
        ]
        found.append(flat(entries))
    assert found[0].size == 10304
    assert (np.ptp(found, axis=0) > 0).sum() == 202


@pytest.mark.parametrize("algorithm", THREE, ids=name)
def test_jacobians_beyond_the_limit_are_refused_before_anything_is_laid_out(algorithm, monkeypatch):
    federation, options = returns(days=1, d=20_000), {"rounds": 1, "params": np.full(20_000, 1e-3), "batch_size": 1}
    events = []
    monkeypatch.setattr(type(algorithm), "init_server", lambda *_: events.append("init_server"))
    with pytest.raises(ValueError, match=r"keeps the Jacobian of every level as numbers, 6.0 GiB for 2 clients"):
        fs.run(risk_averse(eps=0.1), algorithm, federation, **options)
    assert not events


def test_the_limit_counts_all_jacobians_of_all_clients(monkeypatch):
    problem = risk_averse().bind(Vector(jnp.full(100, 0.01)), returns())
    needed = 2 * 8 * 10304
    monkeypatch.setattr(base, "JACOBIAN_LIMIT", needed)
    SCSC(1e-3, 0.5).check(problem)
    monkeypatch.setattr(base, "JACOBIAN_LIMIT", needed - 1)
    with pytest.raises(ValueError, match="which is more than the limit"):
        SCSC(1e-3, 0.5).check(problem)


def test_local_scgdm_is_for_two_levels():
    task = chain(3)
    with pytest.raises(ValueError, match=r"for two levels.*has 3"):
        run(LOCAL, task, sampled(task))


def test_local_scgdm_warns_where_inner_expectations_are_the_clients_own():
    with pytest.warns(base.CouplingWarning, match="LocalSCGDM is made for inner='global'"):
        LOCAL.check(robust(lambda w, example: 0.5 * jnp.sum((w - example["x"]) ** 2)))


@pytest.mark.slow
def test_zero_jacobians_are_laid_out_as_the_oracles_are():
    """Trees of outputs over trees of inputs, also where the dtype is not the default one."""
    x = {"a": jnp.zeros((2, 3), jnp.float32), "b": jnp.zeros((), jnp.float32)}
    first = lambda x, e: (x["b"] * e["x"].astype(x["b"].dtype), {"m": x["a"].T @ x["a"], "s": jnp.sum(x["a"])})
    last = lambda y: jnp.sum(y[0]) + jnp.sum(y[1]["m"])
    federation = fs.Federation.from_clients([{"x": np.ones((2, 4))}])
    problem = Nested([first, last]).bind(Vector(x), federation)
    shard = {"train": flat_split(federation["train"]).view(jnp.array(0), jnp.array(2))}
    oracle = problem.oracle(shard, jax.random.key(0))
    true = (oracle.jacobian(1, Vector(x)), oracle.pull(2, oracle.value(1, Vector(x))))
    kind = lambda tree: jax.tree.map(lambda a: (a.shape, str(a.dtype)), tree)
    zero = zero_jacobians(problem)
    assert kind(zero) == kind(true)
    assert not flat(zero).any()
