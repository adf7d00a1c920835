"""What a run leaves behind as files: the solution by the names of its arrays, and the model where there is one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.files import replacing
from fedstrata.models.base import Model
from fedstrata.models.raveled import Raveled
from fedstrata.models.saved import save_model
from fedstrata.problems.base import model_of
from fedstrata.problems.losses import Regression
from fedstrata.transport.codec import named_arrays
from fedstrata.vector import Vector


def keep_model(folder: Path, problem: Any, solution: Vector, info: Mapping[str, Any]) -> list[Path]:
    """`solution.npz`, and `model.npz` for `fs.load_model` where the problem was made from a model. What was written."""
    kept = [keep_solution(folder, solution)]
    if isinstance(model_of(problem), Model):
        kept.append(save_trained(folder / "model.npz", problem, solution.tree, info))
    return kept


def keep_solution(folder: Path, solution: Vector) -> Path:
    """The arrays of the parameters by their names: `params['weight']`."""
    arrays = named_arrays(solution.tree, "params")
    with replacing(folder / "solution.npz") as path, path.open("wb") as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
    return folder / "solution.npz"


def save_trained(path: Any, problem: Any, params: Any, info: Mapping[str, Any]) -> Path:
    """The model that these parameters of a problem belong to, as a file that `fs.load_model` reads."""
    model = model_of(problem)
    if isinstance(model, Raveled):
        model, params = model.model, model.unravel(params)
    task = "regression" if isinstance(getattr(problem, "loss", None), Regression) else "classification"
    return save_model(path, model, params, dict(info), task)
