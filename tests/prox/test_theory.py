"""Every regulariser against its definition: the prox minimises, ρ is the curvature, distances are limits."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from regularizers import CASES, flat, leaves_of, points, unflat

from fedstrata import prox

CONVEX = [name for name, case in CASES.items() if case.rho == 0]
WEAKLY = [name for name, case in CASES.items() if 0 < case.rho < math.inf]
NONCONVEX = [name for name, case in CASES.items() if case.rho > 0]
ENTRYWISE = [name for name, case in CASES.items() if case.entrywise]
WITH_DISTANCE = [name for name, case in CASES.items() if case.regularizer.has_distance]
KINDS = {type(case.regularizer) for case in CASES.values()}


@pytest.fixture(scope="module")
def compiled():
    """Functions of every regulariser, compiled once for the module: prox(z, step), value(x), distance(x, g)."""
    kept = {}

    def get(name):
        if name not in kept:
            phi = CASES[name].regularizer
            kept[name] = jax.jit(phi.prox), jax.jit(phi.value), jax.jit(phi.distance) if phi.has_distance else None
        return kept[name]

    return get


def objective(case, x, z, step):
    return case.phi(leaves_of(x)) + np.sum((flat(x) - flat(z)) ** 2) / (2 * step)


def test_every_public_regularizer_is_in_the_table():
    public = {v for v in vars(prox).values() if isinstance(v, type) and issubclass(v, prox.Regularizer)}
    assert public - KINDS == {prox.Regularizer, prox.ConstraintSet}


@pytest.mark.parametrize("name", CASES)
def test_value_is_the_definition(name, compiled):
    case, (step, value, _) = CASES[name], compiled(name)
    for z in points(case):
        for x in (z, step(z, case.step)):
            assert float(value(x)) == pytest.approx(case.phi(leaves_of(x)), rel=1e-12)


@pytest.mark.parametrize("name", ENTRYWISE)
def test_prox_of_a_number_is_the_best_of_a_fine_grid(name):
    case = CASES[name]
    grid = np.linspace(-4, 4, 16_001)
    phi = np.array([case.phi([x]) for x in grid])
    starts = [*np.linspace(-3.5, 3.5, 23), *case.kinks]
    found = jax.jit(jax.vmap(case.regularizer.prox, in_axes=(0, None)))(jnp.array(starts), case.step)
    for z, x in zip(starts, np.asarray(found), strict=True):
        costs = phi + (grid - z) ** 2 / (2 * case.step)
        assert case.phi([x]) + (x - z) ** 2 / (2 * case.step) <= costs.min() + 1e-12
        ties = grid[costs <= costs.min() + 1e-9]
        assert np.min(np.abs(ties - x)) <= 6e-4


@pytest.mark.parametrize("name", CASES)
def test_no_point_near_or_far_is_better_than_the_prox(name, compiled):
    case, (step, _, _) = CASES[name], compiled(name)
    random = np.random.default_rng(1)
    for z in points(case, count=3):
        x = step(z, case.step)
        best = objective(case, x, z, case.step)
        assert math.isfinite(best)
        for size in (3.0, 0.3, 1e-2, 1e-4):
            for _ in range(4):
                other = unflat(flat(x) + size * random.normal(size=flat(x).size), x)
                # The prox of a point is in the domain: what is better inside a set would be found.
                for y in (other, step(other, case.step), unflat(0.5 * flat(x) + 0.5 * flat(step(other, 0.01)), x)):
                    assert best <= objective(case, y, z, case.step) + 1e-10


@pytest.mark.parametrize("name", WITH_DISTANCE)
def test_prox_meets_the_optimality_condition(name, compiled):
    case, (step, _, distance) = CASES[name], compiled(name)
    for z in points(case, count=12):
        x = step(z, case.step)
        g = unflat((flat(x) - flat(z)) / case.step, x)
        assert float(distance(x, g)) <= 1e-12 * (1 + np.abs(flat(z)).max())
        worse = unflat(flat(g) + 0.1 * np.sign(flat(x)) + 5.0, x)
        assert float(distance(x, worse)) <= np.linalg.norm(flat(worse) - flat(g)) + 1e-12


@pytest.mark.parametrize("name", WITH_DISTANCE)
def test_distance_is_the_limit_of_the_prox_gradient_residual(name, compiled):
    """|x − prox(x − t g)|/t tends to dist(0, g + ∂φ(x)) as t → 0, for every x in the domain."""
    case, (step, _, distance) = CASES[name], compiled(name)
    random, t, positive = np.random.default_rng(2), 1e-6, 0
    for z in points(case):
        x = jax.tree.map(lambda a: np.where(np.abs(a) < 1e-12, 0, a), step(z, case.step))  # on the kink, not beside it
        for size in (0.3, 1.0, 4.0):
            g = unflat(size * random.normal(size=flat(x).size), x)
            residual = np.linalg.norm(flat(x) - flat(step(unflat(flat(x) - t * flat(g), x), t))) / t
            assert float(distance(x, g)) == pytest.approx(residual, rel=1e-4, abs=1e-5)
            positive += residual > 0.1
    assert positive > 10


@pytest.mark.parametrize("name", [name for name in ENTRYWISE if name != "L0"])  # which has no slopes at zero
def test_distance_of_a_number_is_that_to_the_one_sided_slopes(name):
    case, h = CASES[name], 1e-7
    for x in np.asarray(jax.vmap(case.regularizer.prox, in_axes=(0, None))(jnp.linspace(-3, 3, 13), case.step)):
        high, low = ((case.phi([np.array(x + s)]) - case.phi([np.array(x)])) / s for s in (h, -h))
        for g in (-2.5, -0.4, 0.0, 0.7, 3.0):
            expected = max(low + g, -(high + g), 0.0)
            found = float(case.regularizer.distance(jnp.array(x), jnp.array(g)))
            assert found == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("name", CASES)
def test_rho_is_declared_as_theory_has_it(name):
    case = CASES[name]
    assert case.regularizer.rho == pytest.approx(case.rho)
    assert case.regularizer.convex == (case.rho == 0)


def curvature_gap(case, rho, x, y):
    """How far φ + ρ|·|²/2 is above its chord in the middle: never, if it is convex."""
    bent = lambda v: case.phi(leaves_of(unflat(v, {n: np.zeros(s) for n, s in case.shapes.items()}))) + rho / 2 * v @ v
    return bent((x + y) / 2) - (bent(x) + bent(y)) / 2


@pytest.mark.parametrize("name", [*CONVEX, *WEAKLY])
def test_rho_makes_it_convex(name, compiled):
    case, (step, _, _) = CASES[name], compiled(name)
    random = np.random.default_rng(3)
    shape = {n: np.zeros(s) for n, s in case.shapes.items()}
    for size in (0.5, 2.0, 5.0):
        for _ in range(40):
            near = lambda: flat(step(unflat(size * random.normal(size=flat(shape).size), shape), case.step / 2))  # noqa: B023
            assert curvature_gap(case, case.regularizer.rho, near(), near()) <= 1e-10


@pytest.mark.parametrize("name", NONCONVEX)
def test_no_smaller_rho_does(name):
    case, random = CASES[name], np.random.default_rng(4)
    rho = 0.95 * case.rho if case.rho < math.inf else 1e3
    size = sum(math.prod(s) for s in case.shapes.values())
    gaps = []
    for _ in range(400):  # pairs that differ in one entry, some of them close to zero
        x = random.uniform(0, 2) * random.normal(size=size) * (random.random() < 0.9)
        y = x + random.uniform(0.001, 0.5) * np.eye(size)[random.integers(size)]
        gaps.append(curvature_gap(case, rho, x, y))
    assert max(gaps) > 1e-8


@pytest.mark.parametrize("name", CONVEX)
def test_prox_of_convex_ones_is_firmly_nonexpansive(name, compiled):
    case, (step, _, _) = CASES[name], compiled(name)
    trees = points(case, seed=5)
    for a, b in itertools.pairwise(trees):
        moved = flat(step(a, case.step)) - flat(step(b, case.step))
        assert moved @ (flat(a) - flat(b)) >= moved @ moved - 1e-10


@pytest.mark.parametrize("name", WEAKLY)
def test_prox_of_weakly_convex_ones_is_lipschitz(name, compiled):
    case, (step, _, _) = CASES[name], compiled(name)
    limit = 1 / (1 - case.step * case.rho)
    random, largest = np.random.default_rng(6), 0.0
    for z in points(case, count=20, seed=6):
        near = unflat(flat(z) + 1e-3 * random.normal(size=flat(z).size), z)
        moved = flat(step(z, case.step)) - flat(step(near, case.step))
        ratio = np.linalg.norm(moved) / np.linalg.norm(flat(z) - flat(near))
        assert ratio <= limit + 1e-9
        largest = max(largest, ratio)
    assert largest > 1  # not a contraction: the bound is of use


@pytest.mark.parametrize("name", CASES)
def test_step_zero_gives_the_point_or_its_projection(name, compiled):
    case, (step, _, _) = CASES[name], compiled(name)
    restricted = prox.Simplex(2.0) if name == "set plus square" else case.regularizer
    for z in points(case, count=2):
        expected = restricted.prox(z, 1.0) if isinstance(restricted, prox.ConstraintSet) else z
        np.testing.assert_array_equal(flat(step(z, 0.0)), flat(expected))
