"""Meta-learning with one task per client: find parameters from which one gradient step leads to a good model.

Sinusoids as in finn2017, and Omniglot's characters. FedAvg minimises the mean of the losses before adaptation and is
measured, like all others, after it. With `--data steps=2` the problem has three levels: two steps of adaptation. The
hyper-parameters are those that `fedstrata reproduce mfcgd --scale full` chooses on sinusoids.
"""

from fedstrata.experiments.base import Experiment

from .maml_tasks import build

SAME = {"step_size": 0.18, "local_steps": 5}

EXPERIMENT = Experiment(
    name="maml",
    summary="meta-learning of sinusoids (or Omniglot) with a task at each of 10 clients: loss after adaptation",
    build=build,
    rounds=100,
    batch_size=10,
    methods={
        "FedAvg": {**SAME, "step_size": 0.312},
        "ComFedL": SAME,
        "LocalMOML": {**SAME, "value_momentum": 0.5},
        "LocalSCGDM": {**SAME, "value_momentum": 0.9, "momentum": 0.2},
        "CompositionalFedNest": {**SAME, "step_size": 0.06, "value_momentum": 1.0},
        "MFCGD": {**SAME, "value_momentum": 0.5},
        "AdaMFCGD": {**SAME, "step_size": 0.054, "value_momentum": 0.5},
        "TrackedMFCGD": {**SAME, "value_momentum": 0.5},
    },
    common=SAME,
    panels=("objective", "new/loss"),
)
