"""A site's measures and scores of a solution, on its rows; their names and types, from shapes alone."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fedstrata.core.vector import Vector
from fedstrata.data.federation import Federation
from fedstrata.deploy.agreement import Agreement
from fedstrata.problems.base import Problem
from fedstrata.problems.losses import Classification
from fedstrata.problems.pairwise.problem import Pairwise
from fedstrata.problems.rows import Rows


def own_rows(data: Federation, split: str, dtype: Any) -> Rows | None:
    """A split of a site's data; None if it has no rows."""
    size = data[split].size
    return rows_of(jax.tree.map(jnp.asarray, data[split].examples), size, dtype) if size else None


def rows_of(examples: PyTree, size: int, dtype: Any) -> Rows:
    """Rows of one client, which weigh alike."""
    first = jnp.zeros((1,), jnp.int32)
    weight, owner = jnp.full((size,), 1 / size, dtype), jnp.zeros((size,), jnp.int32)
    return Rows(examples, weight, owner, clients=1, start=first, capacity=size)


def measures(agreement: Agreement, split: str) -> tuple[str, ...]:
    """The names of a site's measures of a split."""
    problem = agreement.context.problem
    return tuple(jax.eval_shape(lambda x, full: _named(problem, x, full[split], split), *_blank(agreement)))


def meaningful(agreement: Agreement) -> list[str]:
    """The splits that a site can measure: the training data, and those that the problem evaluates."""
    problem, (x, full) = agreement.context.problem, _blank(agreement)
    evaluated = lambda split: jax.eval_shape(lambda x, full: problem.evaluate_split(x, full, split), x, full)
    return [s for s in agreement.shapes if measures(agreement, s) and (s == "train" or evaluated(s))]


def score_type(agreement: Agreement, split: str) -> Any:
    """The dtype of the scores of a split; a ValueError if an example has no score, or several."""
    problem = agreement.context.problem
    try:
        score, _ = jax.eval_shape(
            lambda x, example: score_of(problem, x, example), agreement.x0, agreement.shapes[split]
        )
    except (TypeError, KeyError) as error:
        raise ValueError(f"scores of split {split!r}: {error}") from None
    if score.size != 1:
        raise ValueError(
            f"scores of split {split!r}: a pooled AUC needs one score for every example, and this model's have "
            f"shape {score.shape}; leave scores out, or train a model with one output"
        )
    return score.dtype


def score_of(problem: Problem, x: Vector, example: PyTree) -> tuple[Array, Array]:
    """The score of one example, and whether its label is the positive one."""
    if isinstance(problem, Pairwise):
        return problem.score_of(x.tree, example), jnp.asarray(example[problem.label]) == problem.positive
    loss = getattr(problem, "loss", None)
    if not isinstance(loss, Classification):
        raise TypeError(
            f"a {type(problem).__name__} problem has no scores to pool; use a Pairwise problem, or "
            "fs.losses.Classification of a model with one output"
        )
    return loss.model(x.tree, example["x"]), jnp.asarray(example["y"]) == 1


def _blank(agreement: Agreement) -> tuple[Vector, dict[str, Any]]:
    """Shapes of a solution and of every split, with two rows."""
    some = lambda of: jax.tree.map(lambda a: jax.ShapeDtypeStruct((2, *a.shape), a.dtype), of)
    dtype = agreement.x0.scalar_dtype
    full = {s: jax.eval_shape(lambda e: rows_of(e, 2, dtype), some(of)) for s, of in agreement.shapes.items()}
    return jax.eval_shape(lambda: agreement.x0), full


def _named(problem: Problem, x: Vector, rows: Rows, split: str) -> dict[str, Array]:
    """The measures of the only client; the objective on another split than the training data is called loss."""
    rename = lambda name: "loss" if (name, split != "train") == ("objective", True) else name
    return {rename(name): value[0] for name, value in problem.evaluate_clients(x, rows).items()}


@eqx.filter_jit
@jax.default_matmul_precision("highest")
def measured(problem: Problem, x: Vector, rows: Rows, split: str) -> dict[str, Array]:
    """The measures of a split by name."""
    return _named(problem, x, rows, split)


@eqx.filter_jit
@jax.default_matmul_precision("highest")
def scored(problem: Problem, x: Vector, rows: Rows) -> tuple[Array, Array]:
    """The score of every row, and whether its label is the positive one."""
    scores, labels = rows.map(lambda example: score_of(problem, x, example))
    return scores.reshape(-1), labels
