"""Nested federated learning: functions of expectations of functions, K levels deep."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree

from fedstrata.base.errors import unknown
from fedstrata.core.vector import Vector
from fedstrata.data.examples import one_example
from fedstrata.problems.average import Loss
from fedstrata.problems.base import Full, Oracle, Rows
from fedstrata.problems.composite import CompositeProblem, plus
from fedstrata.prox import Regularizer, Zero

Level = Callable[..., PyTree]  # level(y) or level(y, example) -> the next y


class NestedOracle(Oracle):
    """The levels of one client, each estimated from a separate sample ξ_k; levels are counted from 1.

    Values and Jacobian products of level k use the same ξ_k, as recursive estimators need. With `separate=True` they
    use an independent sample ξ'_k, which is also the same for all calls in one step.
    """

    @property
    def levels(self) -> int:
        """The number of levels, K."""
        return len(self.problem.levels)

    def value(self, k: int, y: Vector, separate: bool = False) -> Vector:
        """F_k(y; ξ_k), the mean over the sample."""
        return self._level(k, separate)(y)

    def pull(self, k: int, y: Vector, v: Vector | None = None, separate: bool = False) -> Vector:
        """J_k(y; ξ_k)ᵀ v; for the last level, which is a number, the gradient (no v)."""
        out, transposed = jax.vjp(self._level(k, separate), y)
        return transposed(jax.tree.map(jnp.ones_like, out) if v is None else v)[0]

    def jacobian(self, k: int, y: Vector, separate: bool = False) -> "Jacobian":
        """J_k(y; ξ_k) as an explicit d_k × d_{k−1} matrix."""
        return Jacobian(jax.jacrev(self._level(k, separate))(y).tree)

    def prox(self, z: Vector, step: Any) -> Vector:
        """The minimiser of φ(x) + |x − z|² / (2 step); z without a regulariser."""
        return self.problem.prox(z, step)

    def _level(self, k: int, separate: bool) -> Callable[[Vector], Vector]:
        problem, number = self.problem, k - 1
        level = problem.levels[number]
        if not problem.samples_at(number):
            return lambda y: Vector(level(y.tree))
        sample = self.samples[f"{'jacobian' if separate else 'level'}{k}"]
        return lambda y: Vector(sample.mean(jax.vmap(lambda example: level(y.tree, example))(sample.examples)))


class Jacobian(Vector):
    """A Jacobian as a `Vector` of its entries: a tree of outputs over trees of inputs, with sums and multiples."""

    def pull(self, v: Vector) -> Vector:
        """The product Jᵀ v."""
        outer = jax.tree.structure(v.tree)
        terms = [
            jax.tree.map(lambda a, out=out: jnp.tensordot(out, a, axes=out.ndim), inputs.tree)
            for out, inputs in zip(outer.flatten_up_to(v.tree), outer.flatten_up_to(self.tree), strict=True)
        ]
        return Vector(jax.tree.map(lambda *parts: sum(parts[1:], start=parts[0]), *terms))

    def push(self, dy: Vector) -> Vector:
        """The product J dy."""
        is_input = lambda node: isinstance(node, Vector)

        def apply(inputs: Vector) -> Array:
            pairs = zip(jax.tree.leaves(inputs.tree), jax.tree.leaves(dy.tree), strict=True)
            parts = [jnp.tensordot(a, d, axes=d.ndim) for a, d in pairs]
            return sum(parts[1:], start=parts[0])

        return Vector(jax.tree.map(apply, self.tree, is_leaf=is_input))


class Nested(CompositeProblem):
    r"""$\min_x \bar F_K \circ \dots \circ \bar F_1 (x)$ (global) or $\sum_i p_i F_{i,K} \circ \dots \circ F_{i,1}(x)$.

    The inner levels are expectations over all clients, $\bar F_k = \sum_i p_i F_{i,k}$ (the variance of a portfolio
    around the common mean), or over each client separately, with only the results averaged (robust learning,
    meta-learning). The two objectives differ as soon as clients differ.

    Args:
        levels: functions of one example, `level(y, example)`, or `level(y)` for a level without data, from trees to
            trees. The first takes the parameters, the last returns a number. Each level has a separate sample.
        inner: the expectation of the inner levels: "global", over all clients, or "client", over each client
            separately.
        regularizer: φ of `fs.prox`, added to the objective; may be a constraint.
        splits: the split of each level; None: all "train".
        metrics: functions `metric(y, example)`, averaged over the rows.
        metrics_level: the level whose output is the y of the metrics; 0: the parameters. For a meta-learner, level 1 is
            the client's adapted model.
        gamma: the γ of the recorded stationarity, see `Regularized`.
        more_gammas: further values, recorded as stationarity_γ.
        model: the model of the start values, if `fs.run` gets none.
        when_not_finite: advice for the warning about a run that becomes non-finite.
        shapes: the shapes of x and of the outputs of all levels; set by `bind`.
        clients: the number of clients; set by `bind`.

    >>> import jax.numpy as jnp
    >>> inner = lambda x, example: example["a"] @ x
    >>> problem = Nested([inner, lambda y: jnp.sum(jnp.exp(y))], inner="client")
    """

    levels: tuple[Level, ...] = eqx.field(converter=tuple)
    inner: Literal["global", "client"] = eqx.field(default="global", static=True)
    regularizer: Regularizer = Zero()
    splits: tuple[str, ...] | None = eqx.field(default=None, static=True)
    metrics: Mapping[str, Loss] = eqx.field(default_factory=dict)
    metrics_level: int = 0
    gamma: float = 1.0
    more_gammas: tuple[float, ...] = ()
    model: Any = None
    when_not_finite: str = eqx.field(default="", static=True)
    shapes: Any = eqx.field(default=None, static=True)
    clients: int | None = eqx.field(default=None, static=True)

    Oracle: ClassVar[type] = NestedOracle

    def __check_init__(self) -> None:
        if not self.levels or not all(callable(level) for level in self.levels):
            raise TypeError(
                "Nested: levels must be functions level(y, example) or level(y), the last one giving a number"
            )
        if self.inner not in ("global", "client"):
            raise unknown("inner of Nested", str(self.inner), ["global", "client"])
        if self.splits is not None and len(self.splits) != len(self.levels):
            raise ValueError(
                f"Nested: splits={self.splits!r} must name one split for each of {len(self.levels)} levels"
            )
        if not any(self.samples_at(k) for k in range(len(self.levels))):
            raise ValueError("Nested: no level takes an example, so there is nothing to learn from data")
        if not 0 <= self.metrics_level < len(self.levels):
            raise ValueError(f"Nested: metrics_level={self.metrics_level} must be 0 (parameters) or an inner level")

    def samples_at(self, number: int) -> bool:
        """Whether a level (counted from 0) takes an example."""
        return takes_example(self.levels[number])

    def split_of(self, number: int) -> str:
        """The split of a level (counted from 0)."""
        return "train" if self.splits is None else self.splits[number]

    @property
    def level_streams(self) -> tuple[str, ...]:
        """The samples of the levels, without those for separate Jacobians."""
        return tuple(f"level{k + 1}" for k in range(len(self.levels)) if self.samples_at(k))

    @property
    def streams(self) -> Mapping[str, str]:
        looking = [k for k in range(len(self.levels)) if self.samples_at(k)]
        return {f"{what}{k + 1}": self.split_of(k) for what in ("level", "jacobian") for k in looking}

    @property
    def size_split(self) -> str:
        """The split of the last level with data, whose values are averaged over clients."""
        return self.split_of(max(k for k in range(len(self.levels)) if self.samples_at(k)))

    def init(self, key: PRNGKeyArray) -> PyTree:
        return super().init(key) if self.model is None else self.model.init(key)

    def values(self, x: Vector, full: Full) -> tuple[Vector, ...]:
        """x and the exact value of every level on all data; with client coupling each client's, stacked."""
        rows = full[next(self.split_of(k) for k in range(len(self.levels)) if self.samples_at(k))]
        stack = lambda a: jnp.broadcast_to(a, (rows.clients, *jnp.shape(a)))
        out = [x if self.inner == "global" else x.map(stack)]
        for number, level in enumerate(self.levels):
            if number == 0 and self.inner == "client" and self.samples_at(0):
                # All clients start from the same x, so the first level needs no copy of it for every row.
                found = full[self.split_of(0)].client_means(lambda _, example: self.levels[0](x.tree, example), ())
            else:
                found = self._exact(number, level, out[-1].tree, full)
            out.append(Vector(found))
        return tuple(out)

    def _exact(self, number: int, level: Level, y: PyTree, full: Full) -> PyTree:
        if not self.samples_at(number):
            return level(y) if self.inner == "global" else jax.vmap(level)(y)
        rows = full[self.split_of(number)]
        return rows.mean(lambda e: level(y, e)) if self.inner == "global" else rows.client_means(level, y)

    def smooth_part(self, x: Vector, full: Full) -> Array:
        last = self.values(x, full)[-1].tree
        if self.inner == "global":
            return last
        weights = self._client_weights(full, last.dtype)  # zero for a client without rows, whose value is undefined
        return jnp.sum(jnp.where(weights > 0, weights * last, 0))

    def _client_weights(self, full: Full, dtype: Any) -> Array:
        weights = full[self.size_split].client_weights()
        return (weights / jnp.sum(weights)).astype(dtype)

    def stationarity(self, x: Vector, full: Full, gradient: Vector | None = None) -> Array:
        if isinstance(self.regularizer, Zero):
            return (self.gradient(x, full) if gradient is None else gradient).norm()
        return super().stationarity(x, full, gradient)

    def evaluate(self, x: Vector, full: Full, smooth: tuple[Array, Vector] | None = None) -> dict[str, Array]:
        found = super().evaluate(x, full, smooth)
        if isinstance(self.regularizer, Zero):
            found = {n: v for n, v in found.items() if n not in ("loss", "regularizer", "subdifferential_distance")}
        return {**found, **self.measured(x, full)}

    def measured(self, x: Vector, full: Full) -> dict[str, Array]:
        """The metrics, averaged over all rows."""
        if not self.metrics:
            return {}
        rows, measure = full["train"], lambda y, e: {name: f(y, e) for name, f in self.metrics.items()}
        at = self.values(x, full)[self.metrics_level].tree if self.metrics_level else x.tree
        if self.inner == "global" or not self.metrics_level:
            return rows.mean(lambda e: measure(at, e))
        weights = rows.client_weights()
        return {n: jnp.sum(weights.astype(v.dtype) * v) for n, v in rows.client_means(measure, at).items()}

    def evaluate_clients(self, x: Vector, rows: Rows) -> dict[str, Array]:
        out = {}
        if self.inner == "client" and {self.split_of(k) for k in range(len(self.levels))} == {"train"}:
            values = self.values(x, {"train": rows})[-1].tree
            out["objective"] = jnp.where(rows.client_weights() > 0, values, jnp.nan)
        if not self.metrics_level:
            out |= {name: rows.mean_by_client(lambda e, f=f: f(x.tree, e)) for name, f in self.metrics.items()}
        return out

    def from_clients(self, x: Vector, values: Array, weights: Array) -> Array | None:
        """With client coupling the mean of the clients' compositions, plus φ once; otherwise None."""
        return plus(jnp.sum(weights * values), self.regularizer.value(x)) if self.inner == "client" else None

    def advice(self) -> str:
        return self.when_not_finite

    def check(self, x: Vector, federation: Any) -> None:
        self._trace(x, federation)
        super().check(x, federation)
        if not bool(jnp.isfinite(self.regularizer.value(x))):
            raise ValueError(
                f"Nested: the start values are outside of {self.regularizer!r}, where the objective is not finite; "
                "start inside, e.g. from problem.prox(fs.Vector(params), 1.0).tree"
            )

    def bind(self, x: Vector, federation: Any, rule: Any = None) -> "Nested":
        flat = [jax.tree.flatten(shape) for shape in self._trace(x, federation)]
        shapes = tuple((structure, tuple(leaves)) for leaves, structure in flat)  # hashable, as static fields must be
        return dataclasses.replace(self, shapes=shapes, clients=federation.clients)

    def _trace(self, x: Vector, federation: Any) -> list[Any]:
        """The shapes of x and of every level's output, for one example; raises if levels do not fit together."""
        shapes: list[Any] = [jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), x.tree)]
        for number, level in enumerate(self.levels):
            arguments = [shapes[-1]]
            if self.samples_at(number):
                split = self.split_of(number)
                if split not in federation.splits:
                    raise unknown(f"split of level {number + 1} of Nested", split, federation.splits)
                arguments.append(jax.tree.map(one_example, federation[split].examples))
            try:
                out = jax.eval_shape(level, *arguments)
            except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
                source = "the parameters" if number == 0 else f"the output of level {number}"
                raise ValueError(f"Nested: level {number + 1} does not take {source}, {shapes[-1]}: {error}") from error
            if not all(jnp.issubdtype(a.dtype, jnp.floating) for a in jax.tree.leaves(out)) or not jax.tree.leaves(out):
                raise ValueError(f"Nested: level {number + 1} must return real numbers, not {out}")
            shapes.append(out)
        last = shapes[-1]
        if not (hasattr(last, "shape") and last.shape == ()):
            raise ValueError(f"Nested: the last level must return one real number, not {last}")
        return shapes

    def zeros(self, number: int) -> Vector:
        """A zero of the shape of x (0) or of the output of a level, for a state to start from."""
        if self.shapes is None:
            raise ValueError(
                "the shapes of this Nested problem are not set yet; fs.run sets them, as does problem.bind"
            )
        structure, leaves = self.shapes[number]
        return Vector(structure.unflatten([jnp.zeros(s.shape, s.dtype) for s in leaves]))

    def zero_jacobian(self, k: int) -> Jacobian:
        """A zero of the shape of level k's Jacobian (counted from 1), in the layout of the oracle."""
        outputs, inputs = self.zeros(k), self.zeros(k - 1)
        over = lambda out: inputs.map(lambda a: jnp.zeros((*out.shape, *a.shape), a.dtype))
        return Jacobian(jax.tree.map(over, outputs.tree))

    def sizes(self) -> tuple[int, ...]:
        """d_0 … d_K: the sizes of x and of every level's output."""
        return tuple(sum(int(np.prod(s.shape)) for s in leaves) for _, leaves in self.shapes)


def takes_example(level: Level) -> bool:
    """Whether a level is level(y, example), not level(y)."""
    try:
        parameters = inspect.signature(level).parameters.values()
    except (TypeError, ValueError):
        return True
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]
    return len(needed) >= 2 or any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
