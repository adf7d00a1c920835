"""Convolutions, pooling and group normalisation for one image `(height, width, channels)`, made to run under `vmap`.

Under a `vmap` over clients the weights are batched, and a convolution becomes a grouped one, which XLA runs slowly.
Here a convolution is a matrix product, or a short sum of shifted products, and stays one under any `vmap`. XLA's
grouped convolutions are used only on GPUs, and where they were measured to be faster (`docs/benchmarks/resnet_gpu.md`).
Padding is `(kernel - 1) // 2` zeros on every side, so a stride `s` leaves `ceil(size / s)` pixels.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedstrata.core.vector import widest

EPSILON = 1e-3  # under the root, as in the batch normalisation of the MobileNets


def convolve(weight: Array, image: Array, kernel: int, stride: int = 1, padding: int | None = None) -> Array:
    """A convolution.

    Args:
        weight: of shape `(outputs, kernel * kernel * channels)`.
        image: of shape `(height, width, channels)`.
        kernel: the side of the kernel in pixels.
        stride: in pixels.
        padding: zeros on every side; None: `(kernel - 1) // 2`.

    >>> convolve(jnp.ones((1, 9)), jnp.ones((4, 4, 1)), kernel=3, stride=2)[..., 0].tolist()
    [[4.0, 6.0], [6.0, 9.0]]
    """
    padding = (kernel - 1) // 2 if padding is None else padding
    faster = jax.default_backend() == "gpu" and better_grouped(image.shape, kernel, stride)
    return (grouped if faster else patched)(weight, image, kernel, stride, padding)


def patched(weight: Array, image: Array, kernel: int, stride: int, padding: int) -> Array:
    """The same as one matrix product over patches."""
    window = [(i, j) for i in range(kernel) for j in range(kernel)]
    return pointwise(weight, jnp.concatenate(_shifted(image, window, kernel, stride, padding), axis=-1))


def better_grouped(shape: tuple[int, ...], kernel: int, stride: int) -> bool:
    """Whether a GPU runs a grouped convolution of images of this shape faster than a product over patches.

    Patches take `kernel²` times the memory traffic of the image. A grouped convolution moves only the image, but each
    group has too little work where pixels or channels are few.
    """
    height, width, channels = shape
    return kernel > 1 and stride == 1 and height * width >= 64 and channels >= 32


def grouped(weight: Array, image: Array, kernel: int, stride: int, padding: int) -> Array:
    """The same as XLA's convolution, which `vmap` over weights groups by client."""
    filters = weight.reshape(-1, kernel, kernel, image.shape[-1])
    names, sides = ("NHWC", "OHWI", "NHWC"), [(padding, padding)] * 2
    found = jax.lax.conv_general_dilated(image[None], filters, (stride, stride), sides, dimension_numbers=names)
    return found[0]


def pointwise(weight: Array, image: Array) -> Array:
    """A convolution with a kernel of one pixel; weight: `(outputs, channels)`."""
    return image @ weight.T


def depthwise(weight: Array, image: Array, stride: int = 1) -> Array:
    """A convolution of each channel with a separate kernel; weight: `(kernel, kernel, channels)`.

    Entries of the kernel that only multiply padding are left out: on an image of one pixel, all but the middle.
    """
    kernel = weight.shape[0]
    rows, columns = (_reached(size, kernel, stride) for size in image.shape[:2])
    window = [(i, j) for i in rows for j in columns]
    shifted = _shifted(image, window, kernel, stride, (kernel - 1) // 2)
    total, *rest = [weight[i, j].reshape(1, 1, -1) * part for (i, j), part in zip(window, shifted, strict=True)]
    return sum(rest, start=total)


def max_pool(image: Array, kernel: int, stride: int) -> Array:
    """The maximum of every window; padding does not count.

    >>> max_pool(-jnp.arange(1.0, 17.0).reshape(4, 4, 1), kernel=3, stride=2)[..., 0].tolist()
    [[-1.0, -2.0], [-5.0, -6.0]]
    """
    window = [(i, j) for i in range(kernel) for j in range(kernel)]
    return functools.reduce(jnp.maximum, _shifted(image, window, kernel, stride, (kernel - 1) // 2, fill=-jnp.inf))


def mean_pool(image: Array) -> Array:
    """The mean of each 2x2 block; an odd last row or column is left out."""
    height, width, depth = image.shape[0] // 2, image.shape[1] // 2, image.shape[2]
    blocks = image[: 2 * height, : 2 * width].reshape(height, 2, width, 2, depth)
    return blocks.mean(axis=(1, 3))


def group_norm(scale: Array, shift: Array, image: Array, groups: int, epsilon: float = EPSILON) -> Array:
    r"""Each group of neighbouring channels brought to mean 0 and variance 1, then scaled and shifted by channel.

    $$ y = \gamma \, \frac{x - \mu_g}{\sqrt{\sigma_g^2 + \epsilon}} + \beta $$

    Mean and variance are taken over the pixels and channels of one group in one image, in float32 at least: a sum of
    many bfloat16 numbers keeps too few digits. Scale and shift may be wider than the image: they are applied in their
    type, and the result has the image's. Group normalisation is due to Wu and He (2018).

    Args:
        scale: γ, one number per channel.
        shift: β, one number per channel.
        image: of shape `(height, width, channels)`.
        groups: the number of groups; it divides the channels.
        epsilon: ε.

    >>> image = jnp.array([1.0, 3.0, 10.0, 30.0]).reshape(1, 1, 4)
    >>> group_norm(jnp.ones(4), jnp.zeros(4), image, groups=2).round(2).tolist()
    [[[-1.0, 1.0, -1.0, 1.0]]]
    """
    height, width, channels = image.shape
    wide = image.astype(widest(image.dtype, jnp.float32)).reshape(height * width, groups, channels // groups)
    centred = wide - wide.mean(axis=(0, 2), keepdims=True)
    variance = jnp.square(centred).mean(axis=(0, 2), keepdims=True)
    normal = (centred * jax.lax.rsqrt(variance + epsilon)).astype(scale.dtype).reshape(image.shape)
    return (scale.reshape(1, 1, -1) * normal + shift.reshape(1, 1, -1)).astype(image.dtype)


def _shifted(
    image: Array, window: list[tuple[int, int]], kernel: int, stride: int, padding: int, fill: float = 0.0
) -> list[Array]:
    """For each position in the window, the pixels there of all outputs."""
    sides = ((padding, padding), (padding, padding), (0, 0))
    padded = jnp.pad(image, sides, constant_values=fill) if padding else image
    height, width, channels = padded.shape
    down, across = (stride * ((size - kernel) // stride) + 1 for size in (height, width))
    step = (stride, stride, 1)
    return [jax.lax.slice(padded, (i, j, 0), (i + down, j + across, channels), step) for i, j in window]


def _reached(size: int, kernel: int, stride: int) -> list[int]:
    """The positions along one side of a kernel that ever overlap the image."""
    first = [i - (kernel - 1) // 2 for i in range(kernel)]
    return [i for i, start in enumerate(first) if any(0 <= at + start < size for at in range(0, size, stride))]
