"""MobileNetV3-Small, normalised by groups so that it survives federation."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from fedstrata.models.base import Model, Params, dense, flat, float_type, positive
from fedstrata.models.convolution import convolve, depthwise, group_norm, pointwise


class Bottleneck(NamedTuple):
    """One row of the table: expand, filter each channel, weigh the channels, project."""

    kernel: int
    expanded: int
    outputs: int
    squeeze: bool
    swish: bool  # hard-swish, else relu
    stride: int


_STEM, _LAST, _HIDDEN = 16, 576, 1024
_TABLE = (
    Bottleneck(3, 16, 16, True, False, 2),
    Bottleneck(3, 72, 24, False, False, 2),
    Bottleneck(3, 88, 24, False, False, 1),
    Bottleneck(5, 96, 40, True, True, 2),
    Bottleneck(5, 240, 40, True, True, 1),
    Bottleneck(5, 240, 40, True, True, 1),
    Bottleneck(5, 120, 48, True, True, 1),
    Bottleneck(5, 144, 48, True, True, 1),
    Bottleneck(5, 288, 96, True, True, 2),
    Bottleneck(5, 576, 96, True, True, 1),
    Bottleneck(5, 576, 96, True, True, 1),
)


class MobileNetV3Small(Model):
    """The small network of Howard et al. (2019) with group instead of batch normalisation and without dropout.

    A stem convolution, eleven bottlenecks with squeeze-and-excite, a last convolution, the mean over pixels, one
    hidden layer and the outputs. `width` multiplies every channel count of the table, rounded to a multiple of 8;
    `stem_stride=1` keeps twice the resolution on small images, at about four times the work.

    Normalisation: batch normalisation has no meaning that survives federation. Its statistics belong to one client's
    batch, and its running means are state that nobody averages. Each is replaced by a group normalisation with the
    same scale and shift, so the number of parameters stays, and one example's output does not depend on the others.
    There are `groups` groups, but none of fewer than 8 channels: the last bottlenecks see few pixels (32x32 images
    leave one), and of a few single pixels little remains once their mean and variance are taken out. Every channel
    count is a multiple of 8, which 1, 2, 4 and 8 groups divide; 1 is layer normalisation.

    Without dropout the loss is a function of the parameters and the data alone, as the algorithms assume. Kernels are
    called "weight", all else "bias", "scale" or "shift", so that a regulariser can tell them apart.

    >>> model = MobileNetV3Small((32, 32, 3), outputs=10)
    >>> sum(p.size for p in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    1528106

    Reference: howard2019, Table 2.
    """

    shape: tuple[int, ...] = eqx.field(static=True, converter=tuple, default=(32, 32, 3))  # height, width, channels
    outputs: int = eqx.field(static=True, default=10)
    groups: int = eqx.field(static=True, default=8)
    width: float = eqx.field(static=True, default=1.0)
    stem_stride: int = eqx.field(static=True, default=2)

    def __check_init__(self) -> None:
        who = "MobileNetV3Small"
        if len(self.shape) != 3:
            raise ValueError(f"{who}: shape must be (height, width, channels), got {self.shape}")
        named = {f"shape[{i}]": n for i, n in enumerate(self.shape)}
        positive(who, outputs=self.outputs, groups=self.groups, stem_stride=self.stem_stride, **named)
        if self.groups not in (1, 2, 4, 8):
            raise ValueError(f"{who}: groups must be 1, 2, 4 or 8, to divide every channel count, got {self.groups!r}")
        real = isinstance(self.width, int | float) and not isinstance(self.width, bool)
        if not (real and 0 < self.width < math.inf):
            raise ValueError(f"{who}: width must be a number above 0 (1.0 is the published one), got {self.width!r}")
        if self.stem_stride not in (1, 2):
            raise ValueError(f"{who}: stem_stride must be 1 or 2 (2 is the published one), got {self.stem_stride!r}")

    @property
    def bottlenecks(self) -> list[Bottleneck]:
        """The rows of the table at this width."""
        return [row._replace(expanded=self._wide(row.expanded), outputs=self._wide(row.outputs)) for row in _TABLE]

    def init(self, key: PRNGKeyArray, dtype: Any = None) -> Params:
        return _draw(self, key, float_type(dtype))

    def _starts(self) -> dict[str, Any]:
        """How every parameter starts, in the tree that `init` fills."""
        channels, last, hidden = self._wide(_STEM), self._wide(_LAST), self._wide(_HIDDEN)
        stem, bottlenecks = _kernel(9 * self.shape[2], channels), []
        for row in self.bottlenecks:
            bottlenecks.append(_bottleneck_starts(channels, row))
            channels = row.outputs
        return {
            "stem": stem,
            "bottlenecks": bottlenecks,
            "last": _kernel(channels, last),
            "hidden": _dense(last, hidden, gain=2.0),
            "output": _dense(hidden, self.outputs, gain=1.0),
        }

    def __call__(self, params: Params, x: Array) -> Array:
        size = self.shape[0] * self.shape[1] * self.shape[2]
        image = flat(x, size, params["output"]["weight"].dtype, "MobileNetV3Small").reshape(self.shape)
        image = convolve(params["stem"]["weight"], image, kernel=3, stride=self.stem_stride)
        image = jax.nn.hard_swish(self._normalise(params["stem"], image))
        for layer, row in zip(params["bottlenecks"], self.bottlenecks, strict=True):
            image = self._bottleneck(layer, row, image)
        image = pointwise(params["last"]["weight"], image)
        features = _pool(jax.nn.hard_swish(self._normalise(params["last"], image)))
        return dense(params["output"], jax.nn.hard_swish(dense(params["hidden"], features)))

    def _bottleneck(self, layer: Params, row: Bottleneck, image: Array) -> Array:
        activation: Callable[[Array], Array] = jax.nn.hard_swish if row.swish else jax.nn.relu
        inside = image
        if "expand" in layer:
            inside = activation(self._normalise(layer["expand"], pointwise(layer["expand"]["weight"], inside)))
        inside = depthwise(layer["depthwise"]["weight"], inside, row.stride)
        inside = activation(self._normalise(layer["depthwise"], inside))
        if "squeeze" in layer:
            squeezed = jax.nn.relu(dense(layer["squeeze"], _pool(inside)))
            inside = inside * jax.nn.hard_sigmoid(dense(layer["excite"], squeezed)).reshape(1, 1, -1)
        inside = self._normalise(layer["project"], pointwise(layer["project"]["weight"], inside))
        return image + inside if image.shape == inside.shape and row.stride == 1 else inside

    def _normalise(self, layer: Params, image: Array) -> Array:
        return group_norm(layer["scale"], layer["shift"], image, min(self.groups, image.shape[-1] // 8))

    def _wide(self, channels: int) -> int:
        return divisible(channels * self.width)


def divisible(channels: float) -> int:
    """The nearest multiple of 8, at least 8, and the next one up where that would lose more than a tenth.

    >>> divisible(36), divisible(72 / 4), divisible(11), divisible(1)
    (40, 24, 16, 8)
    """
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * channels else nearest + 8


class Start(NamedTuple):
    """An array that starts at a value plus normal numbers of this variance."""

    shape: tuple[int, ...]
    variance: float = 0.0
    value: float = 0.0


def _kernel(inputs: int, outputs: int) -> dict[str, Start]:
    """A convolution as by He et al. (2015), and its normalisation, which would undo a bias."""
    return {"weight": Start((outputs, inputs), 2.0 / inputs)} | _affine(outputs)


def _affine(channels: int) -> dict[str, Start]:
    return {"scale": Start((channels,), value=1.0), "shift": Start((channels,))}


def _dense(inputs: int, outputs: int, gain: float) -> dict[str, Start]:
    """The law of `init_dense`."""
    return {"weight": Start((outputs, inputs), gain / inputs), "bias": Start((outputs,))}


def _bottleneck_starts(inputs: int, row: Bottleneck) -> dict[str, dict[str, Start]]:
    size, inside = row.kernel, row.expanded
    filters = {"weight": Start((size, size, inside), 2.0 / size**2)} | _affine(inside)
    layer = {"depthwise": filters, "project": _kernel(inside, row.outputs)}
    if inside != inputs:  # an expansion that would not expand is left out, as in the first row
        layer["expand"] = _kernel(inputs, inside)
    if row.squeeze:
        few = divisible(inside / 4)
        layer |= {"squeeze": _dense(inside, few, gain=2.0), "excite": _dense(few, inside, gain=1.0)}
    return layer


@functools.partial(jax.jit, static_argnames="dtype")
def _draw(model: MobileNetV3Small, key: PRNGKeyArray, dtype: Any) -> Params:
    """All start values from one stream: compiling a draw for each of many shapes takes several times as long."""
    starts, tree = jax.tree.flatten(model._starts(), is_leaf=lambda leaf: isinstance(leaf, Start))
    ends = np.cumsum([math.prod(start.shape) if start.variance else 0 for start in starts])
    normal = jnp.split(jax.random.normal(key, (int(ends[-1]),), dtype), ends[:-1])
    full = lambda start: jnp.full(start.shape, start.value, dtype)
    spread = lambda start, part: start.variance**0.5 * part.reshape(start.shape)
    return tree.unflatten([spread(s, n) if s.variance else full(s) for s, n in zip(starts, normal, strict=True)])


def _pool(image: Array) -> Array:
    """The mean over all pixels."""
    return image.mean(axis=(0, 1))
