"""A trained model: scores and labels for new rows."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from fedstrata.base.files import replacing
from fedstrata.models.base import Params
from fedstrata.models.batch import as_batch
from fedstrata.models.linear import Linear
from fedstrata.models.mlp import MLP

Task = Literal["classification", "regression", "ranking"]
Predictor = Callable[[Params, Any], Any]  # of parameters and one example

_ROWS = 1024  # examples at a time, so that a large table does not need its activations in memory at once
_ON_DEVICE = 2**16  # examples on the device at a time


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedModel:
    """An architecture with its parameters, ready to predict.

    Args:
        model: the architecture, or a function of parameters and one example; None: there are only parameters.
        params: the parameters.
        info: further values that were saved with the model.
        task: the meaning of the outputs; None: unknown, so there are scores but no predictions.
        threshold: the score above which a single output means label 1.
    """

    model: Predictor | None
    params: Params
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    task: Task | None = "classification"
    threshold: float | None = None

    def scores(self, x: Any) -> np.ndarray:
        """The outputs for a batch of examples: `(n, outputs)`, or `(n,)` where there is one output.

        Args:
            x: an array or a data frame, one row per example; NaN or infinity raises.
        """
        model = self._model("scores")
        return self.outputs(as_batch(x, _input_shape(model), "TrainedModel"))

    def outputs(self, x: np.ndarray) -> np.ndarray:
        """`scores` of an array, without checks.

        Args:
            x: one row per example.
        """
        model = self._model("outputs")
        one = lambda example: model(self.params, example)
        some = jax.jit(lambda x: jax.lax.map(one, x, batch_size=_ROWS))
        parts = [np.asarray(some(jnp.asarray(x[i : i + _ON_DEVICE]))) for i in range(0, len(x), _ON_DEVICE)]
        outputs = np.concatenate(parts)
        return outputs[:, 0] if outputs.ndim == 2 and outputs.shape[1] == 1 else outputs

    def predict(self, x: Any, threshold: float | None = None) -> np.ndarray:
        """Labels for a classifier or a ranking, values for a regression.

        The largest of several outputs gives the label. A single output gives label 1 above the threshold. The scores
        of a ranking have no natural zero: `Result.save_model` saves the threshold for which the number of training rows
        above it equals the number of positives, and `predict` raises without a threshold.

        Args:
            x: an array or a data frame, one row per example.
            threshold: of a single output; None: the saved one, else 0 for a classifier, where both
                labels are equally likely.
        """
        if self.model is not None and self.task is None:
            raise ValueError(
                "TrainedModel.predict: these parameters are of a plain function, which does not say what its outputs "
                'mean; use scores(x), or load_model(path, model=function, task="classification" or "regression")'
            )
        scores = self.scores(x)
        if np.isnan(scores).any():
            row = np.argwhere(np.isnan(scores))[0][0]
            raise ValueError(f"TrainedModel.predict: the model gives NaN for row {row}; were its parameters diverging?")
        if threshold is not None and (self.task == "regression" or scores.ndim > 1):
            what = "a regression" if self.task == "regression" else f"a classifier with {scores.shape[1]} outputs"
            raise ValueError(f"TrainedModel.predict: threshold={threshold!r} is for a single score; this is {what}")
        if self.task == "regression":
            return scores
        if scores.ndim > 1:
            return scores.argmax(axis=1).astype(np.int32)
        return (scores > np.float64(self._limit(threshold))).astype(np.int32)

    def _limit(self, given: float | None) -> float:
        limit = self.threshold if given is None else given
        if limit is None and self.task == "ranking":
            raise ValueError(
                "TrainedModel.predict: a ranking has no natural zero, and this one was saved without the training data "
                "that would give a threshold; give threshold=, the score above which a row is positive, or use "
                "scores(x), which rank the rows"
            )
        return 0.0 if limit is None else finite_threshold("TrainedModel.predict", limit)

    def _model(self, method: str) -> Predictor:
        if self.model is None:
            raise ValueError(
                f"TrainedModel.{method}: this file holds parameters without a model, because the training loss was a "
                "plain function; give the model, load_model(path, model=function) with function(params, x) of one x"
            )
        return self.model

    def export(self, path: str | Path, shape: Sequence[int] | None = None, batch: int | None = None) -> Path:
        """Write `scores` as a StableHLO program for CPUs and CUDA GPUs, with the parameters inside.

        `jax.export.deserialize(bytearray(Path(path).read_bytes())).call(x)` runs it without FedStrata, with JAX and
        flatbuffers installed; x has the parameters' dtype.

        Args:
            path: the file.
            shape: of one example, where the model does not determine it.
            batch: the number of examples of a call; None: any number.
        """
        model = self._model("export")
        shape = _input_shape(model) if shape is None else tuple(shape)
        if shape is None:
            raise ValueError(f"TrainedModel.export: {type(model).__name__} fixes no input; give shape=, of one x")
        rows = jax.export.symbolic_shape("batch")[0] if batch is None else batch
        x = jax.ShapeDtypeStruct((rows, *shape), jnp.result_type(*jax.tree.leaves(self.params)))

        def scores(x: jax.Array) -> jax.Array:
            outputs = jax.vmap(lambda example: model(self.params, example))(x)
            return outputs[:, 0] if outputs.ndim == 2 and outputs.shape[1] == 1 else outputs

        program = jax.export.export(jax.jit(scores), platforms=("cpu", "cuda"))(x)
        try:
            stored = program.serialize()
        except ImportError as error:
            raise ImportError(
                "TrainedModel.export: JAX writes and reads programs with flatbuffers; pip install flatbuffers"
            ) from error
        with replacing(path) as temporary:
            temporary.write_bytes(stored)
        return Path(path)


def finite_threshold(where: str, threshold: Any) -> float:
    """The threshold, if it is a number."""
    if not isinstance(threshold, int | float | np.number) or not np.isfinite(threshold):
        raise ValueError(f"{where}: threshold={threshold!r} must be a finite number")
    return float(threshold)


def _input_shape(model: Any) -> tuple[int, ...] | None:
    """The shape of one example, where the architecture determines it."""
    if isinstance(model, Linear | MLP):
        return (model.features if isinstance(model, Linear) else model.sizes[0],)
    return getattr(model, "shape", None)
