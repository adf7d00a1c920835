"""What sites say of their data before a run, and the terms that follow from it. No example leaves its site."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.algorithm import Algorithm, as_arrays
from fedstrata.data import check
from fedstrata.data.federation import Federation, Split
from fedstrata.data.sampling import sampler
from fedstrata.problems.base import Problem
from fedstrata.problems.nested import one_example
from fedstrata.random import seed_key
from fedstrata.runtime.job import start_points
from fedstrata.runtime.layout import FlatSplit
from fedstrata.runtime.prepare import (
    Weights,
    check_counts,
    check_parameters,
    check_private,
    check_solves,
    check_weights,
    sizes_of,
)
from fedstrata.runtime.site import Terms
from fedstrata.runtime.world import World
from fedstrata.transport.cohort import selection
from fedstrata.transport.privacy import Privacy
from fedstrata.vector import Vector

Shapes = dict[str, tuple[str, list[int]]]  # by column: dtype and shape of one example


class Survey(NamedTuple):
    """Sizes and shapes of one site's data, by split."""

    site: str
    counts: dict[str, int]
    shapes: dict[str, Shapes]

    @classmethod
    def of(cls, site: str, data: Federation) -> "Survey":
        """Of the one client that `data` has."""
        if data.clients != 1:
            raise ValueError(f"{site}: a site is one client, and its data have {data.clients}; give it its own only")
        counts, shapes = {}, {}
        for name, split in data.splits.items():
            if not isinstance(split.examples, Mapping) or not all(hasattr(a, "dtype") for a in split.examples.values()):
                raise ValueError(f"{site}, split {name!r}: examples must be a dictionary of arrays")
            check.numbered(split.size, f"{site}, split {name!r}")
            counts[name] = int(split.size)
            shapes[name] = {c: (str(a.dtype), list(a.shape[1:])) for c, a in sorted(split.examples.items())}
        return cls(site, counts, shapes)


def described(surveys: Sequence[Survey]) -> Federation:
    """A federation with the sizes and shapes of all sites, in this order, and zeros that take no memory for data."""
    first = surveys[0]
    names = [s.site for s in surveys]
    if len(set(names)) != len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise ValueError(f"two sites call themselves {twice!r}; a name is one site's own")
    for survey in surveys[1:]:
        if survey.shapes != first.shapes:
            raise ValueError(f"{survey.site} has other data than {first.site}: {_difference(first, survey)}")
    splits: dict[str, Split] = {}
    for name, columns in first.shapes.items():
        offsets = np.concatenate([[0], np.cumsum([s.counts[name] for s in surveys])])
        zeros = lambda of, rows=int(offsets[-1]): np.broadcast_to(np.zeros((), of[0]), (rows, *of[1]))
        splits[name] = Split({c: zeros(of) for c, of in columns.items()}, offsets)
    return Federation(splits, names)


def _difference(a: Survey, b: Survey) -> str:
    for split in sorted({*a.shapes, *b.shapes}):
        mine, theirs = a.shapes.get(split), b.shapes.get(split)
        if mine is None or theirs is None:
            return f"only {(a if theirs is None else b).site} has a split {split!r}"
        for column in sorted({*mine, *theirs}):
            if mine.get(column) != theirs.get(column):
                return f"in split {split!r}, column {column!r} is {theirs.get(column)} and not {mine.get(column)}"
    return "nothing"


def terms_of(
    run: str,
    problem: Problem,
    algorithm: Algorithm,
    surveys: Sequence[Survey],
    *,
    seed: int = 0,
    params: Any = None,
    batch_size: Any = 32,
    sampling: str = "replacement",
    cohort: Any = None,
    weights: Weights = "uniform",
    privacy: Privacy | None = None,
) -> Terms:
    """What server and sites agree on. Options are those of `fs.run`, and mean the same."""
    check_solves(algorithm, problem)
    if algorithm.centralised:
        raise ValueError(f"{type(algorithm).__name__} is centralised: it runs on pooled data, and not over sites")
    check_weights(weights, problem)
    federation, rule, chosen = described(surveys), sampler(batch_size, sampling), selection(cohort)
    x0 = start_point(problem, params, seed)
    check_parameters(x0)
    problem = problem.unseen().bind(x0, federation, rule)
    algorithm.check(problem)
    check_counts(problem, federation, rule)
    if privacy is not None:
        check_private(privacy, algorithm, problem)
    chosen.check(federation.clients)
    needed = sorted({*problem.streams.values()})
    flat = {n: FlatSplit(None, None, None, int(federation[n].counts.max())) for n in needed}
    sizes = sizes_of(federation, weights, problem.size_split) if weights == "size" else None
    counts, total = (None, None) if sizes is None else (jnp.asarray(sizes, jnp.int32), float(sizes.sum()))
    world = World(problem, None, rule, chosen, flat, {}, counts, federation.clients, privacy=privacy, total=total)
    shapes = {n: jax.tree.map(one_example, split.examples) for n, split in federation.splits.items()}
    return Terms(run, world, as_arrays(algorithm, x0.scalar_dtype), x0, seed_key(seed), shapes)


def start_point(problem: Problem, params: Any = None, seed: int = 0) -> Vector:
    """x0 of this seed, as `fs.run` has it."""
    return jax.tree.map(lambda a: a[0], start_points(problem, params, [seed]))


def with_data(terms: Terms, data: Federation) -> Terms:
    """The terms as a site has them: with its own data."""
    zero = jnp.zeros((1,), jnp.int32)

    def own(name: str, bare: FlatSplit) -> FlatSplit:
        examples = jax.tree.map(jnp.asarray, data[name].examples)
        return FlatSplit(examples, zero, jnp.asarray([data[name].size], jnp.int32), bare.capacity)

    flat = {name: own(name, bare) for name, bare in terms.world.flat.items()}
    world = terms.world
    return terms._replace(world=dataclasses.replace(world, flat=flat))
