"""Toy algorithms that use each part of the interface once, so that it is proven before the papers need it."""

from typing import Any, NamedTuple

import jax.numpy as jnp

import fedstrata as fs
from fedstrata import Averaged, Broadcast, Cohort, Gathered, Local, Phase, Pooled, Reported, Server, Vector, real
from fedstrata.problems.base import SmoothOracle


class TwoPhase(fs.Algorithm):
    """First the mean gradient is agreed on, then every client takes local steps that use it (SVRG, FedLin)."""

    step_size: float = real(above=0)
    local_steps: int = 3

    class State(NamedTuple):
        x: Averaged[Vector]
        g: Averaged[Vector]
        g_i: Local[Vector]

    def init_server(self, problem, x0):
        return self.State(x=x0, g=x0.zeros(), g_i=x0.zeros())

    def first(self, oracle: SmoothOracle, start, state):
        g = oracle.grad(state.x)
        return state._replace(g=g, g_i=g)

    def second(self, oracle: SmoothOracle, start, state):
        step = oracle.grad(state.x) - state.g_i + start.g
        return state._replace(x=state.x - self.step_size * step)

    def phases(self, problem):
        return [
            Phase(self.first, sends=("g",), receives=("x",)),
            Phase(self.second, steps=self.local_steps, sends=("x",), receives=("g",)),
        ]

    def solution(self, problem, state):
        return state.x


class Repeated(fs.Algorithm):
    """`times` gradient exchanges in one round; `limit` of them happen."""

    step_size: float = real(above=0)
    times: int = 4
    limit: int = 4
    local_steps: int = 1

    class State(NamedTuple):
        x: Broadcast[Vector]
        g: Reported[Vector]
        seen: Local[Any]  # exchanges that this client has worked in

    def init_server(self, problem, x0):
        return self.State(x=x0, g=x0.zeros(), seen=0.0)

    def step(self, oracle: SmoothOracle, start, state):
        return state._replace(g=oracle.grad(start.x), seen=state.seen + 1)

    def server(self, problem, start, merged, cohort: Cohort):
        return merged._replace(x=start.x - self.step_size * merged.g)

    def phases(self, problem):
        when = lambda state, cohort, repetition: repetition < self.limit
        return [Phase(self.step, server_step=self.server, repeat=self.times, when=when)]

    def solution(self, problem, state):
        return state.x


class Scores(fs.Algorithm):
    """Clients pool x·features of the examples they see; the server remembers how the union grew."""

    history: int = 2
    local_steps: int = 2
    batch: int = 2

    class State(NamedTuple):
        x: Averaged[Vector]
        pool: Pooled[fs.Pool]
        mean: Averaged[Any]  # of the union as clients saw it at the start of the round
        count: Averaged[Any]  # valid rows that clients saw

    merge_at_init = True

    def init_server(self, problem, x0):
        pool = fs.Pool.empty(jnp.zeros((), x0.dtype), self.local_steps * self.batch, self.history)
        return self.State(x=x0, pool=pool, mean=0.0, count=0.0)

    def init_client(self, oracle, view):
        return view._replace(
            pool=view.pool.write(0, jnp.full((view.pool.capacity,), 100.0 + oracle.client.astype(float)))
        )

    def local_step(self, oracle: SmoothOracle, start, state):
        rows = oracle.sample("batch").examples["y"][: self.batch]
        mean = start.pool.mean(start.pool.rows)
        pool = state.pool.write(oracle.clock.local_step * self.batch, rows)
        return state._replace(pool=pool, mean=mean, count=jnp.sum(start.pool.valid).astype(mean.dtype))

    def solution(self, problem, state):
        return state.x


class Rows(fs.Algorithm):
    """Every client's gradient arrives at the server as a row; the server follows the longest one."""

    step_size: float = real(above=0)
    local_steps: int = 1

    class State(NamedTuple):
        x: Broadcast[Vector]
        g: Gathered[Vector]
        longest: Server[Any]  # the id of the client with the longest gradient

    def init_server(self, problem, x0):
        return self.State(x=x0, g=x0.zeros(), longest=-1)

    def local_step(self, oracle: SmoothOracle, start, state):
        return state._replace(g=oracle.grad(state.x))

    def server_step(self, problem, start, merged, cohort):
        rows = merged.g.tree
        which = jnp.argmax(jnp.sum(rows**2, axis=1))
        x = start.x - self.step_size * Vector(rows[which])
        return merged._replace(x=x, longest=cohort.ids[which].astype(merged.longest.dtype))

    def solution(self, problem, state):
        return state.x


class Visits(fs.Algorithm):
    """Counts how often each example was drawn, in per-example memory; starts from the example's own target."""

    local_steps: int = 3

    class State(NamedTuple):
        x: Averaged[Vector]
        visits: Local[fs.PerExample]
        target: Local[fs.PerExample]

    def init_server(self, problem, x0):
        return self.State(x=x0, visits=fs.PerExample(0.0), target=fs.PerExample(0.0))

    def init_client(self, oracle, view):
        every = oracle.fresh(0, batch_size="all").sample("batch")
        return view._replace(target=view.target.set(every.position, every.examples["y"]))

    def local_step(self, oracle: SmoothOracle, start, state):
        where = oracle.sample("batch").position
        return state._replace(visits=state.visits.set(where, state.visits[where] + 1))

    def solution(self, problem, state):
        return state.x


class OwnStarts(fs.Algorithm):
    """Every client starts from h = its own mean target, which is first averaged after round 0; x collects Σ h."""

    local_steps: int = 1

    class State(NamedTuple):
        x: Averaged[Vector]
        h: Averaged[Any]
        first: Local[Any]  # the h that this client's round began with, summed over rounds

    def init_server(self, problem, x0):
        return self.State(x=x0, h=0.0, first=0.0)

    def init_client(self, oracle, view):
        sample = oracle.fresh(0, batch_size="all").sample("batch")
        return view._replace(h=sample.mean(sample.examples["y"]))

    def local_step(self, oracle: SmoothOracle, start, state):
        return state._replace(x=state.x + start.h, first=state.first + start.h)

    def solution(self, problem, state):
        return state.x


class Growing(OwnStarts):
    """As OwnStarts, with x multiplied by −2 in every round: its objective explodes, and depends on the own starts."""

    def local_step(self, oracle: SmoothOracle, start, state):
        return state._replace(x=-2 * state.x + start.h, first=state.first + start.h)


class LateStart(fs.Algorithm):
    """No `init_client`, but the server starts from the merge of the (common) start values."""

    merge_at_init = True
    local_steps: int = 1

    class State(NamedTuple):
        x: Averaged[Vector]

    def init_server(self, problem, x0):
        return self.State(x=x0)

    def server_start(self, problem, merged, cohort):
        return merged._replace(x=merged.x + 7)

    def local_step(self, oracle: SmoothOracle, start, state):
        return state

    def solution(self, problem, state):
        return state.x


class MergedStart(OwnStarts):
    """As OwnStarts, but h is averaged before round 0, and the server adds one to it."""

    merge_at_init = True

    def server_start(self, problem, merged, cohort):
        return merged._replace(h=merged.h + 1)


class Looks(fs.Algorithm):
    """Adds up the gradients that it sees before, in and after its step, and in a fresh phase that comes twice."""

    local_steps: int = 1

    class State(NamedTuple):
        x: Averaged[Vector]
        begin: Local[Vector]
        step: Local[Vector]
        end: Local[Vector]
        fresh: Local[Vector]
        latest: Local[Vector]
        met: Local[Any]  # how often a call saw what the step of its round had seen

    def init_server(self, problem, x0):
        return self.State(x0, x0.zeros(), x0.zeros(), x0.zeros(), x0.zeros(), x0.zeros(), 0.0)

    def local_begin(self, oracle: SmoothOracle, start, state):
        return state._replace(begin=state.begin + oracle.grad(state.x))

    def local_step(self, oracle: SmoothOracle, start, state):
        g = oracle.grad(state.x)
        return state._replace(step=state.step + g, latest=g)

    def local_end(self, oracle: SmoothOracle, start, state):
        g = oracle.grad(state.x)
        return state._replace(end=state.end + g, met=state.met + g @ state.latest)

    def again(self, oracle: SmoothOracle, start, state):
        g = oracle.grad(state.x)
        return state._replace(fresh=state.fresh + g, met=state.met + g @ state.latest)

    def phases(self, problem):
        called = {"begin": self.local_begin, "end": self.local_end}
        return [
            Phase(self.local_step, sends=("x",), **called),
            Phase(self.again, sends=("x",), fresh=True, repeat=2),
        ]

    def solution(self, problem, state):
        return state.x
