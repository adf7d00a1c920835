"""Handwritten digits on twenty clients that have different digits.

The hyper-parameters below are those that `python -m fedstrata.experiments.tuning digits` prints.
"""

from fedstrata.experiments.base import Experiment, Setup, grids

STEPS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


def build(clients: int = 20, alpha: float = 0.3, seed: int = 0) -> Setup:
    """Scikit-learn's 8 x 8 digits, labels divided by a Dirichlet draw (hsu2019), a fifth of every client for tests.

    Args:
        clients: how many.
        alpha: of the Dirichlet draw; small values skew labels.
        seed: the seed of the division.
    """
    from fedstrata.data import Dirichlet, federate
    from fedstrata.models import MLP
    from fedstrata.problems.average import Average
    from fedstrata.problems.losses import Classification

    federation = federate("digits", Dirichlet(clients, alpha=alpha), seed=seed, test=0.2)
    return Setup(Average(Classification(MLP((64, 32, 10)))), federation)


EXPERIMENT = Experiment(
    name="digits",
    summary="digits of 20 clients with different label mixes (Dirichlet 0.3), MLP 64-32-10; no files needed",
    build=build,
    rounds=100,
    batch_size=16,
    methods={
        "CentralSGD": {"step_size": 0.3, "local_steps": 10},
        "FedAvg": {"step_size": 0.3, "local_steps": 10},
        "FedProx": {"step_size": 1.0, "local_steps": 10, "mu": 0.1},
        "SCAFFOLD": {"step_size": 0.3, "local_steps": 10},
        "FedAdam": {"step_size": 0.3, "local_steps": 10, "server_step_size": 0.01},
    },
    common={"step_size": 0.3, "local_steps": 10},
    grids=grids(STEPS, mu=(0.001, 0.01, 0.1, 1.0), server_step_size=(0.003, 0.01, 0.03, 0.1)),
)
