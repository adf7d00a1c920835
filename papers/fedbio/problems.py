"""The two problems of the experiment with their recorded columns: a model, and group weights."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fedstrata.base.directions import Direction
from fedstrata.core.vector import Vector
from fedstrata.metrics import fairness
from fedstrata.problems.base import Full, Rows
from fedstrata.problems.fair import Fair
from fedstrata.problems.group_weights import GroupWeights


class Counted(Fair):
    """`fs.Fair` that records two more gaps, for label 0: candidates for the definition behind the published numbers.

    eq_opp_zero: the largest minus the smallest recall of label 0, which is equal opportunity with 0 as the positive
    label. mean_gap_zero: the mean difference of that recall over all pairs of groups.
    """

    def by_group(self, x: Vector, rows: Rows) -> dict[str, Array]:
        dtype = rows.weight.dtype

        def raised(example: PyTree) -> Array:
            negative = ~self.positive(example)
            pair = jnp.stack([negative, negative & (self.logit(x.tree, example) > 0)]).astype(dtype)
            return self.membership(example, dtype)[:, None] * pair[None, :]

        alike = dataclasses.replace(rows, weight=jnp.ones_like(rows.weight))
        negatives, hits = alike.mean(raised).T
        rates, known = fairness.rate(hits, negatives)
        both = known[:, None] & known[None, :]
        apart = jnp.where(both, jnp.abs(rates[:, None] - rates[None, :]), 0)
        pairs = jnp.maximum(jnp.sum(both) - jnp.sum(known), 1).astype(dtype)
        gaps = {"eq_opp_zero": fairness.spread(rates, known), "mean_gap_zero": jnp.sum(apart) / pairs}
        return {**super().by_group(x, rows), **gaps}

    def modes(self) -> dict[str, Direction]:
        return {**super().modes(), "eq_opp_zero": "min", "mean_gap_zero": "min"}


class Followed(GroupWeights):
    """`fair.learn_weights(exact=False)` that records only cheap columns, so that it can record often.

    objective: the upper loss at the clients' current models, not at the exact solutions of their lower problems.
    weight_0, weight_1 …: the weights, from which the exact objective can be computed later.
    """

    @classmethod
    def of(cls, problem: GroupWeights) -> "Followed":
        return cls(**{field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)})

    def observed(self, x: Vector, y: Vector, full: Full) -> dict[str, Array]:
        weights = self.weights(x)
        found = {f"weight_{group}": weights[group] for group in range(weights.shape[0])}
        return {"objective": self._upper(x, y, full), **found}

    def modes(self) -> dict[str, Direction]:
        assert self.fair is not None
        return {**super().modes(), **{f"weight_{group}": "none" for group in range(self.fair.group_count)}}

    def bind(self, x: Vector, federation: Any, rule: Any = None) -> "Followed":
        return self  # no check: with positive weights and an l2 term the lower problems are strongly convex
