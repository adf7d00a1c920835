"""FedBiO, FedBiOAcc, its repair and TrackedBiO: listings, identities, limits, messages, refusals."""

import bilevel_references as plain
import jax.numpy as jnp
import numpy as np
import pytest
from bilevel_references import STREAMS, indices, quadratic
from layouts import prepare

import fedstrata as fs
from fedstrata.algorithms.bilevel import AnchoredBiOAcc, FedBiO, FedBiOAcc, TrackedBiO, theory
from fedstrata.algorithms.nested import CouplingWarning
from fedstrata.core.hyperparameters import hyperparameters
from fedstrata.problems import hypergradients

ETA, GAMMA = 0.05, 0.2
ROUNDS, STEPS, CLIENTS, ROWS = 5, 3, 3, 5
NOISY = quadratic(clients=CLIENTS, rows=ROWS)
X0 = np.array([0.4, -0.3])


def at(table, r, s, m):
    return {stream: table[stream][r, s, m] for stream in STREAMS}


def end(task, algorithm, rounds, **options):
    """x after `rounds` rounds of full batches."""
    options = {"batch_size": "all", "params": jnp.zeros(2), "progress": False, **options}
    result = fs.run(
        task.problem, algorithm, task.federation, rounds=rounds, evaluate_every=rounds, stationarity=False, **options
    )
    return np.asarray(result.solution())


def ends(task, algorithm, table):
    """x after every round, from runs of growing length: nothing but the public result is looked at."""
    run = lambda r: end(task, algorithm, r, batch_size=fs.Replay(table), params=jnp.asarray(X0))
    return np.stack([run(r) for r in range(1, ROUNDS + 1)])


TABLE = indices(ROUNDS, STEPS, CLIENTS, ROWS)


def test_fedbio_is_its_listing():
    expected = plain.fedbio(NOISY, X0, TABLE, ETA, GAMMA, at)
    assert np.allclose(ends(NOISY, FedBiO(ETA, GAMMA, STEPS), TABLE), expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("cls", [FedBiOAcc, AnchoredBiOAcc])
def test_fedbioacc_is_its_listing(cls):
    delta, u, sigma = 0.8, 1.0, 0.5
    alpha = lambda t: delta / (u + sigma**2 * t) ** (1 / 3)
    constants = {"c_nu": 0.9, "c_omega": 0.6, "alpha": alpha, "anchored": cls is AnchoredBiOAcc}
    expected = plain.fedbioacc(NOISY, X0, TABLE, ETA, GAMMA, at, **constants)
    method = cls(ETA, GAMMA, STEPS, momentum=0.9, lower_momentum=0.6, delta=delta, offset=u, sigma=sigma)
    found = ends(NOISY, method, TABLE)
    assert np.allclose(found, expected, atol=1e-9, rtol=0)
    other = plain.fedbioacc(NOISY, X0, TABLE, ETA, GAMMA, at, **{**constants, "anchored": cls is FedBiOAcc})
    assert not np.allclose(found, other, atol=1e-5, rtol=0)  # the two forms differ


@pytest.mark.parametrize("momentum", [None, 0.3])
def test_trackedbio_is_its_listing(momentum):
    # The start looks at the rows of round 0, step 0.
    first = [at(TABLE, 0, 0, m) for m in range(CLIENTS)]
    expected = plain.tracked(NOISY, X0, TABLE, ETA, GAMMA, at, momentum, first)
    found = ends(NOISY, TrackedBiO(ETA, GAMMA, STEPS, momentum=momentum), TABLE)
    assert np.allclose(found, expected, atol=1e-9, rtol=0)


def test_printed_test_of_the_averaging_makes_the_first_round_shorter():
    short = {stream: np.concatenate([rows[:1, 1:], rows[:1, :1]], axis=1) for stream, rows in TABLE.items()}
    first = end(NOISY, FedBiO(ETA, GAMMA, STEPS, sync_offset=1), 1, batch_size=fs.Replay(TABLE), params=jnp.asarray(X0))
    two = {stream: rows[:, : STEPS - 1] for stream, rows in short.items()}
    assert np.allclose(first, plain.fedbio(NOISY, X0, two, ETA, GAMMA, at)[0], atol=1e-12, rtol=0)


# Clients alike.


# As many as those that differ below, and as many steps: a program is compiled once for all tests of a method.
ALIKE = quadratic(clients=4, rows=1, spread=0.0)


@pytest.mark.slow
def test_clients_alike_reach_the_optimum():
    for steps in (1, 5):
        assert np.abs(end(ALIKE, FedBiO(ETA, GAMMA, steps), 4000 // steps) - ALIKE.optimum()).max() < 1e-12
        slow = FedBiOAcc(ETA, GAMMA, steps, delta=1.0, sigma=0.1)
        assert np.abs(end(ALIKE, slow, 6000 // steps) - ALIKE.optimum()).max() < 1e-7


@pytest.mark.slow
def test_with_clients_alike_fedbioacc_is_fedbio_with_its_steps():
    acc = FedBiOAcc(ETA, GAMMA, 5, delta=0.7, offset=2.0, sigma=1.5, momentum=0.3, lower_momentum=0.2)
    alpha = lambda t: 0.7 / (2 + 1.5**2 * t) ** (1 / 3)
    same = FedBiO(
        lambda step: ETA * alpha(step.astype(float) + 1), lambda step: GAMMA * alpha(step.astype(float) + 1), 5
    )
    for rounds in (1, 3, 20):
        assert np.allclose(end(ALIKE, acc, rounds), end(ALIKE, same, rounds), atol=1e-12, rtol=0)


# Clients that differ.

DIFFERENT = [quadratic(clients=4, rows=1, seed=seed) for seed in (1, 2)]


def errors(task, steps):
    """How far from the optimum a method ends, by the same number of steps in all."""
    return lambda method: np.abs(end(task, method, 6000 // steps) - task.optimum()).max()


@pytest.mark.slow
@pytest.mark.parametrize("task", DIFFERENT, ids=["1", "2"])
def test_where_methods_end_when_clients_differ(task):
    steps = 5
    error = errors(task, steps)
    whole, half = error(FedBiO(ETA, GAMMA, steps)), error(FedBiO(ETA / 2, GAMMA, steps))
    assert whole > 1e-3  # it stalls,
    assert 0.35 < half / whole < 0.75  # in proportion to its step
    forgetful = {"delta": 1.0, "momentum": 0.01, "lower_momentum": 0.01}
    printed = error(FedBiOAcc(ETA, GAMMA, steps, **forgetful))
    assert printed > 0.7 * whole  # and the recursion gains nothing,
    assert error(AnchoredBiOAcc(ETA, GAMMA, steps, **forgetful)) < 0.1 * printed  # unless it is put right
    assert error(AnchoredBiOAcc(ETA, GAMMA, steps, delta=1.0, momentum=0.0, lower_momentum=0.0)) < 1e-12
    assert error(TrackedBiO(ETA, GAMMA, steps)) < 1e-12
    assert error(TrackedBiO(ETA, GAMMA, steps, momentum=0.1)) < 1e-12


@pytest.mark.slow
def test_more_steps_a_round_stall_as_well_unless_they_are_tracked():
    error = errors(DIFFERENT[1], 10)
    whole, half = error(FedBiO(ETA, GAMMA, 10)), error(FedBiO(ETA / 2, GAMMA, 10))
    assert whole > 1e-3
    assert 0.35 < half / whole < 0.75
    assert error(TrackedBiO(ETA, GAMMA, 10)) < 1e-12


def test_one_step_a_round_is_exact():
    task = DIFFERENT[0]
    assert np.abs(end(task, FedBiO(ETA, GAMMA, 1), 4000) - task.optimum()).max() < 1e-12


def test_tracking_survives_cohorts():
    """Σ_i c_i over all clients stays zero, and the limit the optimum."""
    task = DIFFERENT[0]
    found = end(task, TrackedBiO(ETA, GAMMA, 5), 4000, cohort=2)
    assert np.abs(found - task.optimum()).max() < 1e-9


@pytest.mark.slow
def test_a_truncated_series_moves_the_limit():
    error = lambda terms: np.abs(
        end(ALIKE, FedBiO(ETA, GAMMA, 2, hypergradients.Neumann(0.2, terms)), 1500) - ALIKE.optimum()
    ).max()
    few, more, many = error(2), error(10), error(200)
    assert few > 2 * more > 1e-6
    assert many < 1e-10


def test_warm_up_starts_y_at_the_solution():
    task = DIFFERENT[0]
    method = FedBiO(1e-12, GAMMA, 1, warm_up=300)
    options = {"rounds": 1, "params": jnp.zeros(2), "batch_size": "all", "progress": False, "stationarity": False}
    history = fs.run(task.problem, method, task.federation, **options).history
    assert history["lower_residual"][0, 0] < 1e-9
    cold = fs.run(task.problem, FedBiO(1e-12, GAMMA, 1), task.federation, **options).history
    largest = max(np.linalg.norm(task.mean(m, "b")) for m in range(4))  # |∂_y g| at x = y = 0
    assert cold["lower_residual"][0, 0] == pytest.approx(largest, rel=1e-9)


def test_upper_objective_is_recorded_at_the_clients_own_y():
    task = DIFFERENT[0]
    history = fs.run(
        task.problem,
        FedBiO(ETA, GAMMA, 1),
        task.federation,
        rounds=1,
        params=jnp.zeros(2),
        batch_size="all",
        progress=False,
        stationarity=False,
    ).history
    at_zero = np.mean([0.5 * np.sum(task.mean(m, "t") ** 2) + 0.5 * np.sum(task.mean(m, "c") ** 2) for m in range(4)])
    assert history["upper"][0, 0] == pytest.approx(at_zero, rel=1e-12)


def test_regulariser_keeps_x_in_its_box():
    task = quadratic(clients=3, rows=1, seed=3, regularizer=fs.prox.Box(-0.1, 0.1))
    found = end(task, FedBiO(0.1, GAMMA, 1), 2000)
    assert np.abs(task.optimum()).max() > 0.1
    assert np.all(np.abs(found) <= 0.1 + 1e-12)
    gradient = task.gradient(found)  # no way down that stays inside
    assert np.all(
        np.where(found > 0.1 - 1e-9, gradient <= 1e-9, np.where(found < -0.1 + 1e-9, gradient >= -1e-9, True))
    )
    inner = np.abs(found) < 0.1 - 1e-9
    assert np.all(np.abs(gradient[inner]) < 1e-9)


# What travels, and what is counted.


@pytest.mark.parametrize(
    ("method", "up", "down"),
    [
        (FedBiO(ETA, GAMMA, 5), {"x"}, {"x"}),
        (FedBiOAcc(ETA, GAMMA, 5), {"x", "nu", "before"}, {"x", "nu", "before"}),
        (AnchoredBiOAcc(ETA, GAMMA, 5), {"x", "nu", "before"}, {"x", "nu", "before"}),
        (TrackedBiO(ETA, GAMMA, 5), {"x", "change"}, {"x", "mean"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_lower_variable_never_travels(method, up, down):
    job = prepare(NOISY.problem, method, NOISY.federation, rounds=1, params=jnp.zeros(2), batch_size=1)
    fields = lambda way: {e.field for e in job.ledger.entries if e.direction == way}
    assert fields("up") == up
    assert fields("down") == down
    assert job.ledger.up == 8 * 2 * len(up)  # numbers of x, eight bytes each


def test_samples_of_a_step_are_counted():
    history = fs.run(
        NOISY.problem,
        FedBiO(ETA, GAMMA, STEPS, hypergradients.Neumann(0.2, 7)),
        NOISY.federation,
        rounds=2,
        params=jnp.zeros(2),
        batch_size=4,
        progress=False,
        stationarity=False,
    ).history
    assert history.last("samples")[0] == 2 * CLIENTS * STEPS * 4 * (3 + 7)


# Constants of the theorems.


def test_theory_keeps_its_conditions():
    mu, L, L_h, steps = 0.7, 2.0, 3.0, 4
    method = theory.fedbio(steps=1000, local_steps=steps, mu=mu, smoothness=L, h_smoothness=L_h)
    delta = method.step_size * 1000 ** (1 / 3)
    q, gamma = 1 - mu * method.lower_step_size / 2, method.lower_step_size
    q1, bar = 1 + mu * gamma / 4, 1 + 4 / (mu * gamma)
    bounds = [
        np.sqrt((1 - q) * (1 - q1 * q**steps)) / (2 * L_h**2 * steps * np.sqrt(bar * q1 * q**steps)),
        1 / (12 * L_h * steps),
        mu * gamma / 2,
        1.0,
    ]
    assert delta == pytest.approx(min(bounds), rel=1e-12)
    with pytest.raises(ValueError, match="between 0 and 1/L"):
        theory.fedbio(steps=10, local_steps=1, mu=1.0, smoothness=2.0, h_smoothness=1.0, lower_step_size=0.6)

    acc = theory.fedbioacc(clients=8, sigma=0.5, mu=mu, smoothness=L, h_smoothness=L_h, rho=1.0, local_steps=steps)
    assert acc.delta == pytest.approx(8 ** (2 / 3) * 0.5 ** (2 / 3) / L_h)
    assert acc.momentum * acc.alpha(1.0) ** 2 < 1
    assert acc.offset >= 16**3 * steps**3 * 8**2 * 0.5**2
    assert 1 / acc.lower_step_size > max(1 / mu, 6 * L_h)
    assert 1 / acc.step_size > 240 * L_h**2 / (mu * acc.lower_step_size)
    acc.check(NOISY.problem)
    given = {"clients": 8, "sigma": 0.5, "mu": mu, "smoothness": L, "h_smoothness": L_h, "rho": 1.0}
    anchored = theory.fedbioacc(**given, local_steps=steps, method=AnchoredBiOAcc)
    assert isinstance(anchored, AnchoredBiOAcc)
    assert hyperparameters(anchored) == hyperparameters(acc)
    with pytest.raises(ValueError, match=r"theory.fedbioacc: sigma=0 must be > 0"):
        theory.fedbioacc(**{**given, "sigma": 0})


# Refusals.


def test_estimators_with_memory_are_refused_where_two_points_are_asked():
    for method in (
        FedBiOAcc(ETA, GAMMA, hypergradient=hypergradients.Tracking(0.1)),
        TrackedBiO(ETA, GAMMA, momentum=0.1, hypergradient=hypergradients.ConjugateGradients(3, warm=True)),
    ):
        with pytest.raises(ValueError, match="starts from the step before"):
            end(NOISY, method, 1)


def test_an_estimator_is_an_object_of_its_kind():
    with pytest.raises(TypeError, match=r"FedBiO: hypergradient = Exact, the class; create one"):
        FedBiO(ETA, GAMMA, hypergradient=hypergradients.Exact)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("field", ["warm_up", "sync_offset"])
def test_counts_are_whole_numbers(field):
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match=rf"FedBiOAcc: {field} = {wrong} must be a whole number >= 0"):
            FedBiOAcc(ETA, GAMMA, **{field: wrong})


def test_weights_of_samples_above_one_are_refused():
    with pytest.raises(ValueError, match="must be at most 1; take a larger offset"):
        end(NOISY, FedBiOAcc(ETA, GAMMA, delta=2.0), 1)


def test_another_lower_level_is_said():
    task = quadratic(lower_level="global")
    with pytest.warns(CouplingWarning, match="lower_level='client'"):
        prepare(task.problem, FedBiO(ETA, GAMMA), task.federation, rounds=1, params=jnp.zeros(2))
