"""The agreement of a deployed run, from what sites report of their data: sizes and shapes, and no example."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from fedstrata.base.random import seed_key
from fedstrata.base.strict_json import LONGEST
from fedstrata.base.text import one_line
from fedstrata.core.algorithm import Algorithm
from fedstrata.core.hyperparameters import as_arrays
from fedstrata.core.vector import Vector
from fedstrata.data.examples import one_example
from fedstrata.data.federation import Federation
from fedstrata.data.sampling import Sampler, sampler
from fedstrata.data.split import Split
from fedstrata.data.validation import LARGEST, numbered
from fedstrata.deploy.data_summary import DataSummary, differing_shapes
from fedstrata.deploy.messages import BEGIN, EVALUATE, START, Stage
from fedstrata.engine import initialise
from fedstrata.engine.checks import (
    check_counts,
    check_grid,
    check_parameters,
    check_private,
    check_solves,
    check_weights,
)
from fedstrata.engine.context import RoundContext
from fedstrata.engine.layout import FlatSplit
from fedstrata.engine.ledger import ledger_of
from fedstrata.engine.participation import Selection, selection
from fedstrata.engine.privacy import Privacy
from fedstrata.engine.start_points import start_points
from fedstrata.problems.base import Problem
from fedstrata.problems.weighting import Weights, sizes_of


def placeholder_federation(summaries: Sequence[DataSummary]) -> Federation:
    """A federation with the sizes and shapes of all sites, in this order. Its data are zeros that take no memory."""
    first = summaries[0]
    names = [s.site for s in summaries]
    if len(set(names)) != len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise ValueError(f"two sites have the name {twice!r}; every site needs a different name")
    for summary in summaries[1:]:
        if summary.shapes != first.shapes:
            raise ValueError(f"{summary.site} has other data than {first.site}: {differing_shapes(first, summary)}")
    check_rows_of(summaries)
    splits: dict[str, Split] = {}
    for name, columns in first.shapes.items():
        offsets = np.concatenate([[0], np.cumsum([s.counts[name] for s in summaries])])
        zeros = lambda of, rows=int(offsets[-1]): np.broadcast_to(np.zeros((), of[0]), (rows, *of[1]))
        splits[name] = Split({c: zeros(of) for c, of in columns.items()}, offsets)
    return Federation(splits, names)


def check_rows_of(summaries: Sequence[DataSummary]) -> None:
    """Refuse numbers of rows that programs cannot count in 32 bits, of one site and of all together.

    Args:
        summaries: of all sites, with the same splits.

    Raises:
        ValueError: a site reports too many rows of a split, or no whole number.
    """
    totals: dict[str, int] = {}
    for summary in summaries:
        for split in summary.shapes:
            rows = summary.counts.get(split)
            where = f"{one_line(summary.site, 200)}, split {one_line(split, 100)!r}"
            if type(rows) is not int or rows < 0:
                raise ValueError(f"{where}: the number of rows must be a whole number >= 0")
            totals[split] = totals.get(split, 0) + rows
            if rows > LARGEST or totals[split] > LARGEST:
                among = "" if rows > LARGEST else f", and with the sites before it {totals[split]:,}"
                shown = f"{rows:,}" if rows < 2**63 else "more than 2^63"
                raise ValueError(
                    f"{where} has {shown} rows{among}; programs number at most {LARGEST:,} rows of "
                    "a split: leave rows or sites out"
                )


class Agreement(NamedTuple):
    """What the server and all sites of a run have in common. `with_data` adds the data of one site."""

    run: str  # its name
    context: RoundContext  # with shapes of data only, or with one site's data
    x0: Vector  # the start point
    key: PRNGKeyArray  # of the run's seed
    shapes: Mapping[str, Any] = {}  # by split: the shapes of one example, for evaluations
    rows: Mapping[str, tuple[int, ...]] = {}  # by split: the rows of every site, as it reported them

    def started(self) -> RoundContext:
        """The context of the run at its start point."""
        return self.context.at_start(self.context.algorithm, self.x0)

    def state_bytes(self) -> int:
        """The size of the server's state. It may depend on the rows that sites report."""
        state = jax.eval_shape(lambda: initialise.blank(self.started(), self.context.clients))
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(state))

    def largest(self, direction: Literal["up", "down"]) -> int:
        """The bytes of a reply (up) or a call (down), at most: as if all fields of a round travelled at once.

        Rows that a site sends for an evaluation come on top.
        """
        context = self.started()
        found = ledger_of(context.algorithm, context.exchanges, context.template, context.cohort_size, context.clients)
        sizes = (max(e.bytes, e.rejoining or 0) + e.more_at_first for e in found.entries if e.direction == direction)
        return sum(sizes) + 2 * LONGEST  # its headers

    def unnamed(self) -> "Agreement":
        """The same without the run's name and the sites' rows, so that runs share compiled programs."""
        return self._replace(run="", rows={})


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
    check_counts(problem, federation, rule, others=len(summaries) == 1)
    check_private(privacy, algorithm, problem)
    if len(summaries) > 1:  # a site is checked before others come
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
    check_grid(context, jax.eval_shape(lambda: context.at_start(context.algorithm, x0).template))
    shapes = {n: jax.tree.map(one_example, split.examples) for n, split in federation.splits.items()}
    rows = {n: tuple(summary.counts[n] for summary in summaries) for n in shapes}
    return Agreement(run, context, x0, seed_key(seed), shapes, rows)


def start_point(problem: Problem, params: Any = None, seed: int = 0) -> Vector:
    """x0 of this seed, the same as in `fs.run`."""
    return jax.tree.map(lambda a: a[0], start_points(problem, params, [seed]))


def with_data(agreement: Agreement, data: Federation) -> Agreement:
    """The agreement at a site: its context holds this site's data.

    Args:
        agreement: the common one.
        data: a federation of one client, the site.

    Raises:
        ValueError: the agreement knows fewer rows than there are. A mean over a part of the rows would reveal the rest.
    """
    zero = jnp.zeros((1,), jnp.int32)

    def on_device(name: str, bare: FlatSplit) -> FlatSplit:
        numbered(data[name].size, f"split {name!r}")
        if data[name].size > bare.capacity:
            raise ValueError(
                f"split {name!r} has {data[name].size} rows, and no site of run {agreement.run!r} has more than "
                f"{bare.capacity} by its agreement; agree again, with this site's own summary"
            )
        # Programs look up a row even where none counts, so a split without rows has one of zeros.
        row = lambda a: jnp.asarray(a) if len(a) else jnp.zeros((1, *a.shape[1:]), a.dtype)
        examples = jax.tree.map(row, data[name].examples)
        return FlatSplit(examples, zero, jnp.asarray([data[name].size], jnp.int32), bare.capacity)

    splits = {name: on_device(name, bare) for name, bare in agreement.context.data.items()}
    return agreement._replace(context=agreement.context.with_data(splits))


def has_stage(context: RoundContext, stage: Stage, after: Stage | None = None) -> bool:
    """Whether a run has such a stage, after a site's earlier one.

    Args:
        context: of the run.
        stage: of a call.
        after: the stage from which the site continues.
    """
    if after is not None and not ((-1, BEGIN) <= after[:2] < stage[:2] and after.exchange >= 0):
        return False
    if stage.exchange == EVALUATE:
        return stage == Stage(max(stage.round, 0), EVALUATE)
    if stage.round < 0:
        twice = initialise.starts_twice(context.algorithm)
        return stage == Stage(-1, BEGIN) or (twice and stage == Stage(-1, START))
    phases = context.algorithm.phases(context.problem)
    if not (0 <= stage.phase < len(phases) and 0 <= stage.repetition < phases[stage.phase].repeat):
        return False
    before = [(phase.when, phase.repeat) for phase in phases[: stage.phase]]
    before.append((phases[stage.phase].when, stage.repetition))
    least = sum(repeat for when, repeat in before if when is None)  # the others may be left out
    return least <= stage.exchange <= sum(repeat for _, repeat in before)
