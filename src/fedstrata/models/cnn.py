"""A small convolutional network."""

import equinox as eqx
import jax
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray

from fedstrata.models.base import Model, Params, dense, flat, init_dense, positive
from fedstrata.models.convolution import convolve


class CNN(Model):
    """Convolution, relu and 2x2 max pooling for each of `channels`, then a hidden layer and the outputs.

    `CNN((28, 28, 1), kernel=5, hidden=512)` is the MNIST network of McMahan et al. (2017). Grey images may omit the
    channel axis.

    Args:
        shape: height, width and channels of an image.
        channels: the output channels of each convolution.
        outputs: the size of the last layer.
        kernel: the side of the convolution kernels in pixels, odd.
        hidden: the size of the hidden layer.

    >>> model = CNN((28, 28, 1), kernel=5, hidden=512)
    >>> sum(p.size for p in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    1663370
    """

    shape: tuple[int, ...] = eqx.field(static=True, converter=tuple)
    channels: tuple[int, ...] = eqx.field(static=True, converter=tuple, default=(32, 64))
    outputs: int = eqx.field(static=True, default=10)
    kernel: int = eqx.field(static=True, default=3)
    hidden: int = eqx.field(static=True, default=128)

    def __check_init__(self) -> None:
        if len(self.shape) != 3:
            raise ValueError(f"CNN: shape must be (height, width, channels), got {self.shape}")
        if not self.channels:
            raise ValueError("CNN: channels needs at least one convolution; for none use MLP")
        named = {f"shape[{i}]": n for i, n in enumerate(self.shape)} | {
            f"channels[{i}]": n for i, n in enumerate(self.channels)
        }
        positive("CNN", outputs=self.outputs, kernel=self.kernel, hidden=self.hidden, **named)
        if self.kernel % 2 == 0:
            raise ValueError(f"CNN: kernel must be odd, so that a convolution keeps the size, got {self.kernel}")
        if min(self.shape[:2]) < 2 ** len(self.channels):
            size = f"{self.shape[0]}x{self.shape[1]}"
            raise ValueError(f"CNN: {len(self.channels)} poolings halve {size} pixels to nothing; use fewer channels")

    def init(self, key: PRNGKeyArray, dtype: DTypeLike | None = None) -> Params:
        keys = jax.random.split(key, len(self.channels) + 2)
        depths = (self.shape[2], *self.channels)
        window = self.kernel**2
        halved = 2 ** len(self.channels)
        features = (self.shape[0] // halved) * (self.shape[1] // halved) * self.channels[-1]
        return {
            "convolutions": [
                init_dense(k, window * n, m, dtype) for k, n, m in zip(keys[:-2], depths[:-1], depths[1:], strict=True)
            ],
            "hidden": init_dense(keys[-2], features, self.hidden, dtype),
            "output": init_dense(keys[-1], self.hidden, self.outputs, dtype, gain=1.0),
        }

    def __call__(self, params: Params, x: Array) -> Array:
        size = self.shape[0] * self.shape[1] * self.shape[2]
        image = flat(x, size, params["output"]["weight"].dtype, "CNN").reshape(self.shape)
        for layer in params["convolutions"]:
            convolved = convolve(layer["weight"], image, self.kernel) + layer["bias"].reshape(1, 1, -1)
            image = _pool(jax.nn.relu(convolved))
        return dense(params["output"], jax.nn.relu(dense(params["hidden"], image.reshape(-1))))


def _pool(image: Array) -> Array:
    """The largest of each 2x2 block; an odd last row or column is left out."""
    height, width, depth = image.shape[0] // 2, image.shape[1] // 2, image.shape[2]
    blocks = image[: 2 * height, : 2 * width].reshape(height, 2, width, 2, depth)
    return blocks.max(axis=(1, 3))
