"""The interfaces of problems and oracles: an objective, and its estimates from one sample."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from fedstrata.base.clock import Clock, stream_key
from fedstrata.base.directions import Direction, checked
from fedstrata.base.random import fold_in
from fedstrata.core.vector import Vector
from fedstrata.data.sampling import Draw, Index, Sampler, sampler
from fedstrata.data.shard import Sample, Shard
from fedstrata.problems.rows import Full, Rows


class Oracle(eqx.Module):
    """The problem of one client in one step, estimated from one random sample ξ of its data.

    All methods of one oracle use the same ξ, as recursive estimators need. `fresh` gives an oracle with an independent
    sample, of another size if wanted. Oracles are made by `Problem.oracle`.

    Args:
        problem: the problem.
        shard: the client's rows of every split.
        samples: the sample of each stream.
        clock: the round and step.
        client: the number of the client.
        key: private randomness of this step, folded from (seed, round, client, step).
        sampler: how samples are drawn.
        round_key: the client's key of the round, from which samples are drawn.
    """

    problem: Any
    shard: Shard
    samples: Mapping[str, Sample]
    clock: Clock
    client: Array
    key: PRNGKeyArray
    sampler: Sampler
    round_key: PRNGKeyArray

    def sample(self, stream: str) -> Sample:
        """The sample of a stream."""
        return self.samples[stream]

    def count(self, split: str = "train") -> Array:
        """The number of examples of this client.

        Args:
            split: the split that is counted.
        """
        return self.shard[split].count

    def fresh(self, number: int, batch_size: int | Literal["all"] | Sampler | None = None) -> Any:
        """The oracle of the same client and step with an independent sample.

        Args:
            number: equal numbers give equal samples.
            batch_size: of the sample; None: as before.
        """
        key = fold_in(self.key, number + 1)
        rule = self.sampler if batch_size is None else sampler(batch_size)
        return self.problem.oracle(self.shard, key, rule, clock=self.clock, client=self.client)


class GradientOracle(Oracle):
    """An oracle of a differentiable function f of x: the whole objective, or its smooth part."""

    @abstractmethod
    def value(self, x: Vector) -> Array:
        """The value f(x; ξ)."""

    def grad(self, x: Vector) -> Vector:
        """The gradient ∇f(x; ξ)."""
        return jax.grad(self.value)(x)

    def value_and_grad(self, x: Vector) -> tuple[Array, Vector]:
        """The value and the gradient."""
        return jax.value_and_grad(self.value)(x)

    def hvp(self, x: Vector, v: Vector) -> Vector:
        """The Hessian product ∇²f(x; ξ) v."""
        return jax.jvp(self.grad, (x,), (v,))[1]


class SmoothOracle(GradientOracle):
    """The oracle of a differentiable objective, as FedAvg and its relatives need it."""


class CompositeOracle(GradientOracle):
    """The oracle of a smooth part f and a regulariser φ with a proximal operator, as proximal methods need it."""

    def prox(self, z: Vector, step: Any) -> Vector:
        """The minimiser of φ(x) + |x − z|² / (2 step)."""
        return self.problem.prox(z, step)


def model_of(problem: Any) -> Any:
    """The model of a problem, or of its loss; None without one."""
    return getattr(problem, "model", None) or getattr(getattr(problem, "loss", None), "model", None)


class Metric(eqx.Module):
    """A metric that declares its direction: `metrics={"recall": fs.Metric(recall, "max")}`.

    A plain function is enough for a metric by which no run is selected.

    Args:
        function: the metric, as the problem takes it.
        mode: "max" where high values are better, "min" where low ones are, "none" where neither.
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
    """The shape of function(params, example); if it fails, an error that shows its arguments."""
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
    """A federated objective: its exact value, gradient and stationarity on full data, and its oracle."""

    Oracle: ClassVar[type[Oracle]]
    may_lack: ClassVar[bool] = False  # whether a client may have no examples in a split that is drawn from
    weighs_clients: ClassVar[bool] = False  # whether the problem itself weighs the clients

    @property
    @abstractmethod
    def streams(self) -> Mapping[str, str]:
        """The split from which each independent sample is drawn, by the sample's name."""

    @property
    def size_split(self) -> str:
        """The split whose rows are the clients' weights with `weights="size"`."""
        first, *others = dict.fromkeys(self.streams.values())
        if others:
            raise TypeError(
                f'weights="size": {type(self).__name__} draws from the splits {first!r} and {others[0]!r}; its class '
                "must define size_split, the one whose rows are the clients' weights"
            )
        return first

    def init(self, key: PRNGKeyArray) -> PyTree:
        """Start values, for a problem with a model."""
        raise ValueError(f"this {type(self).__name__} problem has no model to start from; give params=")

    @abstractmethod
    def objective(self, x: Vector, full: Full) -> Array:
        """The exact global objective.

        Args:
            x: the parameters.
            full: the whole splits, see `fs.full_data`.
        """

    def gradient(self, x: Vector, full: Full) -> Vector:
        """The exact global gradient."""
        return self.smooth(x, full)[1]

    def smooth(self, x: Vector, full: Full) -> tuple[Array, Vector]:
        """Value and gradient of the smooth part: of the whole objective, unless there is a regulariser."""
        return jax.value_and_grad(self.objective)(x, full)

    def stationarity(self, x: Vector, full: Full, gradient: Vector | None = None) -> Array:
        """How far x is from a stationary point: the norm of the gradient, unless a subclass has a better measure.

        Args:
            x: the parameters.
            full: the whole splits.
            gradient: that of `smooth`, if it has been computed.
        """
        return (self.gradient(x, full) if gradient is None else gradient).norm()

    def evaluate(self, x: Vector, full: Full, smooth: tuple[Array, Vector] | None = None) -> dict[str, Array]:
        """The objective and the metrics of the problem; given `smooth(x, full)`, stationarity too."""
        if smooth is None:
            return {"objective": self.objective(x, full)}
        return {"objective": smooth[0], "stationarity": self.stationarity(x, full, smooth[1])}

    def evaluate_split(self, x: Vector, full: Full, split: str) -> dict[str, Array]:
        """The loss and metrics on another split, as if it were the training data."""
        found = self.evaluate(x, {**full, "train": full[split]})
        return {"loss" if name == "objective" else name: value for name, value in found.items()}

    def evaluate_clients(self, x: Vector, rows: Rows) -> dict[str, Array]:
        """Metrics of each client, where they are defined."""
        return {}

    def modes(self) -> dict[str, Direction]:
        """The directions of recorded columns that an `fs.Metric` declares.

        A subclass that records more columns adds them; names of splits are left out.
        """
        own = getattr(self, "metrics", {})
        found = {**getattr(getattr(self, "loss", None), "metrics", {}), **(own if isinstance(own, Mapping) else {})}
        return {name: metric.mode for name, metric in found.items() if isinstance(metric, Metric)}

    def from_clients(self, x: Vector, values: Array, weights: Array) -> Array | None:
        """The exact objective from the clients' "objective" of `evaluate_clients`; None where it does not follow.

        It does not follow for a pairwise objective (the examples of a pair are at two clients), for a nested one with
        global inner expectations, or for a bilevel one (its value at a client needs the lower solution, which depends
        on several splits or on all clients).

        Args:
            x: the parameters.
            values: one per client.
            weights: of the clients, summing to one.
        """
        return None

    def check(self, x: Vector, federation: Any) -> None:
        """Raise for parameters or data that do not fit this problem, before anything compiles."""

    def bind(self, x: Vector, federation: Any, rule: Sampler | None = None) -> Any:
        """This problem with the shapes of its parameters, data and samples, where a state depends on them.

        Args:
            x: the parameters.
            federation: the data.
            rule: how samples are drawn, if known.
        """
        return self

    def parts(self, federation: Any) -> Mapping[str, Any]:
        """By split, the numbers of rows of its parts whose means an algorithm may send one by one: groups.

        Args:
            federation: the data; the problem is bound to them, or to others with the same columns.
        """
        return {}

    def unseen(self) -> Any:
        """This problem for a server that has only sizes and shapes of the data: `bind` then reads no values."""
        return self

    def advice(self) -> str:
        """Advice for the warning about a run that becomes non-finite."""
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
        """The positions of the examples of the streams (None: all) in this step."""
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
        batch_size: int | Literal["all"] | Sampler = "all",
        *,
        clock: Clock | None = None,
        client: Array | int = 0,
        draws: Mapping[str, Index] | None = None,
        samples: Mapping[str, Sample] | None = None,
    ) -> Any:
        """The oracle of one client with one sample.

        Args:
            shard: the client's rows of every split.
            key: the client's key of the round.
            batch_size: the examples of a sample, "all", or a sampler.
            clock: the round and step; None: the first.
            client: the number of the client.
            draws: the positions of the examples, if they have been drawn.
            samples: the examples themselves, if they have been taken.
        """
        clock, rule = clock or Clock.at(0, 1), sampler(batch_size)
        client = jnp.asarray(client, jnp.int32)
        if samples is None:
            drawn = self.draws(shard, key, rule, clock, client, key) if draws is None else draws
            samples = {s: Sample(shard[self.streams[s]].take(index), mask, index) for s, (index, mask) in drawn.items()}
        step_key = stream_key(key, clock.local_step, len(self.streams))
        return self.Oracle(self, shard, samples, clock, client, step_key, rule, key)
