"""One row per regulariser: the leaves on which it acts, its definition in NumPy, and its curvature by theory.

The definitions are written from the formulas, independently of the package. Those of constraint sets tolerate 1e-9.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedstrata import prox

VECTORS = {"a": (3,), "b": (2, 2)}
MATRICES = {"a": (3, 4), "b": (4, 2)}


class Case(NamedTuple):
    regularizer: prox.Regularizer
    phi: Callable[[list[np.ndarray]], float]
    rho: float = 0.0
    shapes: dict[str, tuple[int, ...]] = VECTORS
    kinks: tuple[float, ...] = ()  # entries at which the formulas change, for step
    step: float = 0.7
    entrywise: bool = False  # φ is a sum over entries


def entries(function):
    return lambda leaves: float(sum(np.sum(function(x)) for x in leaves))


def joint(function):
    return lambda leaves: function(np.concatenate([x.ravel() for x in leaves]))


def inside(condition):
    return lambda v: 0.0 if condition(v) else math.inf


def each(function):
    return lambda leaves: float(sum(function(x) for x in leaves))


def mcp(x, weight, theta):
    x = np.abs(x)
    return np.where(x <= theta * weight, weight * x - x**2 / (2 * theta), theta * weight**2 / 2)


def scad(x, weight, a):
    x = np.abs(x)
    middle = (2 * a * weight * x - x**2 - weight**2) / (2 * (a - 1))
    return np.where(x <= weight, weight * x, np.where(x <= a * weight, middle, (a + 1) * weight**2 / 2))


def matrix(x):
    return x.reshape(len(x), -1)


def singular_values(x):
    return np.linalg.svd(matrix(x), compute_uv=False)


def rank(x):
    return float(np.linalg.matrix_rank(matrix(x), tol=1e-9))


def rows(x):
    return float(np.sum(np.linalg.norm(matrix(x), axis=1)))


def columns(x):
    return float(np.sum(np.linalg.norm(x, axis=0)))


def variation(x):
    return float(np.sum(np.abs(np.diff(x, axis=-1))))


TINY = 1e-9
CASES = {
    "Zero": Case(prox.Zero(), entries(lambda x: 0 * x), entrywise=True),
    "L1": Case(prox.L1(0.9), entries(lambda x: 0.9 * np.abs(x)), kinks=(0.63, -0.63), entrywise=True),
    "SquaredL2": Case(prox.SquaredL2(0.8), entries(lambda x: 0.8 * x**2), entrywise=True),
    "ElasticNet": Case(
        prox.ElasticNet(0.9, 0.4), entries(lambda x: 0.9 * np.abs(x) + 0.4 * x**2), kinks=(0.63, -0.63), entrywise=True
    ),
    "L0": Case(prox.L0(0.6), entries(lambda x: 0.6 * (x != 0)), rho=math.inf, entrywise=True),
    "MCP": Case(
        prox.MCP(0.8, theta=1.5), entries(lambda x: mcp(x, 0.8, 1.5)), 1 / 1.5, kinks=(1.2, -0.56), entrywise=True
    ),
    "SCAD": Case(
        prox.SCAD(0.7, a=3.0),
        entries(lambda x: scad(x, 0.7, 3.0)),
        rho=1 / 2,
        kinks=(0.49, -1.19, 2.1),
        entrywise=True,
    ),
    "SCAD long step": Case(
        prox.SCAD(0.7, a=3.0), entries(lambda x: scad(x, 0.7, 3.0)), 1 / 2, kinks=(2.1,), step=1.9, entrywise=True
    ),
    "GroupLasso": Case(prox.GroupLasso(0.9), each(lambda x: 0.9 * rows(x)), shapes=MATRICES | {"c": (2,)}),
    "GroupLasso columns": Case(prox.GroupLasso(0.9, axis=-1), each(lambda x: 0.9 * columns(x)), shapes=MATRICES),
    "GroupLasso scaled": Case(
        prox.GroupLasso(0.5, scaled=True), each(lambda x: 0.5 * math.sqrt(x.shape[1]) * rows(x)), shapes=MATRICES
    ),
    "GroupLasso leaves": Case(prox.GroupLasso(0.9, axis=None), each(lambda x: 0.9 * np.linalg.norm(x))),
    "NuclearNorm": Case(
        prox.NuclearNorm(0.9),
        each(lambda x: 0.9 * np.sum(singular_values(x))),
        shapes=MATRICES | {"c": (2, 2, 2)},
    ),
    "Rank": Case(prox.Rank(0.6), each(lambda x: 0.6 * rank(x)), rho=math.inf, shapes=MATRICES),
    "Box": Case(
        prox.Box(-0.5, 1.5),
        joint(inside(lambda v: np.all((v >= -0.5 - TINY) & (v <= 1.5 + TINY)))),
        kinks=(-0.5, 1.5),
        entrywise=True,
    ),
    "NonNegative": Case(prox.NonNegative(), joint(inside(lambda v: np.all(v >= -TINY))), entrywise=True),
    "LInfBall": Case(
        prox.LInfBall(1.3), joint(inside(lambda v: np.all(np.abs(v) <= 1.3 + TINY))), kinks=(1.3,), entrywise=True
    ),
    "Simplex": Case(
        prox.Simplex(2.0), joint(inside(lambda v: np.all(v >= -TINY) and abs(v.sum() - 2.0) < TINY)), kinks=(2.0, 0.2)
    ),
    "L1Ball": Case(prox.L1Ball(1.5), joint(inside(lambda v: np.abs(v).sum() <= 1.5 + TINY)), kinks=(1.5,)),
    "L2Ball": Case(prox.L2Ball(1.5), joint(inside(lambda v: np.linalg.norm(v) <= 1.5 + TINY)), kinks=(1.5,)),
    "TotalVariation": Case(
        prox.TotalVariation(0.9), each(lambda x: 0.9 * variation(x)), shapes={"a": (9,), "b": (3, 5), "c": (1,)}
    ),
    "scaled": Case(3 * prox.MCP(0.8, theta=6.0), entries(lambda x: 3 * mcp(x, 0.8, 6.0)), rho=0.5, entrywise=True),
    "chosen": Case(prox.L1(0.9).on("b"), lambda leaves: 0.9 * np.abs(leaves[1]).sum(), kinks=(0.63,)),
    "sum": Case(
        prox.MCP(0.8, theta=1.5).on("a") + 2 * prox.SquaredL2(0.3).on("b"),
        lambda leaves: float(mcp(leaves[0], 0.8, 1.5).sum() + 0.6 * (leaves[1] ** 2).sum()),
        rho=1 / 1.5,
    ),
    "weakly convex plus square": Case(
        prox.MCP(0.8, theta=1.5) + prox.SquaredL2(0.1),
        entries(lambda x: mcp(x, 0.8, 1.5) + 0.1 * x**2),
        rho=1 / 1.5 - 0.2,
        step=1.7,  # allowed although the penalty alone would refuse it
        entrywise=True,
    ),
    "set plus square": Case(
        prox.Simplex(2.0) + prox.SquaredL2(0.4),
        joint(lambda v: inside(lambda u: np.all(u >= -TINY) and abs(u.sum() - 2.0) < TINY)(v) + 0.4 * v @ v),
    ),
}


def points(case, count=6, seed=0):
    """Trees to take the prox of: random, with zeros and ties, on the kinks, all zero, all equal, far and near."""
    random = np.random.default_rng(seed)
    draw = lambda size=1.0: {name: size * random.normal(size=shape) for name, shape in case.shapes.items()}
    fill = lambda value: {name: np.full(shape, value) for name, shape in case.shapes.items()}
    trees = [draw(2.0) for _ in range(count)]
    trees += [{name: np.round(x) for name, x in draw(1.5).items()} for _ in range(count)]
    trees += [draw(20.0), draw(0.05)]
    trees += [fill(value) for value in (0.0, 1.0, -0.7, *case.kinks)]
    for kink in case.kinks:
        alone = fill(0.0)
        next(iter(alone.values())).flat[0] = kink
        trees.append(alone)
    return trees


def leaves_of(tree):
    return [np.asarray(x, np.float64) for x in tree.values()]


def flat(tree):
    return np.concatenate([x.ravel() for x in leaves_of(tree)])


def unflat(vector, like):
    ends = np.cumsum([np.size(x) for x in like.values()])
    parts = np.split(vector, ends[:-1])
    return {name: part.reshape(np.shape(x)) for (name, x), part in zip(like.items(), parts, strict=True)}
