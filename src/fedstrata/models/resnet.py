"""ResNet-18, normalised by groups or by frozen statistics."""

from typing import Any

import jax
from jaxtyping import Array

from fedstrata.models.base import Params
from fedstrata.models.norm import DeepNetwork, Normaliser, cast_convolve, lean

_STAGES, _BLOCKS = 4, 2


class ResNet18(DeepNetwork):
    """The network of He et al. (2016): four stages of two residual blocks, each of two 3x3 convolutions.

    Each later stage has twice the channels and half the resolution of the one before it; there the shortcut is a 1x1
    convolution with a normalisation. `DeepNetwork` describes the options in detail.

    Args:
        shape: height, width and channels of an image.
        outputs: the size of the last layer.
        norm: "group", or "batch" for batch normalisation with frozen statistics.
        width: the channels of the first stage; 64 in the paper.
        compute: the type of activations and matrix products, "float32" or "bfloat16"; None: that of the parameters.
        groups: the number of groups of a group normalisation.
        stem: "small", "imagenet" or "auto", by the size of the images.
        remat: whether to save memory by recomputing in the backward pass.

    >>> count = lambda model: sum(p.size for p in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    >>> count(ResNet18((32, 32, 3), outputs=10)), count(ResNet18((224, 224, 3), outputs=1000))
    (11173962, 11689512)

    Reference: he2016, Table 1.
    """

    def starts(self) -> dict[str, Any]:
        stem = self._kernel_starts(self.shape[2], self.width, self.stem_kernel, self.width)
        stages, channels = [], self.width
        for stage in range(_STAGES):
            blocks = []
            for _ in range(_BLOCKS):
                wide = self.width * 2**stage
                block = {
                    "first": self._kernel_starts(channels, wide, 3, wide),
                    "second": self._kernel_starts(wide, wide, 3, wide),
                }
                if channels != wide:
                    block["shortcut"] = self._kernel_starts(channels, wide, 1, wide)
                blocks.append(block)
                channels = wide
            stages.append(blocks)
        return {"stem": stem, "stages": stages, "output": self._output_starts(channels)}

    def body(self, params: Params, image: Array, norm: Normaliser, remat: bool) -> Array:
        def block(layer: Params, image: Array) -> Array:
            stride = 2 if "shortcut" in layer else 1
            inside = jax.nn.relu(norm(layer["first"], cast_convolve(layer["first"], image, 3, stride)))
            inside = norm(layer["second"], cast_convolve(layer["second"], inside, 3))
            if "shortcut" in layer:
                image = norm(layer["shortcut"], cast_convolve(layer["shortcut"], image, 1, stride))
            return jax.nn.relu(image + inside)

        for stage in params["stages"]:
            for layer in stage:
                image = lean(block, remat)(layer, image)
        return image
