"""Risk-averse portfolios: three nested levels on daily returns, where every client holds a period or a region.

Fed-DR-SCGD's experiment (gao2024, eq. 13 and 14). As published the objective is homogeneous, and since daily returns
have κ = μᵀΣ⁻¹μ far below λ² = 1 its minimiser is to buy nothing; `constraint="simplex"` requires a portfolio. The
optimum is known in both cases. Choices that the paper leaves open are in `tasks`.

a = 0.95 is the paper's, and the steps are those that `fedstrata reproduce fed-dr-scgd` chooses with it (figure 4; its
small scale leaves out LevelwiseDRSCGD, which gets the same). With a = 0.05 Fed-DR-SCGD needs its projection or separate
samples, and TrackedSCGD the latter.
"""

from fedstrata.experiments.base import Experiment
from fedstrata.experiments.reproduction import Reproduction

from . import fair, figures, rates
from .tasks import build

SAME = {"momentum": 0.95, "local_steps": 4}

EXPERIMENT = Experiment(
    name="portfolio",
    summary="risk-averse portfolio of 100 assets, 8 periods of time as clients, optimum known (gao2024, eq. 13)",
    build=build,
    rounds=200,
    batch_size=1,
    seeds=2,
    methods={
        "FedDRSCGD": {**SAME, "step_size": 1e-4},
        "LevelwiseDRSCGD": {**SAME, "step_size": 1e-4},
        "TrackedSCGD": {**SAME, "step_size": 1e-4},
        "SMVR": {**SAME, "step_size": 1e-4},
        "SCSC": {**SAME, "step_size": 1e-4},
        "NLASG": {**SAME, "step_size": 1e-4},
    },
    common={**SAME, "step_size": 1e-4},
    panels=("gap", "stationarity"),
)

REPRODUCTION = Reproduction(
    paper="fed-dr-scgd",
    title="Gao (2024): A Doubly Recursive Stochastic Compositional Gradient Descent Method for Federated Multi-Level "
    "Compositional Optimization",
    reference="gao2024",
    figures={
        1: figures.figure_1,
        2: figures.figure_2,
        3: figures.figure_3,
        4: fair.figure_4,
        5: fair.figure_5,
        6: fair.figure_6,
        7: rates.speed_up,
        8: rates.levels,
        9: rates.heterogeneity,
    },
    scales={
        "small": "a quarter of an epoch, 10 seeds, one of the data sets (about ten minutes on two cores)",
        "full": "two epochs with the paper's settings and one with tuned steps, 10 seeds (an hour or two on two cores)",
    },
)
