"""The experiment `fairness`: methods for a model and methods for weights, compared by their final models."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.experiments.base import Setup

from . import methods
from .tasks import DATA, build, chosen, to_weights
from .two_stage import TwoStage

if TYPE_CHECKING:
    from fedstrata.core.algorithm import Algorithm
    from fedstrata.problems.base import Problem
    from fedstrata.simulate.result import Result

ROUNDS = 400
STEP = 0.01  # chosen by `fedstrata reproduce fedbio --scale full` for every method on German Credit


@dataclass(frozen=True)
class Fairness(TwoStage):
    """Methods that average after every step get as many steps as the others, and so more rounds."""

    def estimator(self) -> Any:
        return methods.estimator(methods.BILEVEL[0])["hypergradient"]

    def run_options(self, algorithm: "Algorithm", setup: Setup, **changed: Any) -> dict[str, Any]:
        found = super().run_options(algorithm, setup, **changed)
        longer = methods.LOCAL_STEPS if type(algorithm).__name__ in methods.EVERY_STEP else 1
        found |= {name: longer * found[name] for name in ("rounds", "evaluate_every") if found.get(name)}
        return {**found, **methods.weighting(type(algorithm).__name__)}

    def to_weights(self, problem: Any) -> "Problem":
        return to_weights(problem)

    def pictures(self, results: "Mapping[str, Result]", data: Mapping[str, Any], folder: Any) -> None:
        """Accuracy against fairness, beside the usual picture."""
        from .pareto import Cloud, pareto

        last = lambda result, column: result.history.last(column).reshape(-1)
        points = {n: (last(r, "test/accuracy"), last(r, "test/eq_opp")) for n, r in results.items()}
        name, iid = DATA[chosen(str(data.get("data", "auto")))].title, data.get("iid", True)
        title = f"Fairness, {name}, {'I.I.D.' if iid else 'non-I.I.D.'} clients"
        note = "means and 95 % intervals over seeds; grey: methods that no other beats in both"
        pareto([Cloud("", points)], title, Path(folder) / "pareto.png", note)


EXPERIMENT = Fairness(
    name="fairness",
    summary="group-fair models of German Credit, Adult or synthetic data on 3 clients: accuracy and equal opportunity",
    build=build,
    rounds=ROUNDS,
    batch_size=32,
    seeds=3,
    methods={name: methods.settings(name, STEP, ROUNDS * methods.LOCAL_STEPS) for name in methods.METHODS},
    common={"step_size": STEP, "local_steps": methods.LOCAL_STEPS, "lower_step_size": STEP},
    panels=("test/eq_opp", "test/accuracy"),
    more_files=("pareto.png",),
)
