"""One case per algorithm: hyper-parameters that suit the test problem, and what theory states for it.

A new algorithm joins the common checks by its subclass alone; it needs an entry here, or they fail and say so.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from references import bent, bilevel, composite, least_squares, nested, pairwise, ranking, soft, squared_error

import fedstrata as fs
from fedstrata.algorithms.bilevel.base import BilevelMethod
from fedstrata.algorithms.nested.base import NestedMethod
from fedstrata.algorithms.pairwise.base import PairwiseMethod

TASK = least_squares()
COMPOSITE = composite()
NESTED = {inner: nested(inner) for inner in ("global", "client")}
PAIRWISE = {"linear": pairwise(None), "bent": pairwise(bent)}
RANKING = ranking()
BILEVEL = {level: bilevel(level) for level in ("global", "client")}
START = np.array([0.3, -0.2, 0.5])


class Scored(eqx.Module):
    """The squared error of a model, so that methods for fairness find decisions in it: is wᵀx above 0?"""

    model: Callable = lambda w, x: jnp.dot(w, x)

    def __call__(self, w, example):
        return squared_error(w, example)


class FairSquares(fs.Fair):
    def positive(self, example):
        return example["y"] > 0


FAIR = TASK._replace(problem=FairSquares(Scored(), group=lambda e: (e["x"][1] > 0).astype(jnp.int32), groups=2))


class Case(NamedTuple):
    algorithm: fs.Algorithm
    one_step: Callable  # (x, ∇f) -> the next x with one client, one local step and full batches: the centralised method
    exact: bool  # whether constant steps reach the optimum although clients differ (full batches, full participation)


def task_of(algorithm: fs.Algorithm):
    """A problem of the kind that the algorithm solves, with its optimum."""
    if isinstance(algorithm, NestedMethod):
        return NESTED[algorithm.solves]
    if isinstance(algorithm, BilevelMethod):
        return BILEVEL[algorithm.solves]
    if isinstance(algorithm, fs.CODAPlus | fs.CODASCA):
        return RANKING
    if isinstance(algorithm, PairwiseMethod):
        return PAIRWISE["linear" if isinstance(algorithm, fs.FedX1 | fs.PairSGD) else "bent"]
    needed = algorithm.oracle
    return next(task for task in (TASK, COMPOSITE, FAIR) if needed is None or issubclass(task.problem.Oracle, needed))


def gradient_step(size):
    return lambda x, grad: x - size * grad(x)


def adam_step(x, grad, size=0.1, server=0.02, beta1=0.9, beta2=0.99, tau=1e-3):
    delta = -size * grad(x)
    m, v = (1 - beta1) * delta, beta2 * tau**2 + (1 - beta2) * delta**2
    return x + server * m / (np.sqrt(v) + tau)


def yogi_step(x, grad, size=0.1, server=0.02, beta1=0.9, beta2=0.99, tau=1e-3):
    delta = -size * grad(x)
    m, v = (1 - beta1) * delta, tau**2 - (1 - beta2) * delta**2 * np.sign(tau**2 - delta**2)
    return x + server * m / (np.sqrt(v) + tau)


def prox(z, step):
    return soft(z, step * COMPOSITE.weight)


def normal_map_step(z, grad, step=0.09, gamma=0.5):
    x = prox(z, gamma)
    return prox(z - step * (grad(x) + (z - x) / gamma), gamma)


def proximal_step(size, start=None):
    """x ← prox(x − size ∇f(x)) from the proximal start that the method makes of its parameters."""

    def step(x, grad):
        x = prox(x, size if start is None else start)
        return prox(x - size * grad(x), size)

    return step


def mirror_step(x, grad):
    x = prox(x, 0.1)
    return prox(x + 0.9 * (prox(x - 0.1 * grad(x), 0.1) - x), 0.09)


def adaptive_step(x, grad, size=0.04, theta=0.9, rho=1.0):
    return x - size * grad(x) / (np.sqrt((1 - theta) * grad(x) ** 2) + rho)


def fedreg_step(x, grad, size=0.1, strength=0.01):
    """One client (1 of the task): the gradient of the gap between group means of the sigmoid, over y > 0."""
    data = TASK.federation["train"].shard(1)
    chance = 1 / (1 + np.exp(-data["x"] @ x))
    positive = [(data["y"] > 0) & ((data["x"][:, 1] > 0) == k) for k in (False, True)]
    means = [chance[rows].mean() for rows in positive if rows.any()]
    slopes = [(chance * (1 - chance))[rows] @ data["x"][rows] / rows.sum() for rows in positive if rows.any()]
    gap = slopes[np.argmax(means)] - slopes[np.argmin(means)] if len(means) == 2 else 0 * x
    return x - size * (grad(x) + strength * gap)


def fair_step(x, grad, size=0.1, q=1.0):
    shard = TASK.federation["train"].shard(1)
    loss, g = np.mean(0.5 * (shard["x"] @ x - shard["y"]) ** 2), grad(x)
    return x - size * g / (1 + size * q * (g @ g) / loss)


def hyper_step(size):
    """One step on the hypergradient of client 1, at y = 0."""
    return lambda x, grad: x - size * BILEVEL["client"].hypergradient(1, x, np.zeros(3))


def nest_step(terms, size=0.06, lower=0.1, neumann=0.25):
    """FedNest with one client: a step in y, a truncated series, a step in x."""

    def step(x, grad):
        task = BILEVEL["global"]
        y, hessian = lower * (task.smooth.centres[1] + x), task.smooth.hessians[1] + np.eye(3)
        factors = [np.linalg.matrix_power(np.eye(3) - neumann * hessian, n) for n in range(terms)]
        p = neumann * np.sum(factors, axis=0) @ (task.smooth.gradient(1, y))
        return x - size * (task.weight * x + p)

    return step


CASES = {
    "FedAvg": Case(fs.FedAvg(0.1, 4), gradient_step(0.1), exact=False),
    "FedProx": Case(fs.FedProx(0.1, 4, mu=0.5), gradient_step(0.1), exact=False),
    "FedSGD": Case(fs.FedSGD(0.1), gradient_step(0.1), exact=True),
    "CentralSGD": Case(fs.CentralSGD(0.1, 4), gradient_step(0.1), exact=True),
    "SCAFFOLD": Case(fs.SCAFFOLD(0.1, 4, server_step_size=0.9), gradient_step(0.09), exact=True),
    "FedOpt": Case(fs.FedOpt(0.1, 4, 0.5, optax.sgd), gradient_step(0.05), exact=False),
    "FedAdam": Case(fs.FedAdam(0.1, 4, 0.02), adam_step, exact=False),
    "FedYogi": Case(fs.FedYogi(0.1, 4, 0.02), yogi_step, exact=False),
    "FedNMap": Case(fs.FedNMap(0.1, 4, gamma=0.5, server_step_size=0.9), normal_map_step, exact=True),
    "Zhang2024": Case(fs.Zhang2024(0.1, 4, server_step_size=0.9), proximal_step(0.09), exact=True),
    "FedCanon": Case(fs.FedCanon(0.1, 4, server_step_size=0.9), proximal_step(0.09), exact=False),
    "SCAFFOLDServerProx": Case(fs.SCAFFOLDServerProx(0.1, 4, server_step_size=0.9), proximal_step(0.09), exact=False),
    "FedDA": Case(fs.FedDA(0.1, 4, server_step_size=0.9), proximal_step(0.09, start=0), exact=False),
    "FedMid": Case(fs.FedMid(0.1, 4, server_step_size=0.9), mirror_step, exact=False),
    # b = μ/2 + β = 4: the first step has length 1/4.
    "FastFedDA": Case(fs.FastFedDA(0.5, 3.75, local_steps=4), proximal_step(0.25, start=0), exact=False),
    "FedAvgLocalProx": Case(fs.FedAvgLocalProx(0.1, 4), proximal_step(0.1), exact=False),
    "FedAvgServerProx": Case(fs.FedAvgServerProx(0.1, 4), proximal_step(0.1), exact=False),
    "FedDRSCGD": Case(fs.FedDRSCGD(0.04, 0.2, 4), gradient_step(0.04), exact=False),
    "SeparateDRSCGD": Case(fs.SeparateDRSCGD(0.04, 0.2, 4), gradient_step(0.04), exact=False),
    "AnchoredDRSCGD": Case(fs.AnchoredDRSCGD(0.03, 0.2, 4), gradient_step(0.03), exact=False),
    "LevelwiseDRSCGD": Case(fs.LevelwiseDRSCGD(0.04, 0.2, 4), gradient_step(0.04), exact=False),
    "LocalSCGDM": Case(fs.LocalSCGDM(0.04, 0.5, 0.5, 4), gradient_step(0.04), exact=False),
    "SMVR": Case(fs.SMVR(0.04, 0.2, 4), gradient_step(0.04), exact=False),
    "SCSC": Case(fs.SCSC(0.04, 0.2, 4), gradient_step(0.04), exact=False),
    # z = 0 at first, so that the first step stays where it is.
    "NLASG": Case(fs.NLASG(0.04, 0.2, 4), lambda x, grad: x, exact=False),
    "NLASGAveraged": Case(fs.NLASGAveraged(0.04, 0.2, 4), lambda x, grad: x, exact=False),
    "ComFedL": Case(fs.ComFedL(0.04, 4), gradient_step(0.04), exact=False),
    "LocalMOML": Case(fs.LocalMOML(0.04, 4), gradient_step(0.04), exact=False),
    "MFCGD": Case(fs.MFCGD(0.04, 4, 0.2), gradient_step(0.04), exact=False),
    "AdaMFCGD": Case(fs.AdaMFCGD(0.04, 4, 0.2, rho=1.0), adaptive_step, exact=False),
    "TrackedMFCGD": Case(fs.TrackedMFCGD(0.04, 4, 0.2), gradient_step(0.04), exact=True),
    "TrackedAdaMFCGD": Case(fs.TrackedAdaMFCGD(0.04, 4, 0.2, rho=1.0), adaptive_step, exact=True),
    "CompositionalFedNest": Case(fs.CompositionalFedNest(0.04, 0.5, 2), gradient_step(0.04), exact=False),
    "LevelwiseFedNest": Case(fs.LevelwiseFedNest(0.04, 0.5, 4), gradient_step(0.04), exact=True),
    "FedBiO": Case(fs.FedBiO(0.1, 0.15, 4), hyper_step(0.1), exact=False),
    "FedBiOAcc": Case(fs.FedBiOAcc(0.1, 0.15, 4, 0.1, 0.1, delta=1.0), hyper_step(0.1), exact=False),
    "AnchoredBiOAcc": Case(fs.AnchoredBiOAcc(0.1, 0.15, 4, 0.3, 0.3, delta=1.0), hyper_step(0.1), exact=False),
    "TrackedBiO": Case(fs.TrackedBiO(0.1, 0.15, 4), hyper_step(0.1), exact=True),
    "FedNest": Case(fs.FedNest(0.06, 0.1, 0.25, 4, terms=100, series="sum"), nest_step(100), exact=True),
    "LFedNest": Case(fs.LFedNest(0.06, 0.1, 0.25, 4, terms=6, series="sum"), nest_step(6), exact=False),
    "FedReg": Case(fs.FedReg(0.1, 4, strength=0.01), fedreg_step, exact=False),
    # At first μ = ρ, and the weighted loss is the mean; later it goes to the worst group's optimum.
    "FedMinMax": Case(fs.FedMinMax(0.1, 2e-4), gradient_step(0.1), exact=False),
    "AFL": Case(fs.AFL(0.1, 0.01), gradient_step(0.1), exact=False),
    "FCFL": Case(fs.FCFL(0.08, eps=1.0, stage_one=300, sharpness=0.1), gradient_step(0.08), exact=False),
    "QFFL": Case(fs.QFFL(0.1, 4, q=1.0), fair_step, exact=False),
    # Shuffled partners, the default, take longer to compile; one of the three has them.
    "FedX1": Case(fs.FedX1(0.02, 4), gradient_step(0.02), exact=False),
    "FedX2": Case(fs.FedX2(0.02, 4, momentum=0.5, draws="replacement"), gradient_step(0.01), exact=False),
    "TrackedX": Case(fs.TrackedX(0.02, 4, momentum=0.5, draws="replacement"), gradient_step(0.01), exact=True),
    "LocalPair": Case(fs.LocalPair(0.02, 4), gradient_step(0.02), exact=False),
    "SOX": Case(fs.SOX(0.04, 4, momentum=0.5), gradient_step(0.02), exact=True),
    "PairSGD": Case(fs.PairSGD(0.04, 4), gradient_step(0.04), exact=True),
    "CODASCA": Case(fs.CODASCA(0.1, 4, server_step_size=0.9), gradient_step(0.09), exact=True),
    "CODAPlus": Case(fs.CODAPlus(0.1, 4, server_step_size=0.9), gradient_step(0.09), exact=False),
    "TrackedSCGD": Case(fs.TrackedSCGD(0.04, 0.2, 4), gradient_step(0.04), exact=True),
}


def assert_same(a, b, rtol=1e-12):
    """Two runs came to the same: solutions, states and every recorded column but the time."""
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol / 10)
    jax.tree.map(close, (a.solutions, a.local, a.state), (b.solutions, b.local, b.state))
    for column in a.history.columns:
        if column != "seconds":
            np.testing.assert_allclose(a.history[column], b.history[column], rtol=rtol, atol=rtol, err_msg=column)
