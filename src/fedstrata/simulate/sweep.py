"""Seeds and swept values: the runs of one program, and the labelled axes of its history."""

import itertools
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fedstrata.base.errors import unknown
from fedstrata.base.random import seed_key
from fedstrata.core.algorithm import Algorithm
from fedstrata.core.hyperparameters import as_arrays, reals, with_values
from fedstrata.core.vector import Vector


def seed_list(seeds: int | Sequence[int]) -> list[int]:
    """`seeds=10` means 0 … 9."""
    whole = lambda s: isinstance(s, int | np.integer) and not isinstance(s, bool)
    given: Any = () if isinstance(seeds, str) else seeds
    given = range(given) if whole(given) else [*given] if np.iterable(given) else []
    fits = all(whole(s) and 0 <= s < 2**64 for s in given)
    if not given or not fits or len(set(given)) != len(given):
        raise ValueError(f"seeds={seeds!r} must be a number >= 1, or different whole numbers from 0 to 2**64 - 1")
    return [int(s) for s in given]


def stacked_settings(
    algorithm: Algorithm, sweep: Mapping[str, Sequence[Any]], seeds: list[int], dtype: Any
) -> tuple[Any, Any, dict[str, list]]:
    """The algorithm's array part stacked over sweep × seeds, its static part, and the labelled axes."""
    known = reals(algorithm)
    for name, values in check_grid(sweep, "sweep").items():
        if name not in known:
            if hasattr(algorithm, name):
                raise ValueError(
                    f"{type(algorithm).__name__}: {name!r} cannot be swept in one program, because it changes the "
                    f"program; run once per value, or use fs.tune, which does (can be swept: {', '.join(known)})"
                )
            raise unknown(f"hyper-parameter of {type(algorithm).__name__}", name, known)
        check_distinct(name, values, dtype)
        with_values(algorithm, **{name: np.asarray(values, np.float64)})  # every value in range, before stacking
    names = list(sweep)
    combined = [with_values(algorithm, **dict(zip(names, v, strict=True))) for v in itertools.product(*sweep.values())]
    parts = [eqx.partition(as_arrays(a, dtype), eqx.is_array) for a in combined for _ in seeds]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[p[0] for p in parts])
    axes = {name: [float(v) for v in sweep[name]] for name in names} | {"seed": seeds}
    return stacked, parts[0][1], axes


def repeat_runs(x0: Vector, seeds: list[int], runs: int) -> tuple[Vector, Array]:
    """Start points and keys of all runs: those of the seeds, repeated for every swept setting."""
    times = runs // len(seeds)
    keys = jnp.stack([seed_key(s) for s in seeds])
    return jax.tree.map(lambda a: jnp.concatenate([a] * times), x0), jnp.concatenate([keys] * times)


def check_values(name: str, values: Any, where: str) -> list[Any]:
    """The values of one hyper-parameter must be a list, not empty, without duplicates."""
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
