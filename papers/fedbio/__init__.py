"""Group fairness: Adult and German Credit among three clients, and the claims of li2022 (FedBiO).

FedAvg, FedReg, FedMinMax and FCFL train a model; FedBiO, FedBiOAcc and TrackedBiO first learn a weight for every group
on a small balanced validation set, and FedAvg then trains a model with these weights.
"""

from functools import partial

from fedstrata.experiments.reproduction import Reproduction

from . import experiment, figures, hyperclean
from .rates import speed_up

EXPERIMENTS = (experiment.EXPERIMENT, hyperclean.EXPERIMENT)

REPRODUCTION = Reproduction(
    paper="fedbio",
    title="Li et al. (2022): Local Stochastic Bilevel Optimization with Momentum-Based Variance Reduction",
    reference="li2022",
    figures={
        1: figures.figure_1,
        2: figures.figure_2,
        3: figures.figure_3,
        4: figures.figure_4,
        5: partial(speed_up, number=5),
    },
    scales={
        "small": "German Credit with 1,000 steps, Adult with 200 and I.I.D. clients only (ten minutes on two cores)",
        "full": "2,000 steps, both data sets and both divisions (about an hour on two cores)",
    },
)
