"""Hyper-parameters that theorems name. They are safe and small: expect thousands of rounds."""

import math

from fedstrata.algorithms.regularized.fednmap import FedNMap


def fednmap(
    *,
    smoothness: float,
    gap: float,
    noise: float,
    clients: int,
    rounds: int,
    local_steps: int,
    weak_convexity: float = 0.0,
) -> FedNMap:
    """FedNMap with the steps of (15) in huang2026, for nonconvex f, capped by the bounds of Theorem 5.

    Args:
        smoothness: L of every f_i.
        gap: Δ = ψ(x_0) − inf ψ.
        noise: σ, the deviation of one stochastic gradient.
        clients: n, all of which take part.
        rounds: T, the length of the run.
        local_steps: Q.
        weak_convexity: ρ of φ.

    >>> fednmap(smoothness=1.0, gap=1.0, noise=1.0, clients=20, rounds=1000, local_steps=10).gamma
    0.2
    """
    curvature, variance = weak_convexity + smoothness, noise**2
    gamma = 1 / (5 * curvature)
    m = max(1, math.ceil(math.sqrt(variance * rounds / (9 * curvature * gap * clients * local_steps))))
    cap = (1 - gamma * weak_convexity) / (100 * math.sqrt(smoothness**2 + 1 / gamma**2))
    both, local = cap / m, cap / (local_steps * math.sqrt(m))
    if variance > 0:  # without noise (15) has no bound, and the caps decide
        both = min(both, math.sqrt(clients * local_steps * gap / (variance * rounds * curvature)) / 320)
        first = 380 * (variance * rounds * local_steps**3 * curvature**3 / (clients * gap)) ** 0.25
        local = min(local, 1 / (first + 240 * math.sqrt(curvature * rounds * local_steps * variance / gap)))
    return FedNMap(local, local_steps, gamma, both / (local * local_steps))


def fednmap_pl(
    *,
    smoothness: float,
    pl: float,
    clients: int,
    rounds: int,
    local_steps: int,
    weak_convexity: float = 0.0,
    server_step_size: float = 1.0,
) -> FedNMap:
    """FedNMap with the steps of (19) in huang2026, under the Polyak–Łojasiewicz condition, capped by Theorem 8.

    Args:
        smoothness: L of every f_i.
        pl: μ, the modulus of the condition.
        clients: n, all of which take part.
        rounds: T, the length of the run.
        local_steps: Q.
        weak_convexity: ρ of φ.
        server_step_size: η_s, where the bound on the whole round allows it.

    >>> fednmap_pl(smoothness=1.0, pl=1.0, clients=20, rounds=1000, local_steps=10).gamma
    0.1
    """
    curvature = smoothness + weak_convexity + pl
    m = math.ceil(pl * rounds / (smoothness + weak_convexity))
    local = min(math.log(clients * local_steps * rounds) / (120 * rounds), 1 / 96) / (local_steps * curvature)
    both = min(server_step_size * local * local_steps, 1 / (120 * m * curvature))
    return FedNMap(local, local_steps, 1 / (5 * curvature), both / (local * local_steps))
