"""Client coupling: MFCGD and its relatives, ComFedL and LocalMOML against plain loops, closed forms and each other."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from references import least_squares, soft, squared_error

import fedstrata as fs
from fedstrata.algorithms.nested import theory
from fedstrata.algorithms.nested.ada_mfcgd import AdaMFCGD, DiagonalRule, TrackedAdaMFCGD
from fedstrata.algorithms.nested.comfedl import ComFedL
from fedstrata.algorithms.nested.local_moml import LocalMOML
from fedstrata.algorithms.nested.mfcgd import MFCGD, TrackedMFCGD
from fedstrata.problems.compositions import maml, robust
from fedstrata.problems.nested import Nested
from fedstrata.simulate.options import RunOptions
from fedstrata.simulate.run import prepare

# A small problem without symmetry: R³ → R² → R, different examples at every client, derivatives by hand.

M, D, P, ROWS, BATCH = 3, 3, 2, 6, 2
RNG = np.random.default_rng(7)
SHARDS = [
    {"a": RNG.normal(size=(ROWS, P, D)), "b": RNG.normal(size=(ROWS, P)) + m, "c": RNG.normal(size=(ROWS, P)) - m}
    for m in range(M)
]
X1 = np.array([0.5, -0.3, 0.2])


def inner(x, example):
    return jnp.sin(example["a"] @ x) + example["b"]


def outer(y, example):
    return jnp.sum(0.5 * (y - example["c"]) ** 2 + 0.05 * y**4)


TOY = Nested([inner, outer], inner="client")


def g(m, x, rows):
    return np.mean([np.sin(SHARDS[m]["a"][j] @ x) + SHARDS[m]["b"][j] for j in rows], axis=0)


def jacobian(m, x, rows):
    return np.mean([np.cos(SHARDS[m]["a"][j] @ x)[:, None] * SHARDS[m]["a"][j] for j in rows], axis=0)


def gradient(m, y, rows):
    return np.mean([y - SHARDS[m]["c"][j] + 0.2 * y**3 for j in rows], axis=0)


ROUNDS = 6


def indices(steps, seed=0):
    """One more row of samples than steps: what LocalMOML begins a round with. Programs depend on the shape alone."""
    rng = np.random.default_rng(seed)
    streams = ("level1", "level2", "jacobian1")
    return {stream: rng.integers(0, ROWS, (ROUNDS, steps + 1, M, BATCH)) for stream in streams}


def replayed(algorithm, table, shards=SHARDS):
    options = {"rounds": ROUNDS, "params": X1, "batch_size": fs.Replay(table), "evaluate_every": ROUNDS}
    return fs.run(TOY, algorithm, fs.Federation.from_clients(shards), **options, stationarity=False, execution="vmap")


def ball(a, radius):
    return a if radius is None else a * min(1.0, radius / np.linalg.norm(a))


class At:
    """Tuning parameters as functions of the paper's t."""

    eta = staticmethod(lambda t: 0.05 / (1 + 0.1 * t))
    alpha = staticmethod(lambda t: 0.9 / (2 + 0.2 * t))
    beta = staticmethod(lambda t: 0.7 / (1 + 0.1 * t))
    varrho = staticmethod(lambda t: 0.5 / (1 + 0.05 * t))


SCHEDULES: dict[str, Any] = {  # the library's count from 0
    "step_size": lambda step: At.eta(step.astype(float) + 1),
    "value_momentum": lambda step: At.alpha(step.astype(float) + 1),
    "jacobian_momentum": lambda step: At.beta(step.astype(float) + 1),
    "gradient_momentum": lambda step: At.varrho(step.astype(float) + 1),
}


def coordinate(a, w, theta, rho):
    a = theta * a + (1 - theta) * w**2
    return a, np.sqrt(a) + rho


def norm(a, w, theta, rho):
    a = theta * a + (1 - theta) * np.linalg.norm(w)
    return a, (a + rho) * np.ones(D)


def identity(a, w, theta, rho):
    return a, np.ones(D)


RULES = {"coordinate": coordinate, "norm": norm}


def algorithm_1(table, q, T, rule=identity, theta=None, rho=None, radii=(None, None), tracked=False, old_point="own"):
    """The listing line by line, with t from 1; with tracked, x moves along w + c inside A⁻¹."""
    at, own = At, range(M)
    look = lambda stream, t, m: table[stream][(t - 1) // q, (t - 1) % q, m]  # the sample of index t
    x, c = [X1.copy() for _ in own], [np.zeros(D) for _ in own]
    h = [g(m, x[m], look("level1", 1, m)) for m in own]
    u = [jacobian(m, x[m], look("level1", 1, m)) for m in own]
    v = [gradient(m, h[m], look("level2", 1, m)) for m in own]
    w = [u[m].T @ v[m] for m in own]
    a, clipped = 0.0, 0
    theta = at.alpha if theta is None else (lambda t, fixed=theta: fixed)
    a_1, A = rule(a, np.mean(w, axis=0), theta(1), rho)
    a = a_1 if q > 1 else a  # with q = 1 line 6 comes at t = 1, with the same mean of w
    for t in range(1, T + 1):
        if t % q == 0:
            mean_w, mean_x = np.mean(w, axis=0), np.mean(x, axis=0)
            a, A = rule(a, mean_w, theta(t), rho)
            new = [mean_x - at.eta(t) * mean_w / A for _ in own]
            old = x if old_point == "own" else [mean_x for _ in own]
            c = [mean_w - w[m] if tracked else c[m] for m in own]
        else:
            new, old = [x[m] - at.eta(t) * (w[m] + c[m]) / A for m in own], x
        if t == T:
            return np.mean(new, axis=0), clipped
        for m in own:
            zeta, xi = look("level1", t + 1, m), look("level2", t + 1, m)
            before = h[m]
            h[m] = g(m, new[m], zeta) + (1 - at.alpha(t + 1)) * (h[m] - g(m, old[m], zeta))
            u[m] = jacobian(m, new[m], zeta) + (1 - at.beta(t + 1)) * (u[m] - jacobian(m, old[m], zeta))
            v[m] = gradient(m, h[m], xi) + (1 - at.varrho(t + 1)) * (v[m] - gradient(m, before, xi))
            clipped += sum(r is not None and np.linalg.norm(e) > r for e, r in zip((u[m], v[m]), radii, strict=True))
            u[m], v[m] = ball(u[m], radii[0]), ball(v[m], radii[1])
            w[m] = u[m].T @ v[m]
        x = new
    raise AssertionError


@pytest.mark.parametrize(("q", "radii"), [(1, (None, None)), (3, (None, None)), (3, (1.2, 3.0))])
def test_mfcgd_follows_its_listing(q, radii):
    table = indices(q)
    method = MFCGD(local_steps=q, **SCHEDULES, jacobian_radius=radii[0], gradient_radius=radii[1])
    theirs, clipped = algorithm_1(table, q, ROUNDS * q, radii=radii)
    np.testing.assert_allclose(replayed(method, table).solution(), theirs, rtol=1e-9, atol=1e-12)
    assert (clipped > 0) == (radii[0] is not None)


@pytest.mark.parametrize(("q", "same"), [(1, True), (3, False)])
def test_estimates_continue_from_the_clients_own_point(q, same):
    """From the mean of x instead, the listing ends elsewhere as soon as clients have moved apart."""
    table = indices(q)
    ours = replayed(MFCGD(local_steps=q, **SCHEDULES), table).solution()
    other = algorithm_1(table, q, ROUNDS * q, old_point="mean")[0]
    assert (np.abs(ours - other).max() < 1e-9) == same


@pytest.mark.parametrize(
    ("q", "rule", "theta"), [(1, "coordinate", 0.8), (3, "coordinate", 0.8), (3, "norm", 0.8), (3, "coordinate", None)]
)
def test_adamfcgd_follows_its_listing(q, rule, theta):
    table = indices(q)
    ours = replayed(AdaMFCGD(local_steps=q, **SCHEDULES, rule=rule, rho=0.3, theta=theta), table).solution()
    theirs = algorithm_1(table, q, ROUNDS * q, RULES[rule], theta, 0.3)[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_the_tracked_forms_follow_their_listing():
    table = indices(3)
    ada = TrackedAdaMFCGD(local_steps=3, **SCHEDULES, rule="norm", rho=0.3, theta=0.8)
    for method, rule in ((TrackedMFCGD(local_steps=3, **SCHEDULES), identity), (ada, norm)):
        theirs = algorithm_1(table, 3, 3 * ROUNDS, rule, 0.8, 0.3, tracked=True)[0]
        np.testing.assert_allclose(replayed(method, table).solution(), theirs, rtol=1e-9, atol=1e-12)
        assert np.abs(theirs - algorithm_1(table, 3, 3 * ROUNDS, rule, 0.8, 0.3)[0]).max() > 1e-3


def test_the_first_batch_may_have_its_own_size():
    """A hundred thousand draws of ROWS examples are nearly their mean, which two draws are not."""
    method, whole = MFCGD(1e-12, init_batch_size=100_000, value_momentum=1e-12), np.arange(ROWS)
    h = np.asarray(replayed(method, indices(1)).local["h"].tree)[0]
    for m in range(M):
        np.testing.assert_allclose(h[m], g(m, X1, whole), atol=0.02)
        assert np.abs(g(m, X1, indices(1)["level1"][0, 0, m]) - g(m, X1, whole)).max() > 0.05


# ComFedL and LocalMOML.


def test_comfedl_is_local_descent_on_the_composed_sample_functions():
    table, x = indices(3), X1
    for r in range(ROUNDS):
        ends = []
        for m in range(M):
            z = x
            for s in range(3):
                rows, others = table["level1"][r, s, m], table["level2"][r, s, m]
                z = z - 0.05 * jacobian(m, z, rows).T @ gradient(m, g(m, z, rows), others)
            ends.append(z)
        x = np.mean(ends, axis=0)
    np.testing.assert_allclose(replayed(ComFedL(0.05, 3), table).solution(), x, rtol=1e-9)


@pytest.mark.parametrize("b", [0.3, 1.0])
def test_localmoml_follows_its_listing(b):
    table, w = indices(3), X1
    for r in range(ROUNDS):
        ends = []
        for m in range(M):
            z, u = w, g(m, w, table["level1"][r, -1, m])
            for s in range(3):
                u = (1 - b) * u + b * g(m, z, table["level1"][r, s, m])
                z = z - 0.05 * jacobian(m, z, table["jacobian1"][r, s, m]).T @ gradient(m, u, table["level2"][r, s, m])
            ends.append(z)
        w = np.mean(ends, axis=0)
    np.testing.assert_allclose(replayed(LocalMOML(0.05, 3, b), table).solution(), w, rtol=1e-9)


def test_localmoml_with_one_sample_for_both_and_no_memory_is_comfedl():
    table = indices(3)
    one = replayed(LocalMOML(0.05, 3, 1.0), {**table, "jacobian1": table["level1"]}).solution()
    np.testing.assert_allclose(one, replayed(ComFedL(0.05, 3), table).solution(), rtol=1e-12)


# Meta-learning for linear regression, where everything is known: f_i(x) = x'Hx/2 − b'x, g_i(x) = x − a(Hx − b).

TASK = least_squares(clients=4, dimension=3, seed=5)
ADAPT = 0.1
MAML = maml(squared_error, ADAPT)
START = np.array([1.0, -1.0, 0.5])
CURVED = [np.eye(3) - ADAPT * H for H in TASK.hessians]  # I − aH


def targets():
    data = TASK.federation["train"]
    return np.split(np.asarray(data.examples["y"]), np.cumsum(data.counts)[:-1])


def meta_gradient(i, x):
    return CURVED[i] @ first_order(i, x)


def first_order(i, x):
    H, b = TASK.hessians[i], TASK.centres[i]
    return H @ (CURVED[i] @ x + ADAPT * b) - b


def root(field, clients=range(4)):
    """Where the mean of fields that are linear in x is zero."""
    mean = lambda x: np.mean([field(i, x) for i in clients], axis=0)
    return -np.linalg.solve(np.stack([mean(e) - mean(np.zeros(3)) for e in np.eye(3)], axis=1), mean(np.zeros(3)))


def adapted(algorithm, rounds, problem=MAML, **options):
    given = {"params": START, "batch_size": "all", "evaluate_every": rounds, "execution": "vmap", **options}
    return fs.run(problem, algorithm, TASK.federation, rounds=rounds, **given)


def prepared(algorithm, problem=MAML, params=START):
    """The checks of a run, without one."""
    return prepare(problem, algorithm, TASK.federation, RunOptions(rounds=1, params=params, execution="vmap"))


def descent(field, rounds, q, step, x=START):
    for _ in range(rounds):
        ends = []
        for i in range(4):
            z = x
            for _ in range(q):
                z = z - step * field(i, z)
            ends.append(z)
        x = np.mean(ends, axis=0)
    return x


@pytest.mark.parametrize("momenta", [(0.05, 0.9, 0.4), (1.0, 1.0, 1.0)])
def test_mfcgd_with_all_data_is_local_gradient_descent_and_comfedl(momenta):
    ours = adapted(MFCGD(0.1, 4, *momenta), 9).solution()
    np.testing.assert_allclose(ours, descent(meta_gradient, 9, 4, 0.1), rtol=1e-11)
    np.testing.assert_allclose(ours, adapted(ComFedL(0.1, 4), 9).solution(), rtol=1e-11)


METHODS = {
    "MFCGD": MFCGD(0.3, 1, 0.2, 0.7, 0.4),
    "LocalMOML": LocalMOML(0.3, 1, 0.5),
    "AdaMFCGD": AdaMFCGD(0.1, 1, 0.2, 0.7, 0.4, rho=0.5),
}


@pytest.mark.parametrize("name", METHODS)
def test_with_one_local_step_they_reach_the_optimum(name):
    np.testing.assert_allclose(adapted(METHODS[name], 1500).solution(), root(meta_gradient), atol=1e-10)


def test_the_limit_of_local_steps_is_off_in_proportion_to_the_step():
    ends = []
    for halvings in range(3):
        result = adapted(MFCGD(0.2 / 2**halvings, 4, 0.2, 0.7, 0.4), 600 * 2**halvings)
        ends.append(result.history.last("stationarity"))
    assert ends[-1] > 1e-3
    np.testing.assert_allclose([ends[0] / ends[1], ends[1] / ends[2]], 2, atol=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("q", [1, 4, 10])
def test_the_tracked_form_reaches_the_optimum_with_any_local_steps(q):
    for step, momenta in ((0.1, (0.2, 0.7, 0.4)), (0.05, (1.0, 1.0, 1.0))):
        result = adapted(TrackedMFCGD(step, q, *momenta), 2500)
        assert result.history.last("stationarity") < 1e-12
        np.testing.assert_allclose(result.solution(), root(meta_gradient), atol=1e-11)


def test_the_tracked_form_is_exact_in_an_adaptive_metric():
    result = adapted(TrackedAdaMFCGD(0.05, 4, 0.2, rho=0.5), 2500)
    assert result.history.last("stationarity") < 1e-12


def test_the_tracked_form_is_exact_on_a_nonlinear_problem():
    options = {"rounds": 4000, "params": X1, "batch_size": "all", "evaluate_every": 4000, "execution": "vmap"}
    result = fs.run(TOY, TrackedMFCGD(0.03, 4), fs.Federation.from_clients(SHARDS), **options)
    assert result.history.last("stationarity") < 1e-12


def test_the_tracked_form_is_exact_with_two_clients_a_round():
    """What absent clients last sent is remembered, so the corrections of all clients sum to zero."""
    result = adapted(TrackedMFCGD(0.05, 4, 0.3), 4000, cohort=2)
    np.testing.assert_allclose(result.solution(), root(meta_gradient), atol=1e-9)
    sent = np.asarray(result.local["w_i"].tree)[0]
    assert np.abs(sent).max() > 0.1
    np.testing.assert_allclose(np.asarray(result.state.mean.tree)[0], sent.mean(axis=0), atol=1e-12)


PENALTY = 0.85
PENALISED = maml(squared_error, ADAPT, regularizer=fs.prox.L1(PENALTY))


def penalised_optimum():
    """By the proximal gradient method on the composition."""
    x = START
    for _ in range(6000):
        x = soft(x - 0.1 * np.mean([meta_gradient(i, x) for i in range(4)], axis=0), 0.1 * PENALTY)
    assert 0 < np.sum(x == 0) < 3
    return x


@pytest.mark.slow
@pytest.mark.parametrize("method", [MFCGD(0.1), ComFedL(0.1), LocalMOML(0.1), TrackedMFCGD(0.1, 4)])
def test_steps_are_proximal_ones_with_a_regulariser(method):
    """Exact with one local step, and with any number where all clients walk along the same direction."""
    np.testing.assert_allclose(adapted(method, 3000, PENALISED).solution(), penalised_optimum(), atol=1e-10)


def test_first_order_localmoml_is_fedavg_on_the_adapted_models():
    """Per-FedAvg (FO): w ← w − η ∇f_i(w − a∇f_i(w)), whose limit for one step a round is another point."""
    method = LocalMOML(0.1, 3, 1.0, first_order=True)
    np.testing.assert_allclose(adapted(method, 6).solution(), descent(first_order, 6, 3, 0.1), rtol=1e-11)
    end = adapted(LocalMOML(0.3, 1, first_order=True), 1500).solution()
    np.testing.assert_allclose(end, root(first_order), atol=1e-10)
    assert np.abs(root(first_order) - root(meta_gradient)).max() > 1e-3


def test_a_robust_objective_has_a_number_as_its_first_level():
    """∇ exp(f_i/λ) = exp(f_i/λ) ∇f_i / λ."""
    temperature, x = 20.0, START
    constants = [0.5 * np.mean(y**2) for y in targets()]
    for _ in range(5):
        slopes = []
        for i in range(4):
            loss = 0.5 * x @ TASK.hessians[i] @ x - TASK.centres[i] @ x + constants[i]
            slopes.append(np.exp(loss / temperature) * TASK.gradient(i, x) / temperature)
        x = x - 0.2 * np.mean(slopes, axis=0)
    ours = adapted(MFCGD(0.2), 5, robust(squared_error, temperature)).solution()
    np.testing.assert_allclose(ours, x, rtol=1e-11)


# Identities.


def test_equal_clients_are_one():
    table = indices(3)
    alike = {s: np.repeat(rows[:, :, :1], M, axis=2) for s, rows in table.items()}
    single = {s: rows[:, :, :1] for s, rows in table.items()}
    method = MFCGD(local_steps=3, **SCHEDULES)
    many, one = replayed(method, alike, [SHARDS[0]] * M), replayed(method, single, SHARDS[:1])
    np.testing.assert_allclose(many.solution(), one.solution(), rtol=1e-11)


def test_one_client_with_all_data_is_gradient_descent_on_the_objective():
    x, rows = X1, range(ROWS)
    for _ in range(12):
        x = x - 0.05 * jacobian(0, x, rows).T @ gradient(0, g(0, x, rows), rows)
    one = fs.Federation.from_clients(SHARDS[:1])
    ours = fs.run(TOY, TrackedMFCGD(0.05, 4, 0.2), one, rounds=3, params=X1, batch_size="all", execution="vmap")
    np.testing.assert_allclose(ours.solution(), x, rtol=1e-11)


@pytest.mark.parametrize("rule", ["coordinate", "norm"])
def test_a_metric_that_never_learns_is_no_metric(rule):
    table = indices(3)
    plain = replayed(MFCGD(local_steps=3, **SCHEDULES), table).solution()
    with_metric = lambda theta: AdaMFCGD(local_steps=3, **SCHEDULES, rule=rule, rho=1.0, theta=theta)
    np.testing.assert_allclose(replayed(with_metric(1.0), table).solution(), plain, rtol=1e-12)
    assert not np.allclose(replayed(with_metric(0.5), table).solution(), plain)


@dataclass(frozen=True)
class Constant(DiagonalRule):
    """A = ρ times a fixed diagonal."""

    diagonals: tuple[float, ...]

    def start(self, x0):
        return fs.Vector(jnp.asarray(self.diagonals, x0.dtype))

    def update(self, a, w, theta):
        return a

    def diagonal(self, a, rho):
        return rho * a


def test_a_new_rule_rescales_coordinates():
    scale = np.array([0.5, 1.0, 4.0])
    ours = adapted(AdaMFCGD(0.05, 3, rule=Constant(tuple(scale)), rho=2.0), 6).solution()
    np.testing.assert_allclose(ours, descent(lambda i, x: meta_gradient(i, x) / (2 * scale), 6, 3, 0.05), rtol=1e-11)


def test_parameters_may_be_a_tree():
    split = lambda w, e: 0.5 * (w["first"] * e["x"][0] + w["rest"] @ e["x"][1:] - e["y"]) ** 2
    tree = {"first": np.array(START[0]), "rest": START[1:]}
    method = MFCGD(0.1, 4, jacobian_radius=1.0)
    found = adapted(method, 4, maml(split, ADAPT), params=tree).solution()
    flat = adapted(method, 4).solution()
    np.testing.assert_allclose([found["first"], *found["rest"]], flat, rtol=1e-11)
    assert not np.allclose(flat, descent(meta_gradient, 4, 4, 0.1))  # the radius binds


# Messages, schedules, refusals.


LEDGERS = {
    "MFCGD": (MFCGD(0.1), 2 * D, D),
    "AdaMFCGD": (AdaMFCGD(0.1), 2 * D, 2 * D),
    "AdaMFCGD by norm": (AdaMFCGD(0.1, rule="norm"), 2 * D, D + 1),
    "TrackedMFCGD": (TrackedMFCGD(0.1), 2 * D, 2 * D),
    "TrackedAdaMFCGD by norm": (TrackedAdaMFCGD(0.1, rule="norm"), 2 * D, 2 * D + 1),
    "ComFedL": (ComFedL(0.1), D, D),
    "LocalMOML": (LocalMOML(0.1), D, D),
}


@pytest.mark.parametrize("name", LEDGERS)
def test_what_travels(name):
    method, up, down = LEDGERS[name]
    found = prepared(method).ledger
    assert (found.up, found.down) == (8 * up, 8 * down)


@pytest.mark.parametrize(("first_order", "samples"), [(False, 3), (True, 2)])
def test_localmoml_counts_the_samples_that_it_looks_at(first_order, samples):
    history = adapted(LocalMOML(0.3, 1, first_order=first_order), 1).history
    assert history.last("samples") == samples * sum(len(y) for y in targets())


def test_the_theorys_schedule():
    """η_t = k/(n+t)^{1/3} and α_{t+1} = c η_t², in a run that starts at t = 1."""
    k, n, c, gamma = 0.5, 3.0, (0.4, 0.8, 1.2), 0.7
    method = theory.mfcgd(k=k, n=n, c1=c[0], c2=c[1], c3=c[2], gamma=gamma, local_steps=3, jacobian_radius=2.0)
    assert (method.local_steps, method.init_batch_size, method.jacobian_radius) == (3, 3, 2.0)
    adaptive = theory.mfcgd(k=k, n=n, c1=1.0, c2=1.0, c3=1.0, method=AdaMFCGD, rho=0.3)
    assert (type(adaptive), adaptive.rho) == (AdaMFCGD, 0.3)
    eta = lambda t: k / (n + t) ** (1 / 3)
    for t in (1, 2, 10):
        assert method.step_size(t - 1) == pytest.approx(gamma * eta(t), rel=1e-14)
        momenta = method.value_momentum, method.jacobian_momentum, method.gradient_momentum
        for momentum, constant in zip(momenta, c, strict=True):
            assert momentum(t - 1) == pytest.approx(constant * eta(t - 1) ** 2, rel=1e-14)
    x, rows = X1, range(ROWS)
    for t in range(1, 7):
        x = x - eta(t) * np.mean([jacobian(m, x, rows).T @ gradient(m, g(m, x, rows), rows) for m in range(M)], axis=0)
    one = theory.mfcgd(k=k, n=n, c1=1.0, c2=1.0, c3=1.0, init_batch_size=None)
    every = {stream: np.broadcast_to(np.arange(ROWS), (ROUNDS, 1, M, ROWS)) for stream in ("level1", "level2")}
    np.testing.assert_allclose(replayed(one, every).solution(), x, rtol=1e-11)


def test_the_theory_refuses_momenta_above_one():
    with pytest.raises(ValueError, match=r"c2 η_0² = 8 must be at most 1; take n >= 22\.6"):
        theory.mfcgd(k=1.0, n=1.0, c1=1.0, c2=8.0, c3=1.0)
    theory.mfcgd(k=1.0, n=22.7, c1=1.0, c2=8.0, c3=1.0)
    with pytest.raises(ValueError, match=r"theory\.mfcgd: n=0 must be > 0"):
        theory.mfcgd(k=1.0, n=0, c1=1.0, c2=1.0, c3=1.0)


def test_momenta_out_of_range_are_refused():
    for field in ("value_momentum", "jacobian_momentum", "gradient_momentum"):
        for value in (0.0, 1.5):
            with pytest.raises(ValueError, match=f"{field} = {value} is out of range"):
                MFCGD(**{"step_size": 0.1, field: value})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="theta"):
        AdaMFCGD(0.1, theta=0.0)


@pytest.mark.parametrize("method", [MFCGD(0.1), AdaMFCGD(0.1), TrackedMFCGD(0.1), LocalMOML(0.1)])
def test_three_levels_are_refused(method):
    with pytest.raises(ValueError, match="made for two levels, and this problem has 3"):
        prepared(method, maml(squared_error, ADAPT, steps=2))


def test_comfedl_takes_three_levels():
    """Two steps of adaptation: the composed gradient is (I − aH)² times that at the twice adapted model."""
    twice = lambda i, x: (
        CURVED[i]
        @ CURVED[i]
        @ (
            TASK.hessians[i] @ (CURVED[i] @ (CURVED[i] @ x + ADAPT * TASK.centres[i]) + ADAPT * TASK.centres[i])
            - TASK.centres[i]
        )
    )
    ours = adapted(ComFedL(0.1, 2), 7, maml(squared_error, ADAPT, steps=2)).solution()
    np.testing.assert_allclose(ours, descent(twice, 7, 2, 0.1), rtol=1e-11)


@pytest.mark.parametrize("kind", [AdaMFCGD, TrackedAdaMFCGD])
def test_an_adaptive_metric_refuses_regularisers_and_unknown_rules(kind):
    with pytest.raises(ValueError, match="prox in the metric A"):
        prepared(kind(0.1), PENALISED)
    with pytest.raises(
        ValueError, match=rf"{kind.__name__}: rule \(or a DiagonalRule\): 'coordinat'; did you mean coord"
    ):
        kind(0.1, rule="coordinat")


def test_first_order_needs_an_output_like_the_parameters():
    with pytest.raises(ValueError, match="must look like the parameters"):
        prepared(LocalMOML(0.1, first_order=True), robust(squared_error))


def test_a_globally_coupled_problem_gives_a_warning():
    problem = Nested([lambda x, e: e["x"] * x, lambda y, e: jnp.sum(y**2) * e["y"]], inner="global")
    for method in (MFCGD(0.01), ComFedL(0.01), LocalMOML(0.01)):
        with pytest.warns(UserWarning, match="made for inner='client'"):
            prepared(method, problem)
