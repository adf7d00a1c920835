"""Pairwise objectives: losses between examples that live with different clients (AUC, partial AUC, precision)."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree

from fedstrata.clock import Clock
from fedstrata.data.sampling import Index, Sampler, Whole
from fedstrata.data.shard import Shard
from fedstrata.errors import unknown
from fedstrata.memory import Pool
from fedstrata.models.base import Model
from fedstrata.problems import pairwise_checks, pairwise_exact, ranking
from fedstrata.problems.base import Full, Problem, Rows
from fedstrata.problems.log_means import log_mean_exp
from fedstrata.problems.pair_losses import STEEP
from fedstrata.problems.pairwise_oracle import PairwiseOracle
from fedstrata.vector import Vector


class Pairwise(Problem):
    r"""$\min_w \frac{1}{|S_1|} \sum_{z \in S_1} f \big( \frac{1}{|S_2|} \sum_{z' \in S_2} \ell(h_w(z), h_w(z')) \big)$.

    The two sets lie with the clients, and a pair may have its examples at two of them: the objective is no average of
    local ones.

    score: h, as `score(params, example)`, a number or a vector; or a model with one output, which sees `example["x"]`.
    pair_loss: ℓ, as `loss(a, b)` of two scores, or one of `fs.pair_losses`, which may bring its own f.
    outer: f, as `outer(u)` of the mean loss u of one example of the first set (of log u for a loss that gives its
    logarithm); None: the loss's own, else f(u) = u.
    first, second: the splits S_1 and S_2. `federation.by_label()` makes "positives" and "negatives".
    weighting: "examples": every example counts alike, as above; "clients": every client that has any does.
    l2: adds $\frac{l_2}{2} \|w\|^2$. label, positive: the column of labels, and the one of positives, as for
    `by_label`. objective_rows: the recorded objective and its gradient are those of at most so many examples of each
    set, evenly spaced (None: of all).
    metrics: recorded beside the objective: "auc", "ap" (average precision), "pauc_0.3" (false positive rate up to 0.3;
    McClish's scale, on which guessing is 0.5), "pauc_raw_0.3" (the area over 0.3), "tpauc_0.5_0.3" (both ways: true
    positive rate from 0.5).

    Beside "auc", the area over all data together, "mean_local_auc" is recorded, the mean of the clients' own areas:
    it is another number, because it never compares an example with one of another client.

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
    counts: tuple[Array, Array] | None = None  # (N,) examples of each client in the first and the second set
    shapes: Any = eqx.field(default=None, static=True)  # (shape, dtype) of a row of each side, and of u
    batches: tuple[int, int] | None = eqx.field(default=None, static=True)  # rows that a step draws from each
    whole: bool = eqx.field(default=False, static=True)  # every step sees all of a client's rows, in order
    may_idle: bool = eqx.field(default=False, static=True)
    complete: bool = eqx.field(default=False, static=True)  # every client has examples of both kinds

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
            ranking.parse(name)

    @property
    def streams(self) -> Mapping[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return {"first": self.first, "second": self.second}

    @property
    def model(self) -> Model | None:
        """What the parameters belong to, where scores are a model's."""
        return self.score if isinstance(self.score, Model) else None

    def init(self, key: PRNGKeyArray) -> PyTree:
        return super().init(key) if self.model is None else self.model.init(key)

    # One example, one pair.

    def score_of(self, params: PyTree, example: PyTree) -> Array:
        """h(z): one number or a vector."""
        if isinstance(self.score, Model):
            found = self.score(params, example["x"])
            if found.size != 1:
                raise ValueError(f"Pairwise: the model must have one output, the score; it has shape {found.shape}")
            return found.reshape(())
        return jnp.asarray(self.score(params, example))

    def second_score(self, params: PyTree, example: PyTree) -> Array:
        """What a row of the second set says of itself: its score, with its label where the loss asks for it."""
        return self.second_row(self.score_of(params, example), example)

    def second_row(self, score: Array, example: PyTree) -> Array:
        """The same where the score is known."""
        if not getattr(self.pair_loss, "labelled", False):
            return score
        return jnp.stack([score, (jnp.asarray(example[self.label]) == self.positive).astype(score.dtype)])

    @property
    def in_logs(self) -> bool:
        """Whether mean losses u are kept as log u."""
        return bool(getattr(self.pair_loss, "in_logs", False))

    @property
    def f(self) -> Callable[[Array], Array] | None:
        return self.outer if self.outer is not None else getattr(self.pair_loss, "outer", None)

    @property
    def linear(self) -> bool:
        """Whether f is the identity, so that no estimate of u is needed."""
        return self.f is None

    def inner_mean(self, losses: Array, weight: Array) -> Array:
        """u = Σ_j weight_j ℓ_j over the first axis (with logarithms in and out where `in_logs`)."""
        if self.in_logs:
            return log_mean_exp(losses, weight.astype(losses.dtype))
        return jnp.tensordot(weight.astype(losses.dtype), losses, axes=1, precision="highest")

    def blend(self, u: Array, fresh: Array, gamma: Any) -> Array:
        """(1 − γ) u + γ fresh."""
        gamma = jnp.asarray(gamma, u.dtype)
        if self.in_logs:
            return jnp.logaddexp(jnp.log1p(-gamma) + u, jnp.log(gamma) + fresh)
        return (1 - gamma) * u + gamma * fresh

    def term(self, u: Array | None, a: Array, b: Array) -> Array:
        """A function of two scores whose gradient is f'(u) ∇ℓ(a, b), for an estimate u that is held fixed."""
        loss = self.pair_loss(a, b)
        if self.f is None or u is None:
            return loss
        u = jax.lax.stop_gradient(u)
        slope = jax.grad(self.f)(u)
        if not self.in_logs:
            return jnp.sum(slope * loss)
        # f'(u) ∇ℓ = φ'(log u) (ℓ / u) ∇ log ℓ; with an old u the ratio can be anything, and is cut where it overflows.
        return slope * jnp.exp(jnp.minimum(jax.lax.stop_gradient(loss) - u, STEEP)) * loss

    # On whole data.

    def objective(self, x: Vector, full: Full) -> Array:
        first, second = (pairwise_exact.some(full[split], self.objective_rows) for split in (self.first, self.second))
        return pairwise_exact.objective(self, x, first, second) + self.penalty(x)

    def penalty(self, x: Vector) -> Array:
        return 0.5 * jnp.asarray(self.l2, x.scalar_dtype) * x.norm_squared()

    def penalised(self, x: Vector, slope: Vector) -> Vector:
        """A slope with the penalty's own."""
        return slope if isinstance(self.l2, int | float) and self.l2 == 0 else slope + self.l2 * x

    def evaluate(self, x: Vector, full: Full, smooth: tuple[Array, Vector] | None = None) -> dict[str, Array]:
        own = {self.first, self.second} == {"positives", "negatives"}
        parts = [full[self.first], full[self.second]] if own else [full["train"]]
        return {**super().evaluate(x, full, smooth), **pairwise_exact.measured(self, x, parts)}

    def evaluate_split(self, x: Vector, full: Full, split: str) -> dict[str, Array]:
        if split in (self.first, self.second, "positives", "negatives"):
            return {}  # the training data once more, or one class of it
        return pairwise_exact.measured(self, x, [full[split]])

    def evaluate_clients(self, x: Vector, rows: Rows) -> dict[str, Array]:
        scores, labels = pairwise_exact.scores(self.score_of, x, rows), pairwise_exact.labels(self, rows)
        if scores.ndim > 1:  # vectors have no order
            return {}
        return {"auc": ranking.by_client(scores, labels, rows.client, rows.clients)}

    # What clients know of each other.

    def omega(self, side: int, dtype: Any) -> Array:
        """(N,) by how much a client's mean over its own part of a set counts; their mean is one."""
        count: Any = self._bound[0][side].astype(dtype)
        part = count if self.weighting == "examples" else (count > 0).astype(dtype)
        return part / jnp.mean(part)

    def row_weight(self, side: int, pool: Pool, dtype: Any) -> Array:
        """(n,) how much each row of a pool counts, so that the mean over rows is one over all examples."""
        owner = jnp.maximum(pool.client, 0)
        weight = self.omega(side, dtype)[owner]
        if not self.whole:
            return weight
        count, batch = self._bound[0][side][owner], self._bound[1][side]
        # A client's rows are followed by copies up to those of the largest client, which do not count.
        place = jnp.arange(pool.valid.shape[0], dtype=jnp.int32) % batch
        return jnp.where(place < count, weight * (batch / jnp.maximum(count, 1).astype(dtype)), 0)

    @property
    def bound(self) -> bool:
        """Whether it knows its federation and how samples are drawn."""
        return self.counts is not None and self.batches is not None

    @property
    def _bound(self) -> tuple[Any, Any]:
        if not self.bound:
            raise ValueError(
                "this Pairwise problem does not know its federation yet; fs.run tells it, as does problem.bind"
            )
        return self.counts, self.batches

    @property
    def steps_rows(self) -> tuple[int, int]:
        """How many rows of each set a step draws."""
        return self._bound[1]

    @property
    def positive_share(self) -> Array:
        """|S_1| / (|S_1| + |S_2|)."""
        first, second = (jnp.sum(count) for count in self._bound[0])
        return first / (first + second)

    def blank(self, side: Literal["first", "second", "u"]) -> Array:
        """A zero row of a pool, or a zero u, for a state to start from."""
        if self.shapes is None:
            raise ValueError(
                "this Pairwise problem does not know its shapes yet; fs.run tells it, as does problem.bind"
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

    def check(self, x: Vector, federation: Any) -> None:
        pairwise_checks.splits(self, federation)
        pairwise_checks.traced(self, x, federation)

    def bind(self, x: Vector, federation: Any, rule: Sampler | None = None) -> "Pairwise":
        splits = [federation[name] for name in (self.first, self.second)]
        counts = [np.asarray(split.counts) for split in splits]
        batches = tuple(1 if rule is None else rule.rows(int(c.max())) for c in counts)
        return dataclasses.replace(
            self,
            counts=tuple(jnp.asarray(c, jnp.int32) for c in counts),
            shapes=pairwise_checks.traced(self, x, federation),
            batches=batches,
            whole=isinstance(rule, Whole),
            may_idle=rule is not None and rule.may_idle,
            complete=bool(all((c > 0).all() for c in counts)),
        )
