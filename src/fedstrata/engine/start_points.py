"""Start points: the option `params` as arrays, for every seed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from fedstrata.base.clock import domain
from fedstrata.base.random import seed_key
from fedstrata.core.vector import Vector
from fedstrata.models.base import Model
from fedstrata.problems.base import Problem, model_of


def start_points(problem: Problem, params: PyTree, seeds: list[int]) -> Vector:
    """x0 of every seed: given arrays, a function of a key, or the start of the problem's model."""
    keys = jnp.stack([seed_key(s) for s in seeds])
    if params is not None and not _is_start_function(params):
        given = Vector(_as_arrays_by_name(params))
        return jax.tree.map(lambda a: jnp.broadcast_to(a, (len(seeds), *a.shape)), given)
    make = problem.init if params is None else lambda key: _as_arrays_by_name(_started(params, key))
    points = [make(domain(key, "parameters")) for key in keys]
    return Vector(jax.tree.map(lambda *leaves: jnp.stack(leaves), *points))


def _is_start_function(params: PyTree) -> bool:
    """Whether it makes start values: a callable, unless it is a module whose arrays are themselves the start values."""
    if isinstance(params, Model):
        raise TypeError(
            f"params={params!r} is an architecture, which holds no values; give its start values, params=model.init, "
            "or leave params out where the problem was made from it"
        )
    return callable(params) and not any(isinstance(a, np.ndarray | jax.Array) for a in jax.tree.leaves(params))


def _started(params: PyTree, key: PRNGKeyArray) -> Any:
    """params(key), a user's function."""
    try:
        return params(key)
    except Exception as error:
        raise TypeError(
            f"params is a function and is called with a random key; params(key) raised {type(error).__name__}: "
            f"{error} (start values that do not depend on the seed can be given as arrays)"
        ) from error


def _as_arrays_by_name(params: PyTree) -> Any:
    """Start values as arrays. Other leaves are refused by name."""

    def one(path: tuple, leaf: PyTree) -> Any:
        try:
            return jnp.asarray(leaf)
        except (TypeError, ValueError):
            name, kind = "params" + jax.tree_util.keystr(path), type(leaf).__name__
        rest = (
            "; keep what is no array apart: params, static = equinox.partition(module, equinox.is_inexact_array), and "
            "equinox.combine(params, static) in the loss"
        )
        raise TypeError(f"{name} is a {kind}; parameters must be floating-point arrays{rest if callable(leaf) else ''}")

    return jax.tree_util.tree_map_with_path(one, params.tree if isinstance(params, Vector) else params)


def check_fit(problem: Problem, x: Vector) -> None:
    """Parameters must fit the problem's model, if it has one."""
    if not isinstance(model := model_of(problem), Model):
        return
    try:
        like = jax.eval_shape(problem.init, jax.random.key(0))
    except ValueError:  # the problem's parameters are not the model's
        return
    leaves = jax.tree_util.tree_leaves_with_path
    wanted, found = ({f"params{jax.tree_util.keystr(p)}": a.shape for p, a in leaves(t)} for t in (like, x.tree))
    if wanted != found:
        raise ValueError(
            f"params do not fit {model!r}: it has {wanted}, given were {found}; leave params out to start as the "
            "model does, or give params=model.init(key)"
        )
