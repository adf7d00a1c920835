"""Many runs (settings × seeds) in one program: batched, and divided over a CPU's threads."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedstrata.core.vector import Vector
from fedstrata.engine.context import RoundContext
from fedstrata.simulate.inputs import Inputs
from fedstrata.simulate.state import ProgramOptions


class Runs(eqx.Module):
    """The arguments of a program: those common to all runs, and those of each, with a leading axis of runs."""

    inputs: Inputs  # the algorithm without its real hyper-parameters, which are in `values`
    options: ProgramOptions = eqx.field(static=True)
    values: Any  # the real hyper-parameters: the array part of the algorithm
    x0: Vector
    keys: Array
    seeds: int = eqx.field(static=True)  # runs per setting

    @property
    def count(self) -> int:
        return self.keys.shape[0]

    def context(self, values: Any, x0: Vector) -> RoundContext:
        """The context of one run."""
        shared = self.inputs.context
        return shared.at_start(eqx.combine(values, shared.algorithm), x0)

    def first_context(self) -> RoundContext:
        """The context of the first run."""
        return self.context(*jax.tree.map(lambda a: a[0], (self.values, self.x0)))

    def template(self) -> Any:
        """The shapes of the first run's start values, without computing any."""
        return jax.eval_shape(lambda: self.first_context().template)

    def each(self, function: Callable[..., Any], by_seed: tuple = (), by_run: tuple = ()) -> Any:
        """function(context, key, *by_seed, *by_run) of every run, stacked."""
        one = lambda values, x0, key, *given: function(self.context(values, x0), key, *given)
        return over_runs(one, self.seeds, self.values, (self.x0, self.keys, *by_seed), by_run)


def over_runs(function: Callable[..., Any], seeds: int, values: Any, by_seed: tuple, by_run: tuple = ()) -> Any:
    """function(values, *by_seed, *by_run) of every run (settings × seeds).

    The samples of a seed are drawn and looked up once for all settings. A single run is not batched.
    """
    runs = jax.tree.leaves((values, by_run, by_seed))[0].shape[0]
    settings = runs // seeds
    grid = lambda a: a.reshape((settings, seeds, *a.shape[1:]))
    values = jax.tree.map(lambda a: grid(a)[:, 0], values)
    by_seed, by_run = jax.tree.map(lambda a: a[:seeds], by_seed), jax.tree.map(grid, by_run)
    first = lambda tree, at: jax.tree.map(lambda a: a[at], tree)
    if runs == 1:
        out = function(first(values, 0), *first(by_seed, 0), *first(by_run, (0, 0)))
        return jax.tree.map(lambda a: a[None], out)
    some, many = [None] * len(by_seed), [0] * len(by_run)
    # An algorithm may have no reals. Then only the number of settings is given.
    of_seed = jax.vmap(function, in_axes=(0, *some, *many), axis_size=settings)
    of_all = jax.vmap(of_seed, in_axes=(None, *[0 for _ in some], *[1 for _ in many]), out_axes=1)
    out = of_all(values, *by_seed, *by_run)
    return jax.tree.map(lambda a: a.reshape((runs, *a.shape[2:])), out)


class Groups(NamedTuple):
    """Runs (settings × seeds), divided evenly over threads: by setting or, if that is impossible, by seed."""

    settings: int
    seeds: int
    threads: int

    @property
    def by_setting(self) -> bool:
        return self.settings % self.threads == 0

    @property
    def seeds_each(self) -> int:
        return self.seeds if self.by_setting else self.seeds // self.threads

    def cut(self, tree: Any) -> list[Any]:
        axis = 0 if self.by_setting else 1

        def pieces(leaf: Array) -> list[Array]:
            grid = leaf.reshape((self.settings, self.seeds, *leaf.shape[1:]))
            return [a.reshape((-1, *leaf.shape[1:])) for a in jnp.split(grid, self.threads, axis)]

        leaves, structure = jax.tree.flatten(tree)
        return [structure.unflatten(part) for part in zip(*map(pieces, leaves), strict=True)]

    def join(self, parts: list[Any]) -> Any:
        if self.by_setting:
            return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
        grid = lambda a: a.reshape((self.settings, self.seeds_each, *a.shape[1:]))
        whole = lambda *leaves: jnp.concatenate([grid(a) for a in leaves], axis=1)
        return jax.tree.map(lambda *leaves: whole(*leaves).reshape((-1, *leaves[0].shape[1:])), *parts)


def threads_for(settings: int, seeds: int) -> int:
    """On a CPU, the largest number of equal groups of runs that does not exceed the cores."""
    cores = os.cpu_count() or 1 if jax.default_backend() == "cpu" else 1
    return max(n for n in range(1, cores + 1) if settings % n == 0 or seeds % n == 0)
