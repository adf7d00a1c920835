"""MFCGD and AdaMFCGD on the tasks that their paper names: robust federated learning and meta-learning.

The paper's experiment sections are empty, so tasks, settings and lengths are ours. The claims are its sentences.
"""

from fedstrata.experiments.reproduction import Reproduction

from . import figures, maml, robust

EXPERIMENTS = (robust.EXPERIMENT, maml.EXPERIMENT)

REPRODUCTION = Reproduction(
    paper="mfcgd",
    title="Huang (2022): Faster Adaptive Momentum-Based Federated Methods for Distributed Composition Optimization",
    reference="huang2022",
    figures={1: figures.figure_1, 2: figures.figure_2, 3: figures.figure_3, 4: figures.figure_4},
    scales={
        "small": "a fifth of the rounds, and scikit-learn's digits instead of MNIST (minutes on two cores)",
        "full": "60 to 150 rounds, and MNIST; needs mnist and omniglot (about 40 minutes on two cores)",
    },
)
