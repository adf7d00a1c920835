"""FedNMap's experiments: a shallow sigmoid network on label-sorted MNIST, and a sparse MobileNetV3 on CIFAR-10.

Choices that the paper leaves open are in `tasks`: hidden width, batch size, rounds, the weight of the l1
norm, and the replacement of batch normalisation.
"""

from fedstrata.experiments.base import Experiment
from fedstrata.experiments.reproduction import Reproduction

from . import mobile, shallow
from .tasks import mnist

EXPERIMENT = Experiment(
    name="fednmap",
    summary="elastic-net sigmoid network on MNIST of 20 clients sorted by label (huang2026, Fig. 2); needs mnist",
    build=mnist,
    rounds=100,
    batch_size=8,
    methods={
        "FedNMap": {"step_size": 0.1, "local_steps": 10, "gamma": 4.0},
        "Zhang2024": {"step_size": 0.1, "local_steps": 10},
        "FedCanon": {"step_size": 0.1, "local_steps": 10},
    },
    common={"step_size": 0.1, "local_steps": 10},
    panels=("stationarity", "test/accuracy"),
)

REPRODUCTION = Reproduction(
    paper="fednmap",
    title="Huang, Pu and Johansson (2026): Achieving Linear Speedup for Composite Federated Learning",
    reference="huang2026",
    figures={
        2: shallow.figure_2,
        3: shallow.figure_3,
        4: shallow.figure_4,
        5: shallow.figure_5,
        6: mobile.figure_6,
    },
    scales={
        "small": "100 rounds, 3 trials, and 40 rounds of a narrow MobileNet on 1,000 pictures (an hour on two cores)",
        "full": "2,000 rounds, and the whole MobileNet on 20,000 pictures (minutes on a GPU, days on a laptop)",
    },
)
