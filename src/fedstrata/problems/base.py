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
from fedstrata.directions import Direction, checked
from fedstrata.problems.rows import Full, Rows
from fedstrata.random import fold_in
from fedstrata.vector import Vector


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


def model_of(problem: Any) -> Any:
    """What a problem's parameters belong to, where it was made from a model: its own, or its loss's."""
    return getattr(problem, "model", None) or getattr(getattr(problem, "loss", None), "model", None)


class Metric(eqx.Module):
    """A metric that declares its direction: `metrics={"recall": fs.Metric(recall, "max")}`.

    function: what the problem takes as a metric. mode: "max" where high values are better, "min" where low ones are,
    "none" where neither. A plain function will do for a metric that nothing is chosen by.
    """

    function: Callable[..., Array]
    mode: Direction = eqx.field(static=True)

    def __check_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"Metric: function={self.function!r} must be a function")
        checked(self.mode, "Metric")

    def __call__(self, *arguments: Any) -> Array:
        return self.function(*arguments)


def traced(what: str, function: Callable[[PyTree, PyTree], Any], params: PyTree, example: PyTree) -> Any:
    """The shape of function(params, example), a user's; where it fails, an error that shows what it was given."""
    try:
        return jax.eval_shape(function, params, example)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        show = lambda tree: jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", tree)
        hint = "" if isinstance(example, Mapping) else '; data given as {"x": X, "y": y} make examples with these names'
        if isinstance(params, list):
            hint += "; a list is a tree of its entries: numpy.array(params) is one array"
        raise ValueError(
            f"{what}(params, example) fails: {type(error).__name__}: {why}; params: {show(params)}, one example: "
            f"{show(example)}{hint}"
        ) from error


class Problem(eqx.Module):
    """A federated objective. It knows its true value, gradient and stationarity on full data, and its oracle."""

    Oracle: ClassVar[type[Oracle]]
    streams: ClassVar[Mapping[str, str]]  # name of an independent sample -> the split that it is drawn from
    may_lack: ClassVar[bool] = False  # whether a client may have no examples in a split that is drawn from
    weighs_clients: ClassVar[bool] = False  # whether the problem itself says how much each client counts

    @property
    def size_split(self) -> str:
        """The split whose rows are counted where clients weigh by size: one number per client, for all its splits."""
        first, *others = dict.fromkeys(self.streams.values())
        if others:
            raise TypeError(
                f'weights="size": {type(self).__name__} draws from the splits {first!r} and {others[0]!r}; its class '
                "must define size_split, the one whose rows are the clients' weights"
            )
        return first

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

    def modes(self) -> dict[str, Direction]:
        """The directions of recorded columns that the library does not know: those that an `fs.Metric` declares.

        A subclass that records more columns adds theirs; names of splits are left out.
        """
        own = getattr(self, "metrics", {})
        found = {**getattr(getattr(self, "loss", None), "metrics", {}), **(own if isinstance(own, Mapping) else {})}
        return {name: metric.mode for name, metric in found.items() if isinstance(metric, Metric)}

    def from_clients(self, x: Vector, values: Array, weights: Array) -> Array | None:
        """The true objective from the clients' "objective" of `evaluate_clients`; None where it does not follow.

        weights: of the clients, summing to one. No mean of clients' own values is: a pairwise objective (pairs have
        their examples at two clients), a nested one with global expectations inside, a bilevel one (its value at a
        client needs the lower solution, which is of several splits or of all clients).
        """
        return None

    def check(self, x: Vector, federation: Any) -> None:
        """Refuse parameters or data that this problem cannot take, before anything compiles."""

    def bind(self, x: Vector, federation: Any, rule: Sampler | None = None) -> Any:
        """This problem, knowing the shapes of its parameters, data and samples where it needs them to lay out a state.

        rule: how samples are drawn, where that is known.
        """
        return self

    def unseen(self) -> Any:
        """This problem for one who knows the sizes and shapes of data and sees none: `bind` then looks at no values."""
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
