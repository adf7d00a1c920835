"""Total variation against its dual, a box-constrained least squares, and against its optimality certificate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import lsq_linear

from fedstrata import prox
from fedstrata.prox import variation

denoise = jax.jit(prox.TotalVariation(1.0).prox)


def signals(n, seed=0):
    random = np.random.default_rng(seed)
    noise = random.normal(size=n)
    return {
        "noise": noise,
        "steps": np.repeat(random.normal(size=n) * 5, 7)[:n] + 0.3 * noise,
        "integers": np.round(2 * noise),
        "walk": np.cumsum(noise),
        "slope": np.linspace(-1, 1, n),
        "constant": np.full(n, 0.1),
        "powers": 1.5 ** np.minimum(np.arange(n), 60),
        "saw": np.where(np.arange(n) % 2, 1.0, -1.0),
    }


def certificate(x, z, level):
    """How far the dual u_i = Σ_{j≤i} (x_j − z_j) is from proving that x is the minimiser."""
    u, sign = np.cumsum(x - z), np.sign(np.diff(x))
    at_jumps = np.abs(u[:-1] - level * sign)[sign != 0]
    return max(abs(u[-1]), np.max(np.abs(u[:-1]), initial=0) - level, np.max(at_jumps, initial=0))


@pytest.mark.parametrize("level", [0.05, 0.4, 2.0, 50.0])
@pytest.mark.parametrize("n", [2, 9, 25])
def test_prox_is_the_solution_of_the_dual(n, level):
    differences = np.diff(np.eye(n), axis=0)
    for name, z in signals(n).items():
        u = lsq_linear(differences.T, z, bounds=(-level, level), tol=1e-14, method="bvls").x
        np.testing.assert_allclose(denoise(z, level), z - differences.T @ u, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("level", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("n", [3, 2000])
def test_prox_is_certified_optimal(n, level):
    for name, z in signals(n, seed=n).items():
        x = np.asarray(denoise(z, level))
        assert certificate(x, z, level) <= 1e-14 * n**0.5 * (np.abs(z).max() + level) * 10, name


def test_prox_in_float32_is_that_in_float64():
    for name, z in signals(2000, seed=1).items():
        narrow = denoise(jnp.array(z, jnp.float32), 1.0)
        assert narrow.dtype == jnp.float32
        np.testing.assert_allclose(narrow, denoise(z, 1.0), atol=2e-5 * (1 + np.abs(z).max()), err_msg=name)


def test_a_large_offset_costs_one_rounding():
    """Quarters plus 2⁴⁴ are exact numbers, so the prox may differ only by what its result is rounded by."""
    for seed in range(4):
        z = np.round(4 * signals(2000, seed)["noise"]) / 4
        for level in (2.0, 30.0):
            shifted = np.asarray(denoise(z + 2.0**44, level)) - 2.0**44
            np.testing.assert_allclose(shifted, denoise(z, level), rtol=0, atol=2.0 ** (44 - 52) / 2)


def test_doubling_gives_the_sums_taken_one_by_one():
    """The pass that other devices use, against its definition."""
    random = np.random.default_rng(5)
    for n in (1, 2, 3, 17, 64):
        x, limits = random.normal(size=(2, n)), np.where(random.random((2, n)) < 0.2, 0.0, random.random((2, n)) * 2)
        sums, f = np.zeros((2, n)), np.zeros(2)
        for i in range(n):
            sums[:, i] = f = np.clip(f + x[:, i], -limits[:, i], limits[:, i])
        for method in (variation._limited_sums, variation._limited_sums_by_doubling):
            np.testing.assert_allclose(method(jnp.array(x), jnp.array(limits)), sums, atol=1e-14)


def test_blocks_are_exactly_constant():
    z = signals(500)["steps"]
    x = np.asarray(denoise(z, 2.0))
    jumps = np.abs(np.diff(x))
    assert np.all((jumps == 0) | (jumps > 1e-6))
    assert 20 < np.sum(jumps > 0) < 120
    assert len(np.unique(np.asarray(denoise(z, 1e5)))) == 1
    np.testing.assert_allclose(denoise(z, 1e5), z.mean(), rtol=1e-13)


def test_rows_and_vmap_are_sequences_of_their_own():
    z = np.stack(list(signals(30).values()))
    alone = np.stack([denoise(row, 0.7) for row in z])
    np.testing.assert_allclose(denoise(z, 0.7), alone, atol=1e-13)
    np.testing.assert_allclose(jax.vmap(denoise, in_axes=(0, None))(z, 0.7), alone, atol=1e-13)
    steps = jnp.array([0.0, 0.1, 3.0])
    many = jax.vmap(denoise, in_axes=(None, 0))(z[0], steps)
    np.testing.assert_allclose(many, [denoise(z[0], s) for s in (0.0, 0.1, 3.0)], atol=1e-13)


def test_derivatives_are_those_of_finite_differences():
    z, weights = jnp.array(signals(12)["steps"]), jnp.linspace(-1, 2, 12)
    score = lambda z, step: jnp.dot(weights, denoise(z, step))
    by_z, by_step = jax.grad(score, argnums=(0, 1))(z, 0.6)
    h = 1e-6
    numeric = [(score(z + h * e, 0.6) - score(z - h * e, 0.6)) / (2 * h) for e in jnp.eye(12)]
    np.testing.assert_allclose(by_z, numeric, atol=1e-8)
    assert float(by_step) == pytest.approx(float(score(z, 0.6 + h) - score(z, 0.6 - h)) / (2 * h), abs=1e-8)
    assert np.abs(numeric).max() > 0.1
    np.testing.assert_allclose(jax.jvp(score, (z, 0.6), (weights, 0.0))[1], jnp.dot(by_z, weights), rtol=1e-12)


def test_it_has_no_closed_form_of_the_distance_and_says_so():
    phi = prox.TotalVariation(1.0)
    assert not phi.has_distance
    assert not (2 * phi.on("a") + prox.L1(1.0).on("b")).has_distance
    with pytest.raises(TypeError, match=r"TotalVariation.*no closed form.*prox"):
        phi.distance(jnp.ones(3), jnp.ones(3))
    with pytest.raises(ValueError, match=r"TotalVariation.*'scale'.*not a sequence.*on"):
        phi.check({"scale": jnp.ones(())})


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**-60, 2.0**60, 2.0**120])
@pytest.mark.parametrize("regularizer", [prox.TotalVariation, prox.GroupLasso, prox.NuclearNorm])
def test_prox_of_a_norm_scales_with_its_argument(scale, regularizer):
    """Of a homogeneous function, prox(c z; c ν) = c prox(z; ν); in float32, squares of such entries are lost."""
    z = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    exact = regularizer(0.5).prox(z.astype(np.float64), 1.0)
    found = regularizer(0.5 * scale).prox(jnp.asarray(z * np.float32(scale)), 1.0)
    np.testing.assert_allclose(np.asarray(found, np.float64) / scale, exact, atol=1e-5)
