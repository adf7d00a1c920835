"""The choice of the experiments' hyper-parameters. To repeat it:

    python -m fedstrata.experiments.tuning digits

Every method gets its grid (the same step sizes for all) and `fs.tune`. A fifth of each client's training rows is held
out. The setting with the lowest mean loss on them after the last round wins, on seeds that no reported run uses.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fedstrata.experiments import Experiment, Setup, get

if TYPE_CHECKING:
    from fedstrata.simulate.tune import Tuned

SEEDS = (1000, 1001, 1002)


def tuned(experiment: Experiment, rounds: int | None = None) -> Iterator[tuple[str, "Tuned"]]:
    """The choice for every method that has a grid, one after another.

    Args:
        experiment: the experiment.
        rounds: of every run; None takes the experiment's.
    """
    from fedstrata.simulate.tune import tune

    setup = experiment.build()
    setup = Setup(setup.problem, setup.federation.hold_out("valid", 0.2, seed=1))
    for name, grid in experiment.grids.items():
        start = {key: values[0] for key, values in grid.items()}
        algorithm = experiment.algorithm(name, **start)
        last = rounds or experiment.rounds
        only_end = {"evaluate_every": last, "stationarity": False, "evaluate": ["valid"]}
        options = experiment.run_options(algorithm, setup, rounds=last, seeds=list(SEEDS)) | only_end
        yield name, tune(setup.problem, algorithm, setup.federation, grid, final_seeds=[0], **options)


def main(names: Sequence[str]) -> None:
    for name in names:
        for method, found in tuned(get(name)):
            edge = f" (at the edge of its grid: {', '.join(found.at_edge)})" if found.at_edge else ""
            print(f"{name} {method}: {found.chosen}{edge}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
