"""Tumours of ten clinics, most of which have mainly one diagnosis: logistic regression under strong label skew.

The hyper-parameters below are those that `python -m fedstrata.experiments.tuning breast_cancer` prints.
"""

from fedstrata.experiments.base import Experiment, Setup, grids

STEPS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


def build(clients: int = 10, alpha: float = 0.1, l2: float = 0.001, seed: int = 0) -> Setup:
    """Wisconsin breast cancer, standardised, labels divided by a Dirichlet draw (hsu2019), a fifth for tests.

    Args:
        clients: how many.
        alpha: of the Dirichlet draw; small values skew labels.
        l2: the weight of the squared norm in the objective.
        seed: the seed of the division.
    """
    from fedstrata.data import Dirichlet, federate
    from fedstrata.models import Linear
    from fedstrata.problems.average import Average
    from fedstrata.problems.losses import Classification

    federation = federate("breast_cancer", Dirichlet(clients, alpha=alpha), seed=seed, test=0.2).standardize()
    return Setup(Average(Classification(Linear(30), l2=l2)), federation)


EXPERIMENT = Experiment(
    name="breast_cancer",
    summary="tumours of 10 clinics under strong label skew (Dirichlet 0.1), logistic regression; no files needed",
    build=build,
    rounds=100,
    batch_size=8,
    methods={
        "CentralSGD": {"step_size": 0.1, "local_steps": 10},
        "FedAvg": {"step_size": 0.3, "local_steps": 10},
        "FedProx": {"step_size": 0.3, "local_steps": 10, "mu": 0.1},
        "SCAFFOLD": {"step_size": 0.1, "local_steps": 10},
        "FedAdam": {"step_size": 1.0, "local_steps": 10, "server_step_size": 0.1},
    },
    common={"step_size": 0.1, "local_steps": 10},
    grids=grids(STEPS, mu=(0.01, 0.1, 1.0, 10.0), server_step_size=(0.003, 0.01, 0.03, 0.1, 0.3, 1.0)),
)
