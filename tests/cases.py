"""One case per algorithm: hyper-parameters that suit the test problem, and what theory says about it there.

A new algorithm joins the common checks by its subclass alone; it needs an entry here, or they fail and say so.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import optax

import fedstrata as fs
from references import least_squares

TASK = least_squares()
START = np.array([0.3, -0.2, 0.5])


class Case(NamedTuple):
    algorithm: fs.Algorithm
    one_step: Callable  # (x, g) -> the next x with one client, one local step and full batches: the centralised method
    exact: bool  # whether constant steps reach the optimum although clients differ (full batches, full participation)


def gradient_step(size):
    return lambda x, g: x - size * g


def adam_step(x, g, size=0.1, server=0.02, beta1=0.9, beta2=0.99, tau=1e-3):
    delta = -size * g
    m, v = (1 - beta1) * delta, beta2 * tau**2 + (1 - beta2) * delta**2
    return x + server * m / (np.sqrt(v) + tau)


def yogi_step(x, g, size=0.1, server=0.02, beta1=0.9, beta2=0.99, tau=1e-3):
    delta = -size * g
    m, v = (1 - beta1) * delta, tau**2 - (1 - beta2) * delta**2 * np.sign(tau**2 - delta**2)
    return x + server * m / (np.sqrt(v) + tau)


CASES = {
    "FedAvg": Case(fs.FedAvg(0.1, 4), gradient_step(0.1), exact=False),
    "FedProx": Case(fs.FedProx(0.1, 4, mu=0.5), gradient_step(0.1), exact=False),
    "FedSGD": Case(fs.FedSGD(0.1), gradient_step(0.1), exact=True),
    "CentralSGD": Case(fs.CentralSGD(0.1, 4), gradient_step(0.1), exact=True),
    "Scaffold": Case(fs.Scaffold(0.1, 4, server_step_size=0.9), gradient_step(0.09), exact=True),
    "FedOpt": Case(fs.FedOpt(0.1, 4, 0.5, optax.sgd), gradient_step(0.05), exact=False),
    "FedAdam": Case(fs.FedAdam(0.1, 4, 0.02), adam_step, exact=False),
    "FedYogi": Case(fs.FedYogi(0.1, 4, 0.02), yogi_step, exact=False),
}
