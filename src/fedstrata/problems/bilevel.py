"""Bilevel federated learning: an upper problem over the solution of a lower one."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray, PyTree

from fedstrata.base.errors import unknown
from fedstrata.core.vector import Scalar, Vector
from fedstrata.data.examples import one_example
from fedstrata.data.federation import Federation
from fedstrata.data.sampling import Sampler
from fedstrata.problems.base import Full, Oracle, Rows
from fedstrata.problems.composite import CompositeProblem
from fedstrata.problems.weighting import rows_of, sizes_of
from fedstrata.prox import Regularizer, Zero
from fedstrata.solvers import newton

Objective = Callable[[PyTree, PyTree, PyTree], Array]  # (x, y, example) -> a number


class BilevelOracle(Oracle):
    """Both objectives as one client sees them: f, ∂_y g, ∂²_xy g and ∂²_yy g each on a separate sample.

    Repeated calls use the same samples; `fresh(j)` has independent ones.
    """

    def upper(self, x: Vector, y: Vector) -> Array:
        """f(x, y).

        Args:
            x: the upper variable.
            y: the lower variable.
        """
        return self._mean("upper", self.problem.upper, x, y)

    def upper_grads(self, x: Vector, y: Vector) -> tuple[Vector, Vector]:
        """∂_x f and ∂_y f.

        Args:
            x: the upper variable.
            y: the lower variable.
        """
        return jax.grad(self.upper, argnums=(0, 1))(x, y)

    def lower(self, x: Vector, y: Vector) -> Array:
        """g(x, y).

        Args:
            x: the upper variable.
            y: the lower variable.
        """
        return self._mean("lower", self.problem.lower, x, y)

    def lower_grad(self, x: Vector, y: Vector) -> Vector:
        """∂_y g.

        Args:
            x: the upper variable.
            y: the lower variable.
        """
        return jax.grad(self.lower, argnums=1)(x, y)

    def descend(self, x: Vector, y: Vector, step: Scalar, steps: int) -> Vector:
        """y after some gradient steps on g, all on this sample.

        Args:
            x: the upper variable.
            y: the lower variable.
            step: the step size.
            steps: the number of steps.
        """
        return jax.lax.fori_loop(0, steps, lambda _, y: y - step * self.lower_grad(x, y), y) if steps else y

    def hvp(self, x: Vector, y: Vector, v: Vector) -> Vector:
        """∂²_yy g v.

        Args:
            x: the upper variable.
            y: the lower variable.
            v: a vector like y.
        """
        slope = lambda at: jax.grad(lambda y: self._mean("hessian", self.problem.lower, x, y))(at)
        return jax.jvp(slope, (y,), (v,))[1]

    def cross(self, x: Vector, y: Vector, v: Vector) -> Vector:
        """∂²_xy g v, a vector like x.

        Args:
            x: the upper variable.
            y: the lower variable.
            v: a vector like y.
        """
        slope = lambda at: jax.grad(lambda x: self._mean("cross", self.problem.lower, x, at))(x)
        return jax.jvp(slope, (y,), (v,))[1]

    def prox(self, z: Vector, step: Scalar) -> Vector:
        """argmin_x φ(x) + |x − z|² / (2 step); z itself without a regulariser.

        Args:
            z: a vector like x.
            step: the step size.
        """
        return self.problem.prox(z, step)

    def _mean(self, stream: str, objective: Objective, x: Vector, y: Vector) -> Array:
        sample = self.samples[stream]
        return sample.mean(jax.vmap(lambda example: objective(x.tree, y.tree, example))(sample.examples))


class Solved(NamedTuple):
    """The lower level solved at one x.

    Args:
        problems: the lower problems: one per client, or one.
        rows: their solutions, flattened and stacked.
    """

    problems: newton.Problems
    rows: newton.Stack

    @property
    def y(self) -> Vector:
        """The solutions, stacked."""
        return Vector(jax.vmap(self.problems.unflatten)(self.rows))


class Bilevel(CompositeProblem):
    r"""$\min_x \sum_i p_i f_i(x, y_i(x))$ where $y_i(x) = \arg\min_y g_i(x, y)$ (client), or one y of $\sum_i p_i g_i$.

    The recorded objective and hypergradient are exact. At every evaluation the lower problems are solved by Newton
    steps from `start`, and $\partial_x f - \partial^2_{xy} g \, (\partial^2_{yy} g)^{-1} \partial_y f$ by a Cholesky
    factor, or by conjugate gradients where y has more than 512 numbers. This needs a g that is strongly convex in y,
    which is checked at the start values.

    Args:
        upper: f, a function `(x, y, example)` of one example; trees in, a number out.
        lower: g, alike.
        start: start values of y, a tree like y.
        lower_level: "client": each client solves a separate lower problem and keeps its y; "global": one y for all,
            that of the mean of the lower objectives.
        upper_split: the split of the examples of f.
        lower_split: the split of the examples of g.
        regularizer: φ of `fs.prox` on x, added to the objective; a box for x, say.
        metrics: functions `(x, y, example)`, averaged over the lower split at the exact y(x).
        gamma: γ of the recorded stationarity with a regulariser, $\|F_{nat}^\gamma(x)\|$.
        more_gammas: further ones, recorded as stationarity_γ.
        model: its `init` gives the start values of x where `fs.run` gets none.
        tolerance: the last Newton step is at most this × |y| (None: 1e-9 in double precision, else 1e-5).
        newton_steps: the most Newton steps of an evaluation.
        strongly_convex: False omits the check; the records then belong to the stationary point that Newton's method
            finds, if it finds one.
        exact: False solves nothing (a neural network below, or many records); the recorded objective is then the upper
            one at the clients' y, and there is no stationarity.
        when_not_finite: advice for a run that leaves the finite numbers.
        curvature: set by `bind`: the smallest and the largest eigenvalue of ∂²_yy g at the start values.

    >>> import jax.numpy as jnp
    >>> ridge = lambda x, y, e: (e["a"] @ y - e["b"]) ** 2 + jnp.exp(x) * y @ y
    >>> problem = Bilevel(lambda x, y, e: (e["a"] @ y - e["b"]) ** 2, ridge, start=jnp.zeros(3))
    """

    upper: Objective
    lower: Objective
    start: PyTree
    lower_level: Literal["client", "global"] = eqx.field(default="client", static=True)
    upper_split: str = eqx.field(default="valid", static=True)
    lower_split: str = eqx.field(default="train", static=True)
    regularizer: Regularizer = Zero()
    metrics: Mapping[str, Objective] = eqx.field(default_factory=dict)
    gamma: float = 1.0
    more_gammas: tuple[float, ...] = ()
    model: Any = None
    tolerance: float | None = eqx.field(default=None, static=True)
    newton_steps: int = eqx.field(default=50, static=True)
    strongly_convex: bool = eqx.field(default=True, static=True)
    exact: bool = eqx.field(default=True, static=True)
    when_not_finite: str = eqx.field(default="", static=True)
    curvature: Array | None = None  # an array, so that its values do not recompile anything

    Oracle: ClassVar[type] = BilevelOracle

    def __check_init__(self) -> None:
        if not callable(self.upper) or not callable(self.lower):
            raise TypeError("Bilevel: upper and lower must be functions (x, y, example) -> number")
        if self.lower_level not in ("client", "global"):
            raise unknown("lower_level of Bilevel", str(self.lower_level), ["client", "global"])
        if not jax.tree.leaves(self.start):
            raise ValueError("Bilevel: start has no arrays; give the start values of y, say jnp.zeros(3)")

    @property
    def streams(self) -> Mapping[str, str]:
        below = dict.fromkeys(("lower", "cross", "hessian"), self.lower_split)
        return {"upper": self.upper_split, **below}

    @property
    def size_split(self) -> str:
        return self.upper_split

    def init(self, key: PRNGKeyArray) -> PyTree:
        return super().init(key) if self.model is None else self.model.init(key)

    def lower_start(self) -> Vector:
        """The start values of y."""
        return Vector(jax.tree.map(lambda a: jnp.asarray(a, jnp.result_type(a, 0.0)), self.start))

    def solved(self, x: Vector, full: Full) -> Solved:
        """y(x), on all data.

        Args:
            x: the upper variable.
            full: all rows, by split.
        """
        rows = self._rows(full, self.lower_split)
        value = lambda ys: rows.client_means(lambda y, example: self.lower(x.tree, y, example), ys)
        problems, start = newton.stacked(value, self.lower_start().tree, rows.clients)
        found = newton.minimise(problems, start, self._tolerance(start.dtype), self.newton_steps)
        return Solved(problems, jax.lax.stop_gradient(found))

    def smooth_part(self, x: Vector, full: Full) -> Array:
        return self._upper(x, self.solved(x, full).y, full)

    def smooth(self, x: Vector, full: Full) -> tuple[Array, Vector]:
        """h(x) and the exact hypergradient.

        Args:
            x: the upper variable.
            full: all rows, by split.
        """
        problems, rows = self.solved(x, full)
        y = jax.vmap(problems.unflatten)
        value, (direct, by_y) = jax.value_and_grad(lambda x, r: self._upper(x, Vector(y(r)), full), argnums=(0, 1))(
            x, rows
        )
        v = problems.solve(rows, by_y, self._tolerance(rows.dtype))
        owned = self._rows(full, self.lower_split)

        def slope(r: newton.Stack) -> Vector:
            below = lambda x: jnp.sum(owned.client_means(lambda y, e: self.lower(x.tree, y, e), y(r)))
            return jax.grad(below)(x)

        return value, direct - jax.jvp(slope, (rows,), (v,))[1]

    def stationarity(self, x: Vector, full: Full, gradient: Vector | None = None) -> Array:
        """|∇h|; with a regulariser the norm of the natural residual.

        Args:
            x: the upper variable.
            full: all rows, by split.
            gradient: ∇h(x), where it is known.
        """
        if isinstance(self.regularizer, Zero):
            return (self.gradient(x, full) if gradient is None else gradient).norm()
        return super().stationarity(x, full, gradient)

    def evaluate(self, x: Vector, full: Full, smooth: tuple[Array, Vector] | None = None) -> dict[str, Array]:
        if not self.exact:
            return {}  # `observed` records the objective
        found = super().evaluate(x, full, smooth)
        if isinstance(self.regularizer, Zero):
            found = {n: v for n, v in found.items() if n not in ("loss", "regularizer", "subdifferential_distance")}
        others = [s for s in full if s not in (self.upper_split, self.lower_split)]
        if not self.metrics and not others:
            return found
        y = self.solved(x, full).y
        found |= self.measured(x, y, full, self.lower_split)
        for split in others:
            at = {"loss": self._mean(self.upper, x, y, full, split), **self.measured(x, y, full, split)}
            found |= {f"{split}/{name}": value for name, value in at.items()}
        return found

    def evaluate_split(self, x: Vector, full: Full, split: str) -> dict[str, Array]:
        return {}  # `evaluate` covers all splits, with one solution of the lower problem

    def measured(self, x: Vector, y: Vector, full: Full, split: str) -> dict[str, Array]:
        """The metrics on a split.

        Args:
            x: the upper variable.
            y: the lower variables, stacked.
            full: all rows, by split.
            split: the split.
        """
        return {name: self._mean(metric, x, y, full, split) for name, metric in self.metrics.items()}

    def observed(self, x: Vector, y: Vector, full: Full) -> dict[str, Array]:
        """The upper objective at given y, and the largest gradient of the lower objectives.

        Args:
            x: the upper variable.
            y: the lower variables, stacked: one per client, or one.
            full: all rows, by split.
        """
        slope = jax.grad(lambda y: jnp.sum(self._each(self.lower, x, y, full, self.lower_split)))(y)
        residual = jnp.max(jax.vmap(lambda each: each.norm())(slope))
        found = {"upper": self._upper(x, y, full), "lower_residual": residual}
        return found if self.exact else {"objective": found["upper"], **found}

    def _upper(self, x: Vector, y: Vector, full: Full) -> Array:
        return self._mean(self.upper, x, y, full, self.upper_split)

    def _mean(self, objective: Objective, x: Vector, y: Vector, full: Full, split: str) -> Array:
        """Over all rows of a split, each with its owner's y; over a pooled split, with the mean y."""
        rows = self._rows(full, split)
        if rows.clients != jax.tree.leaves(y.tree)[0].shape[0]:
            mean = y.map(lambda a: jnp.mean(a, axis=0))
            return rows.mean(lambda e: objective(x.tree, mean.tree, e))
        values, weights = self._each(objective, x, y, full, split), rows.client_weights()
        return jnp.sum(jnp.where(weights > 0, weights.astype(values.dtype) * values, 0))

    def _each(self, objective: Objective, x: Vector, y: Vector, full: Full, split: str) -> Array:
        return self._rows(full, split).client_means(lambda y, e: objective(x.tree, y, e), y.tree)

    def _rows(self, full: Full, split: str) -> Rows:
        rows = full[split]
        if self.lower_level == "client":
            return rows
        return dataclasses.replace(rows, client=jnp.zeros_like(rows.client), clients=1, start=None, capacity=0)

    def _tolerance(self, dtype: DTypeLike) -> float:
        return (1e-9 if dtype == jnp.float64 else 1e-5) if self.tolerance is None else self.tolerance

    def advice(self) -> str:
        curved = (
            "the lower problem may have lost its strong convexity (an indefinite Hessian has no Cholesky factor, and a "
            "Neumann series with it, or with a step above 2/L, grows): add an l2 term to it, or shorten the steps"
        )
        return "; ".join(filter(None, (self.when_not_finite, curved)))

    def check(self, x: Vector, federation: Federation) -> None:
        """Refuse functions that do not fit x, y and the examples.

        Args:
            x: the upper variable.
            federation: the data.
        """
        y = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self.lower_start().tree)
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), x.tree)
        named = {"upper": (self.upper, self.upper_split), "lower": (self.lower, self.lower_split)}
        named |= {name: (metric, self.lower_split) for name, metric in self.metrics.items()}
        for name, (function, split) in named.items():
            if split not in federation.splits:
                raise unknown(f"split of {name} of Bilevel", split, federation.splits)
            example = jax.tree.map(one_example, federation[split].examples)
            try:
                out = jax.eval_shape(function, shapes, y, example)
            except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
                raise ValueError(f"Bilevel: {name}(x, y, example) does not take x {shapes}, y {y}: {error}") from error
            if not (hasattr(out, "shape") and out.shape == () and jnp.issubdtype(out.dtype, jnp.floating)):
                raise ValueError(f"Bilevel: {name}(x, y, example) must return one real number, not {out}")
        super().check(x, federation)

    def unseen(self) -> "Bilevel":
        return dataclasses.replace(self, exact=False, strongly_convex=False)

    def bind(self, x: Vector, federation: Federation, rule: Sampler | None = None) -> "Bilevel":
        """This problem with the curvature of the lower problems at the start; refuses one that is not strongly convex.

        Args:
            x: the upper variable.
            federation: the data.
            rule: not used.
        """
        split = federation[self.lower_split]
        if min(split.counts) < 1 or not (self.exact or self.strongly_convex):
            return self  # an empty client is refused elsewhere, by name; or no curvature is needed
        dtype = ravel_pytree(self.lower_start().tree)[0].dtype
        rows = rows_of(split, dtype, sizes_of(federation, "uniform", self.lower_split))
        small, large = jax.device_get(_curvature(self, x, {self.lower_split: rows}))
        worst = int(small.argmin())
        if self.strongly_convex and not small[worst] > 0:
            who = federation.names[worst] if self.lower_level == "client" else "all clients together"
            raise ValueError(
                f"Bilevel: the lower problem of {who} is not strongly convex in y at the start values: its Hessian has "
                f"the eigenvalue {small[worst]:.3g} (the largest is {large[worst]:.3g}). Then y(x) is not one point, "
                "and there is no hypergradient; add an l2 term to `lower`, or skip this check by strongly_convex=False"
            )
        bounds = jnp.stack([small[worst], large.max()])
        return dataclasses.replace(self, curvature=bounds if bool(jnp.all(jnp.isfinite(bounds))) else None)


@eqx.filter_jit
def _curvature(problem: Bilevel, x: Vector, full: Full) -> tuple[Array, Array]:
    rows = problem._rows(full, problem.lower_split)
    value = lambda ys: rows.client_means(lambda y, example: problem.lower(x.tree, y, example), ys)
    return newton.extremes(*newton.stacked(value, problem.lower_start().tree, rows.clients))
