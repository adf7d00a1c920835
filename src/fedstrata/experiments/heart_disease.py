"""Heart disease in four real hospitals with different patients and different numbers of them: logistic regression.

The hyper-parameters below are those that `python -m fedstrata.experiments.tuning heart_disease` prints.
"""

from fedstrata.experiments.base import Experiment, Setup, grids

STEPS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


def build(l2: float = 0.001, seed: int = 0) -> Setup:
    """The four hospitals as they are, a quarter of each for tests.

    Args:
        l2: the weight of the squared norm in the objective.
        seed: the seed of the division into train and test.
    """
    from fedstrata.data import federate
    from fedstrata.models import Linear
    from fedstrata.problems.average import Average
    from fedstrata.problems.losses import Classification

    federation = federate("heart_disease", seed=seed, test=0.25).impute().standardize()
    features = federation["train"].examples["x"].shape[1]
    return Setup(Average(Classification(Linear(features), l2=l2)), federation)


EXPERIMENT = Experiment(
    name="heart_disease",
    summary="patients of four real hospitals, logistic regression; needs the files of heart_disease",
    build=build,
    rounds=60,
    batch_size=16,
    methods={
        "CentralSGD": {"step_size": 0.03, "local_steps": 10},
        "FedAvg": {"step_size": 0.03, "local_steps": 10},
        "FedProx": {"step_size": 0.03, "local_steps": 10, "mu": 1.0},
        "SCAFFOLD": {"step_size": 0.03, "local_steps": 10},
        "FedAdam": {"step_size": 1.0, "local_steps": 10, "server_step_size": 0.1},
    },
    common={"step_size": 0.1, "local_steps": 10},
    grids=grids(STEPS, mu=(0.01, 0.1, 1.0, 10.0), server_step_size=(0.003, 0.01, 0.03, 0.1, 0.3, 1.0)),
)
