"""What `fs.run` is given, checked before anything compiles: every message names the argument and the remedy."""

import warnings
from collections.abc import Mapping, Sequence
from numbers import Real
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.data.check import HOW
from fedstrata.data.federation import Federation
from fedstrata.data.sampling import Sampler, WithReplacement
from fedstrata.models.base import Model
from fedstrata.problems.base import Problem, model_of
from fedstrata.runtime.result import SetupWarning
from fedstrata.vector import Vector

FAR = 20  # times the rows of a client above which a batch is reported


def check_federation(federation: Any) -> None:
    if not isinstance(federation, Federation):
        raise TypeError(f"federation is a {type(federation).__name__}, not a Federation; {HOW}")


def check_whole(**given: Any) -> None:
    """Whole numbers of at least one."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number >= 1")


def warn_of_large_batch(problem: Problem, federation: Federation, rule: Sampler) -> None:
    """A batch drawn with replacement should not be far larger than a client's shard: its rows would only come again."""
    if not isinstance(rule, WithReplacement):
        return
    for split in sorted({*problem.streams.values()}):
        counts = np.asarray(federation[split].counts)
        counts = np.where(counts > 0, counts, counts.max())  # who has nothing draws nothing
        client = int(counts.argmin())
        if rule.batch_size > FAR * counts[client]:
            few = int((rule.batch_size > FAR * counts).sum())
            warnings.warn(
                f"batch_size={rule.batch_size} is more than {FAR} times the {counts[client]} rows of "
                f"{federation.names[client]!r} in {split!r}, the smallest of {few} such clients: with replacement "
                'every row is drawn many times in one step; choose a smaller batch, or batch_size="all"',
                SetupWarning,
                stacklevel=4,
            )


def check_evaluation(evaluate: Any, monitor: Any, select: Any, explosion: Any) -> None:
    if isinstance(evaluate, str) or not isinstance(evaluate, Sequence | set | None):
        raise TypeError(f"evaluate={evaluate!r} must be a list of splits, e.g. ['test'] (default: all)")
    if not isinstance(monitor, Problem | None):
        raise TypeError(f"monitor={monitor!r} is not a Problem; give one to evaluate on, e.g. fs.Average(loss)")
    if not isinstance(select, str | None):
        raise TypeError(f"select={select!r} must name a column of the history, e.g. 'valid/loss'")
    if not isinstance(explosion, Real) or not float(explosion) > 0:
        raise ValueError(f"explosion={explosion!r} must be a number > 0, by which factor an objective may grow")


def check_checkpoint(checkpoint: Any, every: Any) -> None:
    if not isinstance(checkpoint, str | PathLike | None):
        raise TypeError(f"checkpoint={checkpoint!r} must be a folder, or None for no checkpoints")
    if not isinstance(every, Real) or not float(every) >= 0:
        raise ValueError(f"checkpoint_every={every!r} must be a number of seconds >= 0")


def check_values(name: str, values: Any, where: str) -> list[Any]:
    """The values of one hyper-parameter that are tried: a list, not empty, nothing twice."""
    listed = isinstance(values, Sequence) and not isinstance(values, str)
    if not listed and not (isinstance(values, np.ndarray | jax.Array) and values.ndim == 1):
        example = f"; for one value, [{values!r}]" if isinstance(values, Real | str) else ""
        raise TypeError(f"{where}: {name!r} must have a list of values, not {values!r}{example}")
    listed = list(values)
    if not listed:
        raise ValueError(f"{where}: {name!r} has no values; give at least one")
    twice = [v for i, v in enumerate(listed) if repr(v) in map(repr, listed[:i])]
    if twice:
        raise ValueError(f"{where}: {name!r} has the value {twice[0]!r} twice; give every value once")
    return listed


def check_grid(grid: Any, where: str) -> dict[str, list[Any]]:
    """Hyper-parameters and the values of each."""
    if not isinstance(grid, Mapping):
        raise TypeError(f"{where} is a {type(grid).__name__}; give a dictionary, e.g. {{'step_size': [0.1, 0.01]}}")
    return {name: check_values(name, values, where) for name, values in grid.items()}


def check_distinct(name: str, values: Sequence[Any], dtype: Any) -> None:
    """Swept numbers must also differ in the parameters' dtype, or two labels would stand for one run."""
    if any(isinstance(v, bool | str) or not isinstance(v, Real | np.generic | jax.Array) for v in values):
        raise ValueError(f"sweep: {name!r} must have numbers only, not {list(values)} (run schedules one by one)")
    rounded = np.asarray(jnp.asarray(np.asarray(values, np.float64), dtype))
    for i, value in enumerate(rounded):
        if value in rounded[:i]:
            first = values[int(np.flatnonzero(rounded == value)[0])]
            raise ValueError(
                f"sweep: {name!r} has {first!r} and {values[i]!r}, which are one number in the parameters' dtype "
                f"({jnp.dtype(dtype)}); give every value once"
            )


def is_start_function(params: Any) -> bool:
    """Whether it makes start values: a callable, unless it is a module whose arrays are themselves the start values."""
    if isinstance(params, Model):
        raise TypeError(
            f"params={params!r} is an architecture, which holds no values; give its start values, params=model.init, "
            "or leave params out where the problem was made from it"
        )
    return callable(params) and not any(isinstance(a, np.ndarray | jax.Array) for a in jax.tree.leaves(params))


def started(params: Any, key: Any) -> Any:
    """params(key), a user's function."""
    try:
        return params(key)
    except Exception as error:
        raise TypeError(
            f"params is a function and is called with a random key; params(key) raised {type(error).__name__}: "
            f"{error} (start values that do not depend on the seed can be given as arrays)"
        ) from error


def as_arrays_by_name(params: Any) -> Any:
    """Start values as arrays; what is none is refused by its name."""

    def one(path: Any, leaf: Any) -> Any:
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
    """Parameters must be those of the problem's model, where it was made from one."""
    if not isinstance(model := model_of(problem), Model):
        return
    try:
        like = jax.eval_shape(problem.init, jax.random.key(0))
    except ValueError:  # its parameters are not the model's
        return
    leaves = jax.tree_util.tree_leaves_with_path
    wanted, found = ({f"params{jax.tree_util.keystr(p)}": a.shape for p, a in leaves(t)} for t in (like, x.tree))
    if wanted != found:
        raise ValueError(
            f"params do not fit {model!r}: it has {wanted}, given were {found}; leave params out to start as the "
            "model does, or give params=model.init(key)"
        )
