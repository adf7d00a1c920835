"""MNIST on a hundred clients with two digits each, ten clients per round (mcmahan2017, "pathological non-IID").

The hyper-parameters below are those that `python -m fedstrata.experiments.tuning mnist` prints.
"""

from fedstrata.experiments.base import Experiment, Setup, grids

STEPS = (0.03, 0.1, 0.3, 1.0)


def build(clients: int = 100, shards: int = 2, seed: int = 0) -> Setup:
    """The 60,000 training images by label shards, an MLP 784-32-10; MNIST's own test images, pooled.

    Args:
        clients: how many.
        shards: label shards of a client.
        seed: the seed of the division.
    """
    from fedstrata.data import LabelShards, federate
    from fedstrata.models import MLP
    from fedstrata.problems.average import Average
    from fedstrata.problems.losses import Classification

    federation = federate("mnist", LabelShards(clients, shards), seed=seed, flat=True)
    return Setup(Average(Classification(MLP((784, 32, 10)))), federation)


EXPERIMENT = Experiment(
    name="mnist",
    summary="MNIST of 100 clients with two digits each, 10 per round, MLP 784-32-10; needs the files of mnist",
    build=build,
    rounds=200,
    batch_size=32,
    cohort=10,
    methods={
        "CentralSGD": {"step_size": 0.3, "local_steps": 10},
        "FedAvg": {"step_size": 0.3, "local_steps": 10},
        "FedProx": {"step_size": 0.3, "local_steps": 10, "mu": 0.01},
        "SCAFFOLD": {"step_size": 0.1, "local_steps": 10},
        "FedAdam": {"step_size": 0.3, "local_steps": 10, "server_step_size": 0.01},
    },
    common={"step_size": 0.1, "local_steps": 10},
    grids=grids(STEPS, mu=(0.001, 0.01, 0.1), server_step_size=(0.003, 0.01, 0.03)),
)
