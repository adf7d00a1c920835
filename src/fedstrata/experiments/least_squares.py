"""Least squares with heterogeneous clients: FedAvg stalls at a distance from the minimum, SCAFFOLD reaches it.

Clients differ in slopes and in the spread of their features, batches are whole shards, and all methods take the same
steps: curves differ by drift alone. The optimum is known, so the distance to it is recorded.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fedstrata.experiments.base import Experiment, Setup

SAME = {"step_size": 0.05, "local_steps": 10}


def build(clients: int = 10, rows: int = 60, features: int = 20, spread: float = 1.0, seed: int = 0) -> Setup:
    """Synthetic data: client i has slopes w + spread w_i and features of scale 0.5 to 1.5.

    Args:
        clients: how many.
        rows: of each client.
        features: how many.
        spread: how much the clients' slopes differ.
        seed: of everything random in the data.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from fedstrata.data import Federation
    from fedstrata.models import Linear
    from fedstrata.problems.average import Average
    from fedstrata.problems.base import Metric
    from fedstrata.problems.losses import Regression

    rng = np.random.default_rng(seed)
    shared = rng.normal(size=features)
    parts = []
    for _ in range(clients):
        x = rng.uniform(0.5, 1.5, features) * rng.normal(size=(rows, features))
        slopes = shared + spread * rng.normal(size=features)
        parts.append({"x": x, "y": x @ slopes + 0.1 * rng.normal(size=rows)})
    best = optimum(parts)

    def distance(params: Any, example: Any) -> Any:
        """The distance of the parameters to the minimum of the objective; the same for every example."""
        error = jnp.concatenate([params["weight"].reshape(-1), params["bias"]]) - jnp.asarray(
            best, params["bias"].dtype
        )
        return jnp.linalg.norm(error)

    kind = jax.dtypes.canonicalize_dtype(np.float64)
    data = [{name: values.astype(kind) for name, values in part.items()} for part in parts]
    problem = Average(Regression(Linear(features)), metrics={"distance": Metric(distance, "min")})
    return Setup(problem, Federation.from_clients(data))


def optimum(parts: Sequence[Mapping[str, Any]]) -> Any:
    """The minimum of the mean of the clients' mean squared errors, slopes first and intercept last.

    Args:
        parts: the data of each client.
    """
    import numpy as np

    normal, right = 0.0, 0.0
    for part in parts:
        x = np.column_stack([part["x"], np.ones(len(part["x"]))])
        normal, right = normal + x.T @ x / len(x), right + x.T @ part["y"] / len(x)
    return np.linalg.solve(normal, right)


EXPERIMENT = Experiment(
    name="least_squares",
    summary="synthetic least squares of 10 heterogeneous clients, optimum known: drift of FedAvg against SCAFFOLD",
    build=build,
    rounds=100,
    batch_size="all",
    seeds=1,
    methods={
        "CentralSGD": SAME,
        "FedAvg": SAME,
        "FedProx": {**SAME, "mu": 1.0},
        "SCAFFOLD": SAME,
        "FedSGD": {"step_size": 0.05},
    },
    common=SAME,
    panels=("distance", "stationarity"),
)
