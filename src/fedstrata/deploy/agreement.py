"""The agreement of a deployed run, from what sites report of their data: sizes and shapes, and no example."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from fedstrata.base.random import seed_key
from fedstrata.core.algorithm import Algorithm
from fedstrata.core.hyperparameters import as_arrays
from fedstrata.core.vector import Vector
from fedstrata.data.examples import one_example
from fedstrata.data.federation import Federation
from fedstrata.data.sampling import Sampler, sampler
from fedstrata.data.split import Split
from fedstrata.data.validation import numbered
from fedstrata.engine.checks import check_counts, check_parameters, check_private, check_solves, check_weights
from fedstrata.engine.context import RoundContext
from fedstrata.engine.layout import FlatSplit
from fedstrata.engine.participation import Selection, selection
from fedstrata.engine.privacy import Privacy
from fedstrata.engine.start_points import start_points
from fedstrata.problems.base import Problem
from fedstrata.problems.weighting import Weights, sizes_of

Shapes = dict[str, tuple[str, list[int]]]  # by column: dtype and shape of one example


class DataSummary(NamedTuple):
    """Sizes and shapes of one site's data, by split. It travels as JSON, its fields in this order."""

    site: str
    counts: dict[str, int]
    shapes: dict[str, Shapes]

    @classmethod
    def of(cls, site: str, data: Federation) -> "DataSummary":
        """The summary of a site's data.

        Args:
            site: its name.
            data: a federation of one client, the site.
        """
        if data.clients != 1:
            raise ValueError(f"{site}: a site is one client, and its data have {data.clients}; load this site's alone")
        counts, shapes = {}, {}
        for name, split in data.splits.items():
            if not isinstance(split.examples, Mapping) or not all(hasattr(a, "dtype") for a in split.examples.values()):
                raise ValueError(f"{site}, split {name!r}: examples must be a dictionary of arrays")
            numbered(split.size, f"{site}, split {name!r}")
            counts[name] = int(split.size)
            shapes[name] = {c: (str(a.dtype), list(a.shape[1:])) for c, a in sorted(split.examples.items())}
        return cls(site, counts, shapes)


def placeholder_federation(summaries: Sequence[DataSummary]) -> Federation:
    """A federation with the sizes and shapes of all sites, in this order. Its data are zeros that take no memory."""
    first = summaries[0]
    names = [s.site for s in summaries]
    if len(set(names)) != len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise ValueError(f"two sites have the name {twice!r}; every site needs a different name")
    for summary in summaries[1:]:
        if summary.shapes != first.shapes:
            raise ValueError(f"{summary.site} has other data than {first.site}: {_difference(first, summary)}")
    splits: dict[str, Split] = {}
    for name, columns in first.shapes.items():
        offsets = np.concatenate([[0], np.cumsum([s.counts[name] for s in summaries])])
        zeros = lambda of, rows=int(offsets[-1]): np.broadcast_to(np.zeros((), of[0]), (rows, *of[1]))
        splits[name] = Split({c: zeros(of) for c, of in columns.items()}, offsets)
    return Federation(splits, names)


def _difference(a: DataSummary, b: DataSummary) -> str:
    """Where the shapes of two sites differ first, in words."""
    for split in sorted({*a.shapes, *b.shapes}):
        of_a, of_b = a.shapes.get(split), b.shapes.get(split)
        if of_a is None or of_b is None:
            return f"only {(a if of_b is None else b).site} has a split {split!r}"
        for column in sorted({*of_a, *of_b}):
            if of_a.get(column) != of_b.get(column):
                return f"in split {split!r}, column {column!r} is {of_b.get(column)} and not {of_a.get(column)}"
    return "nothing"


class Agreement(NamedTuple):
    """What the server and all sites of a run have in common. `with_data` adds the data of one site."""

    run: str  # its name
    context: RoundContext  # with shapes of data only, or with one site's data
    x0: Vector  # the start point
    key: PRNGKeyArray  # of the run's seed
    shapes: Mapping[str, Any] = {}  # by split: the shapes of one example, for evaluations

    def started(self) -> RoundContext:
        """The context of the run at its start point."""
        return self.context.at_start(self.context.algorithm, self.x0)

    def unnamed(self) -> "Agreement":
        """The same without the run's name, so that runs share compiled programs."""
        return self._replace(run="")


def agree(
    run: str,
    problem: Problem,
    algorithm: Algorithm,
    summaries: Sequence[DataSummary],
    *,
    seed: int = 0,
    params: Any = None,
    batch_size: int | Literal["all"] | Sampler = 32,
    sampling: Literal["replacement", "epochs"] = "replacement",
    cohort: int | Selection | None = None,
    weights: Weights = "uniform",
    privacy: Privacy | None = None,
) -> Agreement:
    """The agreement of a run; the server and every site compute the same one.

    Args:
        run: the run's name.
        problem: what is minimised.
        algorithm: the method; a centralised one is refused.
        summaries: of all sites, in the order of their numbers.
        seed: as in `fs.run`, and so are the following options.
        params: the start point.
        batch_size: examples per step, "all", or a sampler.
        sampling: "replacement" or "epochs".
        cohort: sites per round, or a selection rule; None: all sites.
        weights: "uniform", or "size": sites weigh by their rows.
        privacy: clipping and noise, for differential privacy.
    """
    exchanges = check_solves(algorithm, problem)
    if algorithm.centralised:
        raise ValueError(f"{type(algorithm).__name__} is centralised: it needs pooled data and cannot run over sites")
    check_weights(weights, problem)
    federation = placeholder_federation(summaries)
    rule, participation = sampler(batch_size, sampling), selection(cohort)
    x0 = start_point(problem, params, seed)
    check_parameters(x0)
    problem = problem.unseen().bind(x0, federation, rule)
    algorithm.check(problem)
    check_counts(problem, federation, rule)
    check_private(privacy, algorithm, problem)
    participation.check(federation.clients)
    needed = sorted({*problem.streams.values()})
    sizes = sizes_of(federation, weights, problem.size_split) if weights == "size" else None
    context = RoundContext(
        problem=problem,
        algorithm=as_arrays(algorithm, x0.scalar_dtype),
        sampler=rule,
        participation=participation,
        data={n: FlatSplit(None, None, None, int(federation[n].counts.max())) for n in needed},
        counts=None if sizes is None else jnp.asarray(sizes, jnp.int32),
        total=None if sizes is None else float(sizes.sum()),
        exchanges=exchanges,
        clients=federation.clients,
        privacy=privacy,
        dtype=x0.scalar_dtype,
    )
    shapes = {n: jax.tree.map(one_example, split.examples) for n, split in federation.splits.items()}
    return Agreement(run, context, x0, seed_key(seed), shapes)


def start_point(problem: Problem, params: Any = None, seed: int = 0) -> Vector:
    """x0 of this seed, the same as in `fs.run`."""
    return jax.tree.map(lambda a: a[0], start_points(problem, params, [seed]))


def with_data(agreement: Agreement, data: Federation) -> Agreement:
    """The agreement at a site: its context holds this site's data.

    Args:
        agreement: the common one.
        data: a federation of one client, the site.
    """
    zero = jnp.zeros((1,), jnp.int32)

    def on_device(name: str, bare: FlatSplit) -> FlatSplit:
        examples = jax.tree.map(jnp.asarray, data[name].examples)
        return FlatSplit(examples, zero, jnp.asarray([data[name].size], jnp.int32), bare.capacity)

    splits = {name: on_device(name, bare) for name, bare in agreement.context.data.items()}
    return agreement._replace(context=agreement.context.with_data(splits))
