"""Methods for f + φ: the steps that theory names, and what is refused before anything runs."""

import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from listings import START, STEP, TASK, Q
from references import squared_error

import fedstrata as fs
from fedstrata.algorithms.regularized import theory


def run(algorithm, problem=TASK.problem, rounds=12, **options):
    given = {"params": START, "evaluate_every": rounds, "batch_size": "all", "stationarity": False, **options}
    return fs.run(problem, algorithm, TASK.federation, rounds=rounds, **given)


# Theory's steps.

POSITIVE = st.floats(0.01, 100.0)


@settings(max_examples=50, deadline=None)
@given(POSITIVE, st.floats(0.0, 50.0), POSITIVE, st.floats(0.0, 100.0), st.integers(1, 200), st.integers(1, 50))
def test_theory_steps_respect_the_bounds_of_theorem_5(smooth, rho, gap, noise, clients, q):
    T = 1000
    method = theory.fednmap(
        smoothness=smooth, weak_convexity=rho, gap=gap, noise=noise, clients=clients, rounds=T, local_steps=q
    )
    m = max(1, math.ceil(math.sqrt(noise**2 * T / (9 * (rho + smooth) * gap * clients * q))))
    gamma = method.gamma
    bound = (1 - gamma * rho) / (100 * math.sqrt(smooth**2 + 1 / gamma**2))
    assert gamma <= 1 / (5 * (rho + smooth)) * (1 + 1e-12)
    whole = method.step_size * q * method.server_step_size
    assert 0 < whole <= bound / m * (1 + 1e-9)
    assert 0 < method.step_size <= bound / (q * math.sqrt(m)) * (1 + 1e-9)


def test_theory_steps_are_those_of_15_when_noise_is_large():
    L, rho, gap, noise, n, T, q = 2.0, 0.5, 3.0, 200.0, 10, 500, 4
    method = theory.fednmap(smoothness=L, weak_convexity=rho, gap=gap, noise=noise, clients=n, rounds=T, local_steps=q)
    whole = 1 / (320 * math.sqrt(noise**2 * T * (rho + L) / (n * q * gap)))
    first = 380 * (noise**2 * T * q**3 * (L + rho) ** 3 / (n * gap)) ** (1 / 4)
    local = 1 / (first + 240 * math.sqrt((L + rho) * T * q * noise**2 / gap))
    assert method.step_size == pytest.approx(local)
    assert method.step_size * q * method.server_step_size == pytest.approx(whole)


@settings(max_examples=50, deadline=None)
@given(POSITIVE, st.floats(0.001, 1.0), st.integers(1, 100), st.integers(2, 5000), st.integers(1, 50))
def test_theory_steps_respect_the_bounds_of_theorem_8(smooth, ratio, clients, T, q):
    pl = ratio * smooth
    method = theory.fednmap_pl(smoothness=smooth, pl=pl, clients=clients, rounds=T, local_steps=q)
    m = math.ceil(pl * T / smooth)
    whole = method.step_size * q * method.server_step_size
    assert whole <= 1 / (120 * m * (smooth + pl)) * (1 + 1e-9)
    assert method.step_size <= 1 / (96 * q * (smooth + pl)) * (1 + 1e-9)
    assert method.gamma == pytest.approx(1 / (5 * (smooth + pl)))
    assert method.step_size <= math.log(clients * q * T) / (120 * q * (smooth + pl) * T) * (1 + 1e-9)


# Bad input.


@pytest.mark.parametrize(
    ("method", "phi", "message"),
    [
        (fs.FedNMap(STEP, Q, 4.0), fs.prox.MCP(0.3, theta=2.0), r"FedNMap: the prox is taken at gamma = 4.*1/ρ = 2"),
        (fs.Zhang2024(1.0, Q), fs.prox.MCP(0.3, theta=2.0), r"Zhang2024: .* step_size \* local_steps = 5"),
        (fs.FedMid(0.1, Q, 9.0), fs.prox.MCP(0.3, theta=2.0), r"server_step_size = 4.5"),
        (fs.FedDA(STEP, Q), fs.prox.MCP(0.3, theta=2.0), r"FedDA: .*no bound.*must be convex.*FedNMap"),
        (fs.FastFedDA(0.5, 1.0, Q), fs.prox.MCP(0.3, theta=2.0), r"FastFedDA: .* 2 / strong_convexity = 4"),
        (fs.FedNMap(STEP, Q, 0.1), fs.prox.L0(0.1), r"not weakly convex.*MCP"),
        (fs.FedNMap(STEP, Q, optax.constant_schedule(1.0)), fs.prox.L1(0.1), r"gamma must be a number"),
    ],
)
def test_steps_out_of_range_are_refused_before_anything_runs(method, phi, message):
    with pytest.raises(ValueError, match=message):
        run(method, fs.Regularized(squared_error, phi))


def test_swept_values_out_of_range_are_refused_too():
    problem = fs.Regularized(squared_error, fs.prox.MCP(0.3, theta=2.0))
    with pytest.raises(ValueError, match=r"gamma = 3.*1/ρ"):
        run(fs.FedNMap(STEP, Q, 1.0), problem, sweep={"gamma": [1.0, 3.0]})


def test_a_schedule_out_of_range_stops_the_run_and_keeps_the_last_good_state():
    problem = fs.Regularized(squared_error, fs.prox.MCP(0.3, theta=2.0))
    growing = fs.per_round(lambda t: 0.04 * 1.5 ** t.astype(float))
    with pytest.warns(fs.DivergenceWarning):
        result = run(fs.FedAvgServerProx(growing, Q), problem)
    assert result.diverged
    assert np.isfinite(result.solution()).all()


def test_a_regulariser_that_does_not_fit_the_parameters_is_refused():
    with pytest.raises(ValueError, match="slopes"):
        run(fs.FedNMap(STEP, Q), fs.Regularized(squared_error, fs.prox.L1(0.1).on("slopes")))
    with pytest.raises(ValueError, match="NuclearNorm"):
        run(fs.FedNMap(STEP, Q), fs.Regularized(squared_error, fs.prox.NuclearNorm(0.1)))


class Broken(fs.prox.Regularizer):
    """A prox that fails at once, or once it sees a large entry."""

    limit: float = 0.0

    def _value(self, x):
        return jnp.sum(x) * 0

    def _prox(self, z, step):
        return jnp.where(jnp.max(jnp.abs(z)) > self.limit, jnp.nan, z)

    def _distance(self, x, g):
        return jnp.sum(g**2)


def test_a_prox_that_returns_nan_is_named():
    with pytest.raises(ValueError, match=r"the prox of Broken.*not finite at the start"):
        run(fs.FedNMap(STEP, Q), fs.Regularized(squared_error, Broken()))
    late = fs.Regularized(squared_error, Broken(limit=2.01))
    with pytest.warns(fs.DivergenceWarning, match="z"):
        result = run(fs.FedNMap(0.5, Q), late)
    assert result.diverged


def test_methods_for_smooth_problems_are_refused_and_the_right_ones_named():
    with pytest.raises(TypeError, match=r"FedAvg does not solve Regularized.*FedNMap"):
        run(fs.FedAvg(STEP, Q))
    with pytest.raises(TypeError, match=r"FedNMap does not solve Average.*SCAFFOLD"):
        run(fs.FedNMap(STEP, Q), TASK.smooth.problem)


@pytest.mark.parametrize(
    "arguments", [{"regularizer": 0.1}, {"gamma": 0.0}, {"gamma": 9.0}, {"more_gammas": (1.0, 9.0)}]
)
def test_a_regularised_problem_is_checked_where_it_is_made(arguments):
    with pytest.raises((TypeError, ValueError), match=r"Regularized|step"):
        fs.Regularized(squared_error, **{"regularizer": fs.prox.MCP(0.3, theta=2.0), **arguments})
