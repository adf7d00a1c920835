"""Hyper-parameters that theorems prescribe, for methods of this family."""

from typing import Any, TypeVar

from fedstrata.algorithms.nested.fed_dr_scgd import FedDRSCGD
from fedstrata.algorithms.nested.mfcgd import MFCGD

D = TypeVar("D", bound=FedDRSCGD)
M = TypeVar("M", bound=MFCGD)


def fed_dr_scgd(
    *,
    clients: int,
    rounds: int,
    alpha: float = 1.0,
    eta: float = 1.0,
    gamma: float = 1.0,
    method: type[D] = FedDRSCGD,
) -> D:
    r"""Fed-DR-SCGD with the constants of Remark 4.3 of gao2024, for T = rounds · p steps.

    $$ \alpha = O(1/N), \qquad \eta = O(N^{2/3}/T^{1/3}), \qquad p = S = \lceil T^{1/3}/N^{2/3} \rceil $$

    The paper gives orders of magnitude only. The constants depend on smoothness and bounds of the levels.

    Args:
        clients: N.
        rounds: how many averagings.
        alpha: the constant in α = alpha/N.
        eta: the constant in η = eta N^{2/3}/T^{1/3}.
        gamma: γ.
        method: `FedDRSCGD` or one of its variants.

    >>> fed_dr_scgd(clients=8, rounds=1000).local_steps
    4
    """
    steps = 1
    while steps < (rounds * steps) ** (1 / 3) / clients ** (2 / 3):  # T contains p
        steps += 1
    size = eta * clients ** (2 / 3) / (rounds * steps) ** (1 / 3)
    momentum = alpha / clients * size**2
    if momentum > 1:
        raise ValueError(
            f"theory.fed_dr_scgd: a = αη² = {momentum:g} must be at most 1; take a smaller alpha or eta, or more rounds"
        )
    return method(gamma * size, momentum, steps, init_batch_size=steps)


def mfcgd(
    *,
    k: float,
    n: float,
    c1: float,
    c2: float,
    c3: float,
    gamma: float = 1.0,
    local_steps: int = 1,
    method: type[M] = MFCGD,
    **options: Any,
) -> M:
    r"""MFCGD with the schedules of Theorems 1 and 2 of huang2022.

    $$ \eta_t = k/(n+t)^{1/3}, \qquad \alpha_{t+1} = c_1 \eta_t^2, \qquad \beta_{t+1} = c_2 \eta_t^2, \qquad
       \varrho_{t+1} = c_3 \eta_t^2, \qquad t = 1, 2, \dots $$

    The theorems bound the constants in terms of smoothness, bounds of the gradients and q. The paper's orders are
    n = O(q³) with q = T^{1/3}, and O(1) for the others. The first batch is q.

    Args:
        k: the numerator of η_t.
        n: the offset of η_t.
        c1: the constant of α.
        c2: the constant of β.
        c3: the constant of ϱ.
        gamma: γ.
        local_steps: q.
        method: `MFCGD` or one of its variants.
        **options: other hyper-parameters, such as radii, or ρ of `AdaMFCGD`.

    >>> method = mfcgd(k=1.0, n=8.0, c1=2.0, c2=2.0, c3=2.0, local_steps=2)
    >>> round(method.value_momentum(0), 9), method.init_batch_size
    (0.5, 2)
    """
    given = {"k": k, "n": n, "c1": c1, "c2": c2, "c3": c3, "gamma": gamma}
    for constant, value in given.items():
        if not value > 0:
            raise ValueError(f"theory.mfcgd: {constant}={value!r} must be > 0")
    number = lambda t: t.astype(float) if hasattr(t, "astype") else t  # int32 would give single precision
    eta = lambda t: k / (n + number(t)) ** (1 / 3)
    momentum = lambda c: lambda step: c * eta(step) ** 2  # step counts from 0: α_t at t = step + 1
    for constant in ("c1", "c2", "c3"):
        first = given[constant] * eta(0) ** 2
        if first > 1:
            raise ValueError(
                f"theory.mfcgd: the first momentum {constant} η_0² = {first:g} must be at most 1; take n >= "
                f"{k**3 * given[constant] ** 1.5:g}, or a smaller {constant} or k"
            )
    schedules: dict[str, Any] = {
        "step_size": lambda step: gamma * eta(step + 1),
        "value_momentum": momentum(c1),
        "jacobian_momentum": momentum(c2),
        "gradient_momentum": momentum(c3),
    }
    return method(local_steps=local_steps, **schedules, **{"init_batch_size": local_steps, **options})
