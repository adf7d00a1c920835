"""Singular value thresholding: against truncation, a parametrised subdifferential, and finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedstrata import prox


def matrices(seed=0):
    random = np.random.default_rng(seed)
    low = random.normal(size=(4, 2)) @ random.normal(size=(2, 5))
    equal = np.linalg.qr(random.normal(size=(5, 4)))[0] * 2.0
    return {
        "wide": random.normal(size=(3, 5)),
        "tall": random.normal(size=(5, 2)),
        "low": low,
        "equal": equal,
        "zero": np.zeros((3, 4)),
        "one": random.normal(size=(4, 1)) @ random.normal(size=(1, 4)),
    }


def test_rank_prox_is_the_best_truncation():
    """By Eckart and Young, the best matrix of each rank is a truncation; the prox is the best of them all."""
    for name, z in matrices().items():
        u, s, vt = np.linalg.svd(z, full_matrices=False)
        truncated = [(u[:, :k] * s[:k]) @ vt[:k] for k in range(len(s) + 1)]
        costs = [0.6 * k + np.sum((y - z) ** 2) / (2 * 0.9) for k, y in enumerate(truncated)]
        x = np.asarray(prox.Rank(0.6).prox(z, 0.9))
        cost = float(prox.Rank(0.6).value(x)) + np.sum((x - z) ** 2) / (2 * 0.9)
        assert cost == pytest.approx(min(costs), abs=1e-12), name


@pytest.mark.parametrize("name", matrices())
def test_distance_of_the_nuclear_norm_is_the_minimum_over_its_subdifferential(name):
    """W = U₂ Y V₂ᵀ with |Y| ≤ 1, in bases of the complements: minimised by projected gradient steps on Y."""
    x, random = matrices()[name], np.random.default_rng(1)
    u, s, vt = np.linalg.svd(x)
    r = int(np.sum(s > 1e-10))
    for size in (0.2, 1.0, 5.0):
        g = size * random.normal(size=x.shape)
        y = np.zeros((x.shape[0] - r, x.shape[1] - r))
        residual = lambda y: g + 0.7 * (u[:, :r] @ vt[:r] + u[:, r:] @ y @ vt[r:])  # noqa: B023
        for _ in range(60 if y.size else 0):
            a, t, b = np.linalg.svd(y - u[:, r:].T @ residual(y) @ vt[r:].T, full_matrices=False)
            y = (a * np.minimum(t, 1)) @ b
        expected = np.linalg.norm(residual(y))
        assert float(prox.NuclearNorm(0.7).distance(x, g)) == pytest.approx(expected, rel=1e-6)


def test_distance_of_the_rank_keeps_only_what_changes_the_column_and_row_spaces():
    for name, x in matrices().items():
        u, s, vt = np.linalg.svd(x)
        r = int(np.sum(s > 1e-10))
        g = np.random.default_rng(2).normal(size=x.shape)
        corner = u[:, r:].T @ g @ vt[r:].T
        expected = np.sqrt(max(np.sum(g**2) - np.sum(corner**2), 0))
        assert float(prox.Rank(0.3).distance(x, g)) == pytest.approx(expected, abs=1e-7), name


@pytest.mark.parametrize("phi", [prox.NuclearNorm(0.5), prox.Rank(0.5)], ids=repr)
@pytest.mark.parametrize("name", ["wide", "tall", "equal", "low"])
def test_derivatives_of_the_prox_are_those_of_finite_differences(phi, name):
    z, random = jnp.array(matrices()[name]), np.random.default_rng(3)
    weights, direction = (jnp.array(random.normal(size=z.shape)) for _ in range(2))
    score = jax.jit(lambda z, step: jnp.sum(weights * phi.prox(z, step)))
    by_z, by_step = jax.jit(jax.grad(score, argnums=(0, 1)))(z, 0.8)
    h = 1e-6
    numeric = (score(z + h * direction, 0.8) - score(z - h * direction, 0.8)) / (2 * h)
    assert float(jnp.sum(by_z * direction)) == pytest.approx(float(numeric), abs=1e-7)
    assert float(by_step) == pytest.approx(float(score(z, 0.8 + h) - score(z, 0.8 - h)) / (2 * h), abs=1e-7)


def test_derivatives_at_zero_are_finite():
    zero = jnp.zeros((3, 4))
    for phi in (prox.NuclearNorm(0.5), prox.Rank(0.5)):
        assert np.all(np.isfinite(jax.grad(phi.value)(zero)))
        assert np.all(np.isfinite(jax.jacrev(lambda z: phi.prox(z, 0.8))(zero)))  # noqa: B023
    np.testing.assert_allclose(jax.grad(prox.NuclearNorm(0.5).value)(jnp.eye(3)), 0.5 * np.eye(3), atol=1e-14)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rank_is_decided_within_the_rounding_of_the_dtype(dtype):
    random = np.random.default_rng(4)
    for shape in ((6, 9), (40, 30), (8, 3, 3, 3)):
        left, right = random.normal(size=(shape[0], 2)), random.normal(size=(2, int(np.prod(shape[1:]))))
        x = jnp.array((left @ right).reshape(shape), dtype)
        assert float(prox.Rank(1.0).value(x)) == 2


def test_vectors_are_refused_with_a_remedy():
    tree = {"weight": jnp.ones((2, 3)), "bias": jnp.ones(2)}
    for phi in (prox.NuclearNorm(1.0), prox.Rank(1.0)):
        for use in (phi.check, phi.value, lambda x: phi.prox(x, 0.1), lambda x: phi.distance(x, x)):  # noqa: B023
            with pytest.raises(ValueError, match=r"'bias' of shape \(2,\) is not a matrix; .*on\(prox.kernels\)"):
                use(tree)
        phi.on(prox.kernels).check(tree)
