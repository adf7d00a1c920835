"""Trained models as files: one .npz of named arrays and a line of JSON, with no pickle inside."""

import dataclasses
import io
import json
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from fedstrata.errors import unknown
from fedstrata.files import replacing
from fedstrata.models.base import Model, Params
from fedstrata.models.cnn import CNN
from fedstrata.models.densenet import DenseNet121
from fedstrata.models.linear import Linear
from fedstrata.models.mlp import MLP
from fedstrata.models.mobilenet import MobileNetV3Small
from fedstrata.models.resnet import ResNet18

Task = Literal["classification", "regression"]

_SHIPPED = (Linear, MLP, CNN, MobileNetV3Small, ResNet18, DenseNet121)
_KNOWN: dict[str, type[Model]] = {model.__name__: model for model in _SHIPPED}
_HEADER, _FORMAT, _VERSION = "fedstrata", "fedstrata-model", 1
# Everything that zipfile, NumPy and json raise on bytes that are not theirs.
_BROKEN = (zipfile.BadZipFile, zlib.error, ValueError, LookupError, TypeError, EOFError, RuntimeError)
_ROWS = 1024  # examples at a time, so that a large table does not need its activations in memory at once


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedModel:
    """An architecture with its parameters, ready to predict."""

    model: Model
    params: Params
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    task: Task = "classification"

    def scores(self, x: Any) -> np.ndarray:
        """The outputs for a batch of examples: `(n, outputs)`, or `(n,)` where there is one output."""
        x = jnp.asarray(np.asarray(x))
        if not x.ndim or not len(x):
            raise ValueError(f"TrainedModel: x must be a batch of at least one example, got shape {x.shape}")
        one = lambda example: self.model(self.params, example)
        outputs = np.asarray(jax.jit(lambda x: jax.lax.map(one, x, batch_size=_ROWS))(x))
        return outputs[:, 0] if outputs.ndim == 2 and outputs.shape[1] == 1 else outputs

    def predict(self, x: Any) -> np.ndarray:
        """Labels for a classifier (a single output is read as the log-odds of label 1), values otherwise."""
        scores = self.scores(x)
        if self.task == "regression":
            return scores
        return (scores > 0 if scores.ndim == 1 else scores.argmax(axis=1)).astype(np.int32)

    def export(self, path: str | Path, shape: Sequence[int] | None = None, batch: int | None = None) -> Path:
        """Write `scores` as a StableHLO program for CPUs and CUDA GPUs, with the parameters inside.

        `jax.export.deserialize(bytearray(Path(path).read_bytes())).call(x)` runs it where FedStrata is not installed
        (JAX and flatbuffers are); x has the parameters' dtype. shape: of one example, where the model does not say.
        batch: of how many examples (None: any number).
        """
        shape = _input_shape(self.model) if shape is None else tuple(shape)
        if shape is None:
            raise ValueError(f"TrainedModel.export: {type(self.model).__name__} fixes no input; give shape=, of one x")
        rows = jax.export.symbolic_shape("batch")[0] if batch is None else batch
        x = jax.ShapeDtypeStruct((rows, *shape), jnp.result_type(*jax.tree.leaves(self.params)))

        def scores(x: jax.Array) -> jax.Array:
            outputs = jax.vmap(lambda example: self.model(self.params, example))(x)
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


def save_model(
    path: str | Path, model: Model, params: Params, info: dict[str, Any] | None = None, task: Task = "classification"
) -> Path:
    """Write a model that `load_model` reads back bit for bit; `info` is anything that JSON can hold."""
    if task not in get_args(Task):
        raise unknown("task", str(task), get_args(Task))
    arrays = _by_name(params)
    wanted = _by_name(jax.eval_shape(model.init, jax.random.key(0)))
    _match(wanted, arrays, f"save_model: params do not fit {model!r}")
    arrays = {name: np.asarray(value) for name, value in arrays.items()}
    if odd := {name: str(a.dtype) for name, a in arrays.items() if a.dtype.kind not in "fiub"}:
        raise TypeError(f"save_model: cannot store {odd}; convert the parameters to float32 first")
    config = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    header = {"format": _FORMAT, "version": _VERSION, "class": type(model).__name__, "task": task, "info": info or {}}
    header["config"] = config if type(model) in _KNOWN.values() else None
    try:
        text = json.dumps(header)
    except TypeError as error:
        raise TypeError(f"save_model: info must hold only what JSON can ({error})") from None
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, **{_HEADER: np.array(text)}, **arrays)
    return Path(path)


def load_model(path: str | Path, model: Model | None = None) -> TrainedModel:
    """Read a saved model; one of your own classes has to be given again as `model`."""
    header, arrays = _read(Path(path))
    if header["version"] > _VERSION:
        raise ValueError(f"{path}: written by a newer FedStrata (format {header['version']}); update to read it")
    if model is None:
        if header["class"] not in _KNOWN or header["config"] is None:
            raise ValueError(f"{path} holds a {header['class']}, which is not part of FedStrata; give it as model=...")
        model = _KNOWN[header["class"]](**header["config"])
    like = jax.eval_shape(model.init, jax.random.key(0))
    wanted = _by_name(like)
    _match(wanted, arrays, f"{path} does not fit {model!r}")
    leaves = [_exact(arrays[name], path) for name in wanted]
    return TrainedModel(model, jax.tree.unflatten(jax.tree.structure(like), leaves), header["info"], header["task"])


def _input_shape(model: Any) -> tuple[int, ...] | None:
    """Of one example, where the architecture fixes it."""
    if isinstance(model, Linear | MLP):
        return (model.features if isinstance(model, Linear) else model.sizes[0],)
    return getattr(model, "shape", None)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    stored = path.read_bytes()  # outside the block: a missing or unreadable file is another error
    try:
        with np.load(io.BytesIO(stored), allow_pickle=False) as content:
            header = json.loads(str(content[_HEADER]))
            if header["format"] != _FORMAT or not {"version", "class", "config", "task", "info"} <= header.keys():
                raise ValueError("its header is not a model's")
            return header, {name: content[name] for name in content.files if name != _HEADER}
    except _BROKEN as error:
        raise ValueError(f"{path} is not a saved FedStrata model, or it is damaged: {error}") from error


def _by_name(tree: Any) -> dict[str, Any]:
    return {f"params{jax.tree_util.keystr(path)}": leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _match(wanted: dict[str, Any], found: dict[str, Any], problem: str) -> None:
    shapes = [{name: tuple(np.shape(leaf)) for name, leaf in group.items()} for group in (wanted, found)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"{problem}: expected {shapes[0]}, got {shapes[1]}")


def _exact(array: np.ndarray, path: str | Path) -> jax.Array:
    """The array in its own type; without 64-bit mode JAX would round float64 silently."""
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        raise ValueError(f"{path} holds {array.dtype} parameters: set JAX_ENABLE_X64=1 (jax_enable_x64) to load them")
    return jnp.asarray(array)
