"""The weights of clients and examples in an exact evaluation."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.data.federation import Federation
from fedstrata.data.split import Split
from fedstrata.data.validation import check_federation, numbered
from fedstrata.problems.base import Problem
from fedstrata.problems.rows import Rows
from fedstrata.problems.stored import Stored

Weights = Literal["uniform", "size"]


def sizes_of(federation: Federation, weights: Weights, split: str) -> np.ndarray:
    """Numbers proportional to the weights of the clients: the rows of this split, or one each."""
    counts = np.asarray(federation[split].counts)
    return counts if weights == "size" else np.ones(counts.shape, np.int64)


def rows_of(split: Split, dtype: Any, sizes: np.ndarray, stored: Any = None) -> Rows:
    """A whole split, each example with its share of the objective: p_i / n_i, over the clients that have any.

    In a pooled split every example counts the same.

    Args:
        split: the rows.
        dtype: of the weights.
        sizes: numbers proportional to p_i.
        stored: the examples on a mesh, the place of each row among them and the number of devices; or `Stored`, if they
            stay on the host.
    """
    numbered(split.size, "this split")
    counts = np.asarray(split.counts)
    if not counts.any():
        raise ValueError("this split has no examples, so nothing can be evaluated on it")
    sizes = np.where(counts > 0, counts if split.pooled else sizes, 0)
    share = sizes / (sizes.sum() * np.maximum(counts, 1))
    owners = np.asarray(split.owners)
    weight, owner = jnp.asarray(share[owners], dtype), jnp.asarray(owners, jnp.int32)
    if isinstance(stored, tuple):
        examples, order, devices = stored
        return Rows(examples, weight, owner, split.clients, order=jnp.asarray(order), blocks=devices)
    examples = Stored(split.examples) if stored is Stored else jax.tree.map(jnp.asarray, split.examples)
    start, most = jnp.asarray(np.asarray(split.offsets)[:-1], jnp.int32), int(counts.max())
    return Rows(examples, weight, owner, split.clients, start=start, capacity=most)


def full_data(
    federation: Federation, weights: Weights = "uniform", dtype: Any = None, problem: Problem | None = None
) -> dict[str, Rows]:
    """Every split whole, for `problem.objective(x, full)` and the other exact evaluations.

    Args:
        federation: the data.
        weights: "uniform", or "size": a client weighs by its rows in each split.
        dtype: of the weights; the default float dtype, if left out.
        problem: one that draws from several splits weighs a client by its rows in one of them, for all of these
            splits; given the problem, clients weigh as in `fs.run`.

    >>> fed = Federation.from_clients([{"x": np.zeros(3)}, {"x": np.ones(1)}])
    >>> [round(6 * float(w), 5) for w in full_data(fed)["train"].weight]  # each client counts one half
    [1.0, 1.0, 1.0, 3.0]
    """
    check_federation(federation)
    dtype = jnp.zeros(()).dtype if dtype is None else dtype
    return {n: rows_of(s, dtype, weighing(problem, federation, weights, n)) for n, s in federation.splits.items()}


def weighing(problem: Problem | None, federation: Federation, weights: Weights, name: str) -> np.ndarray:
    """How clients weigh in a split: as in the merge, if the problem draws from it; else by their rows there."""
    if problem is None or weights == "uniform" or problem.weighs_clients or name not in problem.streams.values():
        return sizes_of(federation, weights, name)
    return sizes_of(federation, weights, problem.size_split)
