"""What one client can say of a solution from its own rows, and what is known of that without any data."""

from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fedstrata.data.federation import Federation
from fedstrata.problems.base import Problem
from fedstrata.problems.losses import Classification
from fedstrata.problems.pairwise import Pairwise
from fedstrata.problems.rows import Rows
from fedstrata.vector import Vector

if TYPE_CHECKING:
    from fedstrata.runtime.site import Terms


def own_rows(data: Federation, split: str, dtype: Any) -> Rows | None:
    """A split of a site's data, which are all its own; None where it has no rows."""
    size = data[split].size
    return rows_like(jax.tree.map(jnp.asarray, data[split].examples), size, dtype) if size else None


def rows_like(examples: PyTree, size: int, dtype: Any) -> Rows:
    first = jnp.zeros((1,), jnp.int32)
    weight, owner = jnp.full((size,), 1 / size, dtype), jnp.zeros((size,), jnp.int32)
    return Rows(examples, weight, owner, clients=1, start=first, capacity=size)


def measures(terms: "Terms", split: str) -> tuple[str, ...]:
    """The names of what a client says of a split."""
    problem = terms.world.problem
    return tuple(jax.eval_shape(lambda x, full: _named(problem, x, full[split], split), *_blank(terms)))


def meaningful(terms: "Terms") -> list[str]:
    """The splits on which a client has something to say: the training data, and what the problem evaluates."""
    problem, (x, full) = terms.world.problem, _blank(terms)
    says = lambda split: jax.eval_shape(lambda x, full: problem.evaluate_split(x, full, split), x, full)
    return [s for s in terms.shapes if measures(terms, s) and (s == "train" or says(s))]


def score_type(terms: "Terms", split: str) -> Any:
    """The dtype of the scores of a split; a ValueError where there is not one score for every example."""
    problem = terms.world.problem
    try:
        score, _ = jax.eval_shape(lambda x, example: score_of(problem, x, example), terms.x0, terms.shapes[split])
    except (TypeError, KeyError) as error:
        raise ValueError(f"scores of split {split!r}: {error}") from None
    if score.size != 1:
        raise ValueError(
            f"scores of split {split!r}: a pooled AUC needs one score for every example, and this model gives "
            f"{score.shape}; leave scores out, or train a model with one output"
        )
    return score.dtype


def score_of(problem: Problem, x: Vector, example: PyTree) -> tuple[Array, Array]:
    """The score of one example, and whether its label is the positive one."""
    if isinstance(problem, Pairwise):
        return problem.score_of(x.tree, example), jnp.asarray(example[problem.label]) == problem.positive
    loss = getattr(problem, "loss", None)
    if not isinstance(loss, Classification):
        raise TypeError(
            f"a {type(problem).__name__} problem has no scores to pool; a Pairwise problem has, and one with "
            "fs.losses.Classification of a model with one output"
        )
    return loss.model(x.tree, example["x"]), jnp.asarray(example["y"]) == 1


def _blank(terms: "Terms") -> tuple[Vector, dict[str, Any]]:
    some = lambda of: jax.tree.map(lambda a: jax.ShapeDtypeStruct((2, *a.shape), a.dtype), of)
    dtype = terms.x0.scalar_dtype
    full = {s: jax.eval_shape(lambda e: rows_like(e, 2, dtype), some(of)) for s, of in terms.shapes.items()}
    return jax.eval_shape(lambda: terms.x0), full


def _named(problem: Problem, x: Vector, rows: Rows, split: str) -> dict[str, Array]:
    """The measures of the only client; the objective of another split than the training data is a loss."""
    rename = lambda name: "loss" if (name, split != "train") == ("objective", True) else name
    return {rename(name): value[0] for name, value in problem.evaluate_clients(x, rows).items()}


@eqx.filter_jit
@jax.default_matmul_precision("highest")
def measured(problem: Problem, x: Vector, rows: Rows, split: str) -> dict[str, Array]:
    return _named(problem, x, rows, split)


@eqx.filter_jit
@jax.default_matmul_precision("highest")
def scored(problem: Problem, x: Vector, rows: Rows) -> tuple[Array, Array]:
    scores, labels = rows.map(lambda example: score_of(problem, x, example))
    return scores.reshape(-1), labels
