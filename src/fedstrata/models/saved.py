"""Trained models as files: one .npz of named arrays and a line of JSON, without pickle."""

import dataclasses
import io
import json
import zipfile
import zlib
from os import PathLike
from pathlib import Path
from typing import Any, TypeGuard, get_args

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.base.errors import unknown
from fedstrata.base.files import replacing
from fedstrata.core.vector import Vector
from fedstrata.models.base import Model, Params
from fedstrata.models.cnn import CNN
from fedstrata.models.densenet import DenseNet121
from fedstrata.models.linear import Linear
from fedstrata.models.mlp import MLP
from fedstrata.models.mobilenet import MobileNetV3Small
from fedstrata.models.resnet import ResNet18
from fedstrata.models.trained import Predictor, Task, TrainedModel, finite_threshold

_SHIPPED = (Linear, MLP, CNN, MobileNetV3Small, ResNet18, DenseNet121)
_KNOWN: dict[str, type[Model]] = {model.__name__: model for model in _SHIPPED}
_HEADER, _FORMAT, _VERSION = "fedstrata", "fedstrata-model", 2
# All that zipfile, NumPy and json raise on files of another kind.
_BROKEN = (zipfile.BadZipFile, zlib.error, ValueError, LookupError, TypeError, EOFError, RuntimeError)


def save_model(
    path: str | Path,
    model: Predictor | None,
    params: Params,
    info: dict[str, Any] | None = None,
    task: Task | None = "classification",
    threshold: float | None = None,
) -> Path:
    """Write a model to a file; `load_model` reads it back bit-identically.

    Args:
        path: the file, e.g. "model.npz".
        model: the architecture; None, or a plain function, saves the parameters alone.
        params: its parameters.
        info: further values that JSON can hold.
        task: the meaning of the outputs: "classification", "regression" or "ranking"; None: unknown.
        threshold: the score above which a single output means label 1.
    """
    where = _path(path, "save_model")
    _check_task(task)
    params = params.tree if isinstance(params, Vector) else params
    arrays = _by_name(params)
    if _is_model(model, "save_model"):
        wanted = _by_name(jax.eval_shape(model.init, jax.random.key(0)))
        _match(wanted, arrays, f"save_model: params do not fit {model!r}")
    check_storable(params)
    arrays = {name: np.asarray(value) for name, value in arrays.items()}
    header: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, "task": task, "info": info or {}}
    header |= {"class": None, "config": None, "structure": _structure(params)}
    if isinstance(model, Model):
        config = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
        header |= {"class": type(model).__name__, "config": config if type(model) in _KNOWN.values() else None}
    header["threshold"] = None if threshold is None else finite_threshold("save_model", threshold)
    try:
        text = json.dumps(header)
    except TypeError as error:
        raise TypeError(f"save_model: info must hold only what JSON can ({error})") from None
    with replacing(where) as temporary, temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, **{_HEADER: np.array(text)}, **arrays)
    return where


def check_storable(params: Any) -> None:
    """Refuse parameters of a dtype that the file format does not have, such as bfloat16.

    Args:
        params: of a model.
    """
    if odd := {name: str(a.dtype) for name, a in _by_name(params).items() if np.dtype(a.dtype).kind not in "fiub"}:
        raise TypeError(f"save_model: cannot store {odd}; convert the parameters to float32 first")


def load_model(
    path: str | Path, model: Predictor | None = None, like: Params | None = None, task: Task | None = None
) -> TrainedModel:
    """Read a saved model.

    Args:
        path: the file.
        model: the architecture, if it is not part of FedStrata; or a function of (params, x) for parameters that were
            saved alone.
        like: parameters of the same structure, if it contains classes defined elsewhere.
        task: the meaning of the outputs, where the file does not state it.
    """
    _check_task(task)
    header, arrays = _read(_path(path, "load_model"))
    if header["version"] > _VERSION:
        raise ValueError(f"{path}: written by a newer FedStrata (format {header['version']}); update to read it")
    if model is None and header["class"] is not None:
        if header["class"] not in _KNOWN or header["config"] is None:
            raise ValueError(f"{path} holds a {header['class']}, which is not part of FedStrata; give it as model=...")
        model = _KNOWN[header["class"]](**header["config"])
    if _is_model(model, "load_model"):
        like = jax.eval_shape(model.init, jax.random.key(0))
    elif like is None:
        like = _like(header.get("structure"), arrays, path)
    wanted = _by_name(like)
    _match(wanted, arrays, f"{path} does not fit {'these parameters' if model is None else repr(model)}")
    params = jax.tree.unflatten(jax.tree.structure(like), [_exact(arrays[name], path) for name in wanted])
    return TrainedModel(model, params, header["info"], task or header["task"], header.get("threshold"))


def _check_task(task: Any) -> None:
    if task is not None and task not in get_args(Task):
        raise unknown("task", task, get_args(Task))


def _is_model(model: Any, where: str) -> TypeGuard[Model]:
    """Whether parameters can be checked against it: a model, not a plain function or None."""
    if isinstance(model, type) or not (model is None or callable(model)):
        kind = (
            f"the class {model.__name__}, not an instance" if isinstance(model, type) else f"a {type(model).__name__}"
        )
        raise TypeError(
            f"{where}: model is {kind}; give a model, e.g. fs.models.Linear(3), or None for parameters alone"
        )
    return isinstance(model, Model)


def _path(path: Any, where: str) -> Path:
    if not isinstance(path, str | PathLike):
        raise TypeError(f"{where}: path is a {type(path).__name__}; give the name of a file, e.g. 'model.npz'")
    if Path(path).is_dir():
        raise IsADirectoryError(f"{where}: {path} is a folder; name a file in it, e.g. {Path(path) / 'model.npz'}")
    return Path(path)


def _structure(tree: Any) -> Any:
    """Dictionaries, lists and tuples of arrays as JSON; None for trees with other classes."""
    if type(tree) is dict and all(isinstance(key, str) for key in tree):
        parts = {key: _structure(value) for key, value in tree.items()}
        return None if None in parts.values() else {"dict": parts}
    if type(tree) in (list, tuple):
        parts = [_structure(value) for value in tree]
        return None if None in parts else {type(tree).__name__: parts}
    return "array" if tree is not None and jax.tree_util.treedef_is_leaf(jax.tree.structure(tree)) else None


def _like(structure: Any, arrays: dict[str, Any], path: Any, name: str = "params") -> Any:
    """The arrays in the structure that `_structure` described."""
    if structure is None:
        raise ValueError(f"{path} holds parameters of other classes; give like=, parameters of the same structure")
    if structure == "array":
        return arrays[name]
    ((kind, parts),) = structure.items()
    if kind == "dict":
        return {key: _like(part, arrays, path, f"{name}[{key!r}]") for key, part in parts.items()}
    return {"list": list, "tuple": tuple}[kind](_like(p, arrays, path, f"{name}[{i}]") for i, p in enumerate(parts))


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
    """The array in its stored type; without 64-bit mode JAX would round float64 silently."""
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        raise ValueError(f"{path} holds {array.dtype} parameters: set JAX_ENABLE_X64=1 (jax_enable_x64) to load them")
    return jnp.asarray(array)
