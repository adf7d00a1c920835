"""The linear programs against scipy's solver, closed forms and their own constraints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linprog

from fedstrata.solvers.linear_program import maximise

one, many = jax.jit(maximise), jax.jit(jax.vmap(maximise))
MANY = 30  # instances of a kind


def reference(c, A, b):
    """The value of one program, None where nothing is feasible; rows and c are scaled for HiGHS, which is not exact."""
    row, size = np.maximum(np.abs(A).max(axis=1), np.abs(b)), np.abs(c).max()
    row, size = np.where(row > 0, row, 1), size if size > 0 else 1
    tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    whole = {"A_eq": np.ones((1, len(c))), "b_eq": [1.0]}
    found = linprog(-c / size, A_ub=-A / row[:, None], b_ub=-b / row, **whole, method="highs-ds", options=tight)
    assert found.status in (0, 2)
    return -found.fun * size if found.status == 0 else None


def instances(kind, n, rows):
    rng = np.random.default_rng([n, rows, len(kind)])
    c, A, b = rng.normal(size=(MANY, n)), rng.normal(size=(MANY, rows, n)), 0.3 * rng.normal(size=(MANY, rows))
    if kind == "whole numbers":  # many ties, many degenerate vertices
        c, A, b = np.round(c), np.round(2 * A), np.round(2 * b)
    if kind == "scales":
        size = 10.0 ** rng.uniform(-8, 8, (MANY, rows, 1))
        c, A, b = c * 10.0 ** rng.uniform(-8, 8, (MANY, 1)), A * size, b * size[..., 0]
    if kind == "gradients":  # stage two of FCFL: inner products of as many gradients as there are dimensions, less two
        G = rng.normal(size=(MANY, rows, max(rows - 2, 1))) * 10.0 ** rng.uniform(-2, 2, (MANY, rows, 1))
        A, b = G @ G.transpose(0, 2, 1), np.zeros((MANY, rows))
        c = A.mean(axis=-1)
    return c, A, b


KINDS = [
    *[(kind, *size) for kind in ("random", "whole numbers", "scales") for size in [(2, 1), (3, 4), (12, 5), (20, 21)]],
    *[("gradients", size, size) for size in (3, 8, 21)],
]


@pytest.mark.parametrize(("kind", "n", "rows"), KINDS)
def test_it_agrees_with_scipy(kind, n, rows):
    c, A, b = instances(kind, n, rows)
    found, feasible = map(np.asarray, many(c, A, b))
    values = [reference(*given) for given in zip(c, A, b, strict=True)]
    np.testing.assert_array_equal(feasible, [v is not None for v in values])
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-14)
    assert (found >= 0).all()
    for i in np.flatnonzero(feasible):
        assert abs(c[i] @ found[i] - values[i]) <= 1e-8 * np.abs(c[i]).max()
        size = np.maximum(np.abs(A[i]).max(axis=1), np.abs(b[i])) + 1e-300
        assert ((A[i] @ found[i] - b[i]) / size).min() >= -1e-12
    if kind == "gradients":
        assert feasible.all()  # the shortest combination of gradients opposes none of them


def test_both_outcomes_were_met():
    flags = np.concatenate([np.asarray(many(*instances(*k))[1]) for k in KINDS])
    assert len(flags) >= 300
    assert 0.2 < flags.mean() < 0.8


def test_without_jit_and_without_vmap_it_is_the_same():
    c, A, b = instances("random", 3, 4)
    together = many(c, A, b)
    for i in range(3):
        alone, once = maximise(*map(jnp.asarray, (c[i], A[i], b[i]))), one(c[i], A[i], b[i])
        for part in range(2):
            np.testing.assert_allclose(alone[part], together[part][i], rtol=1e-12, atol=1e-15)
            np.testing.assert_allclose(once[part], together[part][i], rtol=1e-12, atol=1e-15)


def test_single_precision_finds_the_same_values():
    c, A, b = instances("random", 12, 5)
    wide, narrow = many(c, A, b), many(*(a.astype(np.float32) for a in (c, A, b)))
    assert narrow[0].dtype == np.float32
    np.testing.assert_array_equal(wide[1], narrow[1])
    value = lambda found: np.where(found[1], (np.asarray(found[0]) * c).sum(axis=1), 0)
    np.testing.assert_allclose(value(narrow), value(wide), atol=1e-5)


@pytest.mark.parametrize(
    ("c", "A", "b", "value"),
    [
        ([1.0, 2.0, 2.0], [[0.0, 0.0, 0.0]], [0.0], 2.0),  # a tie, and a row that says nothing
        ([0.0, 0.0], [[1.0, -1.0]], [0.0], 0.0),  # nothing to gain
        ([1.0, 3.0], [[1.0, -1.0], [2.0, -2.0], [1.0, -1.0]], [0.0, 0.0, 0.0], 2.0),  # one constraint three times
        ([1.0, 3.0], [[1.0, -1.0], [-1.0, 1.0]], [0.0, 0.0], 2.0),  # an equation
        ([5.0, 1.0], [[0.0, 1.0]], [1.0], 1.0),  # only a vertex is feasible
        ([7.0], [[1.0]], [1.0], 7.0),  # one variable
    ],
)
def test_degenerate_programs(c, A, b, value):
    c, A, b = map(np.array, (c, A, b))
    a, feasible = map(np.asarray, one(c, A, b))
    assert feasible
    np.testing.assert_allclose(c @ a, value, rtol=1e-13, atol=1e-13)
    assert (A @ a - b).min() > -1e-13


def test_no_constraints_is_the_best_vertex():
    a, feasible = one(jnp.array([0.1, 0.7, 0.3]), jnp.zeros((0, 3)), jnp.zeros(0))
    np.testing.assert_array_equal(a, [0, 1, 0])
    assert feasible


def test_beales_example_does_not_cycle():
    """Beale (1955), where the largest-gain rule circles round x = 0; x = 4a, the last weight is the slack."""
    c = np.array([0.75, -150, 0.02, -6, 0]) * 4
    A = -np.array([[0.25, -60, -1 / 25, 9, 0], [0.5, -90, -1 / 50, 3, 0], [0, 0, 1, 0, 0]]) * 4
    b = np.array([0.0, 0.0, -1.0])
    a, feasible = one(c, A, b)
    assert feasible
    np.testing.assert_allclose(c @ a, 1 / 20, rtol=1e-12)


def test_what_cannot_be_met_is_missed_as_little_as_possible():
    """a_1 >= 0.8 and a_2 >= 0.6 miss by 0.4 together wherever a_1 + a_2 = 1 and neither is above its bound."""
    A, b = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), np.array([0.8, 0.6])
    a, feasible = map(np.asarray, one(np.array([0.0, 0.0, 1.0]), A, b))
    assert not feasible
    np.testing.assert_allclose(np.maximum(b - A @ a, 0).sum(), 0.4, rtol=1e-13)
    np.testing.assert_allclose(a.sum(), 1, rtol=1e-15)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"c \(2,\) and b \(1,\) do not fit A \(1, 3\)"):
        maximise(jnp.zeros(2), jnp.zeros((1, 3)), jnp.zeros(1))
