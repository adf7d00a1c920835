"""The experiment `fedx`: the methods for partial AUC, each on its problem, compared by ranking."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from fedstrata.experiments.base import Experiment, Setup

from .tasks import build

if TYPE_CHECKING:
    from fedstrata.core.algorithm import Algorithm
    from fedstrata.problems.base import Problem


@dataclass(frozen=True)
class Ranking(Experiment):
    """Methods for averages get cross-entropy, CODASCA the square loss, the others the loss of the experiment."""

    def problem_for(self, algorithm: "Algorithm", setup: Setup) -> "Problem":
        from fedstrata.problems.losses import Classification
        from fedstrata.problems.pairwise import pair_losses
        from fedstrata.problems.pairwise.oracle import PairwiseOracle

        from .problems import Held, Ranked, Squashed

        problem: Any = setup.problem
        if not isinstance(problem, Held):
            return problem
        network: Any = problem.score.model if isinstance(problem.score, Squashed) else problem.score
        if algorithm.oracle is not PairwiseOracle:
            return Ranked(Classification(network), ranks=problem.metrics)
        if type(algorithm).__name__ in ("CODAPlus", "CODASCA"):
            problem = Held(Squashed(network), pair_losses.Square(), metrics=problem.metrics)
        return self._bound(problem, setup)

    def _bound(self, problem: "Problem", setup: Setup) -> "Problem":
        """A problem that is bound to its federation can be checked before a run."""
        import jax

        from fedstrata.core.vector import Vector
        from fedstrata.data.sampling import sampler

        rule = sampler(cast(Any, self.batch_size))
        return problem.bind(Vector(problem.init(jax.random.key(0))), setup.federation, rule)

    def run_options(self, algorithm: "Algorithm", setup: Setup, **changed: Any) -> dict[str, Any]:
        """A pairwise step draws `batch_size` rows of each class; the other methods draw as many in all."""
        found = super().run_options(algorithm, setup, **changed)
        if type(self.problem_for(algorithm, setup)).__name__ == "Ranked" and isinstance(found["batch_size"], int):
            found["batch_size"] *= 2
        return {"stationarity": False, "evaluate": ["valid", "test"], **found}


STEP = {"local_steps": 32}  # steps are those that `fedstrata reproduce fedx --figure 3` chooses on ijcnn1

EXPERIMENT = Ranking(
    name="fedx",
    summary="partial AUC (FPR ≤ 0.3) of ijcnn1 or digits on 8 clients with different noise (guo2022, Table 1)",
    build=build,
    rounds=20,
    batch_size=32,
    seeds=3,
    methods={
        "SOX": {**STEP, "step_size": 1.0},
        "FedAvg": {**STEP, "step_size": 1.0},
        "CODASCA": {**STEP, "step_size": 2.3},
        "LocalPair": {**STEP, "step_size": 1.0, "momentum": 0.1},
        "FedX2": {**STEP, "step_size": 1.0},
        "TrackedX": {**STEP, "step_size": 1.0},
    },
    common={**STEP, "step_size": 0.1},
    panels=("test/pauc_0.3", "test/pauc_0.5"),
)
