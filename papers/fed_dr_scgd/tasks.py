"""The risk-averse portfolio problem on returns that are divided among clients, with its optimum known."""

import numpy as np

from fedstrata.experiments.base import Setup

from .optimum import Moments, on_simplex, unconstrained
from .returns import returns

UNITS = {"percent": 1.0, "decimal": 0.01}


def build(
    data: str = "us_100_size_op_daily",
    clients: int = 8,
    split: str = "time",
    eps: float = 0.01,
    floor: float = 0.01,
    constraint: str = "none",
    unit: str = "percent",
    risk_aversion: float = 1.0,
    missing: str = "zero",
    days: int = 0,
    seed: int = 0,
) -> Setup:
    r"""Minimise $\lambda \sqrt{\mathrm{Var}(r^\top x) + \epsilon} - E[r^\top x]$ over x, or over the budget simplex.

    Args:
        data: a US set of 13,781 days × 100 portfolios (us_100_size_bm_daily, us_100_size_op_daily,
            us_100_size_inv_daily); `developed`, whose six regions of 7,240 days × 25 portfolios (by size and
            book-to-market) are the six clients, where Global and Global ex US are made of the other four; or
            `synthetic`, which also replaces files that are missing.
        clients: how many.
        split: `time` gives each client a period; `iid` shuffles days first. Every client gets the same number of days.
            The remainder (less than one per client) is left out, so that means over clients are means over days.
        eps: a guard of the root, in the square of the unit.
        floor: another one; 0 is none.
        constraint: none or simplex.
        unit: percent or decimal; steps are not comparable between them.
        risk_aversion: λ.
        missing: of −99.99, see `returns`.
        days: the number of days, from the first; 0: all.
        seed: of everything random in the data.
    """
    import jax.numpy as jnp

    from fedstrata.data import Federation
    from fedstrata.data.sources.dataset import pick

    from .problem import portfolio

    pick("split of portfolio", split, ("time", "iid"))
    pick("constraint of portfolio", constraint, ("none", "simplex"))
    scale = UNITS[pick("unit of portfolio", unit, tuple(UNITS))]
    tables = returns(data, missing, seed)
    tables = [(name, scale * (r[:days] if days else r)) for name, r in tables]
    if len(tables) == 1:
        parts, names = divided(tables[0][1], clients, split, seed), None
    else:
        names, parts = zip(*tables, strict=True)
    federation = Federation.from_clients([{"r": jnp.asarray(r)} for r in parts], names=names)
    solve = on_simplex if constraint == "simplex" else unconstrained
    best = solve(Moments.of(federation), risk_aversion, eps, floor)
    guarded = {"eps": eps, "floor": floor or None}
    problem = portfolio(parts[0].shape[1], best.value, risk_aversion, constraint == "simplex", **guarded)
    return Setup(problem, federation)


def divided(r: np.ndarray, clients: int, split: str, seed: int) -> list[np.ndarray]:
    """Equal shards of whole days, in order or shuffled; the remainder is left out."""
    each = len(r) // clients
    if not each:
        raise ValueError(f"portfolio: {clients} clients cannot share {len(r)} days; take fewer clients or more days")
    order = np.arange(len(r)) if split == "time" else np.random.default_rng(seed).permutation(len(r))
    return [r[part] for part in order[: clients * each].reshape(clients, each)]
