"""Problems and oracles: what is minimised, and what one sample can say about it."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from fedstrata.clock import Clock, stream_key
from fedstrata.data.sampling import Draw, Index, Sampler, sampler
from fedstrata.data.shard import Sample, Shard
from fedstrata.random import fold_in
from fedstrata.vector import Vector, widest


class Oracle(eqx.Module):
    """The problem as one client sees it in one step: its data through one random sample ξ.

    Every question put to one oracle is answered on the same ξ, which recursive estimators need. `fresh` gives an
    oracle with an independent sample, of another size if wanted.
    """

    problem: Any
    shard: Shard
    samples: Mapping[str, Sample]
    clock: Clock
    client: Array
    key: PRNGKeyArray  # private randomness of this step; folded from (seed, round, client, step)
    sampler: Sampler
    round_key: PRNGKeyArray  # the client's key of the round, from which samples are drawn

    def sample(self, stream: str) -> Sample:
        return self.samples[stream]

    def count(self, split: str = "train") -> Array:
        """How many examples this client has."""
        return self.shard[split].count

    def fresh(self, number: int, batch_size: Any = None) -> Any:
        """The same client and time with an independent sample; equal numbers give equal samples."""
        key = fold_in(self.key, number + 1)
        rule = self.sampler if batch_size is None else sampler(batch_size)
        return self.problem.oracle(self.shard, key, rule, clock=self.clock, client=self.client)


class GradientOracle(Oracle):
    """An oracle that knows a differentiable function of x: the whole objective, or the smooth part of it."""

    @abstractmethod
    def value(self, x: Vector) -> Array:
        """f(x; ξ)"""

    def grad(self, x: Vector) -> Vector:
        """∇f(x; ξ)"""
        return jax.grad(self.value)(x)

    def value_and_grad(self, x: Vector) -> tuple[Array, Vector]:
        return jax.value_and_grad(self.value)(x)

    def hvp(self, x: Vector, v: Vector) -> Vector:
        """∇²f(x; ξ) v"""
        return jax.jvp(self.grad, (x,), (v,))[1]


class SmoothOracle(GradientOracle):
    """The whole objective is differentiable: what FedAvg and its relatives ask for."""


class CompositeOracle(GradientOracle):
    """A smooth part f and a regulariser φ, known by its proximal operator: what proximal methods ask for."""

    def prox(self, z: Vector, step: Any) -> Vector:
        """argmin_x φ(x) + |x − z|² / (2 step)"""
        return self.problem.prox(z, step)


class Rows(eqx.Module):
    """A whole split with one weight per example (summing to one), for exact evaluation."""

    examples: PyTree
    weight: Array
    client: Array  # who owns the row
    clients: int = eqx.field(static=True)
    chunk: int = eqx.field(static=True, default=4096)
    start: Array | None = None  # (clients,) where each client's rows begin, if they lie together and weigh the same
    capacity: int = eqx.field(static=True, default=0)  # the most rows that a client has

    def mean(self, function: Callable[[PyTree], PyTree]) -> PyTree:
        """Σ_j w_j function(example_j), in chunks that fit, differentiable with as little memory."""

        def sum_up(values: Array, w: Array) -> Array:
            wide = widest(values.dtype, w.dtype)
            return jnp.tensordot(w.astype(wide), values.astype(wide), axes=1, precision="highest")

        weighted = lambda rows, w, _: jax.tree.map(lambda v: sum_up(v, w), jax.vmap(function)(rows))
        return self._over_chunks(weighted, self.chunk)

    def client_weights(self) -> Array:
        """Σ of the weights of each client's rows."""
        return jax.ops.segment_sum(self.weight, self.client, self.clients)

    def client_means(self, function: Callable[[PyTree, PyTree], PyTree], values: PyTree) -> PyTree:
        """For every client i the mean of function(values[i], example) over its rows: stacked, in and out.

        Differentiable, in chunks that fit. A client's rows are taken together, so that a product with its value is one
        of matrices; only where clients are of very different sizes has every row its owner's value at hand instead.
        """
        if self.clients == 1:
            own = jax.tree.map(lambda a: a[0], values)
            found = eqx.tree_at(lambda rows: rows.weight, self, self.weight / jnp.sum(self.weight))
            return jax.tree.map(lambda v: v[None], found.mean(lambda example: function(own, example)))
        if self.start is not None and self.clients * self.capacity <= 3 * self.weight.shape[0]:
            return self._means_of_windows(function, values)
        size = sum(int(a.size) for a in jax.tree.leaves(values)) // self.clients
        totals = self.client_weights()
        share = self.weight / totals[self.client]

        def by_client(rows: PyTree, w: Array, owner: Array) -> PyTree:
            own = jax.tree.map(lambda a: a[owner], values)
            found = jax.vmap(function)(own, rows)
            spread = lambda v: w.reshape((-1,) + (1,) * (v.ndim - 1)).astype(v.dtype) * v
            return jax.tree.map(lambda v: jax.ops.segment_sum(spread(v), owner, self.clients), found)

        scaled = eqx.tree_at(lambda rows: rows.weight, self, share)
        return scaled._over_chunks(by_client, min(self.chunk, max(1, 2**24 // max(size, 1))))

    def _means_of_windows(self, function: Callable[[PyTree, PyTree], PyTree], values: PyTree) -> PyTree:
        starts: Any = self.start
        count = jax.ops.segment_sum(jnp.ones_like(self.client), self.client, self.clients)
        length, last = max(1, self.chunk // self.clients), self.weight.shape[0] - 1

        def part(own: PyTree, start: Array, count: Array, first: Array) -> PyTree:
            at = first + jnp.arange(min(length, self.capacity), dtype=jnp.int32)
            take = jnp.minimum(start + jnp.minimum(at, jnp.maximum(count - 1, 0)), last)
            found = jax.vmap(lambda e: function(own, e))(jax.tree.map(lambda a: a[take], self.examples))
            inside = lambda v: (at < count).reshape((-1,) + (1,) * (v.ndim - 1))
            share = lambda v: jnp.sum(jnp.where(inside(v), v, 0), axis=0) / jnp.maximum(count, 1).astype(v.dtype)
            return jax.tree.map(share, found)

        zero = jnp.array(0, jnp.int32)
        whole = lambda first: jax.vmap(part, in_axes=(0, 0, 0, None))(values, starts, count, first)
        if self.capacity <= length:
            return whole(zero)
        some = jax.checkpoint(whole)
        add = lambda total, first: (jax.tree.map(jnp.add, total, some(first)), None)
        return jax.lax.scan(add, some(zero), jnp.arange(length, self.capacity, length, dtype=jnp.int32))[0]

    def _over_chunks(self, part: Callable[[PyTree, Array, Array], PyTree], length: int) -> PyTree:
        """The sum of part(examples, weights, owners) over chunks of this many rows."""
        size = self.weight.shape[0]
        if size <= length:
            return part(self.examples, self.weight, self.client)

        @jax.checkpoint
        def chunk(number: Array) -> PyTree:
            rows = number * length + jnp.arange(length)
            take = jnp.minimum(rows, size - 1)
            examples = jax.tree.map(lambda a: a[take], self.examples)
            return part(examples, jnp.where(rows < size, self.weight[take], 0), self.client[take])

        first = chunk(jnp.array(0))
        add = lambda total, number: (jax.tree.map(jnp.add, total, chunk(number)), None)
        return jax.lax.scan(add, first, jnp.arange(1, -(-size // length)))[0]

    def mean_by_client(self, function: Callable[[PyTree], Array]) -> Array:
        """The plain mean of function(example) over each client's rows; NaN for a client without any."""
        values = jax.lax.map(function, self.examples, batch_size=self.chunk)
        total = jax.ops.segment_sum(values, self.client, self.clients)
        return total / jax.ops.segment_sum(jnp.ones_like(values), self.client, self.clients)


Full = Mapping[str, Rows]  # by split


def model_of(problem: Any) -> Any:
    """What a problem's parameters belong to, where it was made from a model: its own, or its loss's."""
    return getattr(problem, "model", None) or getattr(getattr(problem, "loss", None), "model", None)


class Problem(eqx.Module):
    """A federated objective. It knows its true value, gradient and stationarity on full data, and its oracle."""

    Oracle: ClassVar[type[Oracle]]
    streams: ClassVar[Mapping[str, str]]  # name of an independent sample -> the split that it is drawn from
    may_lack: ClassVar[bool] = False  # whether a client may have no examples in a split that is drawn from
    weighs_clients: ClassVar[bool] = False  # whether the problem itself says how much each client counts

    def init(self, key: PRNGKeyArray) -> PyTree:
        """Start values, where the problem was made from a model."""
        raise ValueError(f"this {type(self).__name__} problem has no model to start from; give params=")

    @abstractmethod
    def objective(self, x: Vector, full: Full) -> Array:
        """The true global objective."""

    def gradient(self, x: Vector, full: Full) -> Vector:
        """The true global gradient."""
        return self.smooth(x, full)[1]

    def smooth(self, x: Vector, full: Full) -> tuple[Array, Vector]:
        """Value and gradient of the part that has one, in one go: of everything, unless there is a regulariser."""
        return jax.value_and_grad(self.objective)(x, full)

    def stationarity(self, x: Vector, full: Full, gradient: Vector | None = None) -> Array:
        """How far x is from a stationary point: the gradient's norm, unless the problem has a better measure.

        gradient: that of `smooth`, where it is known already.
        """
        return (self.gradient(x, full) if gradient is None else gradient).norm()

    def evaluate(self, x: Vector, full: Full, smooth: tuple[Array, Vector] | None = None) -> dict[str, Array]:
        """The objective and the problem's own metrics; given `smooth(x, full)`, stationarity too."""
        if smooth is None:
            return {"objective": self.objective(x, full)}
        return {"objective": smooth[0], "stationarity": self.stationarity(x, full, smooth[1])}

    def evaluate_split(self, x: Vector, full: Full, split: str) -> dict[str, Array]:
        """The loss and metrics on another split, as if it were the training data."""
        found = self.evaluate(x, {**full, "train": full[split]})
        return {"loss" if name == "objective" else name: value for name, value in found.items()}

    def evaluate_clients(self, x: Vector, rows: Rows) -> dict[str, Array]:
        """Metrics of each client, where they have a meaning."""
        return {}

    def check(self, x: Vector, federation: Any) -> None:
        """Refuse parameters or data that this problem cannot take, before anything compiles."""

    def bind(self, x: Vector, federation: Any, rule: Sampler | None = None) -> Any:
        """This problem, knowing the shapes of its parameters, data and samples where it needs them to lay out a state.

        rule: how samples are drawn, where that is known.
        """
        return self

    def advice(self) -> str:
        """What to say, beside the facts, when a run leaves the finite numbers."""
        return ""

    def draws(
        self,
        shard: Shard,
        key: PRNGKeyArray,
        rule: Sampler,
        clock: Clock,
        client: Any,
        lasting: Any,
        streams: Collection[str] | None = None,
    ) -> Any:
        """The positions that the streams (None: all) look at in this step."""
        out: dict[str, Index] = {}
        for number, (stream, split) in enumerate(self.streams.items()):
            if streams is not None and stream not in streams:
                continue
            view, at = shard[split], Draw(key, lasting, clock, client, stream, number)
            out[stream] = rule.draw(at, view.count, view.capacity)
        return out

    def oracle(
        self,
        shard: Shard,
        key: PRNGKeyArray,
        batch_size: Any = "all",
        *,
        clock: Clock | None = None,
        client: Array | int = 0,
        draws: Mapping[str, Index] | None = None,
        samples: Mapping[str, Sample] | None = None,
    ) -> Any:
        """This problem seen by one client through one sample; `key` is the client's key of the round.

        draws, samples: which examples they are, or the examples themselves, where that is known already.
        """
        clock, rule = clock or Clock.at(0, 1), sampler(batch_size)
        client = jnp.asarray(client, jnp.int32)
        if samples is None:
            drawn = self.draws(shard, key, rule, clock, client, key) if draws is None else draws
            samples = {s: Sample(shard[self.streams[s]].take(index), mask, index) for s, (index, mask) in drawn.items()}
        step_key = stream_key(key, clock.local_step, len(self.streams))
        return self.Oracle(self, shard, samples, clock, client, step_key, rule, key)
