"""Linear models: least squares, logistic and softmax regression, by the loss that is put on them."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from fedstrata.models.base import Model, Params, dense, flat, float_type, positive


class Linear(Model):
    """$W x + b$, started at zero: with a convex loss no start is better, and none is unlucky.

    >>> import jax
    >>> model = Linear(features=3, outputs=2)
    >>> model(model.init(jax.random.key(0)), jnp.ones(3)).tolist()
    [0.0, 0.0]
    """

    features: int = eqx.field(static=True)
    outputs: int = eqx.field(static=True, default=1)

    def __check_init__(self) -> None:
        positive("Linear", features=self.features, outputs=self.outputs)

    def init(self, key: PRNGKeyArray | None = None, dtype: Any = None) -> Params:
        kind = float_type(dtype)
        return {"weight": jnp.zeros((self.outputs, self.features), kind), "bias": jnp.zeros(self.outputs, kind)}

    def __call__(self, params: Params, x: Array) -> Array:
        return dense(params, flat(x, self.features, params["weight"].dtype, "Linear"))
