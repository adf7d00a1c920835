"""Every operator that pyproximal has too. Its steps are called tau; a factor ½ stands in its squared norm only."""

import numpy as np
import pyproximal
import pytest

from fedstrata import prox

random = np.random.default_rng(0)
VECTORS = [2 * random.normal(size=12) for _ in range(5)] + [np.round(2 * random.normal(size=12)) for _ in range(3)]
STEP = 0.6

THEIRS = {
    "L1": (prox.L1(0.8), pyproximal.L1(0.8)),
    # Theirs drops what is below tau · sigma; the minimiser of ν|x|₀ + |x − z|²/(2γ) drops below √(2γν).
    "L0": (prox.L0(0.8), pyproximal.L0(np.sqrt(2 * 0.8 / STEP))),
    "SquaredL2": (prox.SquaredL2(0.8), pyproximal.L2(sigma=1.6)),
    "SCAD": (prox.SCAD(0.9, a=3.3), pyproximal.SCAD(0.9, a=3.3)),
    "GroupLasso": (prox.GroupLasso(0.8, axis=None), pyproximal.Euclidean(0.8)),
    "Box": (prox.Box(-0.4, 1.1), pyproximal.Box(-0.4, 1.1)),
    "NonNegative": (prox.NonNegative(), pyproximal.Box(lower=0.0)),
    "LInfBall": (prox.LInfBall(0.9), pyproximal.Box(-0.9, 0.9)),
    "Simplex": (prox.Simplex(1.7), pyproximal.Simplex(12, 1.7, xtol=1e-13, engine="numpy")),
    "L1Ball": (prox.L1Ball(1.7), pyproximal.L1Ball(12, 1.7, xtol=1e-13)),
    "L2Ball": (prox.L2Ball(1.7), pyproximal.EuclideanBall(np.zeros(12), 1.7)),
    "TotalVariation": (prox.TotalVariation(0.5), pyproximal.TV((12,), 0.5, niter=1500, rtol=1e-15)),
}
MATRICES = {
    "NuclearNorm": (prox.NuclearNorm(0.8), pyproximal.Nuclear((3, 4), 0.8)),
    "Rank": (prox.Rank(0.8), pyproximal.SingularValuePenalty((3, 4), pyproximal.L0(np.sqrt(2 * 0.8 / STEP)))),
    # Theirs groups the columns of a (dimensions × points) matrix.
    "GroupLasso": (prox.GroupLasso(0.8, axis=1), pyproximal.L21(3, 0.8)),
}


@pytest.mark.parametrize("name", THEIRS)
def test_prox_and_value_of_vectors(name):
    ours, theirs = THEIRS[name]
    for z in VECTORS:
        x = np.asarray(ours.prox(z, STEP))
        np.testing.assert_allclose(x, theirs.prox(z.copy(), STEP), atol=1e-5 if name == "TotalVariation" else 1e-11)
        if not isinstance(ours, (prox.ConstraintSet, prox.L0)):
            assert float(ours.value(z)) == pytest.approx(float(theirs(z)), rel=1e-12)


@pytest.mark.parametrize("name", MATRICES)
def test_prox_and_value_of_matrices(name):
    ours, theirs = MATRICES[name]
    for z in VECTORS[:5]:
        x = np.asarray(ours.prox(z.reshape(3, 4), STEP))
        np.testing.assert_allclose(x.ravel(), theirs.prox(z.copy(), STEP), atol=1e-12)
        if name != "Rank":
            # Theirs takes roots of eigenvalues, which halves the digits.
            assert float(ours.value(z.reshape(3, 4))) == pytest.approx(float(theirs(z)), rel=1e-7)
