"""Pairwise objectives: losses between examples of different clients (AUC, partial AUC, average precision)."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, PRNGKeyArray, PyTree

from fedstrata.base.clock import Clock
from fedstrata.base.errors import unknown
from fedstrata.core.memory import Pool
from fedstrata.core.vector import Vector
from fedstrata.data.federation import Federation
from fedstrata.data.sampling import Index, Sampler, Whole
from fedstrata.data.shard import Shard
from fedstrata.metrics import ranking
from fedstrata.models.base import Model
from fedstrata.problems.base import Full, Problem, Rows
from fedstrata.problems.log_means import log_mean_exp
from fedstrata.problems.pairwise import checks, columns, exact
from fedstrata.problems.pairwise.oracle import PairwiseOracle
from fedstrata.problems.pairwise.pair_losses import STEEP


class Pairwise(Problem):
    r"""$\min_w \frac{1}{|S_1|} \sum_{z \in S_1} f \big( \frac{1}{|S_2|} \sum_{z' \in S_2} \ell(h_w(z), h_w(z')) \big)$.

    Both sets are divided among the clients, and the two examples of a pair may belong to two clients: the objective
    cannot be written as an average of local losses.

    Beside "auc", the area over all data together, "mean_local_auc" is recorded, the mean of the per-client areas. It
    is a different number, because it never compares examples of different clients.

    Args:
        score: h, as `score(params, example)`, a number or a vector; or a model with one output, applied to
            `example["x"]`.
        pair_loss: ℓ, as `loss(a, b)` of two scores, or one of `fs.pair_losses`, which may define f.
        outer: f, as `outer(u)` of the mean loss u of one example of the first set (of log u for a loss that returns its
            logarithm); None: that of the loss, else f(u) = u.
        first: the split S_1. `federation.by_label()` makes "positives" and "negatives".
        second: the split S_2.
        weighting: "examples": all examples have equal weights, as above; "clients": all clients that have any do.
        l2: adds $\frac{l_2}{2} \|w\|^2$.
        metrics: recorded beside the objective: "auc", "ap" (average precision), "pauc_0.3" (false positive rate up to
            0.3 on McClish's scale, where guessing is 0.5), "pauc_raw_0.3" (the area over 0.3), "tpauc_0.5_0.3" (two
            ways: true positive rate from 0.5).
        label: the column of labels, as for `by_label`.
        positive: the label of positives, as for `by_label`.
        objective_rows: the recorded objective and its gradient use at most this many examples of each set, evenly
            spaced (None: all).
        counts: set by `bind`: (N,) examples of each client in the first and in the second set.
        shapes: set by `bind`: (shape, dtype) of a row of each set, and of u.
        batches: set by `bind`: rows that a step draws from each set.
        whole: set by `bind`: every step sees all of a client's rows, in order.
        may_idle: set by `bind`: a client may finish its steps before the others.
        complete: set by `bind`: every client has examples of both sets.

    >>> import fedstrata as fs
    >>> problem = Pairwise(fs.models.Linear(3), fs.pair_losses.KLOPAUC(lam=1.0), metrics=("auc", "pauc_0.3"))
    >>> problem.linear
    False
    """

    score: Callable[[PyTree, PyTree], Array]
    pair_loss: Callable[[Array, Array], Array]
    outer: Callable[[Array], Array] | None = None
    first: str = eqx.field(default="positives", static=True)
    second: str = eqx.field(default="negatives", static=True)
    weighting: Literal["examples", "clients"] = eqx.field(default="examples", static=True)
    l2: float = 0.0
    metrics: tuple[str, ...] = eqx.field(default=("auc",), static=True, converter=tuple)
    label: str = eqx.field(default="y", static=True)
    positive: int = eqx.field(default=1, static=True)
    objective_rows: int | None = eqx.field(default=None, static=True)
    # Set by `bind`.
    counts: tuple[Array, Array] | None = None
    shapes: Any = eqx.field(default=None, static=True)
    batches: tuple[int, int] | None = eqx.field(default=None, static=True)
    whole: bool = eqx.field(default=False, static=True)
    may_idle: bool = eqx.field(default=False, static=True)
    complete: bool = eqx.field(default=False, static=True)

    Oracle: ClassVar[type] = PairwiseOracle
    may_lack: ClassVar[bool] = True
    weighs_clients: ClassVar[bool] = True

    def __check_init__(self) -> None:
        for name in ("score", "pair_loss"):
            if not callable(getattr(self, name)):
                raise TypeError(f"Pairwise: {name}={getattr(self, name)!r} must be a function")
        if self.weighting not in ("examples", "clients"):
            raise unknown("weighting of Pairwise", str(self.weighting), ["examples", "clients"])
        if isinstance(self.l2, int | float) and not 0 <= self.l2 < float("inf"):
            raise ValueError(f"Pairwise: l2={self.l2} must be finite and at least 0")
        if self.objective_rows is not None and self.objective_rows < 1:
            raise ValueError(f"Pairwise: objective_rows={self.objective_rows} must be at least 1, or None for all")
        for name in self.metrics:
            columns.parse(name)

    @property
    def streams(self) -> Mapping[str, str]:
        return {"first": self.first, "second": self.second}

    @property
    def model(self) -> Model | None:
        """The model whose parameters are optimised, where scores come from a model."""
        return self.score if isinstance(self.score, Model) else None

    def init(self, key: PRNGKeyArray) -> PyTree:
        return super().init(key) if self.model is None else self.model.init(key)

    # One example, one pair.

    def score_of(self, params: PyTree, example: PyTree) -> Array:
        """h(z): one number or a vector.

        Args:
            params: the parameters, a tree.
            example: z.
        """
        if isinstance(self.score, Model):
            found = self.score(params, example["x"])
            if found.size != 1:
                raise ValueError(f"Pairwise: the model must have one output, the score; it has shape {found.shape}")
            return found.reshape(())
        return jnp.asarray(self.score(params, example))

    def second_score(self, params: PyTree, example: PyTree) -> Array:
        """The row of a second example: its score, with its label where the loss needs it.

        Args:
            params: the parameters, a tree.
            example: z'.
        """
        return self.second_row(self.score_of(params, example), example)

    def second_row(self, score: Array, example: PyTree) -> Array:
        """The row of a second example whose score is known.

        Args:
            score: h(z').
            example: z', for its label.
        """
        if not getattr(self.pair_loss, "labelled", False):
            return score
        return jnp.stack([score, (jnp.asarray(example[self.label]) == self.positive).astype(score.dtype)])

    @property
    def in_logs(self) -> bool:
        """Whether mean losses u are kept as log u."""
        return bool(getattr(self.pair_loss, "in_logs", False))

    @property
    def f(self) -> Callable[[Array], Array] | None:
        """The outer function; None for f(u) = u."""
        return self.outer if self.outer is not None else getattr(self.pair_loss, "outer", None)

    @property
    def linear(self) -> bool:
        """Whether f is the identity, so that no estimate of u is needed."""
        return self.f is None

    def inner_mean(self, losses: Array, weight: Array) -> Array:
        """u = Σ_j weight_j ℓ_j; logarithms in and out where `in_logs`.

        Args:
            losses: ℓ_j along the first axis.
            weight: of each.
        """
        if self.in_logs:
            return log_mean_exp(losses, weight.astype(losses.dtype))
        return jnp.tensordot(weight.astype(losses.dtype), losses, axes=1, precision="highest")

    def blend(self, u: Array, fresh: Array, gamma: ArrayLike) -> Array:
        """(1 − γ) u + γ fresh; of logarithms where `in_logs`.

        Args:
            u: the old estimate.
            fresh: the new one.
            gamma: γ.
        """
        gamma = jnp.asarray(gamma, u.dtype)
        if self.in_logs:
            return jnp.logaddexp(jnp.log1p(-gamma) + u, jnp.log(gamma) + fresh)
        return (1 - gamma) * u + gamma * fresh

    def term(self, u: Array | None, a: Array, b: Array) -> Array:
        """A function of two scores whose gradient is f'(u) ∇ℓ(a, b), with u held fixed.

        Args:
            u: an estimate of the first example's mean loss; None for f(u) = u.
            a: score of the first example.
            b: row of the second example.
        """
        loss = self.pair_loss(a, b)
        if self.f is None or u is None:
            return loss
        u = jax.lax.stop_gradient(u)
        slope = jax.grad(self.f)(u)
        if not self.in_logs:
            return jnp.sum(slope * loss)
        # f'(u) ∇ℓ = φ'(log u) (ℓ / u) ∇ log ℓ; with an old u the ratio is unbounded, and is cut where it overflows.
        return slope * jnp.exp(jnp.minimum(jax.lax.stop_gradient(loss) - u, STEEP)) * loss

    # On whole data.

    def objective(self, x: Vector, full: Full) -> Array:
        """F(x) over all pairs, or over those of `objective_rows`.

        Args:
            x: the parameters.
            full: all rows, by split.
        """
        first, second = (exact.some(full[split], self.objective_rows) for split in (self.first, self.second))
        return exact.objective(self, x, first, second) + self.penalty(x)

    def penalty(self, x: Vector) -> Array:
        """l2 / 2 · |x|².

        Args:
            x: the parameters.
        """
        return 0.5 * jnp.asarray(self.l2, x.scalar_dtype) * x.norm_squared()

    def penalised(self, x: Vector, slope: Vector) -> Vector:
        """A slope plus that of the penalty.

        Args:
            x: the parameters.
            slope: of the rest of the objective.
        """
        return slope if isinstance(self.l2, int | float) and self.l2 == 0 else slope + self.l2 * x

    def evaluate(self, x: Vector, full: Full, smooth: tuple[Array, Vector] | None = None) -> dict[str, Array]:
        own = {self.first, self.second} == {"positives", "negatives"}
        parts = [full[self.first], full[self.second]] if own else [full["train"]]
        return {**super().evaluate(x, full, smooth), **exact.measured(self, x, parts)}

    def evaluate_split(self, x: Vector, full: Full, split: str) -> dict[str, Array]:
        if split in (self.first, self.second, "positives", "negatives"):
            return {}  # the training data once more, or one class of it
        return exact.measured(self, x, [full[split]])

    def evaluate_clients(self, x: Vector, rows: Rows) -> dict[str, Array]:
        scores, labels = exact.scores(self.score_of, x, rows), exact.labels(self, rows)
        if scores.ndim > 1:  # vectors have no order
            return {}
        return {"auc": ranking.auc_by_client(scores, labels, rows.client, rows.clients)}

    # Weights and shapes, known once bound.

    def omega(self, side: int, dtype: DTypeLike) -> Array:
        """(N,) the weights of the clients' means over their parts of a set; their mean is one.

        Args:
            side: 0 for the first set, 1 for the second.
            dtype: of the weights.
        """
        count: Any = self._bound[0][side].astype(dtype)
        part = count if self.weighting == "examples" else (count > 0).astype(dtype)
        return part / jnp.mean(part)

    def row_weight(self, side: int, pool: Pool, dtype: DTypeLike) -> Array:
        """(n,) the weights of a pool's rows that make the mean over rows one over all examples.

        Args:
            side: 0 for the first set, 1 for the second.
            pool: the pool.
            dtype: of the weights.
        """
        owner = jnp.maximum(pool.client, 0)
        weight = self.omega(side, dtype)[owner]
        if not self.whole:
            return weight
        count, batch = self._bound[0][side][owner], self._bound[1][side]
        # A client's rows are followed by copies, up to the size of the largest client, which do not count.
        place = jnp.arange(pool.valid.shape[0], dtype=jnp.int32) % batch
        return jnp.where(place < count, weight * (batch / jnp.maximum(count, 1).astype(dtype)), 0)

    @property
    def bound(self) -> bool:
        """Whether `bind` has set the sizes of the federation and of the samples."""
        return self.counts is not None and self.batches is not None

    @property
    def _bound(self) -> tuple[Any, Any]:
        if not self.bound:
            raise ValueError(
                "this Pairwise problem is not bound to a federation; fs.run binds it, as does problem.bind"
            )
        return self.counts, self.batches

    @property
    def steps_rows(self) -> tuple[int, int]:
        """The number of rows of each set that a step draws."""
        return self._bound[1]

    @property
    def positive_share(self) -> Array:
        """|S_1| / (|S_1| + |S_2|)."""
        # Each set is numbered in 31 bits, so 32 are enough for both.
        first, second = (jnp.sum(count.astype(jnp.uint32)) for count in self._bound[0])
        return first / (first + second)

    def blank(self, side: Literal["first", "second", "u"]) -> Array:
        """A zero row of a pool, or a zero u: the start of a state.

        Args:
            side: the set, or "u".
        """
        if self.shapes is None:
            raise ValueError(
                "this Pairwise problem is not bound to a federation; fs.run binds it, as does problem.bind"
            )
        shape, dtype = self.shapes[("first", "second", "u").index(side)]
        return jnp.zeros(shape, dtype)

    def draws(
        self,
        shard: Shard,
        key: PRNGKeyArray,
        rule: Sampler,
        clock: Clock,
        client: Any,
        lasting: Any,
        streams: Collection[str] | None = None,
    ) -> dict[str, Index]:
        found = super().draws(shard, key, rule, clock, client, lasting, streams)
        if self.complete:
            return found
        here = lambda index, mask, there: jnp.broadcast_to(there, index.shape) & (True if mask is None else mask)
        return {s: (i, here(i, m, shard[self.streams[s]].count > 0)) for s, (i, m) in found.items()}

    # Before a run.

    def check(self, x: Vector, federation: Federation) -> None:
        """Refuse data that this problem cannot take.

        Args:
            x: the parameters.
            federation: the data.
        """
        checks.splits(self, federation)
        checks.traced(self, x, federation)

    def bind(self, x: Vector, federation: Federation, rule: Sampler | None = None) -> "Pairwise":
        """This problem with the sizes of the federation and of the samples.

        Args:
            x: the parameters.
            federation: the data.
            rule: how samples are drawn, where that is known.
        """
        splits = [federation[name] for name in (self.first, self.second)]
        counts = [np.asarray(split.counts) for split in splits]
        batches = tuple(1 if rule is None else rule.rows(int(c.max())) for c in counts)
        return dataclasses.replace(
            self,
            counts=tuple(jnp.asarray(c, jnp.int32) for c in counts),
            shapes=checks.traced(self, x, federation),
            batches=batches,
            whole=isinstance(rule, Whole),
            may_idle=rule is not None and rule.may_idle,
            complete=bool(all((c > 0).all() for c in counts)),
        )
