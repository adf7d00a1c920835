"""Pretrained weights: from an .npz file with torchvision's names to parameters of a model."""

import io
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray

from fedstrata.models.base import Params, float_type
from fedstrata.models.densenet import DenseNet121
from fedstrata.models.resnet import ResNet18

_BROKEN = (zipfile.BadZipFile, zlib.error, ValueError, LookupError, TypeError, EOFError, RuntimeError)
_SHOWN = 5  # names in one message


class Name(NamedTuple):
    """The name of an array in torchvision.

    Args:
        text: the name.
        kernel: the side of a convolution's kernel; 0 for all other arrays.
    """

    text: str
    kernel: int = 0


def load_pretrained(
    path: str | Path, model: ResNet18 | DenseNet121, key: PRNGKeyArray | None = None, dtype: DTypeLike | None = None
) -> Params:
    """The parameters of `model` from a file of arrays under torchvision's names.

    Make such a file once, where torch is installed:

        state = torchvision.models.densenet121(weights="DEFAULT").state_dict()
        arrays = {name: value.float().numpy() for name, value in state.items()}
        numpy.savez("densenet121.npz", **arrays)

    The networks were trained with batch normalisation, so the model needs `norm="batch"`, which uses the running means
    and variances of the file as frozen statistics. For images of any size it needs `stem="imagenet"`. If the file has
    no statistics, as for a network trained with group normalisation, the model needs `norm="group"`; `groups` must then
    be that of the training (shapes do not determine it).

    Every name and shape is checked: missing and unexpected arrays and wrong shapes are listed in an error. There are
    two exceptions: counters of batches, and a last layer with another number of outputs. That layer is replaced by
    start values. Images must be scaled as in the training: for torchvision's networks, (x / 255 - mean) / deviation
    with the means 0.485, 0.456, 0.406 and the deviations 0.229, 0.224, 0.225 of red, green and blue.

    Args:
        path: the .npz file.
        model: the network.
        key: the random key of a last layer that is replaced; None: `jax.random.key(0)`.
        dtype: of the parameters; None: JAX's default float type.
    """
    arrays = _read(Path(path))
    dtype = float_type(dtype)
    places = torchvision_names(model)
    names, tree = jax.tree.flatten(places, is_leaf=lambda leaf: isinstance(leaf, Name))
    leaves = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
    expected = {name.text: _torch_shape(name, leaf.shape) for name, leaf in zip(names, leaves, strict=True)}
    replaced = _other_outputs(expected, arrays, places["output"])
    _check(expected, arrays, f"{path} does not fit {model!r}")
    found = tree.unflatten([_ours(name, arrays[name.text], dtype) for name in names])
    if replaced:
        found["output"] = model.init(jax.random.key(0) if key is None else key, dtype)["output"]
    return found


def torchvision_names(model: ResNet18 | DenseNet121) -> Params:
    """The names of torchvision's state dict, in the tree of the model's parameters."""
    if isinstance(model, ResNet18):
        return _resnet(model, model.norm == "batch")
    if isinstance(model, DenseNet121):
        return _densenet(model, model.norm == "batch")
    raise TypeError(f"load_pretrained: model must be a ResNet18 or a DenseNet121, got {type(model).__name__}")


def _resnet(model: ResNet18, statistics: bool) -> Params:
    def block(layer: Mapping[str, Any], at: str) -> Params:
        found = {
            "first": _layer(f"{at}.conv1", f"{at}.bn1", 3, statistics),
            "second": _layer(f"{at}.conv2", f"{at}.bn2", 3, statistics),
        }
        if "shortcut" in layer:
            found["shortcut"] = _layer(f"{at}.downsample.0", f"{at}.downsample.1", 1, statistics)
        return found

    stages = [
        [block(layer, f"layer{i}.{j}") for j, layer in enumerate(stage)]
        for i, stage in enumerate(model.starts()["stages"], start=1)
    ]
    return {"stem": _layer("conv1", "bn1", model.stem_kernel, statistics), "stages": stages, "output": _output("fc")}


def _densenet(model: DenseNet121, statistics: bool) -> Params:
    def layer(at: str) -> Params:
        first = _layer(f"{at}.conv1", f"{at}.norm1", 1, statistics)
        return {"first": first, "second": _layer(f"{at}.conv2", f"{at}.norm2", 3, statistics)}

    between = [f"features.transition{i}" for i in range(1, len(model.blocks))]
    return {
        "stem": _layer("features.conv0", "features.norm0", model.stem_kernel, statistics),
        "blocks": [
            [layer(f"features.denseblock{i}.denselayer{j}") for j in range(1, length + 1)]
            for i, length in enumerate(model.blocks, start=1)
        ],
        "transitions": [_layer(f"{at}.conv", f"{at}.norm", 1, statistics) for at in between],
        "last": _norm(f"features.norm{len(model.blocks) + 1}", statistics),
        "output": _output("classifier"),
    }


def _layer(convolution: str, norm: str, kernel: int, statistics: bool) -> dict[str, Name]:
    return {"weight": Name(f"{convolution}.weight", kernel)} | _norm(norm, statistics)


def _norm(at: str, statistics: bool) -> dict[str, Name]:
    names = {"scale": Name(f"{at}.weight"), "shift": Name(f"{at}.bias")}
    stored = {"mean": Name(f"{at}.running_mean"), "variance": Name(f"{at}.running_var")}
    return names | stored if statistics else names


def _output(at: str) -> dict[str, Name]:
    return {"weight": Name(f"{at}.weight"), "bias": Name(f"{at}.bias")}


def _torch_shape(name: Name, shape: tuple[int, ...]) -> tuple[int, ...]:
    """(outputs, kernel * kernel * inputs) is (outputs, inputs, kernel, kernel) there."""
    return (shape[0], shape[1] // name.kernel**2, name.kernel, name.kernel) if name.kernel else tuple(shape)


def _ours(name: Name, array: np.ndarray, dtype: Any) -> Array:
    if name.kernel:
        array = array.transpose(0, 2, 3, 1).reshape(len(array), -1)
    return jnp.asarray(array.astype(dtype))


def _other_outputs(expected: dict[str, Any], arrays: dict[str, np.ndarray], head: dict[str, Name]) -> bool:
    """Whether the file's last layer has another number of outputs; its shape then becomes the expected one."""
    weight, bias = head["weight"].text, head["bias"].text
    outputs, features = expected[weight]
    shape = arrays[weight].shape if weight in arrays else ()
    if len(shape) != 2 or shape[0] == outputs or shape[1] != features:
        return False
    expected |= {weight: shape, bias: shape[:1]}
    return True


def _check(expected: dict[str, tuple[int, ...]], arrays: dict[str, np.ndarray], problem: str) -> None:
    missing = [name for name in expected if name not in arrays]
    more = [name for name in arrays if name not in expected]
    other = [
        f"{name} of shape {arrays[name].shape} instead of {shape}"
        for name, shape in expected.items()
        if name in arrays and arrays[name].shape != shape
    ]
    odd = [f"{n} of {arrays[n].dtype}" for n in expected if n in arrays and arrays[n].dtype.kind != "f"]
    kinds = {"missing": missing, "unexpected": more, "wrong shape": other, "not floating-point": odd}
    if not any(kinds.values()):
        return
    hints = []
    if any("running_" in name for name in more):
        hints.append('the file holds batch statistics: use norm="batch"')
    if any("running_" in name for name in missing):
        hints.append('the file lacks batch statistics: use norm="group", if it was trained so')
    if any(re.match(r"(features\.)?conv[01]\.weight", line) for line in other):
        hints.append('published networks take three channels and have stem="imagenet"')
    lists = [f"{kind}: {_some(lines)}" for kind, lines in kinds.items() if lines]
    raise ValueError("; ".join([f"load_pretrained: {problem}: {lists[0]}", *lists[1:], *hints]))


def _some(lines: list[str]) -> str:
    return ", ".join(lines[:_SHOWN]) + (f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else "")


def _read(path: Path) -> dict[str, np.ndarray]:
    stored = path.read_bytes()  # outside the block: a missing or unreadable file is another error
    try:
        with np.load(io.BytesIO(stored), allow_pickle=False) as content:
            arrays = {name: content[name] for name in content.files}
    except (*_BROKEN, AttributeError) as error:  # a lone .npy array has no files
        raise ValueError(f"load_pretrained: {path} is not an .npz of arrays, or it is damaged: {error}") from error
    # Torchvision's older DenseNet files spell norm1 as norm.1; torchvision's loader renames them likewise.
    old = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])\.")
    return {old.sub(r"\1\2.", name): a for name, a in arrays.items() if not name.endswith("num_batches_tracked")}
