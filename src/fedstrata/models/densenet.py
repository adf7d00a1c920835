"""DenseNet-121, normalised by groups or by frozen statistics."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedstrata.models.base import Params, positive
from fedstrata.models.convolution import mean_pool
from fedstrata.models.norm import DeepNetwork, Normaliser, cast_convolve, lean

_BOTTLENECK = 4  # channels between the two convolutions of a layer, in units of the growth


class DenseNet121(DeepNetwork):
    """The network of Huang et al. (2017): every layer of a block sees the results of all layers before it.

    A layer normalises its input, brings it to four times `growth` channels by a 1x1 convolution, normalises again and
    adds `growth` channels by a 3x3 convolution. Between blocks a 1x1 convolution halves the channels and a mean over
    2x2 pixels halves the resolution. A normalisation follows the small stem too, so that both stems have the same
    layers. `DeepNetwork` describes the options in detail. With `remat` the concatenated images, whose size grows with
    the square of a block's length, are not kept either (Pleiss et al., 2017).

    Args:
        shape: height, width and channels of an image.
        outputs: the size of the last layer.
        norm: "group", or "batch" for batch normalisation with frozen statistics.
        width: the channels of the stem; twice the growth in the paper.
        compute: the type of activations and matrix products, "float32" or "bfloat16"; None: that of the parameters.
        groups: the number of groups of a group normalisation.
        stem: "small", "imagenet" or "auto", by the size of the images.
        remat: whether to save memory by recomputing in the backward pass.
        blocks: the number of layers of each block.
        growth: the channels that each layer adds.

    >>> model = DenseNet121((224, 224, 3), outputs=1000)
    >>> sum(p.size for p in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    7978856

    Reference: huang2017, Table 1.
    """

    blocks: tuple[int, ...] = eqx.field(static=True, converter=tuple, default=(6, 12, 24, 16))
    growth: int = eqx.field(static=True, default=32)

    def __check_init__(self) -> None:
        if not self.blocks:
            raise ValueError("DenseNet121: blocks needs at least one number of layers, got ()")
        positive("DenseNet121", growth=self.growth, **{f"blocks[{i}]": n for i, n in enumerate(self.blocks)})
        pixels = min(self.shape[:2])
        if self.stem_kernel == 7:
            pixels = (pixels + 3) // 4
        if pixels < 2 ** (len(self.blocks) - 1):
            size = f"{self.shape[0]}x{self.shape[1]}"
            raise ValueError(f'DenseNet121: {size} pixels are halved to nothing; use stem="small" or fewer blocks')

    def starts(self) -> dict[str, Any]:
        stem = self._kernel_starts(self.shape[2], self.width, self.stem_kernel, self.width)
        blocks, transitions, channels, inside = [], [], self.width, _BOTTLENECK * self.growth
        for length in self.blocks:
            if blocks:
                transitions.append(self._kernel_starts(channels, channels // 2, 1, channels))
                channels //= 2
            block = []
            for _ in range(length):
                first = self._kernel_starts(channels, inside, 1, channels)
                block.append({"first": first, "second": self._kernel_starts(inside, self.growth, 3, inside)})
                channels += self.growth
            blocks.append(block)
        last, output = self._norm_starts(channels), self._output_starts(channels)
        return {"stem": stem, "blocks": blocks, "transitions": transitions, "last": last, "output": output}

    def body(self, params: Params, image: Array, norm: Normaliser, remat: bool) -> Array:
        def active(layer: Params, seen: list[Array]) -> Array:
            return jax.nn.relu(norm(layer, jnp.concatenate(seen, axis=-1)))

        def grow(layer: Params, seen: list[Array]) -> Array:
            inside = cast_convolve(layer["first"], active(layer["first"], seen), 1)
            return cast_convolve(layer["second"], active(layer["second"], [inside]), 3)

        def transition(layer: Params, seen: list[Array]) -> Array:
            # The paper convolves before the mean. The two commute, and in this order there are a quarter of the pixels.
            return cast_convolve(layer, mean_pool(active(layer, seen)), 1)

        seen = [image]
        for i, block in enumerate(params["blocks"]):
            if i:
                seen = [lean(transition, remat)(params["transitions"][i - 1], seen)]
            for layer in block:
                seen.append(lean(grow, remat)(layer, seen))
        return lean(active, remat)(params["last"], seen)
