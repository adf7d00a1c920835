"""FedX: partial AUC, AUC with wrong labels and average precision of clients with different noise (guo2022).

`fedstrata run fedx` compares the methods for KL-OPAUC on ijcnn1 (or scikit-learn's digits if its file is missing);
`fedstrata reproduce fedx` writes the paper's tables and figures beside ours.
"""

from fedstrata.experiments.reproduction import Reproduction

from . import figures, rates
from .experiment import EXPERIMENT

__all__ = ["EXPERIMENT", "REPRODUCTION"]

REPRODUCTION = Reproduction(
    paper="fedx",
    title="Guo et al. (2022): FedX, Federated Learning for Compositional Pairwise Risk Optimization",
    reference="guo2022",
    figures={
        1: figures.figure_1,
        2: figures.figure_2,
        3: figures.figure_3,
        4: figures.figure_4,
        5: figures.figure_5,
        6: rates.speed_up,
    },
    scales={
        "small": "640 steps, four data sets that a CPU can do, 10 seeds (40 minutes on two busy cores)",
        "full": "CIFAR-10 with ResNet-18 (a GPU; see papers/fedx/cifar.py), and 2,560 steps on the others (hours)",
    },
)
