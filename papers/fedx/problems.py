"""Parts of the problems: scores between 0 and 1, cross-entropy with ranking metrics, falling steps."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from fedstrata.core.vector import Vector
from fedstrata.models.base import Model, Params
from fedstrata.problems.average import Average
from fedstrata.problems.base import Full, Problem, Rows
from fedstrata.problems.pairwise import columns as ranking
from fedstrata.problems.pairwise.problem import Pairwise


class Squashed(Model):
    """A model whose outputs go through the logistic function, as the networks of the authors' code do.

    >>> from fedstrata.models import Linear
    >>> model = Squashed(Linear(2))
    >>> model(model.init(jax.random.key(0)), jnp.ones(2)).tolist()
    [0.5]
    """

    model: Model

    def init(self, key: PRNGKeyArray, dtype: Any = None) -> Params:
        return self.model.init(key, dtype)

    def __call__(self, params: Params, x: Array) -> Array:
        return jax.nn.sigmoid(self.model(params, x))


class Held(Pairwise):
    """`fs.Pairwise` that records its metrics on held-out data only.

    Each metric sorts all rows, and compiling the sorts on training data would take most of the compilation time.
    """

    def evaluate(self, x: Vector, full: Full, smooth: tuple[Array, Vector] | None = None) -> dict[str, Array]:
        return Problem.evaluate(self, x, full, smooth)

    def evaluate_split(self, x: Vector, full: Full, split: str) -> dict[str, Array]:
        return {} if split == "train" else super().evaluate_split(x, full, split)


class Ranked(Average):
    """`fs.Average` of a loss whose model has one output, with ranking metrics recorded on held-out data.

    ranks: metrics by name, as in `fs.Pairwise`.
    """

    ranks: tuple[str, ...] = eqx.field(default=("auc",), static=True, converter=tuple)

    def evaluate_split(self, x: Vector, full: Full, split: str) -> dict[str, Array]:
        return {**super().evaluate_split(x, full, split), **self._ranked(x, full[split])}

    def _ranked(self, x: Vector, rows: Rows) -> dict[str, Array]:
        model: Any = getattr(self.loss, "model", None)
        score = lambda example: model(x.tree, example["x"]).reshape(())
        scores = rows.map(score)
        return ranking.measures(self.ranks, scores, rows.column("y") == 1, rows.client, rows.clients)


class Quartered(eqx.Module):
    """A step size that falls to a tenth after every quarter of a run: after 5,000 of 20,000 steps in the paper.

    Its values are arrays, so that other values do not recompile.

    >>> step = Quartered.of(0.5, steps=100)
    >>> [round(float(step(jnp.asarray(k))), 6) for k in (0, 24, 25, 99)]
    [0.5, 0.5, 0.05, 0.0005]
    """

    first: Array
    quarter: Array

    @classmethod
    def of(cls, first: float, steps: int) -> "Quartered":
        return cls(jnp.asarray(first, float), jnp.asarray(max(1, -(-steps // 4)), jnp.int32))

    def __call__(self, step: Array) -> Array:
        tenths = jnp.minimum(step // self.quarter, 3).astype(self.first.dtype)
        return self.first * jnp.asarray(0.1, self.first.dtype) ** tenths
