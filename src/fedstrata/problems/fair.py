"""Fair federated learning: an average of losses whose examples belong to groups."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree

from fedstrata.core.vector import Vector
from fedstrata.metrics import fairness
from fedstrata.problems import groups
from fedstrata.problems.average import Loss, LossProblem
from fedstrata.problems.base import Full, Rows, SmoothOracle, model_of
from fedstrata.problems.groups import GroupOf
from fedstrata.problems.losses import Regression


class FairOracle(SmoothOracle):
    """The loss of one client, and sums and gaps by group for methods of group fairness, all on the same sample."""

    def value(self, x: Vector) -> Array:
        weights = self.problem.weights
        return self._mean(x, None if weights is None else jnp.asarray(weights))

    def weighted_value(self, x: Vector, weights: Vector) -> Array:
        """The mean of w[a] ℓ(x; ξ) over the sample, with a the group of the example, plus the l2 term of the loss."""
        return self._mean(x, weights.tree)

    def weighted_grad(self, x: Vector, weights: Vector) -> Vector:
        """The gradient of `weighted_value` in x."""
        return jax.grad(self.weighted_value)(x, weights)

    def group_sums(self, x: Vector) -> tuple[Vector, Vector]:
        """The sum of the losses (without l2 term) and the number of the examples of each group in the sample.

        `oracle.fresh(0, "all").group_sums(x)` is the same over all examples of the client.
        """
        losses = self._losses(x).astype(x.scalar_dtype)
        members = self._members(losses.dtype)
        return Vector(jnp.sum(members * losses[:, None], axis=0)), Vector(jnp.sum(members, axis=0))

    def disparity(self, x: Vector, sharpness: Any = 1.0) -> Array:
        """A differentiable gap in equal opportunity: largest minus smallest group mean of σ(sharpness · logit).

        The means are over a group's positives in the sample. Groups without positives are left out; with fewer than two
        groups left the gap is 0. Where groups tie, the gradient shares the derivative between them.

        Args:
            x: the parameters.
            sharpness: the factor of the logit.
        """
        problem, examples = self.problem, self.samples["batch"].examples
        logits = jax.vmap(lambda example: problem.logit(x.tree, example))(examples)
        chance = jax.nn.sigmoid(jnp.asarray(sharpness, logits.dtype) * logits)
        positive = jax.vmap(problem.positive)(examples).astype(logits.dtype)
        members = self._members(logits.dtype) * positive[:, None]
        return fairness.spread(*fairness.rate(jnp.sum(members * chance[:, None], axis=0), jnp.sum(members, axis=0)))

    def disparity_grad(self, x: Vector, sharpness: Any = 1.0) -> Vector:
        """The gradient of `disparity`."""
        return jax.grad(self.disparity)(x, sharpness)

    def disparity_value_and_grad(self, x: Vector, sharpness: Any = 1.0) -> tuple[Array, Vector]:
        """The value and the gradient of `disparity`."""
        return jax.value_and_grad(self.disparity)(x, sharpness)

    def _mean(self, x: Vector, weights: Array | None) -> Array:
        losses = self._losses(x)
        if weights is not None:
            losses = losses * jax.vmap(lambda e: self.problem.weight_of(e, weights, losses.dtype))(self._examples)
        value = self.samples["batch"].mean(losses)
        return value + self.problem.penalty(x).astype(value.dtype)

    @property
    def _examples(self) -> PyTree:
        return self.samples["batch"].examples

    def _losses(self, x: Vector) -> Array:
        return jax.vmap(lambda example: self.problem.data_loss(x.tree, example))(self._examples)

    def _members(self, dtype: Any) -> Array:
        """(b, K): 1 where an example of the sample counts and is in the group."""
        members = jax.vmap(lambda example: self.problem.membership(example, dtype))(self._examples)
        mask = self.samples["batch"].mask
        return members if mask is None else members * mask.astype(dtype)[:, None]


class Fair(LossProblem):
    r"""$\min_x \sum_i p_i \, \frac{1}{n_i} \sum_{\xi \in D_i} w_{a(\xi)} \, \ell(x; \xi) + \frac{l_2}{2} \|x\|^2$.

    An average problem, $w = 1$, whose examples belong to groups $a$; or the same with a weight for every group.

    Recorded besides the objective and the metrics of the loss, over all rows with equal weights (not by client):
    worst_group_loss (without l2), and for a model with decisions, "logit above 0", the measures of `fs.fairness`:
    eq_opp, eq_odds, demographic_parity and worst_group_accuracy. Label 1 is the positive one.

    Args:
        loss: usually `fs.losses.Classification` of a model with one output and labels 0 and 1; its l2 term is not
            weighted. Any `loss(params, example) -> scalar` works for methods without decisions, such as FedMinMax.
        group: the column of the group, a whole number from 0, or a function of one example.
        groups: the number of groups; None: counted in the data.
        weights: one number per group, at least 0; None: all 1.
        metrics: more functions like the loss, averaged.

    >>> import fedstrata as fs
    >>> problem = Fair(fs.losses.Classification(fs.models.Linear(3), l2=0.01), group="group", groups=2)
    >>> problem.weighted([0.5, 1.5]).weights.tolist()
    [0.5, 1.5]
    """

    group: str | GroupOf = eqx.field(default="group", static=True)
    groups: int | None = eqx.field(default=None, static=True)
    weights: Any = eqx.field(default=None, converter=lambda w: w if w is None else _array(w))
    metrics: Mapping[str, Loss] = eqx.field(default_factory=dict)
    Oracle: ClassVar[type] = FairOracle

    def __check_init__(self) -> None:
        if not callable(self.loss):
            raise TypeError(f"Fair: loss={self.loss!r} must be callable as loss(params, example)")
        if not (isinstance(self.group, str) or callable(self.group)):
            raise TypeError(f"Fair: group={self.group!r} must name a column, or be a function of one example")
        if self.groups is not None and (
            isinstance(self.groups, bool) or not isinstance(self.groups, int) or self.groups < 1
        ):
            raise ValueError(f"Fair: groups={self.groups!r} must be a whole number >= 1, or None to count them")
        if self.weights is None or isinstance(self.weights, Tracer):
            return
        values = np.asarray(self.weights)
        if values.ndim != 1 or (self.groups is not None and values.size != self.groups):
            wanted = "one number per group" if self.groups is None else f"one number for each of {self.groups} groups"
            raise ValueError(f"Fair: weights has shape {values.shape}; give {wanted}")
        if not np.all(np.isfinite(values)) or np.any(values < 0) or not np.any(values > 0):
            raise ValueError(
                f"Fair: weights={values.tolist()} must be finite, at least 0 and not all 0: a loss with a negative "
                "weight has no minimum; learn weights through a link or a projection that keeps them positive"
            )

    def weighted(self, weights: Any) -> "Fair":
        """The same problem with a weight for every group, e.g. to train FedAvg with learned weights.

        Args:
            weights: one number per group, an array or a `Vector`.
        """
        return dataclasses.replace(self, weights=weights)

    def learn_weights(self, start: PyTree, link: Any = "sigmoid", **options: Any) -> Any:
        """The bilevel problem of learning group weights: the loss on a balanced "valid" split of models so trained.

        Needs `groups=`.

        Args:
            start: start values of each client's model.
            link: the weights as a function of x. "sigmoid": w = σ(x), between 0 and 1; "box": w = x, kept between
                low=0.01 and high=10; "literal": w = x as published, which may become negative (the run then stops with
                that reason).
            **options: low, high, and parameters of `fs.Bilevel`; allow_missing=True for clients without a group.
        """
        from fedstrata.problems.group_weights import learn_weights

        return learn_weights(self, start, link, **options)

    # One example.

    def group_of(self, example: PyTree) -> Any:
        return example[self.group] if isinstance(self.group, str) else self.group(example)

    def membership(self, example: PyTree, dtype: Any) -> Array:
        """One-hot group of the example; sums with it are faster than reads by index and their gradients."""
        return jax.nn.one_hot(jnp.asarray(self.group_of(example)).astype(jnp.int32), self.group_count, dtype=dtype)

    def weight_of(self, example: PyTree, weights: Array, dtype: Any) -> Array:
        return jnp.sum(self.membership(example, dtype) * weights.astype(dtype))

    def data_loss(self, params: PyTree, example: PyTree) -> Array:
        """The loss without its l2 term."""
        return getattr(self.loss, "data_loss", self.loss)(params, example)

    def logit(self, params: PyTree, example: PyTree) -> Array:
        """The model's score of one example; the decision is 1 where it is above 0."""
        if not self.decides:
            raise TypeError(
                f"Fair: the loss {type(self.loss).__name__} has no scores of 0/1 labels, so there are no decisions to "
                "compare; use fs.losses.Classification(model)"
            )
        return model_of(self)(params, example["x"]).reshape(())

    def positive(self, example: PyTree) -> Array:
        """Whether the label is the positive one."""
        return jnp.asarray(example["y"]) == 1

    # Properties of the problem.

    @property
    def decides(self) -> bool:
        """Whether the loss scores binary labels by a model, so that there are decisions to compare."""
        return callable(getattr(self.loss, "model", None)) and not isinstance(self.loss, Regression)

    @property
    def group_count(self) -> int:
        """The number of groups."""
        if self.groups is None:
            raise ValueError(
                "the number of groups of this Fair problem is not set yet; give groups=, or let fs.run or problem.bind "
                "count them"
            )
        return self.groups

    def per_group(self, value: float, like: Vector) -> Vector:
        """The value once per group, as a start value of a state."""
        return Vector(jnp.full((self.group_count,), value, like.scalar_dtype))

    def penalty(self, x: Vector) -> Array:
        """The l2 term of the loss."""
        l2 = getattr(self.loss, "l2", 0.0) if hasattr(self.loss, "data_loss") else 0.0
        if isinstance(l2, int | float) and l2 == 0:
            return jnp.zeros((), x.scalar_dtype)
        return 0.5 * jnp.asarray(l2, x.scalar_dtype) * x.norm_squared()

    # All data.

    def example_loss(self, x: Vector, example: PyTree) -> Array:
        """The weighted loss of one example, without the l2 term."""
        value = self.data_loss(x.tree, example)
        return value if self.weights is None else self.weight_of(example, self.weights, value.dtype) * value

    def mean_loss(self, x: Vector, full: Full) -> Array:
        value = full["train"].mean(lambda example: self.example_loss(x, example))
        return value + self.penalty(x).astype(value.dtype)

    def objective(self, x: Vector, full: Full) -> Array:
        return self.mean_loss(x, full)

    def evaluate(self, x: Vector, full: Full, smooth: tuple[Array, Vector] | None = None) -> dict[str, Array]:
        rows = full["train"]
        return {**super().evaluate(x, full, smooth), **self.measured(x, rows), **self.by_group(x, rows)}

    def evaluate_split(self, x: Vector, full: Full, split: str) -> dict[str, Array]:
        return {**super().evaluate_split(x, full, split), **self.by_group(x, full[split])}

    def evaluate_clients(self, x: Vector, rows: Rows) -> dict[str, Array]:
        found = super().evaluate_clients(x, rows)
        mean = rows.mean_by_client(lambda example: self.example_loss(x, example))
        return {**found, "objective": mean + self.penalty(x).astype(mean.dtype)}

    def by_group(self, x: Vector, rows: Rows) -> dict[str, Array]:
        """The loss of the worst group and the measures of `fs.fairness`, over rows with equal weights."""
        alike = eqx.tree_at(lambda r: r.weight, rows, jnp.ones_like(rows.weight))
        dtype = rows.weight.dtype

        def count(example: PyTree) -> dict[str, Array]:
            member = self.membership(example, dtype)
            found = {"members": member, "losses": member * self.data_loss(x.tree, example).astype(dtype)}
            if self.decides:
                pair = lambda yes: jnp.stack([~yes, yes]).astype(dtype)
                label, guess = pair(self.positive(example)), pair(self.logit(x.tree, example) > 0)
                found["table"] = member[:, None, None] * (label[:, None] * guess[None, :])[None]
            return found

        sums = alike.mean(count)
        risks, known = fairness.rate(sums["losses"], sums["members"])
        measures = fairness.measures(sums["table"]) if self.decides else {}
        return {"worst_group_loss": jnp.max(jnp.where(known, risks, -jnp.inf)), **measures}

    # Before a run.

    def check(self, x: Vector, federation: Any) -> None:
        count = groups.count(self.group, self.groups, federation)
        super().check(x, federation)
        if self.weights is not None and self.weights.shape[0] != count:
            raise ValueError(f"Fair: {self.weights.shape[0]} weights were given for {count} groups")
        if self.decides:
            groups.check_decisions(model_of(self), x, federation)
        groups.warn_of_missing(self.group, count, federation)

    def parts(self, federation: Any) -> dict[str, Any]:
        return groups.sizes(self.group, self.group_count, federation, labels=self.decides)

    def unseen(self) -> "Fair":
        if self.groups is None:
            raise ValueError("Fair: give groups=, their number: without data they cannot be counted")
        return self

    def bind(self, x: Vector, federation: Any, rule: Any = None) -> "Fair":
        return dataclasses.replace(self, groups=groups.count(self.group, self.groups, federation))


def _array(weights: Any) -> Any:
    return jnp.asarray(weights.tree if isinstance(weights, Vector) else weights)
