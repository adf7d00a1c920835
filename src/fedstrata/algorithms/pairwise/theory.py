"""Hyper-parameters that theorems name, up to constants."""

from fedstrata.algorithms.pairwise.fedx1 import FedX1
from fedstrata.algorithms.pairwise.fedx2 import FedX2


def fedx1(*, clients: int, rounds: int, scale: float = 1.0) -> FedX1:
    """FedX1 with η = scale · N / R^(2/3) and K = R^(1/3) / N, of Theorem 1 in guo2022.

    Args:
        clients: N.
        rounds: R, the length of the run.
        scale: the constant of η.

    >>> fedx1(clients=4, rounds=64_000).local_steps
    10
    """
    local_steps = max(1, round(rounds ** (1 / 3) / clients))
    return FedX1(step_size=scale * clients / rounds ** (2 / 3), local_steps=local_steps)


def fedx2(*, examples: int, rounds: int, scale: float = 1.0) -> FedX2:
    """FedX2 with the settings of Theorem 2 in guo2022.

    They are γ = M^(1/3) / R^(2/3), β = 1 / (M^(1/6) R^(2/3)), η = scale / (M R)^(2/3) and K = (M R)^(1/3).

    Args:
        examples: M, the most examples of the first set that a client has.
        rounds: R, the length of the run.
        scale: the constant of η.

    >>> fedx2(examples=64, rounds=1000).local_steps
    40
    """
    m, r = float(examples), float(rounds)
    return FedX2(
        step_size=scale / (m * r) ** (2 / 3),
        local_steps=max(1, round((m * r) ** (1 / 3))),
        memory_weight=min(1.0, m ** (1 / 3) / r ** (2 / 3)),
        momentum=min(1.0, 1 / (m ** (1 / 6) * r ** (2 / 3))),
    )
