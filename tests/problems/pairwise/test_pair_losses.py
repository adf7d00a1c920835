"""Pair losses: their values and slopes in NumPy, scores far out in float32, and what each of them is known for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pairwise_references import LOSSES, linear_score
from scipy.special import logsumexp

import fedstrata as fs
from fedstrata.core.vector import Vector
from fedstrata.problems.pairwise.pair_losses import (
    KLOPAUC,
    PSM,
    STEEP,
    AveragePrecision,
    Mirrored,
    Square,
    SquaredHinge,
    TwoWay,
)
from fedstrata.problems.weighting import full_data

SHIPPED = ("square", "squared hinge", "logistic", "psm", "kl", "two-way", "precision")
RANDOM = np.random.default_rng(0).normal(scale=1.5, size=(30, 2))
FAR = {
    **{name: LOSSES[name].ours for name in SHIPPED},
    "kl, small lam": KLOPAUC(1e-3),
    "kl, large lam": KLOPAUC(1e3),
    "two-way, small": TwoWay(0.05, 0.05),
    "two-way, steep": TwoWay(10.0, 0.01),
    "two-way, flat": TwoWay(0.01, 10.0),
    "mirrored": Mirrored(KLOPAUC(0.1)),
}


def call(loss, a, b, y):
    """Our loss as a (k,) array of ℓ itself."""
    a, b = jnp.asarray(a), jnp.asarray(b)
    second = jnp.stack([b, jnp.asarray(y, b.dtype)]) if getattr(loss, "labelled", False) else b
    found = jnp.atleast_1d(loss(a, second))
    return jnp.exp(found) if getattr(loss, "in_logs", False) else found


@pytest.mark.parametrize("name", SHIPPED)
def test_values_and_slopes(name):
    """Ours are NumPy's, and NumPy's slopes are finite differences of its values, which the other tests build on."""
    loss, eps = LOSSES[name], 1e-6
    for y in (0, 1):
        ours = jax.jit(jax.vmap(lambda a, b, y=y: call(loss.ours, a, b, y)))
        slopes = jax.jit(jax.vmap(jax.jacobian(lambda a, b, y=y: call(loss.ours, a, b, y), (0, 1))))
        wanted = [[d(a, b, y) for a, b in RANDOM] for d in (loss.value, loss.d1, loss.d2)]
        np.testing.assert_allclose(ours(*RANDOM.T), wanted[0], rtol=1e-12, atol=1e-14)
        for found, theirs in zip(slopes(*RANDOM.T), wanted[1:], strict=True):
            np.testing.assert_allclose(found, theirs, rtol=1e-10, atol=1e-13)
        for (a, b), one, two in zip(RANDOM, *wanted[1:], strict=True):
            differ = lambda da, db, a=a, b=b, y=y: (
                (loss.value(a + da, b + db, y) - loss.value(a - da, b - db, y)) / 2 / eps
            )
            np.testing.assert_allclose(one, differ(eps, 0), rtol=2e-6, atol=1e-7)
            np.testing.assert_allclose(two, differ(0, eps), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("name", SHIPPED)
def test_outer_functions(name):
    loss = LOSSES[name]
    if loss.ours.outer is None:
        assert name in ("square", "squared hinge", "logistic", "psm")
        return
    logs = loss.ours.in_logs
    for u in np.random.default_rng(1).uniform(0.2, 5, (10, 1 if logs else 2)):
        point = jnp.log(jnp.asarray(u[0])) if logs else jnp.asarray(u)
        value, slope = jax.value_and_grad(loss.ours.outer)(point)
        np.testing.assert_allclose(value, loss.f(u), rtol=1e-12)
        np.testing.assert_allclose(slope / u[0] if logs else slope, loss.slope(u).reshape(slope.shape), rtol=1e-12)


def far_federation():
    """Scores of ±1e4, 0 and around them, in float32, on two unequal clients."""
    x = np.array([1e4, -1e4, 0, 9999, -9999, 1e-4, 3.0, -3.0, 1e4, -1e4], np.float32)
    y = np.array([1, 1, 1, 1, 1, 0, 0, 0, 0, 0])
    parts = [{"x": x[rows, None], "y": y[rows]} for rows in ([0, 1, 2, 5, 9], [3, 4, 6, 7, 8])]
    return fs.Federation.from_clients(parts, classes=2).by_label()


@pytest.mark.parametrize("name", FAR)
def test_scores_up_to_ten_thousand_in_float32(name):
    """The loss, its slopes, the objective, its gradient and the terms of FedX2 with any u: all finite."""
    loss = FAR[name]
    scores = jnp.asarray([-1e4, -5e3, -1.0, 0.0, 1.0, 5e3, 1e4], jnp.float32)
    both = lambda b: jnp.stack([b, jnp.ones_like(b)], -1) if getattr(loss, "labelled", False) else b
    value = lambda a, b: jnp.sum(loss(a, both(b)))
    table = jax.vmap(jax.vmap(jax.value_and_grad(value, (0, 1)), (None, 0)), (0, None))
    found = jax.jit(table)(scores, scores)
    assert all(leaf.dtype == jnp.float32 and jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(found))

    problem = fs.Pairwise(linear_score, loss, second="train" if getattr(loss, "labelled", False) else "negatives")
    full = full_data(far_federation(), dtype=jnp.float32)
    value, gradient = jax.jit(problem.smooth)(Vector(jnp.ones(1, jnp.float32)), full)
    assert value.dtype == gradient.tree.dtype == jnp.float32
    assert jnp.isfinite(value)
    assert jnp.all(jnp.isfinite(gradient.tree))

    if problem.f is None:
        return
    # An estimate u may be of any other time: of the losses of all these pairs.
    u = jax.vmap(lambda a: jax.vmap(lambda b: loss(a, both(b)))(scores))(scores)
    u = u.reshape((-1, *u.shape[2:]))
    term = lambda a, b, u: problem.term(u, a, both(b))
    each = jax.vmap(jax.vmap(jax.vmap(jax.grad(term, (0, 1)), (None, None, 0)), (None, 0, None)), (0, None, None))
    assert all(jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(jax.jit(each)(scores, scores, u)))


@pytest.mark.parametrize("lam", [1e-3, 0.5, 20.0])
def test_kl_opauc_is_a_log_sum_exp(lam):
    rng = np.random.default_rng(2)
    parts = [{"x": rng.normal(scale=30, size=(n, 1)), "y": np.arange(n) % 2} for n in (4, 7)]
    fed = fs.Federation.from_clients(parts, classes=2).by_label()
    a, b = (fed[name].examples["x"][:, 0] for name in ("positives", "negatives"))
    hinges = np.maximum(1 - a[:, None] + b[None, :], 0) ** 2
    wanted = np.mean(lam * (logsumexp(hinges / lam, axis=1) - np.log(b.size)))
    found = fs.Pairwise(linear_score, KLOPAUC(lam)).objective(Vector(jnp.ones(1)), full_data(fed))
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    # Between the mean over all negatives (large λ) and the maximum (small λ).
    assert np.mean(hinges) <= wanted <= np.mean(hinges.max(axis=1))
    if lam == 1e-3:
        np.testing.assert_allclose(wanted, np.mean(hinges.max(axis=1)), rtol=1e-3)


def test_the_pairwise_sigmoid_is_symmetric():
    a, b = jnp.asarray(RANDOM.T)
    np.testing.assert_allclose(PSM()(a, b) + PSM()(b, a), 1, rtol=1e-15)
    assert not np.allclose(SquaredHinge()(a, b) + SquaredHinge()(b, a), 1)


def test_mirrored_swaps_the_scores_and_keeps_the_rest():
    a, b = jnp.asarray(RANDOM.T)
    loss = Mirrored(KLOPAUC(0.7))
    np.testing.assert_array_equal(loss(b, a), KLOPAUC(0.7)(a, b))
    assert loss.in_logs
    assert float(loss.outer(jnp.asarray(2.0))) == 0.7 * 2.0
    assert Mirrored(Square()).outer is None
    assert not Mirrored(Square()).in_logs


def test_the_two_way_power_is_continued_by_its_tangent():
    loss, ratio = TwoWay(2.0, 0.5), 4.0
    edge = STEEP / ratio  # of log u
    value, slope = jax.value_and_grad(loss.outer)(jnp.asarray(edge - 1e-9))
    for further in (0.1, 1.0, 100.0):
        beyond, steep = jax.value_and_grad(loss.outer)(jnp.asarray(edge + further))
        np.testing.assert_allclose(beyond, value + further * slope, rtol=1e-7)
        np.testing.assert_allclose(steep, slope, rtol=1e-7)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: KLOPAUC(0.0), "lam=0"),
        (lambda: KLOPAUC(float("nan")), "lam=nan"),
        (lambda: TwoWay(1.0, -1.0), "lam_first=-1"),
        (lambda: AveragePrecision(margin=0.0), "margin=0"),
        (lambda: AveragePrecision(floor=0.0), "floor=0"),
        (lambda: Mirrored(AveragePrecision()), "Mirrored"),
    ],
)
def test_refusals(make, named):
    with pytest.raises(ValueError, match=named):
        make()
