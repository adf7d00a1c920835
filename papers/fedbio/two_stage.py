"""Experiments in two stages: bilevel methods learn weights, then FedAvg trains a model with them."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.experiments.base import Experiment, Setup

if TYPE_CHECKING:
    from fedstrata.core.algorithm import Algorithm
    from fedstrata.problems.base import Problem
    from fedstrata.simulate.result import Result


@dataclass(frozen=True)
class TwoStage(Experiment):
    """`rounds` each for the weights and for the model. The problem has `learn_weights()` and `weighted(weights)`."""

    def settings(self, algorithm: "type[Algorithm]") -> dict[str, Any]:
        fields = {f.name for f in dataclasses.fields(algorithm)}
        estimator = {"hypergradient": self.estimator()} if "hypergradient" in fields else {}
        return {**estimator, **super().settings(algorithm)}

    def estimator(self) -> Any:
        """The hypergradient estimator of the bilevel methods."""
        from fedstrata.problems.hypergradients import ConjugateGradients

        return ConjugateGradients(10)

    def problem_for(self, algorithm: "Algorithm", setup: Setup) -> "Problem":
        from fedstrata.algorithms.bilevel.base import BilevelMethod

        return self.to_weights(setup.problem) if isinstance(algorithm, BilevelMethod) else setup.problem

    def to_weights(self, problem: Any) -> "Problem":
        """The problem of the first stage, without exact solutions: only its end counts."""
        return problem.learn_weights(exact=False)

    def simulate(self, algorithm: "Algorithm", setup: Setup, **options: Any) -> "Result":
        """`fs.run`, twice for a bilevel method."""
        first = super().simulate(algorithm, setup, **options)
        return first if self.problem_for(algorithm, setup) is setup.problem else second_stage(first, setup, options)


def second_stage(first: "Result", setup: Setup, options: Mapping[str, Any]) -> "Result":
    """FedAvg with the weights of every run of stage one. Rounds, bytes, samples and seconds continue from its end.

    Its steps, and their number per round, are those of the clients' models in stage one.
    """
    import jax

    from fedstrata.algorithms import FedAvg
    from fedstrata.core.algorithm import steps_of
    from fedstrata.simulate.run import run

    problem: Any = setup.problem
    before, shape = first.history, first.endings.shape
    weights = np.asarray(first.problem.weights(first.solutions)).reshape(first.endings.size, -1)
    seeds = np.broadcast_to(before.seeds, shape).reshape(-1)
    steps = np.broadcast_to(lower_steps(first), shape).reshape(-1)
    same = {k: v for k, v in options.items() if k not in ("seeds", "sweep", "checkpoint", "progress")}
    parts, folder = [], options.get("checkpoint")
    for number, (weight, seed, step) in enumerate(zip(weights, seeds, steps, strict=True)):
        kept: dict[str, Any] = {} if folder is None else {"checkpoint": Path(folder) / f"stage_two_{number}"}
        method = FedAvg(float(step), steps_of(first.algorithm))
        parts.append(run(problem.weighted(weight), method, setup.federation, seeds=[int(seed)], **same, **kept))
    stacked = lambda *arrays: np.concatenate(arrays).reshape((*shape, *arrays[0].shape[1:]))
    columns = {name: stacked(*(part.history[name] for part in parts)) for name in parts[0].history.columns}
    for name in ("round", "bytes_up", "bytes_down", "samples", "seconds"):
        columns[name] = columns[name] + before.last(name)[..., None]
    return dataclasses.replace(
        first,
        history=dataclasses.replace(parts[0].history, axes=before.axes, columns=columns, per_client={}),
        problem=problem,
        solutions=jax.tree.map(stacked, *(part.solutions for part in parts)),
        endings=stacked(*(part.endings for part in parts)),
        notes=[*first.notes, *(note for part in parts for note in part.notes)],
        seconds=first.seconds + sum(part.seconds for part in parts),
        compile_seconds=first.compile_seconds + sum(part.compile_seconds for part in parts),
        rounds=first.rounds + parts[0].rounds,
    )


def lower_steps(first: "Result") -> np.ndarray:
    """The step of each run's lower level, along the axes of the history; FedBiOAcc's is γα at the start."""
    method: Any = first.algorithm
    scale = float(method.delta / method.offset ** (1 / 3)) if hasattr(method, "delta") else 1.0
    axes = first.history.axes
    if "lower_step_size" not in axes:
        return np.asarray(scale * float(method.lower_step_size))
    at = list(axes).index("lower_step_size")
    return scale * np.asarray(axes["lower_step_size"]).reshape([-1 if i == at else 1 for i in range(len(axes))])
