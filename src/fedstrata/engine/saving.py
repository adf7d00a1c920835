"""The files of a run's result: the solution by the names of its arrays, and the model if there is one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from jaxtyping import PyTree

from fedstrata.base.files import replacing
from fedstrata.core.vector import Vector
from fedstrata.data.federation import Federation
from fedstrata.engine.codec import named_arrays
from fedstrata.models.base import Model
from fedstrata.models.raveled import Raveled
from fedstrata.models.saved import save_model
from fedstrata.models.trained import Task, TrainedModel
from fedstrata.problems.base import Problem, model_of
from fedstrata.problems.losses import Classification, Regression
from fedstrata.problems.pairwise.problem import Pairwise


def keep_model(folder: Path, problem: Problem, solution: Vector, info: Mapping[str, Any]) -> list[Path]:
    """Write `solution.npz`, and `model.npz` for `fs.load_model` if the problem has a model. Returns the paths."""
    kept = [keep_solution(folder, solution)]
    if isinstance(model_of(problem), Model):
        kept.append(save_trained(folder / "model.npz", problem, solution.tree, info))
    return kept


def keep_solution(folder: Path, solution: Vector) -> Path:
    """Write the arrays of the parameters by name: `params['weight']`."""
    arrays = named_arrays(solution.tree, "params")
    with replacing(folder / "solution.npz") as path, path.open("wb") as file:
        np.savez(file, **cast(Any, arrays))
    return folder / "solution.npz"


def save_trained(
    path: str | Path,
    problem: Problem,
    params: PyTree,
    info: Mapping[str, Any],
    federation: Federation | None = None,
) -> Path:
    """Write the problem's model with these parameters as a file that `fs.load_model` reads.

    A problem made from a plain function has no model: only its parameters are saved. federation: the training data,
    for the threshold of a ranking.
    """
    model, limit = model_of(problem), None
    if isinstance(model, Raveled):
        model, params = model.model, model.unravel(params)
    model = model if isinstance(model, Model) else None
    if isinstance(problem, Pairwise) and model is not None and federation is not None:
        limit = training_threshold(problem, TrainedModel(model, params), federation)
    return save_model(path, model, params, dict(info), task_of(problem), limit)


def task_of(problem: Problem) -> Task | None:
    """The kind of output of a problem's model; None for a user's function."""
    loss = getattr(problem, "loss", None)
    if isinstance(problem, Pairwise):
        return "ranking"
    if isinstance(loss, Regression):
        return "regression"
    known = isinstance(loss, Classification) or isinstance(model_of(problem), Model)
    return "classification" if known else None


def training_threshold(problem: Pairwise, trained: TrainedModel, federation: Federation) -> float | None:
    """The score above which there are as many training rows as positives; None if scores are not finite."""
    own = {problem.first, problem.second} == {"positives", "negatives"}
    splits = [federation[name] for name in ((problem.first, problem.second) if own else ("train",))]
    scores = np.concatenate([trained.outputs(np.asarray(split.examples["x"])) for split in splits]).astype(np.float64)
    if not np.isfinite(scores).all():
        return None
    labels = lambda split: np.asarray(split.examples[problem.label]) == problem.positive
    positives = federation["positives"].size if own else int(labels(splits[0]).sum())
    return threshold_for(scores, positives)


def threshold_for(scores: np.ndarray, count: int) -> float:
    """A threshold with `count` scores above it, half way to the next one; with ties, the nearest possible count.

    >>> threshold_for(np.array([3.0, 1.0, 2.0, 0.0]), 2)
    1.5
    """
    values, counts = np.unique(scores, return_counts=True)
    beyond = 1 + np.abs(values[[0, -1]])
    levels = np.r_[values[-1] + beyond[1], values[::-1], values[0] - beyond[0]]  # from high to low
    above = np.r_[0, np.cumsum(counts[::-1])]  # scores above the gap after each level
    at = int(np.abs(above - count).argmin())
    high, low = levels[at], levels[at + 1]
    middle = low + (high - low) / 2
    return float(middle if middle < high else low)
