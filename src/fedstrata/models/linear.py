"""Linear models: with a suitable loss, least squares, logistic or softmax regression."""

import equinox as eqx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray

from fedstrata.models.base import Model, Params, dense, flat, float_type, positive


class Linear(Model):
    """The linear model $W x + b$, started at zero.

    Args:
        features: the number of inputs.
        outputs: the number of outputs.

    >>> import jax
    >>> model = Linear(features=3, outputs=2)
    >>> model(model.init(jax.random.key(0)), jnp.ones(3)).tolist()
    [0.0, 0.0]
    """

    features: int = eqx.field(static=True)
    outputs: int = eqx.field(static=True, default=1)

    def __check_init__(self) -> None:
        positive("Linear", features=self.features, outputs=self.outputs)

    def init(self, key: PRNGKeyArray | None = None, dtype: DTypeLike | None = None) -> Params:
        kind = float_type(dtype)
        return {"weight": jnp.zeros((self.outputs, self.features), kind), "bias": jnp.zeros(self.outputs, kind)}

    def __call__(self, params: Params, x: Array) -> Array:
        return dense(params, flat(x, self.features, params["weight"].dtype, "Linear"))
