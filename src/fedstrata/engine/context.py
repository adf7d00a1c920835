"""The context of a round: everything that all rounds of a run read and never change."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from fedstrata.base.clock import Clock, domain
from fedstrata.base.random import fold_in
from fedstrata.core.algorithm import Algorithm, Cohort, steps_of
from fedstrata.core.grid import Grid
from fedstrata.core.hyperparameters import at_time
from fedstrata.core.vector import Vector
from fedstrata.data.sampling import Sampler
from fedstrata.engine.exchange import Exchange
from fedstrata.engine.layout import Flat
from fedstrata.engine.mesh import Spread
from fedstrata.engine.participation import Everyone, Selection
from fedstrata.engine.privacy import Privacy, noise_key
from fedstrata.problems.base import Problem

Execution = str | int  # "vmap", "map", or the number of clients in a chunk


def profiled(name: str) -> Any:
    """Name a part of a round, so that `fs.profile` finds it in a trace."""
    return jax.named_scope(f"fs.{name}")


class RoundContext(eqx.Module):
    """Problem, algorithm, participation and data of a run. Simulations, sites and servers use the same class.

    `at_start` fills in the parts of one run: the algorithm with its hyper-parameters, and the start point.
    """

    problem: Problem
    algorithm: Algorithm
    sampler: Sampler
    participation: Selection
    data: Flat  # of all clients, of one cohort, of one site, or shapes only
    counts: Array | None  # (N,) rows by which clients are weighted; None: uniform weights
    total: float | None  # Σ counts
    exchanges: tuple[Exchange, ...] = eqx.field(static=True)
    clients: int = eqx.field(static=True)  # N, in the whole federation
    privacy: Privacy | None = eqx.field(static=True, default=None)
    spread: Spread | None = eqx.field(static=True, default=None)  # clients over a device mesh
    in_cohort_order: bool = eqx.field(static=True, default=False)  # `data` are those of the cohort's clients only
    execution: Execution = eqx.field(static=True, default="vmap")
    template: Any = None  # one client's start value of every field
    dtype: Any = eqx.field(static=True, default=None)  # of scalars computed with the parameters

    def at_start(self, algorithm: Algorithm, x0: Vector) -> "RoundContext":
        """The context of one run: this algorithm from this start point."""
        template = start_values(algorithm, self.problem, x0)
        return dataclasses.replace(self, algorithm=algorithm, template=template, dtype=x0.scalar_dtype)

    def with_data(self, data: Flat) -> "RoundContext":
        return dataclasses.replace(self, data=data)

    @property
    def state(self) -> type:
        """The class of the algorithm's state."""
        return type(self.algorithm).State

    @property
    def cohort_size(self) -> int:
        """Clients in a round."""
        return self.participation.size(self.clients)

    def cohort(self, key: PRNGKeyArray, round: Array) -> Cohort:
        """The cohort of a round, weighted uniformly or by counts; `key` is the run's."""
        with profiled("cohort"):
            return self._cohort(self.participation, key, round)

    def everyone(self, key: PRNGKeyArray) -> Cohort:
        """All clients, which send their starts before round 0."""
        with profiled("cohort"):
            return self._cohort(Everyone(), key, jnp.array(0, jnp.int32))

    def _cohort(self, participation: Selection, key: PRNGKeyArray, round: Array) -> Cohort:
        now = fold_in(domain(key, "cohort"), round)
        ids = participation.draw_once(now, round, self.clients)
        clock = Clock.at(round, steps_of(self.algorithm), steps_of(self.algorithm) - 1)
        present = jnp.ones(ids.shape, bool) if participation.full else ids >= 0
        if self.counts is None or self.total is None:
            weights, share = present.astype(self.dtype), present.sum() / self.clients
        else:
            weights = jnp.where(present, self.counts[jnp.maximum(ids, 0)].astype(self.dtype), 0)
            everyone = isinstance(participation, Everyone)  # then the share is exactly one, without rounding
            share = jnp.ones((), self.dtype) if everyone else jnp.sum(weights) / self.total
        weights = weights / jnp.sum(weights)
        return Cohort(clock, jnp.maximum(ids, 0), present, weights, fold_in(now, 1), self.clients, share)

    def noise(
        self, key: PRNGKeyArray, round: Array | int = -1, phase: int = 0, repetition: Array | int = 0
    ) -> PRNGKeyArray | None:
        """The key of the noise of one exchange, in a private simulation; before round 0 the round is −1."""
        return None if self.privacy is None else noise_key(domain(key, "privacy"), round, phase, repetition)

    def grid(self, paths: tuple[str, ...], clients: int | None = None) -> Grid | None:
        """The grid of the noise of an exchange of a private run, in which `clients` (a cohort) send these paths."""
        if self.privacy is None:
            return None
        return self.privacy.grid(self.template, paths, self.cohort_size if clients is None else clients)


def start_values(algorithm: Algorithm, problem: Problem, x0: Vector) -> Any:
    """The template: the state of `init_server` as arrays, with its type checked."""
    state = at_time(algorithm, Clock.at(0, steps_of(algorithm)), x0.scalar_dtype).init_server(problem, x0)
    if type(state) is not type(algorithm).State:
        raise TypeError(f"{type(algorithm).__name__}.init_server must return its State, not {type(state).__qualname__}")
    number = lambda a: jnp.asarray(a, x0.scalar_dtype) if isinstance(a, int | float) else jnp.asarray(a)
    return jax.tree.map(number, state)
