"""MobileNetV3-Small with group normalisation, which couples neither examples nor clients."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray

from fedstrata.models.base import Model, Params, dense, flat, float_type, positive
from fedstrata.models.convolution import convolve, depthwise, group_norm, pointwise
from fedstrata.models.initial import InitialArray, draw_together


class Bottleneck(NamedTuple):
    """One row of the table: expand, filter each channel, weigh the channels, project.

    Args:
        kernel: the side of the kernel in pixels.
        expanded: the channels inside.
        outputs: the channels of the result.
        squeeze: whether channels are weighed (squeeze-and-excite).
        swish: hard-swish, else relu.
        stride: of the filter.
    """

    kernel: int
    expanded: int
    outputs: int
    squeeze: bool
    swish: bool
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
    hidden layer and the outputs.

    Normalisation: batch normalisation does not fit federated learning. Its statistics depend on one client's batch, and
    its running means are state that no algorithm averages. Each is replaced by a group normalisation with the same
    scale and shift, so the number of parameters is unchanged, and the output of an example does not depend on others.
    A group has at least 8 channels: the last bottlenecks have few pixels (one, for 32x32 images), and normalising a
    group of few numbers removes most of their information.

    Without dropout the loss is a function of the parameters and the data alone, as the algorithms assume. Kernels are
    called "weight", all else "bias", "scale" or "shift", so that a regulariser can select among them.

    Args:
        shape: height, width and channels of an image.
        outputs: the size of the last layer.
        groups: the number of groups of a normalisation: 1 (layer normalisation), 2, 4 or 8.
        width: multiplies every channel count of the table, rounded to a multiple of 8; 1.0 is the published network.
        stem_stride: 2 as published; 1 doubles the resolution for small images, at about four times the work.

    >>> model = MobileNetV3Small((32, 32, 3), outputs=10)
    >>> sum(p.size for p in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    1528106

    Reference: howard2019, Table 2.
    """

    shape: tuple[int, ...] = eqx.field(static=True, converter=tuple, default=(32, 32, 3))
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

    def init(self, key: PRNGKeyArray, dtype: DTypeLike | None = None) -> Params:
        return _draw(self, key, float_type(dtype))

    def _starts(self) -> dict[str, Any]:
        """The tree of parameters, as `InitialArray`."""
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
    """The nearest multiple of 8, at least 8; the next larger one if the nearest is below 0.9 times the number.

    >>> divisible(36), divisible(72 / 4), divisible(11), divisible(1)
    (40, 24, 16, 8)
    """
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * channels else nearest + 8


def _kernel(inputs: int, outputs: int) -> dict[str, InitialArray]:
    """A convolution as in He et al. (2015), and its normalisation, which would cancel a bias."""
    return {"weight": InitialArray((outputs, inputs), 2.0 / inputs)} | _affine(outputs)


def _affine(channels: int) -> dict[str, InitialArray]:
    return {"scale": InitialArray((channels,), value=1.0), "shift": InitialArray((channels,))}


def _dense(inputs: int, outputs: int, gain: float) -> dict[str, InitialArray]:
    """A layer with the distribution of `init_dense`."""
    return {"weight": InitialArray((outputs, inputs), gain / inputs), "bias": InitialArray((outputs,))}


def _bottleneck_starts(inputs: int, row: Bottleneck) -> dict[str, dict[str, InitialArray]]:
    size, inside = row.kernel, row.expanded
    filters = {"weight": InitialArray((size, size, inside), 2.0 / size**2)} | _affine(inside)
    layer = {"depthwise": filters, "project": _kernel(inside, row.outputs)}
    if inside != inputs:  # an expansion that would not expand is left out, as in the first row
        layer["expand"] = _kernel(inputs, inside)
    if row.squeeze:
        few = divisible(inside / 4)
        layer |= {"squeeze": _dense(inside, few, gain=2.0), "excite": _dense(few, inside, gain=1.0)}
    return layer


@functools.partial(jax.jit, static_argnames="dtype")
def _draw(model: MobileNetV3Small, key: PRNGKeyArray, dtype: DTypeLike) -> Params:
    return draw_together(model._starts(), key, dtype)


def _pool(image: Array) -> Array:
    """The mean over all pixels."""
    return image.mean(axis=(0, 1))
