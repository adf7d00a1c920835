"""How a run begins: the server's state, every client's local fields, and per-client starts of the first cohort."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from fedstrata.algorithm import Algorithm, Cohort, at_time, steps_of
from fedstrata.clock import Clock
from fedstrata.memory import Pool
from fedstrata.placement import placements, select
from fedstrata.runtime.crew import Crew, local_ids, over_clients, read_local, write_local
from fedstrata.runtime.layout import Flat, empty_union, local_fields, stack_local, window
from fedstrata.runtime.mesh import Spread
from fedstrata.runtime.round import Member, Setting, member_of, merge, own_start
from fedstrata.runtime.sight import ClientSight, hide_local, server_sight, show_server
from fedstrata.vector import Vector

CHUNK = 256  # clients whose `init_client` runs at a time over a large federation


class Start(NamedTuple):
    shared: Any  # the server's state
    local: dict[str, Any]  # Local fields, stacked over all clients
    own: dict[str, Any]  # fields that the first cohort starts from client by client, stacked; usually none


def begin(setting: Setting, key: PRNGKeyArray, cohort: Cohort, crew: Crew) -> Start:
    """The state before round 0. `key` is the run's key for starts."""
    algorithm, template, flat = setting.algorithm, setting.template, setting.flat
    all_clients, fields = everybody(cohort.clients, crew.spread), local_fields(type(template))
    clients = all_clients.ids.shape[0]
    shared = hide_local(template, algorithm)
    size = cohort.ids.shape[0]
    wide = {f: empty_union(v, size) for f in template._fields if isinstance(v := getattr(template, f), Pool)}
    gathered = select(type(template), lambda p: p.merge == "rows")
    widen = lambda value: jax.tree.map(lambda a: jnp.broadcast_to(a, (size, *jnp.shape(a))), value)
    shared = shared._replace(**wide, **{f: widen(getattr(template, f)) for f in gathered})
    local = {f: stack_local(getattr(template, f), clients, flat) for f in fields}
    local = local if crew.spread is None else crew.spread.cut(local)
    if type(algorithm).init_client is Algorithm.init_client and not algorithm.merge_at_init:
        return Start(shared, local, {})

    def run(function: Callable, given: Any, crew: Crew, wanted: Any, execution: Any) -> dict[str, Any]:
        def one(flat: Flat, given: Any, id: Array) -> dict[str, Any]:
            setting, key, *more = given
            member = member_of(flat, id, local_ids(id, crew), key, 0)
            state = function(setting._replace(flat=flat), member, *more)
            return {f: getattr(state, f) for f in wanted}

        return over_clients(one, flat, (setting._replace(flat={}), key, *given), crew.ids, crew, execution)

    def of_all(function: Callable, *given: Any) -> dict[str, Any]:
        if not fields:
            return {}
        rows = run(function, given, all_clients, fields, min(CHUNK, clients))
        rows = all_clients.settled(rows, read_local(local, flat, all_clients))
        return write_local(local, rows, flat, all_clients)

    local = of_all(init_one)
    sent = select(type(template), lambda p: p.up)
    moved = [f for f in select(type(template), lambda p: p.down and p.merge == "mean") if f in _moved(setting, key)]
    if algorithm.merge_at_init:
        first = run(init_one, (), crew, sent, setting.execution)
        places = placements(type(template))
        join = lambda f: merge(places[f].merge, getattr(shared, f), first[f], cohort, crew)
        merged = shared._replace(**{f: join(f) for f in sent})
        now = at_time(algorithm, Clock.at(0, steps_of(algorithm)), setting.dtype)
        begin = lambda merged: now.server_start(setting.problem, merged, cohort)
        merged = server_sight(f"{type(algorithm).__name__}.server_start", begin, merged)
        if type(algorithm).client_start is Algorithm.client_start:
            return Start(merged, local, {})
        local = of_all(start_one, merged)
        pooled = run(start_one, (merged,), crew, tuple(wide), setting.execution)
        anew = {f: merge("union", wide[f], pooled[f], cohort, crew) for f in wide}
        return Start(merged._replace(**anew), local, {})
    return Start(shared, local, run(init_one, (), crew, moved, setting.execution) if moved else {})


def everybody(clients: int, spread: Spread | None) -> Crew:
    """All clients, who begin together whoever is in the first cohort; on a mesh also the places without one."""
    size = clients if spread is None else spread.slots
    ids = jnp.arange(size, dtype=jnp.int32)
    here = ids < clients
    return Crew(ids, here, here.astype(float), True, size == clients, None, spread)


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
        zero = jnp.array(0, jnp.int32)
        member = member_of(setting.flat, zero, zero, key, 0)
        out = init_one(setting._replace(template=view), member)
        for field in view._fields:
            old, new = (jax.tree.leaves(getattr(s, field)) for s in (view, out))
            if len(old) != len(new) or any(a is not b for a, b in zip(old, new, strict=True)):
                changed.add(field)
        return 0

    jax.eval_shape(trace, setting.template)
    return changed


def start_values(algorithm: Algorithm, problem: Any, x0: Vector) -> Any:
    """The template: `init_server`, with everything as arrays and its type checked."""
    state = at_time(algorithm, Clock.at(0, steps_of(algorithm)), x0.scalar_dtype).init_server(problem, x0)
    if type(state) is not type(algorithm).State:
        raise TypeError(f"{type(algorithm).__name__}.init_server must return its State, not {type(state).__qualname__}")
    number = lambda a: jnp.asarray(a, x0.scalar_dtype) if isinstance(a, int | float) else jnp.asarray(a)
    return jax.tree.map(number, state)
