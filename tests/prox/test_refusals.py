"""What is refused, when, and in which words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedstrata import prox
from fedstrata.prox import L0, L1, MCP, ElasticNet, Simplex, SquaredL2, TotalVariation

TREE = {
    "layers": [
        {"weight": jnp.array([[1.5, -0.2], [0.3, 2.0]]), "bias": jnp.array([0.4, -3.0])},
        {"weight": jnp.array([[0.7, -1.0]]), "bias": jnp.array([0.1])},
    ],
    "mix": jnp.array([0.6, 0.9, -0.5]),
}


USES = {
    "check": lambda phi, x: phi.check(x),
    "value": lambda phi, x: phi.value(x),
    "prox": lambda phi, x: phi.prox(x, 0.1),
    "distance": lambda phi, x: phi.distance(x, x),
    "compiled": lambda phi, x: jax.jit(phi.prox)(x, 0.1),
}


@pytest.mark.parametrize("use", USES)
def test_what_does_not_fit_the_tree_is_refused_however_it_is_used(use):
    overlapping = r"L1.*and MCP.*both act on leaf 'layers/0/weight'.*no closed form.*\.on\(.*SquaredL2"
    with pytest.raises(ValueError, match=overlapping):
        USES[use](L1(1.0).on("weight") + MCP(1.0, theta=3.0).on("layers/0/*"), TREE)
    with pytest.raises(ValueError, match=r"L1.*and L1.*both act on leaf"):
        USES[use](L1(1.0) + L1(2.0), TREE)
    with pytest.raises(ValueError, match=r"both act on leaf 'layers/0/weight'"):
        USES[use](L1(1.0) + SquaredL2(2.0).on("weight"), TREE)
    with pytest.raises(ValueError, match=r"L1.*'wieght' matches no leaf; .*'layers/0/weight'.*pattern"):
        USES[use](L1(1.0).on("weight", "wieght"), TREE)
    with pytest.raises(ValueError, match=r"L1.*leaf 'n' holds int\d+, not floats; .*\.on"):
        USES[use](L1(1.0), {"n": jnp.arange(3), "x": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"GroupLasso.*'s' has 0 dimension.*no axis 0;.*axis=None"):
        USES[use](prox.GroupLasso(1.0), {"s": jnp.array(1.0)})
    with pytest.raises(ValueError, match="no arrays"):
        USES[use](L1(1.0), {})
    with pytest.raises(ValueError, match=r"same name.*'a/b'"):
        USES[use](L1(1.0), {"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}})


def test_x_and_g_must_match():
    with pytest.raises(ValueError, match=r"L1.*distance: x and g must have the same leaves.*\(2,\).*\(3,\)"):
        L1(1.0).distance(jnp.ones(2), jnp.ones(3))


BAD = {
    "weight = -1 must be finite and >= 0": lambda: L1(-1),
    "L0: weight = 0 must be finite and > 0": lambda: L0(0),
    "weight = nan": lambda: SquaredL2(float("nan")),
    "l2 = inf": lambda: ElasticNet(1.0, np.inf),
    "MCP: theta = 0 must be finite and > 0": lambda: MCP(1.0, theta=0),
    "MCP: weight = 0": lambda: MCP(0.0, theta=1.0),
    "SCAD: a = 2 must be finite and > 2": lambda: prox.SCAD(1.0, a=2),
    "GroupLasso: weight": lambda: prox.GroupLasso(-0.1),
    "NuclearNorm: weight": lambda: prox.NuclearNorm(-0.1),
    "Rank: weight": lambda: prox.Rank(0),
    "TotalVariation: weight": lambda: TotalVariation(-2),
    r"Box: low = 1 and high = 0 .*low <= high": lambda: prox.Box(1, 0),
    "Box: low = nan": lambda: prox.Box(np.nan, 0),
    "Box: low = inf": lambda: prox.Box(np.inf, np.inf),
    "Simplex: total = 0": lambda: Simplex(0),
    "L1Ball: radius": lambda: prox.L1Ball(0),
    "L2Ball: radius": lambda: prox.L2Ball(-1),
    "LInfBall: radius": lambda: prox.LInfBall(0),
    "factor = 0 must be finite and > 0": lambda: 0 * L1(1.0),
    "factor = -2": lambda: L1(1.0) * -2,
    "factor = inf": lambda: np.inf * L1(1.0),
    r"on\(\) needs at least one": lambda: L1(1.0).on(),
    "step = -0.1 must be finite and at least 0": lambda: L1(1.0).prox(jnp.ones(2), -0.1),
    "step = nan": lambda: L1(1.0).prox(jnp.ones(2), np.nan),
    "step = inf": lambda: L1(1.0).prox(jnp.ones(2), jnp.inf),
    r"one number, got an array of shape \(2,\).*vmap": lambda: L1(1.0).prox(jnp.ones(2), jnp.ones(2)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_numbers_are_refused(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()


WRONG = {
    "L1: weight = 'a' must be a plain number": lambda: L1("a"),
    "L1: weight = True": lambda: L1(True),
    "L1: weight = .*must be a plain number, known before": lambda: jax.jit(lambda w: L1(w).value(jnp.ones(2)))(1.0),
    r"weight = '\[1. 1.\]'": lambda: L1(np.ones(2)),
    "Box: high = None": lambda: prox.Box(0, None),
    "GroupLasso: axis = 0.5": lambda: prox.GroupLasso(1.0, axis=0.5),
    r"on\(3\): choose leaves by a string or a function": lambda: L1(1.0).on(3),
    "step = True must be a number": lambda: L1(1.0).prox(jnp.ones(2), True),
    r"unsupported operand .* \+": lambda: L1(1.0) + 3,
    r"unsupported operand .* \*": lambda: L1(1.0) * L1(1.0),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_types_are_refused(message):
    with pytest.raises(TypeError, match=message):
        WRONG[message]()


@pytest.mark.parametrize(
    ("phi", "limit"),
    [
        (MCP(1.0, theta=2.0), 2.0),
        (prox.SCAD(1.0, a=3.0), 2.0),
        (2 * MCP(1.0, theta=2.0), 1.0),
        (MCP(1.0, theta=2.0).on("*"), 2.0),
        (MCP(1.0, theta=2.0).on("a") + L0(1.0).on("b"), 2.0),
        (MCP(1.0, theta=2.0) + SquaredL2(0.125), 4.0),
    ],
    ids=repr,
)
def test_steps_of_one_over_rho_are_refused_or_give_nan(phi, limit):
    tree = {"a": jnp.array([0.3, 5.0, 0.0]), "b": jnp.array([1.0])}
    for step in (limit, 3 * limit, jnp.float32(limit), np.float64(limit)):
        with pytest.raises(ValueError, match=rf"(?s)step = {float(step):g} is too long.*ρ = .*step < 1/ρ = {limit:g}"):
            phi.prox(tree, step)
        with pytest.raises(ValueError, match="too long"):
            phi.check_step(step)
    traced = jax.jit(phi.prox)
    for step in (limit, 1.5 * limit, -0.1, np.nan, np.inf):
        assert np.all(np.isnan(traced(tree, step)["a"])), step
    assert np.all(np.isfinite(traced(tree, 0.99 * limit)["a"]))
    phi.check_step(0.99 * limit)


def test_regularizers_with_infinite_rho_take_any_step():
    for phi in (L0(1.0), prox.Rank(1.0)):
        phi.check_step(1e6)
        assert np.all(np.asarray(phi.prox(jnp.eye(2), 1e6)) == 0)
