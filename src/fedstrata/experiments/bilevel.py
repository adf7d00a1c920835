"""A bilevel problem with heterogeneous clients: which methods reach a stationary point, and how far others end from it.

Every client has different quadratic upper and lower objectives, batches are whole shards, and all methods take the
same steps, five per round. With lower_level="client" every client solves its own lower problem, with "global" there is
one for all. Stationarity below about 1e-6 needs float64: set JAX_ENABLE_X64=1.
"""

from typing import Any

from fedstrata.experiments.base import Experiment, Setup

SAME = {"step_size": 0.05, "lower_step_size": 0.2, "local_steps": 5}


def build(
    lower_level: str = "client",
    clients: int = 4,
    rows: int = 10,
    dimension: int = 3,
    lower_dimension: int = 4,
    spread: float = 1.0,
    noise: float = 0.2,
    seed: int = 0,
) -> Setup:
    """f = ½|y − t|² + ½|x − c|² above, g = ½ yᵀA y − yᵀ(B x + b) below, with A, B, b, t and c by client and row.

    Args:
        lower_level: "client" (a y for each) or "global" (one for all).
        clients: how many.
        rows: of each client.
        dimension: of x.
        lower_dimension: of y.
        spread: how much clients differ.
        noise: how much the rows of a client differ, which matters for small batches.
        seed: of everything random in the data.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from fedstrata.data import Federation
    from fedstrata.problems.bilevel import Bilevel

    rng, kind = np.random.default_rng(seed), jax.dtypes.canonicalize_dtype(np.float64)
    p, d = dimension, lower_dimension
    shapes = {"A": (d, d), "B": (d, p), "b": (d,), "t": (d,), "c": (p,)}
    common = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    data = []
    for _ in range(clients):
        own = {name: common[name] + spread / 2 * rng.normal(size=shape) for name, shape in shapes.items()}
        each = {name: own[name] + noise * rng.normal(size=(rows, *shape)) for name, shape in shapes.items()}
        each["A"] = np.einsum("nij,nkj->nik", each["A"], each["A"]) / d + 0.7 * np.eye(d)
        data.append({name: values.astype(kind) for name, values in each.items()})
    train = Federation.from_clients(data)["train"]
    lower = lambda x, y, e: 0.5 * y @ e["A"] @ y - y @ (e["B"] @ x + e["b"])
    upper = lambda x, y, e: 0.5 * jnp.sum((y - e["t"]) ** 2) + 0.5 * jnp.sum((x - e["c"]) ** 2)
    options: dict[str, Any] = {"start": jnp.zeros(d, kind), "model": _Start(p), "lower_level": lower_level}
    problem = Bilevel(upper, lower, **options)
    return Setup(problem, Federation({"train": train, "valid": train}))


class _Start:
    """x = 0 for every seed, so that methods alone differ."""

    def __init__(self, size: int) -> None:
        self.size = size

    def init(self, key: object) -> object:
        import jax.numpy as jnp

        return jnp.zeros(self.size)


EXPERIMENT = Experiment(
    name="bilevel",
    summary="a synthetic bilevel problem of 4 heterogeneous clients: which methods reach a stationary point",
    build=build,
    rounds=400,
    batch_size="all",
    seeds=1,
    methods={
        "FedBiO": SAME,
        "FedBiOAcc": {**SAME, "delta": 1.0, "momentum": 0.05, "lower_momentum": 0.05},
        "AnchoredBiOAcc": {**SAME, "delta": 1.0, "momentum": 0.05, "lower_momentum": 0.05},
        "TrackedBiO": SAME,
    },
    common={**SAME, "neumann_step": 0.2},
    panels=("stationarity",),
)
