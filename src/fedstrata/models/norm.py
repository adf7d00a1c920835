"""Normalisation with a stated policy, and what the deep image networks share."""

import abc
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from fedstrata.errors import unknown
from fedstrata.models.base import Model, Params, dense, flat, float_type, positive
from fedstrata.models.convolution import convolve, group_norm, max_pool
from fedstrata.models.mobilenet import Start
from fedstrata.vector import widest

Norm = Literal["group", "batch"]
Stem = Literal["auto", "small", "imagenet"]
Compute = Literal["float32", "bfloat16"]
Normaliser = Callable[[Params, Array], Array]

EPSILON = 1e-5  # under the root; the one of the published ResNets and DenseNets
_SMALL = 64  # pixels along the longer side that the small stem is for
_AXIS = "images"


class DeepNetwork(Model):
    """A stem, a body of normalised convolutions, the mean over pixels and one layer to the outputs.

    shape: height, width and channels of an image. outputs: the size of the last layer. width: channels of the stem.

    norm: `"group"`, or `"batch"` with frozen statistics.

    - `"group"` takes mean and variance over one group of channels in one image, so that nothing couples examples or
      clients. That is why it is the default: batch statistics differ between clients with different data, and what
      one client's layers learn to expect does not fit another's (Hsieh et al., 2020). There are `groups` groups (32
      as in Wu and He, 2018), or the largest smaller number that divides the channels and leaves each group two.
    - `"batch"` is batch normalisation as in *fine-tuning with frozen statistics*. Every layer stores a mean and a
      variance per channel, and uses them as constants in training and in evaluation alike; scale and shift are
      trained. It is not batch-coupled training: no mean over the batch at hand is ever taken, and nothing is updated
      on the way. A loss here is a function of the parameters and one example, and a batch mean is not. The statistics
      come from a file (`load_pretrained`) or from `with_statistics`; as drawn by `init` they are 0 and 1.
      They lie in the parameters as "mean" and "variance", so they travel, are saved and are averaged with the rest.
      Their gradients are exactly zero, so a step along gradients leaves them as they are, and so does the
      mean over clients that started from the same ones. What acts on all parameters regardless of gradients acts on
      them too: weight decay and other regularisers (put them on "weight" leaves), noise for privacy, and lossy
      compression. Set statistics once, on the server, before training: clients that each set their own would have
      them averaged, and a mean of variances is not the variance of the union.

    compute: the type of activations and matrix products. None is the parameters' own; `"bfloat16"` halves memory and
    uses the fast units of an accelerator. Parameters keep their type, normalisation is done in float32 at least, and
    the mean over pixels and the last layer are done in the parameters' type, which the outputs have.

    stem: `"small"` (3x3, stride 1, no pooling), `"imagenet"` (7x7, stride 2, then 3x3 max pooling with stride 2) or
    `"auto"`: small where no side is longer than 64 pixels.

    remat: keep only the results of matrix products for the backward pass and compute the rest again from them. A
    convolution multiplies patches, which are nine times as large as the image for a 3x3 kernel; they and the
    normalised images need not be kept. No product is done twice.

    Kernels are called "weight", all else "bias", "scale", "shift", "mean" or "variance".
    """

    shape: tuple[int, ...] = eqx.field(static=True, converter=tuple, default=(32, 32, 3))  # height, width, channels
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
        small = self.stem == "small" or (self.stem == "auto" and max(self.shape[:2]) <= _SMALL)
        return 3 if small else 7

    @abc.abstractmethod
    def starts(self) -> dict[str, Any]:
        """How every parameter starts, in the tree that `init` fills."""

    @abc.abstractmethod
    def body(self, params: Params, image: Array, norm: Normaliser, remat: bool) -> Array:
        """From the stem's result to the image whose mean over pixels are the features."""

    def init(self, key: PRNGKeyArray, dtype: Any = None) -> Params:
        return _draw(self, key, float_type(dtype))

    def __call__(self, params: Params, x: Array) -> Array:
        norm = self._group if self.norm == "group" else frozen_norm
        return self._forward(params, x, norm, self.remat)

    def with_statistics(self, params: Params, images: Any) -> Params:
        """The parameters with the means and variances that `images` (a batch) have in every layer.

        One pass from the first layer to the last: what a layer sees has been normalised by those before it, with
        their new statistics. Afterwards the normalised channels of these images have mean 0 and variance 1, wherever
        the variance is well above the 1e-5 under the root. All images are in memory at once; a few hundred will do.
        """
        who = type(self).__name__
        if self.norm != "batch":
            raise ValueError(f'{who}: with_statistics needs norm="batch"; norm={self.norm!r} stores no statistics')
        images = jnp.asarray(images)
        if images.ndim < 2 or not len(images):
            raise ValueError(f"{who}: with_statistics needs a batch of at least one image, got shape {images.shape}")

        def one(params: Params, image: Array) -> Params:
            fresh = jax.tree.map(lambda leaf: leaf, params)  # dictionaries of our own, to write into

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

    def _kernel_starts(self, inputs: int, outputs: int, kernel: int, normalised: int) -> dict[str, Start]:
        """A convolution as by He et al. (2015), and the normalisation before or after it, which undoes a bias."""
        window = kernel**2 * inputs
        return {"weight": Start((outputs, window), 2.0 / window)} | self._norm_starts(normalised)

    def _norm_starts(self, channels: int) -> dict[str, Start]:
        zero, one = Start((channels,)), Start((channels,), value=1.0)
        statistics = {"mean": zero, "variance": one} if self.norm == "batch" else {}
        return {"scale": one, "shift": zero} | statistics

    def _output_starts(self, features: int) -> dict[str, Start]:
        return {"weight": Start((self.outputs, features), 1.0 / features), "bias": Start((self.outputs,))}


def frozen_norm(layer: Params, image: Array) -> Array:
    """Each channel with its stored mean and variance taken out, which are constants, then scaled and shifted.

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
    """The same function; with `remat` the backward pass finds only the results of its matrix products."""
    return jax.checkpoint(function, policy=jax.checkpoint_policies.dots_saveable) if remat else function


def group_count(channels: int, most: int) -> int:
    """The largest number of equal groups, up to `most`, of at least two channels each.

    >>> group_count(64, 32), group_count(48, 32), group_count(4, 32), group_count(7, 32), group_count(1, 32)
    (32, 24, 2, 1, 1)
    """
    return max(n for n in range(1, most + 1) if n == 1 or (channels % n == 0 and channels >= 2 * n))


@functools.partial(jax.jit, static_argnames="dtype")
def _draw(model: DeepNetwork, key: PRNGKeyArray, dtype: Any) -> Params:
    """All start values from one stream: compiling a draw for each of many shapes takes several times as long."""
    starts, tree = jax.tree.flatten(model.starts(), is_leaf=lambda leaf: isinstance(leaf, Start))
    ends = np.cumsum([math.prod(start.shape) if start.variance else 0 for start in starts])
    normal = jnp.split(jax.random.normal(key, (int(ends[-1]),), dtype), ends[:-1])
    full = lambda start: jnp.full(start.shape, start.value, dtype)
    spread = lambda start, part: start.variance**0.5 * part.reshape(start.shape)
    return tree.unflatten([spread(s, n) if s.variance else full(s) for s, n in zip(starts, normal, strict=True)])
