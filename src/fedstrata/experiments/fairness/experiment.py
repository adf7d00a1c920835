"""The experiment `fairness`: methods for a model and methods for weights, compared by the models that they end with."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.experiments.base import Experiment, Setup
from fedstrata.experiments.fairness import methods
from fedstrata.experiments.fairness.tasks import DATA, build, chosen, to_weights

if TYPE_CHECKING:
    from fedstrata.algorithm import Algorithm
    from fedstrata.problems.base import Problem
    from fedstrata.runtime.result import Result

ROUNDS = 100
STEP = 0.1  # what `fedstrata reproduce fedbio` chooses for most methods


@dataclass(frozen=True)
class Fairness(Experiment):
    """An experiment whose bilevel methods have two stages of `rounds` each: weights, and FedAvg with them.

    Methods that average after every step get as many steps as the others, so more rounds.
    """

    def settings(self, algorithm: "type[Algorithm]") -> dict[str, Any]:
        fields = {f.name for f in dataclasses.fields(algorithm)}
        estimator = methods.estimator(methods.BILEVEL[0]) if "hypergradient" in fields else {}
        return {**estimator, **super().settings(algorithm)}

    def run_options(self, algorithm: "Algorithm", setup: Setup, **changed: Any) -> dict[str, Any]:
        chosen = super().run_options(algorithm, setup, **changed)
        longer = methods.LOCAL_STEPS if type(algorithm).__name__ in methods.EVERY_STEP else 1
        for name in ("rounds", "evaluate_every"):
            if chosen.get(name):
                chosen[name] *= longer
        return {**chosen, **methods.weighting(type(algorithm).__name__)}

    def problem_for(self, algorithm: "Algorithm", setup: Setup) -> "Problem":
        """The problem that this algorithm is run on: weights for a bilevel method, otherwise the model."""
        from fedstrata.algorithms.bilevel.base import BilevelMethod
        from fedstrata.experiments.fairness.problems import Followed

        problem: Any = setup.problem
        return Followed.of(to_weights(problem)) if isinstance(algorithm, BilevelMethod) else problem

    def run(self, algorithm: "str | Algorithm", setup: Setup | None = None, **options: Any) -> "Result":
        setup = self.build() if setup is None else setup
        method = self.algorithm(algorithm) if isinstance(algorithm, str) else algorithm
        return self.simulate(method, setup, **self.run_options(method, setup, **options))

    def simulate(self, algorithm: "Algorithm", setup: Setup, **options: Any) -> "Result":
        """`fs.run`, twice for a bilevel method."""
        from fedstrata.runtime.run import run

        problem = self.problem_for(algorithm, setup)
        folder = options.get("checkpoint")
        first = run(problem, algorithm, setup.federation, **options)
        return first if problem is setup.problem else second_stage(first, setup, folder, options)

    def pictures(self, results: "Mapping[str, Result]", data: Mapping[str, Any], folder: Any) -> list[str]:
        """Accuracy against fairness, beside the usual picture."""
        from fedstrata.experiments.fairness.pareto import Cloud, pareto

        last = lambda result, column: result.history.last(column).reshape(-1)
        points = {n: (last(r, "test/accuracy"), last(r, "test/eq_opp")) for n, r in results.items()}
        name, iid = DATA[chosen(str(data.get("data", "auto")))].title, data.get("iid", True)
        title = f"Fairness, {name}, {'I.I.D.' if iid else 'non-I.I.D.'} clients"
        note = "means and 95 % intervals over seeds; grey: methods that no other beats in both"
        pareto([Cloud("", points)], title, Path(folder) / "pareto.png", note)
        return ["pareto.png"]


def second_stage(first: "Result", setup: Setup, folder: Any, options: Mapping[str, Any]) -> "Result":
    """FedAvg with the weights of every run of stage one; rounds, bytes, samples and seconds go on from its end.

    The step is that of the clients' own models in stage one.
    """
    from fedstrata.runtime.run import run
    from fedstrata.vector import Vector

    problem: Any = setup.problem
    runs = len(first.endings.reshape(-1))
    weights = np.asarray(first.problem.weights(first.solutions)).reshape(runs, -1)
    seeds = [int(seed) for seed in np.resize(first.history.seeds, runs)]
    steps = np.broadcast_to(_steps(first), first.endings.shape).reshape(-1)
    same = {k: v for k, v in options.items() if k not in ("seeds", "sweep", "checkpoint", "progress")}
    parts = []
    for number, (weight, seed, step) in enumerate(zip(weights, seeds, steps, strict=True)):
        kept: dict[str, Any] = {} if folder is None else {"checkpoint": Path(folder) / f"stage_two_{number}"}
        method = methods.method("FedAvg", float(step), 0)
        parts.append(run(problem.weighted(weight), method, setup.federation, seeds=[seed], **same, **kept))
    last, before = parts[0], first.history
    shape = first.endings.shape
    stacked = lambda arrays: np.concatenate(arrays).reshape((*shape, *arrays[0].shape[1:]))
    columns = {name: stacked([part.history[name] for part in parts]) for name in last.history.columns}
    for name in ("round", "bytes_up", "bytes_down", "samples", "seconds"):
        if name in columns:
            columns[name] = columns[name] + before.last(name)[..., None]
    import jax

    models = jax.tree.map(lambda *leaves: stacked([np.asarray(leaf) for leaf in leaves]), *[p.solutions for p in parts])
    return dataclasses.replace(
        first,
        history=type(before)(before.axes, columns),
        problem=problem,
        solutions=models if isinstance(models, Vector) else Vector(models),
        endings=np.array([p.endings.reshape(-1)[0] for p in parts]).reshape(shape),
        notes=[*first.notes, *(note for p in parts for note in p.notes)],
        seconds=first.seconds + sum(p.seconds for p in parts),
        compile_seconds=first.compile_seconds + sum(p.compile_seconds for p in parts),
        rounds=first.rounds + last.rounds,
    )


def _steps(first: "Result") -> np.ndarray:
    """The step of each run's lower level, along the axes of the history."""
    scale = methods.DELTA if type(first.algorithm).__name__ == "FedBiOAcc" else 1.0
    swept = first.history.axes.get("lower_step_size")
    if swept is None:
        return np.asarray(scale * float(first.algorithm.lower_step_size))
    at = list(first.history.axes).index("lower_step_size")
    return scale * np.asarray(swept).reshape([-1 if i == at else 1 for i in range(len(first.history.axes))])


SAME = {name: methods.settings(name, STEP, ROUNDS * methods.LOCAL_STEPS) for name in methods.METHODS}

EXPERIMENT = Fairness(
    name="fairness",
    summary="group-fair models of German Credit, Adult or synthetic data on 3 clients: accuracy and equal opportunity",
    build=build,
    rounds=ROUNDS,
    batch_size=32,
    seeds=3,
    methods=SAME,
    common={"step_size": STEP, "local_steps": methods.LOCAL_STEPS, "lower_step_size": STEP},
    panels=("test/eq_opp", "test/accuracy"),
)
