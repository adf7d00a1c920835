"""The simulator's program: many rounds, evaluation included, as one compiled loop.

The loop's bounds are traced, so a segment of any length is the same executable: how a run is cut into segments
never changes a bit of its result. A run that diverges or stops early is frozen in place, at the cost of the cohort.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from fedstrata.algorithm import Algorithm, Cohort, Phase, steps_of
from fedstrata.clock import Clock, domain
from fedstrata.data.sampling import Sampler
from fedstrata.memory import Pool
from fedstrata.problems.base import Rows
from fedstrata.random import fold_in
from fedstrata.runtime import start as starting
from fedstrata.runtime.crew import Crew, Execution, crew_of, read_local, unspread, write_local
from fedstrata.runtime.layout import Flat
from fedstrata.runtime.mesh import Spread
from fedstrata.runtime.round import Round, Setting, part_of_time, run_round
from fedstrata.runtime.sight import show_server
from fedstrata.transport.cohort import Everyone, Selection
from fedstrata.vector import Vector, where, widest

RUNNING, DIVERGED, EXPLODED, STOPPED = range(4)


class World(eqx.Module):
    """Everything a run looks at and never changes."""

    problem: Any
    monitor: Any  # another problem to evaluate on, or None
    sampler: Sampler
    selection: Selection
    flat: Flat
    full: dict[str, Rows]  # the splits to evaluate on; "train" is the objective
    counts: Array | None  # (N,) weights of clients; None: all alike
    clients: int = eqx.field(static=True)
    spread: Spread | None = eqx.field(static=True, default=None)  # how the clients lie on a device mesh
    host: Any = eqx.field(static=True, default=None)  # what stays on the host; `flat` then has one cohort's data

    @property
    def streamed(self) -> bool:
        return self.host is not None


class Plan(NamedTuple):
    """The static part of a run: what another value of would make another program."""

    records: int  # evaluations that one segment may hold
    execution: Execution = "vmap"
    stationarity: bool = True
    per_client: bool = False
    select: str | None = None  # the column by which the best solution is kept
    sign: int = -1  # +1: the larger the better
    patience: int | None = None  # evaluations without improvement before a run stops
    explosion: float = 1e6  # an objective that grew by this factor counts as diverged


class Span(NamedTuple):
    """Which rounds a segment runs, and when it evaluates: all traced, so none of it recompiles."""

    first: Array
    last: Array
    every: Array
    rounds: Array  # of the whole run: its last round is always evaluated

    def due(self, done: Array) -> Array:
        return (done % self.every == 0) | (done == self.rounds)


class Carry(NamedTuple):
    """All that a run remembers between rounds: a checkpoint of it is complete by construction."""

    shared: Any
    local: dict[str, Any]
    status: Array
    bad_round: Array  # the round in which it diverged, or −1
    bad_fields: Array  # which fields then were not finite, in the order of the state
    first: Array  # the objective at the start
    best: Array  # the best value of `select` so far
    best_x: Vector | None
    best_round: Array
    waited: Array  # evaluations since


def setting_of(world: World, algorithm: Algorithm, plan: Plan, x0: Vector) -> Setting:
    template = starting.start_values(algorithm, world.problem, x0)
    return Setting(algorithm, world.problem, world.sampler, plan.execution, world.flat, template, x0.scalar_dtype)


def cohort_at(world: World, algorithm: Algorithm, key: PRNGKeyArray, round: Array, dtype: Any) -> Cohort:
    """The clients of a round, weighted evenly or by their counts."""
    with part_of_time("cohort"):
        return _cohort_at(world, algorithm, key, round, dtype)


def _cohort_at(world: World, algorithm: Algorithm, key: PRNGKeyArray, round: Array, dtype: Any) -> Cohort:
    now = fold_in(domain(key, "cohort"), round)
    ids = world.selection.draw(now, round, world.clients)
    clock = Clock.at(round, steps_of(algorithm), steps_of(algorithm) - 1)
    present = jnp.ones(ids.shape, bool) if world.selection.full else ids >= 0
    weights = present.astype(dtype)
    if world.counts is not None:
        weights = jnp.where(present, world.counts[jnp.maximum(ids, 0)].astype(dtype), 0)
    weights = weights / jnp.sum(weights)
    return Cohort(clock, jnp.maximum(ids, 0), present, weights, fold_in(now, 1), world.clients)


def crew_at(world: World, cohort: Cohort) -> Crew:
    """Who is worked on for a cohort, and where."""
    if world.streamed:
        seats = jnp.arange(cohort.ids.shape[0], dtype=jnp.int32)
        return Crew(cohort.ids, cohort.present, cohort.weights, False, world.selection.full, seats=seats)
    return crew_of(cohort, isinstance(world.selection, Everyone), world.selection.full, world.spread)


@jax.default_matmul_precision("highest")  # what is reported is exact to the dtype, on a GPU too
def measure(
    world: World, algorithm: Algorithm, plan: Plan, shared: Any, local: dict[str, Any]
) -> tuple[Vector, dict[str, Array]]:
    """The solution and everything that is recorded about it."""
    x = algorithm.solution(world.problem, show_server(shared))
    known = getattr(world.problem, "exact", True)  # a problem may be too costly to solve
    smooth = world.problem.smooth(x, world.full) if plan.stationarity and known else None
    out = world.problem.evaluate(x, world.full, smooth)
    if smooth is not None:
        out |= algorithm.diagnose(world.problem, show_server(shared), x, smooth[1])
    if not world.streamed:  # the clients' own fields are not here
        out |= algorithm.observe(world.problem, unspread(local, world.flat, world.spread), x, world.full)
    for split in world.full:
        if split != "train":
            out |= {f"{split}/{name}": v for name, v in world.problem.evaluate_split(x, world.full, split).items()}
    if world.monitor is not None:
        smooth = world.monitor.smooth(x, world.full) if plan.stationarity else None
        found = world.monitor.evaluate(x, world.full, smooth)
        out |= {f"monitor/{name}": v for name, v in found.items()}
    if plan.per_client:
        out |= {f"client/{n}": v for n, v in world.problem.evaluate_clients(x, world.full["train"]).items()}
    return x, {name: v.astype(widest(v.dtype, jnp.float32)) for name, v in out.items()}


def judge(plan: Plan, carry: Carry, x: Vector, found: dict[str, Array], round: Array) -> Carry:
    """Divergence, the best solution so far, and early stopping, at one evaluation."""
    value, running = found["objective"], carry.status == RUNNING
    grown = value - carry.first > plan.explosion * jnp.maximum(jnp.abs(carry.first), 1)
    status = jnp.where(running & (~jnp.isfinite(value) | grown), EXPLODED, carry.status)
    carry = carry._replace(status=status, bad_round=jnp.where(status != carry.status, round, carry.bad_round))
    if plan.select is None:
        return carry
    score = plan.sign * found[plan.select].astype(carry.best.dtype)
    better = (carry.status == RUNNING) & (score > carry.best)
    waited = jnp.where(better, 0, carry.waited + 1)
    if plan.patience is not None:
        late = (carry.status == RUNNING) & (waited >= plan.patience)
        carry = carry._replace(status=jnp.where(late, STOPPED, carry.status))
    return carry._replace(
        best=jnp.where(better, score, carry.best),
        best_x=where(better, x, carry.best_x),
        best_round=jnp.where(better, round, carry.best_round),
        waited=waited,
    )


def begin(
    world: World, algorithm: Algorithm, plan: Plan, x0: Vector, key: PRNGKeyArray
) -> tuple[Carry, Any, starting.Start]:
    """The state before round 0, its evaluation, and how the first cohort starts.

    Of a streamed world, `flat` has the first cohort's data, and the local fields are begun elsewhere.
    """
    setting = setting_of(world, algorithm, plan, x0)
    cohort = cohort_at(world, algorithm, key, jnp.array(0, jnp.int32), x0.scalar_dtype)
    start = starting.begin(setting, domain(key, "start"), cohort, crew_at(world, cohort))
    if world.streamed:
        local = {}
    else:
        local = starting.begin_local(setting, domain(key, "start"), world.clients, world.spread, start.merged)
    x, found = measure(world, algorithm, plan, start.shared, local)
    none, fields = jnp.array(-1, jnp.int32), jnp.zeros((len(start.shared._fields),), bool)
    carry = Carry(
        start.shared,
        local,
        jnp.array(RUNNING, jnp.int32),
        none,
        fields,
        found["objective"],
        jnp.array(-jnp.inf, found["objective"].dtype),
        x if plan.select else None,
        none,
        none,
    )
    return (*_everywhere(world, judge(plan, carry, x, found, jnp.array(0, jnp.int32)), found), start)


def one_round(
    world: World, algorithm: Algorithm, plan: Plan, x0: Vector, key: PRNGKeyArray, carry: Carry, round: Array, own: Any
) -> tuple[Carry, Array, Array]:
    """One round of a running simulation; returns also the examples looked at and the clients that took part."""
    cohort = cohort_at(world, algorithm, key, round, x0.scalar_dtype)
    crew = crew_at(world, cohort)
    rows = read_local(carry.local, world.flat, crew)
    carry, rows, seen, took = one_cohort(world, algorithm, plan, x0, key, carry, cohort, rows, own)
    return carry._replace(local=write_local(carry.local, rows, world.flat, crew)), seen, took


def one_cohort(
    world: World,
    algorithm: Algorithm,
    plan: Plan,
    x0: Vector,
    key: PRNGKeyArray,
    carry: Carry,
    cohort: Cohort,
    rows: dict[str, Any],
    own: Any,
) -> tuple[Carry, dict[str, Any], Array, Array]:
    """A round of a cohort, given and returning the rows of its Local fields."""
    setting, crew, round = setting_of(world, algorithm, plan, x0), crew_at(world, cohort), cohort.clock.round
    shared, new_rows = run_round(Round(setting, cohort, crew, domain(key, "sample"), own or {}), carry.shared, rows)
    new_rows = crew.settled(new_rows, rows)
    finite = jnp.array([_finite(getattr(shared, f)) & _finite(new_rows.get(f)) for f in shared._fields])
    running = carry.status == RUNNING
    keep = running & jnp.all(finite)
    failed = running & ~keep
    carry = carry._replace(
        shared=where(keep, shared, carry.shared),
        status=jnp.where(failed, DIVERGED, carry.status),
        bad_round=jnp.where(failed, round + 1, carry.bad_round),
        bad_fields=jnp.where(failed, ~finite, carry.bad_fields),
    )
    took = jnp.where(running, jnp.sum(cohort.present), 0).astype(jnp.int32)
    seen = jnp.where(running, _examples_seen(world, algorithm, cohort), 0)
    return carry, where(keep, new_rows, rows), seen, took


def advance(
    world: World,
    algorithm: Algorithm,
    plan: Plan,
    x0: Vector,
    key: PRNGKeyArray,
    carry: Carry,
    span: Span,
    own: Any = None,
) -> tuple[Carry, dict[str, Array], Array, Array]:
    """The rounds of a span. Returns what was recorded on the way, and how many examples and clients took part."""
    look = jax.jit(partial(measure, world, algorithm, plan))  # traced once, although it is asked for its shapes first
    shapes = jax.eval_shape(look, carry.shared, carry.local)[1]
    blank = lambda s: jnp.full((plan.records, *s.shape), jnp.nan, s.dtype)
    counts = {name: jnp.zeros((plan.records,), jnp.int32) for name in ("samples", "took", "status")}
    records = {**jax.tree.map(blank, shapes), **counts}

    def body(round: Array, loop: tuple) -> tuple:
        carry, records, at, samples, took = loop
        carry, more, came = one_round(world, algorithm, plan, x0, key, carry, round, own)
        samples, took = samples + more, took + came

        def record() -> tuple:
            judged, found = record_of(plan, carry, look, round + 1)
            found |= {"samples": samples, "took": took, "status": judged.status}
            return judged, {n: records[n].at[at].set(v) for n, v in found.items()}

        due = span.due(round + 1)
        carry, records = jax.lax.cond(due, record, lambda: (carry, records))
        return carry, records, at + due.astype(jnp.int32), samples, took

    zero = jnp.array(0, jnp.int32)
    carry, records, _, samples, took = jax.lax.fori_loop(
        span.first, span.last, body, (carry, records, zero, zero, zero)
    )
    return (*_everywhere(world, carry, records), samples, took)


def record_of(plan: Plan, carry: Carry, look: Callable, round: Array) -> tuple[Carry, dict[str, Array]]:
    """An evaluation and what follows from it; a run that has gone wrong records nothing.

    look: `measure` of the state.
    """
    with part_of_time("evaluation"):
        x, found = look(carry.shared, carry.local)
    judged = judge(plan, carry, x, found, round)
    bad = (judged.status == DIVERGED) | (judged.status == EXPLODED)
    return judged, {n: jnp.where(bad, jnp.nan, v) for n, v in found.items()}


def _everywhere(world: World, carry: Carry, found: dict[str, Array]) -> tuple[Carry, dict[str, Array]]:
    """On a mesh: all but the clients' own fields on every device, where any process can read them."""
    if world.spread is None:
        return carry, found
    local, rest = carry.local, carry._replace(local={})
    rest, found = world.spread.whole((rest, found))
    return rest._replace(local=local), found


def _finite(value: Any) -> Array:
    leaves = jax.tree.leaves(value.rows if isinstance(value, Pool) else value)
    floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in floats])) if floats else jnp.array(True)


def _examples_seen(world: World, algorithm: Algorithm, cohort: Cohort) -> Array:
    """Examples that the cohort's local steps drew in this round, over all streams."""
    present = cohort.present
    counts = {n: split.count if world.streamed else split.count[cohort.ids] for n, split in world.flat.items()}
    total = jnp.zeros(present.shape, jnp.int32)
    for stream, steps in _draws(world.problem, algorithm.phases(world.problem)):
        split = world.problem.streams[stream]
        seen = world.sampler.seen(jnp.asarray(steps, jnp.int32)[:, None], counts[split][None, :])
        whole = world.sampler.rows(world.flat[split].capacity)
        rows = whole * len(steps) if seen is None else jnp.sum(jnp.broadcast_to(seen, (len(steps), *present.shape)), 0)
        total += jnp.where(counts[split] > 0, jnp.asarray(rows).astype(jnp.int32), 0)
    return jnp.sum(jnp.where(present, total, 0), dtype=jnp.int32)


def _draws(problem: Any, phases: list[Phase]) -> list[tuple[str, list[int]]]:
    """The local steps at which each stream is drawn from. Phases share the samples of a step, unless they are fresh."""
    shared: dict[tuple[str, int], set[int]] = {}
    fresh: list[tuple[str, list[int]]] = []
    for phase in phases:
        steps = range(phase.first, phase.first + phase.steps)
        named = tuple(problem.streams if phase.streams is None else phase.streams)
        for at, stream in enumerate(named):
            if phase.fresh:
                fresh += [(stream, list(steps))] * phase.repeat
            else:
                shared.setdefault((stream, named[:at].count(stream)), set()).update(steps)
    return [*((stream, sorted(steps)) for (stream, _), steps in shared.items()), *fresh]
