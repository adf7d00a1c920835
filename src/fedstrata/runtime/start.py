"""How a run begins: the server's state, every client's local fields, and per-client starts of the first cohort."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from fedstrata.algorithm import Algorithm, Cohort, at_time, steps_of
from fedstrata.clock import Clock
from fedstrata.memory import Pool
from fedstrata.placement import placements, select
from fedstrata.runtime.layout import empty_union, local_fields, stack_local, window, write_rows
from fedstrata.runtime.round import Member, Setting, members, merge, over_clients, own_start
from fedstrata.runtime.sight import ClientSight, hide_local, server_sight, show_server
from fedstrata.vector import Vector

CHUNK = 256  # clients whose `init_client` runs at a time over a large federation


class Start(NamedTuple):
    shared: Any  # the server's state
    local: dict[str, Any]  # Local fields, stacked over all clients
    own: dict[str, Any]  # fields that the first cohort starts from client by client, stacked; usually none


def begin(setting: Setting, key: PRNGKeyArray, cohort: Cohort) -> Start:
    """The state before round 0. `key` is the run's key for starts."""
    algorithm, template, flat = setting.algorithm, setting.template, setting.flat
    clients, fields = cohort.clients, local_fields(type(template))
    shared = hide_local(template, algorithm)
    size = cohort.ids.shape[0]
    wide = {f: empty_union(v, size) for f in template._fields if isinstance(v := getattr(template, f), Pool)}
    gathered = select(type(template), lambda p: p.merge == "rows")
    widen = lambda value: jax.tree.map(lambda a: jnp.broadcast_to(a, (size, *jnp.shape(a))), value)
    shared = shared._replace(**wide, **{f: widen(getattr(template, f)) for f in gathered})
    local = {f: stack_local(getattr(template, f), clients, flat) for f in fields}
    if type(algorithm).init_client is Algorithm.init_client and not algorithm.merge_at_init:
        return Start(shared, local, {})

    run = lambda ids, wanted, execution: over_clients(
        lambda member: {f: getattr(init_one(setting, member), f) for f in wanted}, members(flat, ids, key, 0), execution
    )
    everyone = jnp.arange(clients, dtype=jnp.int32)
    rows = run(everyone, fields, min(CHUNK, clients)) if fields else {}
    local = {f: _flatten(local[f], rows[f], setting) for f in fields}
    sent = select(type(template), lambda p: p.up)
    moved = [f for f in select(type(template), lambda p: p.down and p.merge == "mean") if f in _moved(setting, key)]
    if algorithm.merge_at_init:
        first = run(cohort.ids, sent, setting.execution)
        places = placements(type(template))
        merged = shared._replace(**{f: merge(places[f].merge, getattr(shared, f), first[f], cohort) for f in sent})
        now = at_time(algorithm, Clock.at(0, steps_of(algorithm)), setting.dtype)
        begin = lambda merged: now.server_start(setting.problem, merged, cohort)
        merged = server_sight(f"{type(algorithm).__name__}.server_start", begin, merged)
        if type(algorithm).client_start is Algorithm.client_start:
            return Start(merged, local, {})
        again = lambda ids, wanted, execution: over_clients(
            lambda member: {f: getattr(start_one(setting, member, merged), f) for f in wanted},
            members(flat, ids, key, 0),
            execution,
        )
        rows = again(everyone, fields, min(CHUNK, clients)) if fields else {}
        local = {f: _flatten(local[f], rows[f], setting) for f in fields}
        pooled = again(cohort.ids, tuple(wide), setting.execution)
        anew = {f: merge("union", wide[f], pooled[f], cohort) for f in wide}
        return Start(merged._replace(**anew), local, {})
    return Start(shared, local, run(cohort.ids, moved, setting.execution) if moved else {})


def init_one(setting: Setting, member: Member) -> Any:
    """`init_client` of one client, on its own data."""
    algorithm, oracle, clock = setting.algorithm, *_oracle(setting, member)
    view = window(setting.template, setting.flat)
    view = view._replace(**own_start(setting, view, member.id))
    sight = ClientSight(algorithm, known=select(type(view), lambda p: p.down))
    now = at_time(algorithm, clock, setting.dtype)
    return sight.call(lambda oracle, start, state: now.init_client(oracle, state), oracle, view, view)


def start_one(setting: Setting, member: Member, merged: Any) -> Any:
    """`client_start` of one client, which knows what was merged."""
    algorithm, oracle, clock = setting.algorithm, *_oracle(setting, member)
    own = init_one(setting, member)
    received = {f: getattr(show_server(merged), f) for f in select(type(own), lambda p: p.down)}
    sight = ClientSight(algorithm, known=received)
    state = own._replace(**{f: v for f, v in received.items() if not isinstance(v, Pool)})
    return sight.call(at_time(algorithm, clock, setting.dtype).client_start, oracle, own._replace(**received), state)


def _oracle(setting: Setting, member: Member) -> tuple[Any, Clock]:
    algorithm, problem = setting.algorithm, setting.problem
    shard = {s: f.view(member.starts[s], member.counts[s]) for s, f in setting.flat.items()}
    clock = Clock.at(0, steps_of(algorithm))
    looked_at = [p.streams for p in algorithm.phases(problem)]
    streams = None if None in looked_at else {s for names in looked_at for s in names or ()}
    draws = problem.draws(shard, member.key, setting.sampler, clock, member.id, member.lasting_key, streams)
    return problem.oracle(shard, member.key, setting.sampler, clock=clock, client=member.id, draws=draws), clock


def _moved(setting: Setting, key: PRNGKeyArray) -> set[str]:
    """The fields that `init_client` really changes, found by tracing it: an untouched field is the same object."""
    changed: set[str] = set()

    def trace(view: Any) -> Any:
        member = jax.tree.map(lambda a: a[0], members(setting.flat, jnp.zeros((1,), jnp.int32), key, 0))
        out = init_one(setting._replace(template=view), member)
        for field in view._fields:
            old, new = (jax.tree.leaves(getattr(s, field)) for s in (view, out))
            if len(old) != len(new) or any(a is not b for a, b in zip(old, new, strict=True)):
                changed.add(field)
        return 0

    jax.eval_shape(trace, setting.template)
    return changed


def _flatten(stacked: Any, rows: Any, setting: Setting) -> Any:
    """Rows of all clients as they are stored: per-example windows back into one flat array."""
    if not (leaves := jax.tree.leaves(rows)):  # a field without numbers
        return stacked
    count = leaves[0].shape[0]
    ids, present = jnp.arange(count, dtype=jnp.int32), jnp.ones((count,), bool)
    return write_rows(stacked, rows, ids, present, setting.flat, everyone=True)


def start_values(algorithm: Algorithm, problem: Any, x0: Vector) -> Any:
    """The template: `init_server`, with everything as arrays and its type checked."""
    state = at_time(algorithm, Clock.at(0, steps_of(algorithm)), x0.scalar_dtype).init_server(problem, x0)
    if type(state) is not type(algorithm).State:
        raise TypeError(f"{type(algorithm).__name__}.init_server must return its State, not {type(state).__qualname__}")
    number = lambda a: jnp.asarray(a, x0.scalar_dtype) if isinstance(a, int | float) else jnp.asarray(a)
    return jax.tree.map(number, state)
