"""Checks of a pairwise problem before anything compiles, and the shapes that they find."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.vector import Vector
from fedstrata.data.federation import Federation
from fedstrata.problems import base

if TYPE_CHECKING:
    from fedstrata.problems.pairwise.problem import Pairwise


def splits(problem: "Pairwise", federation: Federation) -> None:
    """Refuse a federation without the two sets, or with sets made from other labels than the problem's."""
    for split in (problem.first, problem.second):
        if split not in federation.splits and split in ("positives", "negatives"):
            raise ValueError(
                f"Pairwise: this federation has no split {split!r}; federation.by_label() makes it from the labels"
            )
        examples = federation[split].examples if split in ("positives", "negatives") else {}
        if problem.label in examples:
            has = np.asarray(examples[problem.label]) == problem.positive
            wrong = ~has if split == "positives" else has
            if wrong.any():  # a site may have no rows of one kind
                raise ValueError(
                    f"Pairwise: the split {split!r} does not match label={problem.label!r} and "
                    f"positive={problem.positive}; give the problem the same label and positive as by_label"
                )


def traced(problem: "Pairwise", x: Vector, federation: Federation) -> tuple[Any, ...]:
    """(shape, dtype) of a score of each set and of a mean loss; refuses functions that do not fit together."""
    shapes = []
    for split, score in ((problem.first, problem.score_of), (problem.second, problem.second_score)):
        one = lambda a: jax.ShapeDtypeStruct(a.shape[1:], jax.dtypes.canonicalize_dtype(a.dtype))
        found = base.traced("Pairwise: score", score, x.tree, jax.tree.map(one, federation[split].examples))
        if not jnp.issubdtype(found.dtype, jnp.floating):
            raise ValueError(f"Pairwise: score(params, example) must return real numbers, not {found}")
        shapes.append(found)
    u = jax.eval_shape(problem.pair_loss, *shapes)
    value = u if problem.f is None else jax.eval_shape(problem.f, u)
    if not (hasattr(value, "shape") and value.shape == () and jnp.issubdtype(value.dtype, jnp.floating)):
        what = "pair_loss(a, b)" if problem.f is None else "outer(pair_loss(a, b))"
        raise ValueError(f"Pairwise: {what} must return one real number for scores {shapes}, not {value}")
    return tuple((tuple(s.shape), jnp.dtype(s.dtype)) for s in (*shapes, u))
