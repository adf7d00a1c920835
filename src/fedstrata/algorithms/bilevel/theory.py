"""Hyper-parameters that theorems name. They are safe and small: expect thousands of rounds."""

from typing import Any

from fedstrata.algorithms.bilevel.fedbio import FedBiO
from fedstrata.algorithms.bilevel.fedbioacc import FedBiOAcc


def fedbio(
    *,
    steps: int,
    local_steps: int,
    mu: float,
    smoothness: float,
    h_smoothness: float,
    lower_step_size: float | None = None,
    **options: Any,
) -> FedBiO:
    r"""FedBiO with the constant steps of Theorem 5.1 in li2022: $\eta = \delta / T^{1/3}$ with the largest δ.

    Args:
        steps: T, the length of the run.
        local_steps: I.
        mu: μ, the strong convexity of g.
        smoothness: L of g.
        h_smoothness: $L_h$ of h and of the hypergradient.
        lower_step_size: γ, below 1/L (None: 0.9/L).
        **options: other hyper-parameters.

    >>> method = fedbio(steps=1000, local_steps=5, mu=1.0, smoothness=2.0, h_smoothness=3.0)
    >>> method.lower_step_size, round(method.step_size, 6)
    (0.45, 0.000249)
    """
    _positive("fedbio", steps=steps, mu=mu, smoothness=smoothness, h_smoothness=h_smoothness)
    if mu > smoothness:
        raise ValueError(f"theory.fedbio: mu={mu!r} is above smoothness={smoothness!r}; no function has that")
    gamma = 0.9 / smoothness if lower_step_size is None else lower_step_size
    if not 0 < gamma < 1 / smoothness:
        raise ValueError(f"theory.fedbio: lower_step_size={gamma!r} must be between 0 and 1/L = {1 / smoothness:g}")
    q, q1, q1_bar = 1 - mu * gamma / 2, 1 + mu * gamma / 4, 1 + 4 / (mu * gamma)
    stale = q1 * q**local_steps
    drift = ((1 - q) * (1 - stale)) ** 0.5 / (2 * h_smoothness**2 * local_steps * (q1_bar * stale) ** 0.5)
    delta = min(drift, 1 / (12 * h_smoothness * local_steps), mu * gamma / 2, 1.0)
    return FedBiO(delta / steps ** (1 / 3), gamma, local_steps, **options)


def fedbioacc(
    *,
    clients: int,
    sigma: float,
    mu: float,
    smoothness: float,
    h_smoothness: float,
    rho: float,
    local_steps: int = 1,
    method: type[FedBiOAcc] = FedBiOAcc,
    **options: Any,
) -> FedBiOAcc:
    r"""FedBiOAcc with the constants of Theorem 10.1 in li2022, and the largest steps γ and η that it allows.

    Args:
        clients: M.
        sigma: σ, the noise of the samples.
        mu: μ, the strong convexity of g.
        smoothness: L of g.
        h_smoothness: $L_h$ of h and of the hypergradient.
        rho: ρ, the Lipschitz constant of y(x).
        local_steps: I.
        method: `FedBiOAcc`, or `AnchoredBiOAcc` with the same constants.
        **options: other hyper-parameters.

    >>> method = fedbioacc(clients=4, sigma=1.0, mu=1.0, smoothness=2.0, h_smoothness=3.0, rho=1.0)
    >>> round(method.delta, 4), round(method.momentum * method.alpha(1.0) ** 2, 4) <= 1
    (0.8399, True)
    """
    _positive("fedbioacc", clients=clients, sigma=sigma, mu=mu, smoothness=smoothness, h_smoothness=h_smoothness)
    steps, short = local_steps, 1 - 1e-9  # the theorem's inequalities are strict
    delta = (clients * sigma) ** (2 / 3) / h_smoothness
    extra = sigma**2 / (24 * delta**3 * h_smoothness * steps)
    c_nu, c_omega = 160 * h_smoothness**2 + extra, 160 * smoothness**2 + extra
    offset = max(
        2 * sigma**2,
        delta**3,
        c_nu**1.5 * delta**3,
        c_omega**1.5 * delta**3,
        16**3 * steps**3 * clients**2 * sigma**2,
    )
    gamma = short * min(mu, 1 / (6 * h_smoothness))
    wide = 12 * (1 + rho**2) / steps**2 + 97 / 256 + gamma**2 / (2 * mu**2) + (1 + 16 / (mu * gamma)) * steps
    eta = short / max(4 * gamma / mu + 1 / (4 * steps), wide, 240 * h_smoothness**2 / (mu * gamma), mu / gamma)
    constants = {"momentum": c_nu, "lower_momentum": c_omega, "delta": delta, "offset": offset, "sigma": sigma}
    return method(eta, gamma, steps, **{**constants, **options})


def _positive(function: str, **values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"theory.{function}: {name}={value!r} must be > 0")
