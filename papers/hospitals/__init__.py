"""Heart disease in four real hospitals: rank the patients of all of them together, without moving a patient's data.

FedX1 and FedX2 compare patients of different hospitals through pooled scores, LocalPair only patients of one hospital.
FedAvg trains a logistic regression, CODASCA a min-max form of the square loss. PairSGD and SOX run on pooled data, and
PairSGD also on each hospital alone. Twenty seeds are twenty divisions into train (56 %), valid (14 %) and test (30 %).

The step sizes are those that `python -m fedstrata.experiments.site_study.tuning hospitals` prints: the same nine for
every method, chosen by the best mean validation AUC over twenty divisions that are not reported. Ranking does not
depend on the scale of scores: with small steps the methods tend to a multiple of their first direction, a difference of
class means. On so few patients that is hard to beat: for FedX2, LocalPair, CODASCA, SOX and a hospital alone the
smallest step of the grid was chosen.
"""

from fedstrata.experiments.base import Setup
from fedstrata.experiments.site_study.methods import LOCAL_STEPS, settings
from fedstrata.experiments.site_study.sites import Sites
from fedstrata.experiments.site_study.study import Study

__all__ = ["EXPERIMENT"]


def build(l2: float = 0.001, indicators: bool = False) -> Setup:
    """The four hospitals as they are; a seed of the run is a division of their patients.

    Args:
        l2: the weight of the squared norm in every method's objective.
        indicators: add a 0/1 column for each column with missing values.
    """
    from fedstrata.data import federate
    from fedstrata.experiments.site_study.sites import divided

    federation = federate("heart_disease", test=False, indicators=indicators)
    return Sites.of(lambda seed: divided(federation, seed), l2)


EXPERIMENT = Study(
    name="hospitals",
    summary="heart disease in 4 real hospitals: AUC of all together and of each; needs the files of heart_disease",
    build=build,
    rounds=100,
    batch_size=16,
    seeds=20,
    methods=settings(
        FedX2=0.0003, FedX1=0.001, FedAvg=0.01, LocalPair=0.0003, CODASCA=0.0003, SOX=0.0003, PairSGD=0.001
    ),
    common={"step_size": 0.001, "local_steps": LOCAL_STEPS},
    alone_step=0.0003,
    site="hospital",
)
