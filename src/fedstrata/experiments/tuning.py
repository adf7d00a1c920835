"""How the hyper-parameters of the experiments were chosen; run it again with

    python -m fedstrata.experiments.tuning digits

Every method gets its grid (the same step sizes for all), on seeds that no reported run uses. A fifth of each client's
training rows is held out; the setting with the lowest mean loss on them after the last round wins.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedstrata.experiments import Experiment, Setup, get

SEEDS = (1000, 1001, 1002)
COLUMN = "valid/loss"


def tune(experiment: Experiment, seeds: Sequence[int] = SEEDS, rounds: int | None = None) -> dict[str, dict[str, Any]]:
    """The best setting of every method that has a grid, and its score."""
    setup = experiment.build()
    federation = setup.federation.hold_out("valid", 0.2, seed=1)
    setup = Setup(setup.problem, federation)
    out = {}
    for name, grid in experiment.grids.items():
        sweep = {key: list(values) for key, values in grid.items()}
        last = {"rounds": rounds or experiment.rounds, "evaluate_every": rounds or experiment.rounds}
        only = {"stationarity": False, "evaluate": ["valid"]}
        result = experiment.run(name, setup, sweep=sweep, seeds=list(seeds), **last, **only)
        scores = [(float(runs.mean(COLUMN)[-1]), setting) for setting, runs in result.history.settings()]
        good = [pair for pair in scores if np.isfinite(pair[0])]
        if not good:
            raise ValueError(f"tuning {experiment.name}: every setting of {name} diverged; widen its grid downwards")
        score, setting = min(good, key=lambda pair: pair[0])
        out[name] = {**setting, COLUMN: score}
    return out


def main(names: Sequence[str]) -> None:
    import warnings

    from fedstrata.runtime.result import DivergenceWarning

    warnings.simplefilter("ignore", DivergenceWarning)  # the ends of a grid are meant to be too far
    for name in names:
        experiment = get(name)
        for method, found in tune(experiment).items():
            at_end = [k for k, v in experiment.grids[method].items() if found[k] in (v[0], v[-1])]
            note = f"   (at the end of its grid: {', '.join(at_end)})" if at_end else ""
            print(f"{name} {method}: {found}{note}")


if __name__ == "__main__":
    main(sys.argv[1:])
