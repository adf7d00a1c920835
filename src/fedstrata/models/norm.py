"""Group normalisation or frozen batch statistics, and the base class of the deep image networks."""

import abc
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, PRNGKeyArray

from fedstrata.base.errors import unknown
from fedstrata.core.vector import widest
from fedstrata.models.base import Model, Params, dense, flat, float_type, positive
from fedstrata.models.convolution import convolve, group_norm, max_pool
from fedstrata.models.initial import InitialArray, draw_together

Norm = Literal["group", "batch"]
Stem = Literal["auto", "small", "imagenet"]
Compute = Literal["float32", "bfloat16"]
Normaliser = Callable[[Params, Array], Array]

EPSILON = 1e-5  # under the root, as in the published ResNets and DenseNets
_SMALL = 64  # pixels along the longer side that the small stem is for
_AXIS = "images"


class DeepNetwork(Model):
    """A stem, a body of normalised convolutions, the mean over pixels and one layer to the outputs.

    Kernels are called "weight", all else "bias", "scale", "shift", "mean" or "variance".

    Normalisation:

    - "group" takes mean and variance over one group of channels in one image, so it couples neither examples nor
      clients. It is the default: batch statistics differ between clients with different data, and layers trained with
      the statistics of one client do not fit another (Hsieh et al., 2020).
    - "batch" is batch normalisation as in *fine-tuning with frozen statistics*. Every layer stores a mean and a
      variance per channel, and uses them as constants in training and evaluation; scale and shift are trained. It is
      not batch-coupled training: no mean over a batch is taken, and training updates no statistics. A loss here is a
      function of the parameters and one example, which a batch mean is not. The statistics come from a file
      (`load_pretrained`) or from `with_statistics`; `init` sets them to 0 and 1.
      They are parameters named "mean" and "variance", so they are sent, saved and averaged with the rest. Their
      gradients are exactly zero: gradient steps, and means over clients that started from the same statistics, leave
      them unchanged. Anything that changes all parameters regardless of gradients changes them too: weight decay and
      other regularisers (restrict these to "weight" leaves), noise for privacy, and lossy compression. Set statistics
      once, on the server, before training. If each client set separate ones, they would be averaged, and a mean of
      variances is not the variance of the union.

    With `compute="bfloat16"` parameters keep their type, and normalisation is done in float32 at least. The mean over
    pixels and the last layer are computed in the parameters' type, which the outputs have.

    With `remat` only the results of matrix products are kept for the backward pass; the rest is recomputed from them.
    A convolution multiplies patches, which are nine times as large as the image for a 3x3 kernel; they and the
    normalised images need not be kept. No product is computed twice.

    Args:
        shape: height, width and channels of an image.
        outputs: the size of the last layer.
        norm: "group", or "batch" for batch normalisation with frozen statistics.
        width: the channels of the stem.
        compute: the type of activations and matrix products; None: that of the parameters. "bfloat16" halves memory and
            uses the fast units of an accelerator.
        groups: the number of groups (32 in Wu and He, 2018), reduced to the largest number that divides the channels
            and leaves each group two.
        stem: "small" (3x3, stride 1, no pooling), "imagenet" (7x7, stride 2, then 3x3 max pooling with stride 2) or
            "auto": small where no side is longer than 64 pixels.
        remat: whether to save memory by recomputing in the backward pass.
    """

    shape: tuple[int, ...] = eqx.field(static=True, converter=tuple, default=(32, 32, 3))
    outputs: int = eqx.field(static=True, default=1)
    norm: Norm = eqx.field(static=True, default="group")
    width: int = eqx.field(static=True, default=64)
    compute: Compute | None = eqx.field(static=True, default=None)
    groups: int = eqx.field(static=True, default=32)
    stem: Stem = eqx.field(static=True, default="auto")
    remat: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        who = type(self).__name__
        if len(self.shape) != 3:
            raise ValueError(f"{who}: shape must be (height, width, channels), got {self.shape}")
        named = {f"shape[{i}]": n for i, n in enumerate(self.shape)}
        positive(who, outputs=self.outputs, width=self.width, groups=self.groups, **named)
        for name, kind in (("norm", Norm), ("stem", Stem)):
            if (value := getattr(self, name)) not in get_args(kind):
                raise unknown(f"{who}.{name}", str(value), get_args(kind))
        if self.compute is not None and self.compute not in get_args(Compute):
            raise unknown(f"{who}.compute", str(self.compute), get_args(Compute))

    @property
    def stem_kernel(self) -> int:
        """The side of the stem's kernel in pixels."""
        small = self.stem == "small" or (self.stem == "auto" and max(self.shape[:2]) <= _SMALL)
        return 3 if small else 7

    @abc.abstractmethod
    def starts(self) -> dict[str, Any]:
        """The tree of parameters, as `InitialArray`."""

    @abc.abstractmethod
    def body(self, params: Params, image: Array, norm: Normaliser, remat: bool) -> Array:
        """From the result of the stem to the image whose mean over pixels gives the features."""

    def init(self, key: PRNGKeyArray, dtype: DTypeLike | None = None) -> Params:
        return _draw(self, key, float_type(dtype))

    def __call__(self, params: Params, x: Array) -> Array:
        norm = self._group if self.norm == "group" else frozen_norm
        return self._forward(params, x, norm, self.remat)

    def with_statistics(self, params: Params, images: ArrayLike) -> Params:
        """The parameters with the means and variances of a batch of images in every layer.

        One pass from the first layer to the last: the input of a layer has been normalised by the earlier layers with
        their new statistics. Afterwards the normalised channels of these images have mean 0 and variance 1, wherever
        the variance is well above the 1e-5 under the root.

        Args:
            params: the parameters.
            images: a batch; all are in memory at once, and a few hundred are enough.
        """
        who = type(self).__name__
        if self.norm != "batch":
            raise ValueError(f'{who}: with_statistics needs norm="batch"; norm={self.norm!r} stores no statistics')
        images = jnp.asarray(images)
        if images.ndim < 2 or not len(images):
            raise ValueError(f"{who}: with_statistics needs a batch of at least one image, got shape {images.shape}")

        def one(params: Params, image: Array) -> Params:
            fresh = jax.tree.map(lambda leaf: leaf, params)  # a copy of the dictionaries, to write into

            def norm(layer: Params, image: Array) -> Array:
                wide = image.astype(widest(image.dtype, jnp.float32))
                mean = jax.lax.pmean(wide.mean(axis=(0, 1)), _AXIS)
                square = jnp.square(wide - mean.reshape(1, 1, -1)).mean(axis=(0, 1))
                layer["mean"] = mean.astype(layer["mean"].dtype)
                layer["variance"] = jax.lax.pmean(square, _AXIS).astype(layer["variance"].dtype)
                return frozen_norm(layer, image)

            self._forward(fresh, image, norm, remat=False)
            return fresh

        return jax.jit(jax.vmap(one, (None, 0), out_axes=None, axis_name=_AXIS))(params, images)

    def _forward(self, params: Params, x: Array, norm: Normaliser, remat: bool) -> Array:
        kind, who = params["output"]["weight"].dtype, type(self).__name__
        image = flat(x, math.prod(self.shape), self.compute or kind, who).reshape(self.shape)
        large = self.stem_kernel == 7

        def stem(layer: Params, image: Array) -> Array:
            image = jax.nn.relu(norm(layer, cast_convolve(layer, image, self.stem_kernel, stride=2 if large else 1)))
            return max_pool(image, kernel=3, stride=2) if large else image

        image = self.body(params, lean(stem, remat)(params["stem"], image), norm, remat)
        return dense(params["output"], image.astype(kind).mean(axis=(0, 1)))

    def _group(self, layer: Params, image: Array) -> Array:
        groups = group_count(image.shape[-1], self.groups)
        return group_norm(layer["scale"], layer["shift"], image, groups, EPSILON)

    def _kernel_starts(self, inputs: int, outputs: int, kernel: int, normalised: int) -> dict[str, InitialArray]:
        """A convolution as in He et al. (2015), and the normalisation before or after it, which cancels a bias."""
        window = kernel**2 * inputs
        return {"weight": InitialArray((outputs, window), 2.0 / window)} | self._norm_starts(normalised)

    def _norm_starts(self, channels: int) -> dict[str, InitialArray]:
        zero, one = InitialArray((channels,)), InitialArray((channels,), value=1.0)
        statistics = {"mean": zero, "variance": one} if self.norm == "batch" else {}
        return {"scale": one, "shift": zero} | statistics

    def _output_starts(self, features: int) -> dict[str, InitialArray]:
        return {"weight": InitialArray((self.outputs, features), 1.0 / features), "bias": InitialArray((self.outputs,))}


def frozen_norm(layer: Params, image: Array) -> Array:
    """Each channel normalised by its stored mean and variance, which are constants, then scaled and shifted.

    >>> layer = {"scale": jnp.array([3.0]), "shift": jnp.array([1.0])}
    >>> layer |= {"mean": jnp.array([5.0]), "variance": jnp.array([4.0])}
    >>> frozen_norm(layer, jnp.array([5.0, 7.0]).reshape(1, 2, 1)).round(3).tolist()
    [[[1.0], [4.0]]]
    """
    wide = widest(image.dtype, layer["scale"].dtype, jnp.float32)
    scale, shift = (layer[name].astype(wide) for name in ("scale", "shift"))
    mean, variance = (jax.lax.stop_gradient(layer[name]).astype(wide) for name in ("mean", "variance"))
    # Noise for privacy may carry a small variance below zero.
    gain = scale * jax.lax.rsqrt(jnp.maximum(variance, 0) + EPSILON)
    centred = image.astype(wide) - mean.reshape(1, 1, -1)
    return (centred * gain.reshape(1, 1, -1) + shift.reshape(1, 1, -1)).astype(image.dtype)


def cast_convolve(layer: Params, image: Array, kernel: int, stride: int = 1) -> Array:
    """The layer's convolution in the type of the image."""
    return convolve(layer["weight"].astype(image.dtype), image, kernel, stride)


def lean(function: Callable[..., Array], remat: bool) -> Callable[..., Array]:
    """The same function; with `remat` only the results of its matrix products are kept for the backward pass."""
    return jax.checkpoint(function, policy=jax.checkpoint_policies.dots_saveable) if remat else function


def group_count(channels: int, most: int) -> int:
    """The largest number of equal groups, up to `most`, of at least two channels each.

    >>> group_count(64, 32), group_count(48, 32), group_count(4, 32), group_count(7, 32), group_count(1, 32)
    (32, 24, 2, 1, 1)
    """
    return max(n for n in range(1, most + 1) if n == 1 or (channels % n == 0 and channels >= 2 * n))


@functools.partial(jax.jit, static_argnames="dtype")
def _draw(model: DeepNetwork, key: PRNGKeyArray, dtype: DTypeLike) -> Params:
    return draw_together(model.starts(), key, dtype)
