"""The choice of the step sizes. To repeat it:

    python -m fedstrata.experiments.site_study.tuning hospitals

Every method, and a site alone, tries the same steps on twenty divisions that no reported run uses; the step with the
best mean AUC on their validation rows wins.
"""

import sys
import warnings
from collections.abc import Iterator, Sequence

import numpy as np

from fedstrata.experiments import get
from fedstrata.experiments.site_study.methods import STEPS
from fedstrata.experiments.site_study.study import ALL, ALONE, AXIS, Study

DIVISIONS = tuple(range(1000, 1020))  # with five, the choice is mostly noise
CRITERION = "valid/auc"


def tuned(
    experiment: Study, rounds: int | None = None, divisions: Sequence[int] = DIVISIONS
) -> Iterator[tuple[str, float, dict[float, float]]]:
    """For each method, and "alone": the chosen step, and the mean criterion of every step.

    Args:
        experiment: the experiment.
        rounds: of every run; None takes the experiment's.
        divisions: their seeds.
    """
    from fedstrata.simulate.result import DivergenceWarning

    setup = experiment.build()
    last = rounds or experiment.rounds
    for name in experiment.methods:
        algorithm = experiment.algorithm(name)
        options = experiment.run_options(algorithm, setup, rounds=last, seeds=list(divisions), evaluate_every=last)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DivergenceWarning)
            history = experiment.simulate(algorithm, setup, **options, sweep={"step_size": list(STEPS)}).history
        if name != ALONE:
            yield name, *_best(history.last(CRITERION))
            continue
        yield name, *_best(history.select(**{AXIS: ALL}).last(CRITERION))
        sites = [site for site in history.axes[AXIS] if site != ALL]
        yield "alone", *_best(np.mean(history.select(**{AXIS: sites}).last(CRITERION), axis=0))


def _best(values: np.ndarray) -> tuple[float, dict[float, float]]:
    """The best step; values: (steps, divisions). A step that diverged on any of them is excluded."""
    means = values.mean(axis=-1)
    return STEPS[int(np.nanargmax(means))], dict(zip(STEPS, means.tolist(), strict=True))


def main(names: Sequence[str]) -> None:
    for name in names:
        experiment = get(name)
        if not isinstance(experiment, Study):
            raise SystemExit(f"{name} is no experiment of this kind; hospitals and clinics are such experiments")
        for method, step, means in tuned(experiment):
            edge = " (an end of the grid)" * (step in (STEPS[0], STEPS[-1]))
            tried = ", ".join(f"{s:g}: {m:.4f}" for s, m in means.items())
            print(f"{name} {method}: {step:g}{edge}; {tried}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
