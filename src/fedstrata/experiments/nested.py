"""A nested problem with heterogeneous clients: which methods reach a stationary point, and how far others end from it.

Every client has different matrices at every level, batches are whole shards, and all methods take the same steps. With
inner="global" the levels are expectations over all clients. A method that averages its estimates of them, but computes
each from one client's data, stalls at a distance that no step size reduces. With inner="client" every client composes
its own levels, and only the client drift of ordinary federated learning remains. Stationarity below about 1e-6 needs
float64: set JAX_ENABLE_X64=1.
"""

from typing import Any

from fedstrata.experiments.base import Experiment, Setup

SAME = {"step_size": 0.03, "momentum": 0.05, "local_steps": 4}


def build(
    levels: int = 2,
    inner: str = "global",
    clients: int = 4,
    rows: int = 10,
    dimension: int = 3,
    spread: float = 1.0,
    noise: float = 0.2,
    seed: int = 0,
) -> Setup:
    """Inner levels y + ½ tanh(A y + b), the last ½|A y − b|² + 0.1|y|², with A and b by client, level and row.

    Args:
        levels: K.
        inner: "global" or "client": whose expectation an inner level is.
        clients: how many.
        rows: of each client.
        dimension: of x and of every inner level.
        spread: how much clients differ.
        noise: how much the rows of a client differ, which matters for small batches.
        seed: of everything random in the data.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from fedstrata.data import Federation
    from fedstrata.problems.nested import Nested

    rng, kind = np.random.default_rng(seed), jax.dtypes.canonicalize_dtype(np.float64)
    draw = lambda *shape: rng.normal(size=(*shape, dimension)) / (dimension**0.5 if len(shape) > 2 else 1)
    matrices, offsets = draw(levels, 1, dimension), draw(levels, 1)
    data = []
    for _ in range(clients):
        a = matrices + spread / 2 * draw(levels, 1, dimension) + noise * draw(levels, rows, dimension)
        b = offsets + spread * draw(levels, 1) + noise * draw(levels, rows)
        data.append({"a": np.moveaxis(a, 0, 1).astype(kind), "b": np.moveaxis(b, 0, 1).astype(kind)})

    def level(number: int) -> Any:
        image = lambda y, e: e["a"][number] @ y
        if number + 1 < levels:
            return lambda y, e: y + 0.5 * jnp.tanh(image(y, e) + e["b"][number])
        return lambda y, e: 0.5 * jnp.sum((image(y, e) - e["b"][number]) ** 2) + 0.1 * jnp.sum(y**2)

    start: Any = _Start(np.linspace(0.5, -0.5, dimension).astype(kind))
    coupling: Any = inner
    problem = Nested([level(k) for k in range(levels)], inner=coupling, model=start)
    return Setup(problem, Federation.from_clients(data))


class _Start:
    """The same start for every seed, so that methods alone differ."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def init(self, key: Any) -> Any:
        import jax.numpy as jnp

        return jnp.asarray(self.values)


EXPERIMENT = Experiment(
    name="nested",
    summary="a synthetic two-level problem of 4 heterogeneous clients: which nested methods reach a stationary point",
    build=build,
    rounds=1000,
    batch_size="all",
    seeds=1,
    methods={
        "FedDRSCGD": SAME,
        "AnchoredDRSCGD": SAME,
        "LevelwiseDRSCGD": SAME,
        "TrackedSCGD": SAME,
        "LocalSCGDM": {"step_size": 0.03, "value_momentum": 0.5, "momentum": 0.5, "local_steps": 4},
        "SMVR": SAME,
        "SCSC": SAME,
        "NLASG": SAME,
    },
    common=SAME,
    panels=("stationarity",),
)
