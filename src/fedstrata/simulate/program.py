"""The simulator's program: many rounds, evaluation included, as one compiled loop.

The loop's bounds are traced, so segments of all lengths use the same program: results are bit-identical however a run
is divided. A run that diverges or stops early is frozen; its cohort is still computed.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from fedstrata.core.algorithm import Cohort
from fedstrata.core.memory import Pool
from fedstrata.core.vector import Vector, where
from fedstrata.engine.context import RoundContext
from fedstrata.engine.counting import examples_seen
from fedstrata.engine.initialise import Start, initialise, initialise_local
from fedstrata.engine.over_clients import read_local, write_local
from fedstrata.engine.round import run_round
from fedstrata.engine.slots import slots_of
from fedstrata.simulate.evaluate import judge, measure, record_of
from fedstrata.simulate.inputs import Inputs
from fedstrata.simulate.state import DIVERGED, RUNNING, Carry, ProgramOptions, Segment


def begin(
    inputs: Inputs, options: ProgramOptions, context: RoundContext, key: PRNGKeyArray
) -> tuple[Carry, dict[str, Array], Start]:
    """The state before round 0, its evaluation, and `first_round_starts`."""
    start = initialise(context, key)
    local = initialise_local(context, key, start.merged)
    x, found = measure(inputs, options, context, start.shared, local)
    carry = first_carry(options, start.shared, local, x, found["objective"])
    judged = judge(options, carry, x, found, jnp.array(0, jnp.int32))
    return (*_on_every_device(context, judged, found), start)


def first_carry(options: ProgramOptions, shared: Any, local: dict[str, Any], x: Vector, objective: Array) -> Carry:
    """The carry of a run before its first round; x: its solution, with this objective."""
    none, fields = jnp.array(-1, jnp.int32), jnp.zeros((len(shared._fields),), bool)
    running, worst = jnp.array(RUNNING, jnp.int32), jnp.array(-jnp.inf, objective.dtype)
    return Carry(
        shared=shared,
        local=local,
        status=running,
        bad_round=none,
        bad_fields=fields,
        first=objective,
        best=worst,
        best_x=x if options.select else None,
        best_round=none,
        waited=none,
    )


def one_round(
    context: RoundContext, key: PRNGKeyArray, carry: Carry, round: Array, first_round_starts: Mapping[str, Any]
) -> tuple[Carry, Array, Array]:
    """One round of a run. Also returns the number of examples drawn and of clients that took part."""
    cohort = context.cohort(key, round)
    slots = slots_of(context, cohort)
    rows = read_local(carry.local, context.data, slots)
    carry, rows, seen, took = one_cohort(context, key, carry, cohort, rows, first_round_starts)
    return carry._replace(local=write_local(carry.local, rows, context.data, slots)), seen, took


def one_cohort(
    context: RoundContext,
    key: PRNGKeyArray,
    carry: Carry,
    cohort: Cohort,
    rows: dict[str, Any],
    first_round_starts: Mapping[str, Any],
) -> tuple[Carry, dict[str, Any], Array, Array]:
    """A round of a cohort, given and returning the rows of its Local fields."""
    slots, round = slots_of(context, cohort), cohort.clock.round
    shared, new_rows = run_round(context, cohort, slots, key, carry.shared, rows, first_round_starts)
    new_rows = slots.keep_present(new_rows, rows)
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
    seen = jnp.where(running, examples_seen(context, cohort), 0)
    return carry, where(keep, new_rows, rows), seen, took


def advance(
    inputs: Inputs,
    options: ProgramOptions,
    context: RoundContext,
    key: PRNGKeyArray,
    carry: Carry,
    segment: Segment,
    first_round_starts: Mapping[str, Any] | None = None,
) -> tuple[Carry, dict[str, Array], Array, Array]:
    """The rounds of a segment. Returns the records, and the numbers of examples and clients that took part."""
    # Jitted, so that shapes and loop share one trace.
    look = jax.jit(partial(measure, inputs, options, context))
    shapes = jax.eval_shape(look, carry.shared, carry.local)[1]
    blank = lambda s: jnp.full((options.records, *s.shape), jnp.nan, s.dtype)
    counts = {name: jnp.zeros((options.records,), jnp.int32) for name in ("samples", "took", "status")}
    records = {**jax.tree.map(blank, shapes), **counts}

    def body(round: Array, loop: tuple) -> tuple:
        carry, records, at, samples, took = loop
        carry, more, came = one_round(context, key, carry, round, first_round_starts or {})
        samples, took = samples + more, took + came

        def record() -> tuple:
            judged, found = record_of(options, carry, look, round + 1)
            found |= {"samples": samples, "took": took, "status": judged.status}
            return judged, {n: records[n].at[at].set(v) for n, v in found.items()}

        due = segment.due(round + 1)
        carry, records = jax.lax.cond(due, record, lambda: (carry, records))
        return carry, records, at + due.astype(jnp.int32), samples, took

    zero = jnp.array(0, jnp.int32)
    start = (carry, records, zero, zero, zero)
    carry, records, _, samples, took = jax.lax.fori_loop(segment.first, segment.last, body, start)
    return (*_on_every_device(context, carry, records), samples, took)


def _on_every_device(context: RoundContext, carry: Carry, found: dict[str, Array]) -> tuple[Carry, dict[str, Array]]:
    """On a mesh: everything except `Local` fields on every device, where every process can read it."""
    if context.spread is None:
        return carry, found
    local, rest = carry.local, carry._replace(local={})
    rest, found = context.spread.whole((rest, found))
    return rest._replace(local=local), found


def _finite(value: Any) -> Array:
    leaves = jax.tree.leaves(value.rows if isinstance(value, Pool) else value)
    floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in floats])) if floats else jnp.array(True)
