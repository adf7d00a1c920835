"""Scaling, sums and chosen leaves: identities between regularisers, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedstrata import prox
from fedstrata.prox import L0, L1, MCP, ElasticNet, Simplex, SquaredL2, TotalVariation, Zero, kernels

TREE = {
    "layers": [
        {"weight": jnp.array([[1.5, -0.2], [0.3, 2.0]]), "bias": jnp.array([0.4, -3.0])},
        {"weight": jnp.array([[0.7, -1.0]]), "bias": jnp.array([0.1])},
    ],
    "mix": jnp.array([0.6, 0.9, -0.5]),
}
G = jax.tree.map(lambda x: jnp.cos(3 * x), TREE)
STEP = 0.4


def same(one, other, on=TREE, step=STEP):
    """The same function, by value, prox, distance and ρ."""
    assert one.rho == pytest.approx(other.rho)
    answers = lambda phi: (phi.value(on), phi.prox(on, step), phi.distance(on, G) if phi.has_distance else 0.0)
    ours, theirs = jax.jit(lambda: (answers(one), answers(other)))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), ours, theirs)


def leaves(tree):
    return jax.tree.leaves(tree)


def test_the_elastic_net_is_the_lasso_plus_a_square():
    same(L1(0.7) + SquaredL2(0.3), ElasticNet(0.7, 0.3))
    same(SquaredL2(0.3) + L1(0.7), ElasticNet(0.7, 0.3))
    same(2 * (L1(0.35) + SquaredL2(0.1)) + SquaredL2(0.1), ElasticNet(0.7, 0.3))
    same(L1(0.7).on("weight") + 3 * SquaredL2(0.1).on("weight"), ElasticNet(0.7, 0.3).on("weight"))
    same(L1(0.7).on("weight") + SquaredL2(0.3) + L1(0.7).on("bias", "mix"), ElasticNet(0.7, 0.3))
    same(ElasticNet(0.7, 0.0), L1(0.7))
    same(ElasticNet(0.0, 0.3), SquaredL2(0.3))


@pytest.mark.slow
def test_scaling_is_the_weight():
    same(2.0 * L1(0.3), L1(0.6))
    for factor in (2, np.float32(2), np.float64(2), jnp.float32(2), jnp.bfloat16(2)):
        assert factor * L1(0.3) == L1(0.3) * factor == 2.0 * L1(0.3)
    same(4 * MCP(0.5, theta=8.0), MCP(2.0, theta=2.0))  # c·MCP(λ, θ) = MCP(cλ, θ/c)
    same(2 * (3 * L0(0.1)), L0(0.6))
    same(5 * Simplex().on("mix"), Simplex().on("mix"))
    same(2 * (L1(0.3).on("weight") + SquaredL2(0.1).on("bias")), L1(0.6).on("weight") + SquaredL2(0.2).on("bias"))
    same(0.5 * TotalVariation(1.0), TotalVariation(0.5))


def test_sums_of_squares_and_of_nothing_simplify():
    assert SquaredL2(0.25) + SquaredL2(0.5) == SquaredL2(0.75)
    assert 2 * SquaredL2(0.25) == SquaredL2(0.5)
    assert L1(1.0) + Zero() == Zero() + L1(1.0) == L1(1.0)
    assert Zero() + Zero() == Zero()
    assert L1(1.0) + SquaredL2(0.0) == L1(1.0)


def test_a_square_makes_a_weakly_convex_one_less_so():
    phi = MCP(1.0, theta=2.0) + SquaredL2(0.1)
    assert phi.rho == pytest.approx(0.3)
    assert (MCP(1.0, theta=2.0) + SquaredL2(0.25)).convex
    phi.check_step(3.0)
    with pytest.raises(ValueError, match=r"SquaredL2\(weight=0.1\): step = 4 .* ρ = 0.3"):
        phi.check_step(4.0)
    assert (L0(1.0) + SquaredL2(5.0)).rho == np.inf


def test_a_sum_on_different_leaves_is_each_part_on_its_own():
    phi = L1(0.7).on("weight") + MCP(0.5, theta=4.0).on("layers/*/bias") + Simplex().on("mix")
    new, alone = phi.prox(TREE, STEP), [MCP(0.5, theta=4.0), L1(0.7), MCP(0.5, theta=4.0), L1(0.7), Simplex()]
    for x, z, part in zip(leaves(new), leaves(TREE), alone, strict=True):
        np.testing.assert_array_equal(x, part.prox(z, STEP))
    assert phi.rho == 0.25
    parts = [part.value(x) for x, part in zip(leaves(new), alone, strict=True)]
    np.testing.assert_allclose(phi.value(new), sum(parts), rtol=1e-13)
    lengths = [part.distance(x, g) for x, g, part in zip(leaves(new), leaves(G), alone, strict=True)]
    np.testing.assert_allclose(phi.distance(new, G), np.linalg.norm(lengths), rtol=1e-13)
    assert float(phi.value(TREE)) == float(phi.distance(TREE, G)) == np.inf


def test_leaves_that_nobody_chose_are_left_alone():
    phi = 2 * L1(0.7).on("weight") + SquaredL2(0.1).on("mix")
    new = phi.prox(TREE, STEP)
    for i in (0, 1):
        assert new["layers"][i]["bias"] is TREE["layers"][i]["bias"]
        np.testing.assert_array_equal(new["layers"][i]["weight"], L1(1.4).prox(TREE["layers"][i]["weight"], STEP))
    assert float(Zero().value(TREE)) == 0
    zero = jax.tree.map(jnp.zeros_like, TREE)
    free = np.linalg.norm([jnp.linalg.norm(G["layers"][i]["bias"]) for i in (0, 1)])
    reach = jax.tree.map(lambda x: 0.1 * x, G) | {"mix": jnp.zeros(3)}  # shorter than the weights where x = 0
    np.testing.assert_allclose(phi.distance(zero, reach), 0.1 * free, rtol=1e-12)
    np.testing.assert_allclose(Zero().distance(TREE, G), np.linalg.norm(np.concatenate([g.ravel() for g in leaves(G)])))


@pytest.mark.parametrize(
    ("selectors", "names"),
    [
        (["weight"], ["layers/0/weight", "layers/1/weight"]),
        (["layers/0/weight"], ["layers/0/weight"]),
        (["layers/1/*", "mix"], ["layers/1/bias", "layers/1/weight", "mix"]),
        (["0"], ["layers/0/bias", "layers/0/weight"]),
        ([kernels], ["layers/0/weight", "layers/1/weight"]),
        ([lambda name, leaf: leaf.size == 3], ["mix"]),
        (["*"], ["layers/0/bias", "layers/0/weight", "layers/1/bias", "layers/1/weight", "mix"]),
    ],
)
def test_on_chooses_by_name_part_pattern_or_function(selectors, names):
    seen = []
    spy = lambda name, leaf: bool(seen.append(name)) or True
    L1(1.0).on(spy).on(*selectors).check(TREE)
    assert seen == names


def test_chosen_leaves_of_the_chosen_are_both():
    same(L1(0.7).on("weight").on("layers/0/*"), L1(0.7).on("layers/0/weight"))


def test_joint_sets_take_the_chosen_leaves_together():
    phi = prox.L2Ball(1.0).on("bias")
    new = phi.prox(TREE, STEP)
    together = jnp.concatenate([layer["bias"] for layer in TREE["layers"]])
    expected = together / jnp.linalg.norm(together)
    np.testing.assert_allclose(jnp.concatenate([layer["bias"] for layer in new["layers"]]), expected, rtol=1e-14)


def test_a_plain_array_has_the_empty_name():
    x = jnp.array([2.0, -2.0])
    np.testing.assert_array_equal(L1(1.0).on("*").prox(x, 1.0), [1.0, -1.0])
    with pytest.raises(ValueError, match="'weight' matches no leaf"):
        L1(1.0).on("weight").prox(x, 1.0)


def test_integers_may_stand_beside_the_chosen_leaves():
    tree = {"n": jnp.arange(3), "x": jnp.array([2.0])}
    new = L1(1.0).on("x").prox(tree, 1.0)
    assert new["n"] is tree["n"]
    assert new["x"].tolist() == [1.0]


def test_check_needs_shapes_only():
    shapes = jax.eval_shape(lambda: TREE)
    (L1(1.0).on(kernels) + prox.GroupLasso(1.0).on("bias")).check(shapes)
    with pytest.raises(ValueError, match="not a matrix"):
        prox.NuclearNorm(1.0).check(shapes)


def test_names_are_written_as_they_are_made():
    phi = 2 * (L1(0.5).on("weight", kernels) + MCP(1.0, theta=3.0).on("bias")) + SquaredL2(0.25)
    assert repr(phi) == (
        "(2 * L1(weight=0.5)).on('weight', kernels) + (2 * MCP(weight=1.0, theta=3.0)).on('bias') "
        "+ SquaredL2(weight=0.25)"
    )
