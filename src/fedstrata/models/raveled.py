"""A model whose parameters are one vector."""

import jax
from jax.flatten_util import ravel_pytree
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray

from fedstrata.models.base import Model, Params


class Raveled(Model):
    """A model with all of its parameters in one array.

    Algorithms then do arithmetic on one long array instead of on hundreds of short ones: a deep network compiles and
    runs faster. But parameters have no names, so a regulariser cannot act on some layers only. Save the trained model
    with its names by `save_model(path, raveled.model, raveled.unravel(params))`.

    Args:
        model: the model.

    >>> from fedstrata.models import MLP
    >>> model = Raveled(MLP((4, 3, 2)))
    >>> model.init(jax.random.key(0)).shape
    (23,)
    """

    model: Model

    def init(self, key: PRNGKeyArray, dtype: DTypeLike | None = None) -> Params:
        return ravel_pytree(self.model.init(key, dtype))[0]

    def __call__(self, params: Params, x: Array) -> Array:
        return self.model(self.unravel(params), x)

    def unravel(self, params: Array) -> Params:
        """The parameters as the tree of the model.

        Args:
            params: the array.
        """
        like = jax.eval_shape(lambda key: self.model.init(key, params.dtype), jax.random.key(0))
        leaves, structure = jax.tree.flatten(like)
        out, start = [], 0
        for leaf in leaves:
            out.append(params[start : start + leaf.size].reshape(leaf.shape))
            start += leaf.size
        return jax.tree.unflatten(structure, out)
