"""FedNest, LFedNest and the compositional case: their listings, which Hessian is inverted, and where they end."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from layouts import ledger
from nested_listings import START as POINT
from nested_listings import Chain, chain, indices
from nested_listings import problem as chain_problem
from references import soft

import fedstrata as fs
from fedstrata.algorithms.bilevel.fednest import FedNest, LFedNest
from fedstrata.algorithms.nested.base import CouplingWarning
from fedstrata.algorithms.nested.fednest_compositional import CompositionalFedNest, LevelwiseFedNest
from fedstrata.core.vector import Vector
from fedstrata.problems.bilevel import Bilevel
from fedstrata.problems.compositions import maml, robust
from fedstrata.problems.nested import Nested

START, ALPHA, BETA, ETA = np.array([0.5, -0.7]), 0.05, 0.2, 0.3
WEIGHT = 0.1  # of |x|₁, where there is a regulariser


class Quadratics(NamedTuple):
    """f = ½ x'Px − d'x + ½ (y − c)'Q(y − c) and g = ½ y'Hy − y'(Bx + e): every limit solves a linear system."""

    data: dict  # (clients, examples, …): P, d, Q, c of the upper level, H, B, e of the lower

    @property
    def clients(self):
        return len(self.data["d"])

    @property
    def federation(self):
        rows = lambda names, n: {k: self.data[k][n] for k in names}
        below, above = ([rows(names, n) for n in range(self.clients)] for names in ("HBe", "PdQc"))
        split = lambda parts: fs.Federation.from_clients(parts)["train"]
        return fs.Federation({"train": split(below), "valid": split(above)})

    def at(self, n, names, rows=slice(None)):
        return (self.data[k][n, rows].mean(axis=0) for k in names)

    def lower(self, n, x, y, rows=slice(None)):
        """∂_y g of client n."""
        H, B, e = self.at(n, "HBe", rows)
        return H @ y - B @ x - e

    def upper(self, n, x, y, rows=slice(None)):
        """∂_x f and ∂_y f"""
        P, d = self.at(n, "Pd", rows)
        slopes = [Q @ (y - c) for Q, c in zip(self.data["Q"][n, rows], self.data["c"][n, rows], strict=True)]
        return P @ x - d, np.mean(slopes, axis=0)

    def mean(self, function):
        return np.mean([function(n) for n in range(self.clients)], axis=0)

    @property
    def hessian(self):
        return self.mean(lambda n: next(self.at(n, "H")))

    def solved(self, x):
        """y(x) of the mean lower problem."""
        pull = lambda B, e: B @ x + e
        return np.linalg.solve(self.hessian, self.mean(lambda n: pull(*self.at(n, "Be"))))

    def gradient(self, x, inverse):
        """The hypergradient with this in the place of the inverse of the mean Hessian."""
        y = self.solved(x)
        p = inverse @ self.mean(lambda n: self.upper(n, x, y)[1])
        return self.mean(lambda n: self.upper(n, x, y)[0] + next(self.at(n, "B")).T @ p)

    def local_gradient(self, x, inverse):
        """The mean of the clients' own, at the common y(x); inverse: a function of a client's Hessian."""
        y = self.solved(x)

        def own(n):
            direct, by_y = self.upper(n, x, y)
            H, B = self.at(n, "HB")
            return direct + B.T @ inverse(H) @ by_y

        return self.mean(own)


def upper(x, y, example):
    e = example
    return 0.5 * x @ e["P"] @ x - e["d"] @ x + 0.5 * (y - e["c"]) @ e["Q"] @ (y - e["c"])


def lower(x, y, example):
    return 0.5 * y @ example["H"] @ y - y @ (example["B"] @ x + example["e"])


PROBLEM = Bilevel(upper, lower, start=np.zeros(3), lower_level="global")


def quadratics(clients=3, examples=4, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=(clients, 1, *shape)) + 0.3 * rng.normal(size=(clients, examples, *shape))
    square = lambda a, floor: floor * np.eye(a.shape[-1]) + a @ a.swapaxes(-1, -2) / a.shape[-1]
    positive = lambda size, floor: square(draw(size, size), floor)
    below = {"H": positive(3, 0.6), "B": draw(3, 2), "e": draw(3)}
    return Quadratics({**below, "P": positive(2, 0.5), "d": draw(2), "Q": positive(3, 0.2), "c": draw(3)})


TASK = quadratics()
MU, LARGEST = np.linalg.eigvalsh(TASK.hessian)[[0, -1]]


def truncated(H, terms, eta=ETA):
    """η Σ_{n<N} (I − ηH)^n"""
    eye = np.eye(len(H))
    return eta * sum(np.linalg.matrix_power(eye - eta * H, n) for n in range(terms))


def root(residual, d=2):
    """Where an affine function is zero."""
    at_zero = residual(np.zeros(d))
    return np.linalg.solve(np.stack([residual(e) - at_zero for e in np.eye(d)], axis=1), -at_zero)


def run(algorithm, task=TASK, problem=PROBLEM, **options):
    given = {"rounds": 1, "batch_size": "all", "params": START, "stationarity": False, **options}
    given = {"evaluate_every": given["rounds"], **given}
    return fs.run(problem, algorithm, task.federation, **given)


def samples(task, rounds, steps, batch=2, seed=5) -> Any:
    rng, shape = np.random.default_rng(seed), (rounds, steps, task.clients, batch)
    return {s: rng.integers(0, task.data["d"].shape[1], shape) for s in ("upper", "lower", "cross", "hessian")}


# The listings: plain loops over clients. All exchanges of a round look at the rows of their local step.


def fed_inn(task, x, y, steps, rows, corrected=True):
    own = []
    q = task.mean(lambda n: task.lower(n, x, y, rows("lower", 0, n)))
    for n in range(task.clients):
        y_i = y
        for step in range(steps):
            at = lambda point, n=n, step=step: task.lower(n, x, point, rows("lower", step, n))
            y_i = y_i - BETA * (at(y_i) - at(y) + q if corrected else at(y_i))
        own.append(y_i)
    return np.mean(own, axis=0)


def hvp(task, n, p, rows):
    return next(task.at(n, "H", rows("hessian", 0, n))) @ p


def fed_ihgp(task, x, y, terms, rows, number=None):
    """The whole sum, or the random term of this number."""
    p = task.mean(lambda n: task.upper(n, x, y, rows("upper", 0, n))[1])
    if number is None:
        total = p
        for _ in range(terms - 1):
            p = p - ETA * task.mean(lambda n, p=p: hvp(task, n, p, rows))
            total = total + p
        return ETA * total
    for _ in range(number):
        p = p - ETA * task.mean(lambda n, p=p: hvp(task, n, p, rows))
    return terms * ETA * p


def fed_out(task, x, y, p, steps, rows, prox):
    def hypergradient(n):
        return task.upper(n, x, y, rows("upper", 0, n))[0] + next(task.at(n, "B", rows("cross", 0, n))).T @ p

    own, h = [], task.mean(hypergradient)
    for n in range(task.clients):
        x_i = x
        for step in range(steps):
            at = lambda point, n=n, step=step: task.upper(n, point, y, rows("upper", step, n))[0]
            x_i = prox(x_i - ALPHA * (h - at(x) + at(x_i)))
        own.append(x_i)
    return np.mean(own, axis=0)


def everything(stream, step, n):
    return slice(None)


def fednest(method, task, rounds, table=None, number=None, prox=lambda x: x):
    x, y, p = START, np.zeros(3), np.zeros(3)
    for r in range(rounds):
        rows = everything if table is None else (lambda stream, step, n, r=r: table[stream][r, step, n])
        for _ in range(method.inner_rounds):
            y = fed_inn(task, x, y, method.local_steps, rows)
        p = fed_ihgp(task, x, y, method.terms, rows, number)
        x = fed_out(task, x, y, p, method.local_steps, rows, prox)
    return x, y, p


def lfednest(method, task, rounds, table):
    x, y = START, np.zeros(3)
    for r in range(rounds):
        rows = lambda stream, step, n, r=r: table[stream][r, step, n]
        for _ in range(method.inner_rounds):
            y = fed_inn(task, x, y, method.local_steps, rows, corrected=False)
        own = []
        for n in range(task.clients):
            x_i = x
            for step in range(method.local_steps):
                direct, p = task.upper(n, x_i, y, rows("upper", step, n))
                total, H = p, next(task.at(n, "H", rows("hessian", step, n)))
                for _ in range(method.terms - 1):
                    p = p - ETA * H @ p
                    total = total + p
                x_i = x_i - ALPHA * (direct + ETA * next(task.at(n, "B", rows("cross", step, n))).T @ total)
            own.append(x_i)
        x = np.mean(own, axis=0)
    return x, y


SUM = FedNest(ALPHA, BETA, ETA, local_steps=3, inner_rounds=2, terms=4, series="sum")
LOCAL = LFedNest(ALPHA, BETA, ETA, local_steps=3, inner_rounds=3, terms=4, series="sum")
close = lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-11)


def test_fednest_follows_its_listing():
    """With a regulariser, on samples."""
    table = samples(TASK, 3, SUM.local_steps)
    sparse = dataclasses.replace(PROBLEM, regularizer=fs.prox.L1(WEIGHT))
    result = run(SUM, problem=sparse, rounds=3, batch_size=fs.Replay(table))
    x, y, p = fednest(SUM, TASK, 3, table, prox=lambda x: soft(x, ALPHA * WEIGHT))
    close(result.solution(), x)
    close(result.state.y.tree[0], y)
    close(result.state.p.tree[0], p)
    assert np.linalg.norm(x - START) > 0.1


def test_lfednest_follows_its_listing():
    table = samples(TASK, 3, LOCAL.local_steps)
    result = run(LOCAL, rounds=3, batch_size=fs.Replay(table))
    x, y = lfednest(LOCAL, TASK, 3, table)
    close(result.solution(), x)
    close(result.state.y.tree[0], y)
    assert np.linalg.norm(x - fednest(SUM, TASK, 3, table)[0]) > 1e-3


def test_with_equal_clients_and_one_step_local_and_global_are_one_method():
    same = Quadratics({k: np.repeat(v[:1], 3, axis=0) for k, v in TASK.data.items()})
    method = LFedNest(ALPHA, BETA, ETA, inner_rounds=2, terms=4, series="sum")
    close(run(method, same, rounds=5).solution(), fednest(method, same, 5)[0])


# The series.


def pair():
    """The two clients of the example: the mean Hessian is 0.55 I, and ∂_y f = (1, 1)."""
    H = np.stack([np.diag([1.0, 0.1]), np.diag([0.1, 1.0])])[:, None]
    problem = Bilevel(
        lambda x, y, e: jnp.sum(y),
        lambda x, y, e: 0.5 * y @ e["H"] @ y - y @ x,
        start=np.zeros(2),
        lower_level="global",
        upper_split="train",
    )
    return H, problem, fs.Federation.from_clients([{"H": h} for h in H])


def public(H, v, eta, terms):
    """The recursion of the public code: every client its own factor, and a list that is never cleared."""
    p, factors, sent = v, [v] * len(H), []
    for _ in range(terms):
        factors = [c - eta * h @ c for h, c in zip(H, factors, strict=True)]
        sent += [p + c for c in factors]
        p = np.mean(sent, axis=0)
    return eta * p


def test_it_inverts_the_averaged_hessian():
    H, problem, federation = pair()
    method = FedNest(0.1, 0.5, 0.5, terms=50, series="sum")
    result = fs.run(problem, method, federation, rounds=1, batch_size="all", params=START, stationarity=False)
    np.testing.assert_allclose(result.state.p.tree[0], np.linalg.solve(H[:, 0].mean(axis=0), np.ones(2)), rtol=1e-6)
    np.testing.assert_allclose(result.state.p.tree[0], 1.818, atol=5e-4)
    np.testing.assert_allclose(public(H[:, 0], np.ones(2), 0.5, 50), 1.417, atol=5e-4)


@pytest.mark.slow
def test_the_bias_of_the_truncated_sum_falls_geometrically():
    errors, counts = [], (20, 30)
    for terms in counts:
        state = run(FedNest(ALPHA, BETA, ETA, terms=terms, series="sum")).state
        by_y = TASK.mean(lambda n, y=state.y.tree[0]: TASK.upper(n, START, y)[1])
        errors.append(np.linalg.norm(state.p.tree[0] - np.linalg.solve(TASK.hessian, by_y)))
    rate = (errors[1] / errors[0]) ** (1 / (counts[1] - counts[0]))
    assert errors[0] > 1e-6
    np.testing.assert_allclose(rate, 1 - ETA * MU, rtol=5e-3)


@pytest.mark.slow
def test_the_random_term_is_the_sum_on_average():
    """p is one of N vectors, each as often as the others, and their mean is the truncated sum."""
    terms, seeds = 4, 200
    method = FedNest(ALPHA, BETA, ETA, local_steps=2, terms=terms)
    result = run(method, seeds=seeds)
    cases = [fednest(method, TASK, 1, number=n) for n in range(terms)]
    close(np.mean([p for _, _, p in cases], axis=0), fednest(method, TASK, 1)[2])
    distance = np.linalg.norm(np.asarray(result.state.p.tree)[:, None] - [p for _, _, p in cases], axis=-1)
    number = distance.argmin(axis=1)
    assert distance.min(axis=1).max() < 1e-12
    close(result.state.x.tree, np.stack([cases[n][0] for n in number]))
    counts = np.bincount(number, minlength=terms)
    assert np.sum((counts - seeds / terms) ** 2) / (seeds / terms) < 16.3  # 99.9 % of χ² with 3 degrees of freedom


@pytest.mark.slow
def test_lfednest_draws_a_term_of_its_own_at_every_client():
    """Of two equal clients, which meet in the mean of two of the N points that one of them could get to."""
    terms, alone = 3, Quadratics({k: v[:1] for k, v in TASK.data.items()})
    both = Quadratics({k: v[[0, 0]] for k, v in TASK.data.items()})
    found = np.asarray(run(LFedNest(ALPHA, BETA, ETA, terms=terms), both, seeds=40).state.x.tree)
    (H, B), y = alone.at(0, "HB"), fed_inn(alone, START, np.zeros(3), 1, everything)
    direct, by_y = alone.upper(0, START, y)
    power = lambda n: terms * ETA * np.linalg.matrix_power(np.eye(3) - ETA * H, n)
    cases = np.stack([START - ALPHA * (direct + B.T @ power(n) @ by_y) for n in range(terms)])
    pairs = (cases[:, None] + cases).reshape(-1, 2) / 2
    distance = np.linalg.norm(found[:, None] - pairs, axis=-1)
    assert distance.min(axis=1).max() < 1e-12
    met = {tuple(sorted(divmod(int(which), terms))) for which in distance.argmin(axis=1)}
    assert len(met) == 6  # all pairs of 0, 1 and 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FedNest, LFedNest])
def test_every_product_has_a_sample_of_its_own(kind):
    """H is 0.2 or 1.8: with independent samples E p = 1, with one sample for all products it would be 1.64."""
    problem = Bilevel(
        lambda x, y, e: y[0],
        lambda x, y, e: 0.5 * e["H"] * y[0] ** 2 - x[0] * y[0],
        start=np.zeros(1),
        lower_level="global",
        upper_split="train",
    )
    federation = fs.Federation.from_clients([{"H": np.array([0.2, 1.8])}])
    method = kind(1.0, 0.5, 1.0, terms=3, series="sum")
    options = {"rounds": 1, "batch_size": 1, "params": np.zeros(1), "seeds": 600, "stationarity": False}
    result = fs.run(problem, method, federation, **options)
    p = np.asarray(result.state.x.tree)[:, 0] * -1  # h = −∂²_xy g p = p, and one step of length 1 from 0
    assert abs(p.mean() - 1) < 4 * p.std() / len(p) ** 0.5 < 0.2


# Where they end: all data, clients that differ.

OPTIMUM = root(lambda x: TASK.gradient(x, np.linalg.inv(TASK.hessian)))


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "terms"), [(1, 4), (5, 120)])
def test_only_the_length_of_the_series_keeps_fednest_from_the_optimum(steps, terms):
    method = FedNest(0.25 / steps, 0.3 / steps, ETA, local_steps=steps, terms=terms, series="sum")
    result = run(method, rounds=600, stationarity=terms == 120)
    limit = root(lambda x: TASK.gradient(x, truncated(TASK.hessian, terms)))
    np.testing.assert_allclose(result.solution(), limit, atol=1e-12)
    if terms == 120:
        assert np.linalg.norm(result.solution() - OPTIMUM) < 1e-12
        assert result.history.last("stationarity") < 1e-12
    else:
        assert np.linalg.norm(limit - OPTIMUM) > 0.01


@pytest.mark.slow
def test_with_the_random_series_it_goes_on_moving():
    method = FedNest(0.1, 0.3, ETA, terms=20)
    distances = lambda method: np.linalg.norm(run(method, rounds=400, seeds=10).state.x.tree - OPTIMUM, axis=1)
    far, near = distances(method), distances(dataclasses.replace(method, step_size=0.02))
    assert np.median(near) > 1e-3
    assert np.median(far) > 1.5 * np.median(near)


def test_lfednest_inverts_every_clients_own_hessian():
    method = LFedNest(0.25, 0.3, 0.15, terms=12, series="sum")
    result = run(method, rounds=300, stationarity=True)
    limit = lambda terms: root(lambda x: TASK.local_gradient(x, lambda H: truncated(H, terms, 0.15)))
    np.testing.assert_allclose(result.solution(), limit(12), atol=1e-9)
    assert result.history.last("stationarity") > 0.05
    exact = root(lambda x: TASK.local_gradient(x, np.linalg.inv))
    np.testing.assert_allclose(limit(500), exact, atol=1e-9)
    assert np.linalg.norm(TASK.gradient(exact, np.linalg.inv(TASK.hessian))) > 0.05  # nor would more terms help


# Messages and refusals.


@pytest.mark.parametrize(("T", "N"), [(1, 1), (3, 5)])
def test_the_exchanges_of_a_round(T, N):
    """2T + N' + 3, with the largest N' that may come; up go y T times twice, p N times, x twice."""
    problem, x = PROBLEM.bind(Vector(jnp.asarray(START)), TASK.federation), Vector(jnp.asarray(START))
    book = lambda method: ledger(method, problem, method.init_server(problem, x), 3)
    found = book(FedNest(ALPHA, BETA, ETA, inner_rounds=T, terms=N))
    assert sum(e.repeat for e in found.entries if e.direction == "up") == 2 * T + (N - 1) + 3
    assert found.up == 8 * (3 * (2 * T + N) + 2 * 2)
    assert found.down == 8 * (2 + 3 * (2 * T + 1) + 3 * N + 2)
    local = book(LFedNest(ALPHA, BETA, ETA, inner_rounds=T, terms=N))
    assert sum(e.repeat for e in local.entries if e.direction == "up") == T + 1
    assert (local.up, local.down) == (8 * (3 * T + 2), 8 * (2 + 3 * T + 3))


@pytest.mark.parametrize("kind", [FedNest, LFedNest])
def test_what_it_refuses(kind):
    with pytest.warns(CouplingWarning, match="made for lower_level='global'"):
        kind(ALPHA, BETA, ETA).check(dataclasses.replace(PROBLEM, lower_level="client"))
    bound = PROBLEM.bind(Vector(jnp.asarray(START)), TASK.federation)
    kind(ALPHA, BETA, 1.99 / LARGEST).check(bound)
    with pytest.raises(ValueError, match=r"below 2/L"):
        kind(ALPHA, BETA, 2.01 / LARGEST).check(bound)
    with pytest.raises(ValueError, match=r"terms = 0 must be a whole number >= 1"):
        kind(ALPHA, BETA, ETA, terms=0)
    with pytest.raises(ValueError, match=r"inner_rounds = 1.5 must be"):
        kind(ALPHA, BETA, ETA, inner_rounds=1.5)
    with pytest.raises(ValueError, match="series"):
        kind(ALPHA, BETA, ETA, series="some")


# The compositional case.

STEP, B, TAU, T = 0.05, 0.3, 3, 2
FORMS = (CompositionalFedNest, LevelwiseFedNest)


def composition(task: Chain, rounds, table, levelwise, b=B, steps=TAU, inner=T, prox=lambda x: x):
    """As published: every client takes its own τ corrected steps in y, and τ steps along h in x."""
    x, y, N = POINT, np.empty(0), range(task.workers)
    for round in range(rounds):
        rows = lambda k, n, round=round: table[f"level{k}"][round, 0, n]
        r = [task.value(1, n, rows(1, n), x) for n in N]
        y = np.mean(r, axis=0) if round == 0 else y
        for _ in range(inner):
            q, own = y - np.mean(r, axis=0), []
            for n in N:
                y_i = y
                for _ in range(steps):
                    y_i = y_i - b * ((y_i - r[n]) - (y - r[n]) + q)
                own.append(y_i)
            y = np.mean(own, axis=0)
        J = [task.jacobian(1, n, rows(1, n), x) for n in N]
        slopes = [task.jacobian(2, n, rows(2, n), y)[0] for n in N]
        p = [np.mean(slopes, axis=0)] * len(N) if levelwise else slopes
        h = np.mean([J[n].T @ p[n] for n in N], axis=0)
        x = prox(x - steps * STEP * h)  # τ steps along the same h; with a regulariser one of their length: ours
    return x, y


def flat(tree):
    return np.concatenate([np.ravel(part) for part in tree])


def compose(method, task, table, rounds=4, weight=0.0):
    options = {"params": POINT, "rounds": rounds, "evaluate_every": rounds, "stationarity": False}
    return fs.run(chain_problem(2, weight), method, task.federation, batch_size=fs.Replay(table), **options)


@pytest.mark.parametrize(("kind", "weight"), [(FORMS[0], 0.0), (FORMS[1], 0.3)])
def test_a_composition_follows_the_printed_rule(kind, weight):
    task = chain(2)
    table = indices(task, 4, TAU, 6)
    result = compose(kind(STEP, B, TAU, T), task, table, weight=weight)
    prox = lambda x: soft(x, TAU * STEP * weight)
    x, y = composition(task, 4, table, kind is LevelwiseFedNest, prox=prox)
    close(result.solution(), x)
    close(flat(part[0] for part in result.state.y.tree), y)
    assert np.linalg.norm(x - composition(task, 4, table, kind is not LevelwiseFedNest, prox=prox)[0]) > 1e-3


def whole(task, rounds):
    """Tables that look at all examples in every step."""
    every = np.arange(task.examples)
    return {f"level{k}": np.broadcast_to(every, (rounds, TAU, task.workers, len(every))) for k in (1, 2)}


def true_gradient(task, x):
    """Of the globally coupled objective."""
    every, mean = np.arange(task.examples), lambda f: np.mean([f(n) for n in range(task.workers)], axis=0)
    y = mean(lambda n: task.value(1, n, every, x))
    slope = mean(lambda n: task.jacobian(2, n, every, y)[0])
    return mean(lambda n: task.jacobian(1, n, every, x)).T @ slope


def shared_outer(task):
    return task.changed(
        w=lambda a: np.broadcast_to(a[:1, :1], a.shape), t=lambda a: np.broadcast_to(a[:1, :1], a.shape)
    )


@pytest.mark.parametrize(
    ("kind", "change"), [(LevelwiseFedNest, lambda task: task), (CompositionalFedNest, shared_outer)]
)
def test_with_the_whole_mean_it_is_gradient_descent(kind, change):
    task, x = change(chain(2)), POINT
    for _ in range(5):
        x = x - TAU * STEP * true_gradient(task, x)
    np.testing.assert_allclose(compose(kind(STEP, 1.0, TAU), task, whole(task, 5), 5).solution(), x, rtol=1e-12)
    if kind is CompositionalFedNest:
        wrong = compose(kind(STEP, 1.0, TAU), chain(2), whole(task, 5), 5).solution()
        assert np.linalg.norm(wrong - composition(chain(2), 5, whole(task, 5), True, 1.0, TAU, 1)[0]) > 1e-3


@pytest.mark.parametrize("kind", FORMS)
def test_where_a_composition_ends(kind):
    """The corrected form ends at a stationary point, the published one at another point, though y settles for any b."""
    rng, d = np.random.default_rng(0), 3
    A, offset = np.eye(d) + 0.4 * rng.normal(size=(4, d, d)), rng.normal(size=(4, d))
    half = rng.normal(size=(4, d, d))
    Q, c = np.eye(d) + 0.3 * half @ half.swapaxes(1, 2), rng.normal(size=(4, d))
    rows = {"A": A, "b": offset, "Q": Q, "c": c}
    federation = fs.Federation.from_clients([{k: v[n : n + 1] for k, v in rows.items()} for n in range(4)])
    problem = Nested([lambda x, e: e["A"] @ x + e["b"], lambda y, e: 0.5 * y @ e["Q"] @ y - e["c"] @ y])
    slopes = lambda x: Q @ (A.mean(axis=0) @ x + offset.mean(axis=0)) - c
    right = root(lambda x: A.mean(axis=0).T @ slopes(x).mean(axis=0), d)
    printed = root(lambda x: np.einsum("nji,nj->i", A, slopes(x)) / 4, d)
    options = {"params": POINT, "rounds": 3000, "evaluate_every": 3000, "batch_size": "all"}
    result = fs.run(problem, kind(0.02, 0.3, 2), federation, **options)
    np.testing.assert_allclose(result.solution(), right if kind is LevelwiseFedNest else printed, rtol=1e-9)
    assert np.linalg.norm(right - printed) > 0.05
    assert (result.history.last("stationarity") < 1e-10) == (kind is LevelwiseFedNest)


def test_the_repaired_composition_is_fednest_on_a_bilevel_problem():
    """With g = ½ |y − r(x)|², N = 1 and η = 1; from its second round on, as the first differs in where y starts."""
    task = chain(2)
    inside, outside = chain_problem(2).levels
    follow = lambda x, y, e: 0.5 * jnp.sum((jnp.concatenate(y) - jnp.concatenate(inside(x, e))) ** 2)
    y0 = composition(task, 1, whole(task, 1), True)[1]
    options = {"start": (y0[:1], y0[1:]), "lower_level": "global", "upper_split": "train"}
    bilevel = Bilevel(lambda x, y, e: outside(y, e), follow, **options)
    method = FedNest(STEP, B, 1.0, local_steps=TAU, inner_rounds=T, terms=1, series="sum")
    options = {"params": POINT, "rounds": 4, "evaluate_every": 4, "stationarity": False, "batch_size": "all"}
    found = fs.run(bilevel, method, task.federation, **options)
    close(found.solution(), compose(LevelwiseFedNest(STEP, B, TAU, T), task, whole(task, 4)).solution())


def test_the_messages_of_a_composition():
    task, x = chain(2), Vector(jnp.asarray(POINT))
    problem = chain_problem(2).bind(x, task.federation)
    books = [ledger(kind(STEP, B, TAU, T), problem, kind(STEP).init_server(problem, x), 3) for kind in FORMS]
    exchanges = [sum(e.repeat for e in book.entries if e.direction == "up") for book in books]
    assert exchanges == [T + 1, T + 2]
    assert [(book.up / 8, book.down / 8) for book in books] == [(4 * T + 3, 3 + 4), (4 * T + 4 + 3, 3 + 4 + 4)]


@pytest.mark.parametrize("kind", FORMS)
def test_a_composition_refuses_what_it_cannot_solve(kind):
    loss = lambda w, example: 0.5 * jnp.sum((w - example["x"]) ** 2)
    for problem in (robust(loss), maml(loss, 0.1)):
        with pytest.warns(CouplingWarning, match="made for inner='global'"):
            kind(STEP).check(problem)
    with pytest.raises(ValueError, match=r"made for two levels.*has 3"):
        kind(STEP).check(chain_problem(3))
    with pytest.raises(ValueError, match=r"inner_rounds = 0 must be"):
        kind(STEP, inner_rounds=0)
