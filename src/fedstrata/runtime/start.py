"""How a run begins: the server's state, per-client starts of the first cohort, and every client's own fields."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from fedstrata.algorithm import Algorithm, Cohort, at_time, steps_of
from fedstrata.clock import Clock
from fedstrata.memory import Pool
from fedstrata.placement import select
from fedstrata.runtime.crew import Crew, over_clients, read_local, write_local
from fedstrata.runtime.layout import Flat, empty_union, local_fields, newest, stack_local, window
from fedstrata.runtime.local import Member, Setting, member_of, own_start
from fedstrata.runtime.mesh import Spread
from fedstrata.runtime.round import merge, merged_of
from fedstrata.runtime.sight import ClientSight, hide_local, server_sight, show_server
from fedstrata.transport.privacy import untold
from fedstrata.vector import Vector

CHUNK = 256  # clients whose `init_client` runs at a time over a large federation


class Start(NamedTuple):
    shared: Any  # the server's state
    own: dict[str, Any]  # what the first rounds start from beside it, usually nothing: see `first_rounds`
    merged: dict[str, Any] | None = None  # what clients know of each other's starts when their own fields begin


def begin_apart(setting: Setting, key: PRNGKeyArray, cohort: Cohort, crew: Crew) -> Start:
    """The server's state before round 0 where nothing is merged then, and what the first cohort starts from.

    `key` is the run's key for starts; `setting.flat` has the cohort's data.
    """
    fields = own_fields(setting, key)
    own = starts_of(setting, key, crew, setting.execution, fields, init_one) if fields else {}
    return Start(blank(setting, cohort.ids.shape[0]), own)


def begin_merged(
    setting: Setting,
    key: PRNGKeyArray,
    everyone: Cohort,
    crew: Crew,
    size: int,
    noise: PRNGKeyArray | None = None,
) -> Start:
    """The same where the starts of all clients are merged before round 0; `size`: of a round's cohort.

    noise: the key of the noise on what is merged, if clients are private.
    """
    execution = setting.execution if size == everyone.ids.shape[0] else min(CHUNK, crew.ids.shape[0])
    each = partial(starts_of, setting, key, crew, execution)
    empty = blank(setting, everyone.ids.shape[0])
    merged = merge_starts(setting, empty, each(sent_at_start(setting), sent_one), everyone, crew, noise)
    if not starts_twice(setting.algorithm):
        return narrowed(setting, merged, everyone, size)
    known = received_at_start(merged)
    pooled = each(pools(setting), start_one, known)
    return narrowed(setting, pool_again(setting, empty, merged, pooled, everyone, crew), everyone, size, known)


def narrowed(setting: Setting, merged: Any, everyone: Cohort, size: int, known: dict[str, Any] | None = None) -> Start:
    """The server's state after the starts of all clients were merged, with room for the rows of one cohort.

    Where a cohort is not everyone, the first pools stand beside the state until their history has passed.
    """
    if size == everyone.ids.shape[0]:
        return Start(merged, {}, known)
    rows = select(type(merged), lambda p: p.held == "by cohort")
    empty, first = blank(setting, size), {f: newest(getattr(merged, f)) for f in pools(setting)}
    histories = {f: pool.history for f, pool in first.items()}
    if len({*histories.values()}) > 1:  # the first pools of all clients come and go together
        raise ValueError(
            f"{type(setting.algorithm).__name__}: with a cohort all pools need one history, not {histories}"
        )
    return Start(merged._replace(**{f: getattr(empty, f) for f in rows}), first, known)


def first_rounds(own: Mapping[str, Any]) -> int:
    """How many rounds have a start beside the server's state: the history of a first pool, else the first one."""
    return max((value.history for value in own.values() if isinstance(value, Pool)), default=1) if own else 0


def blank(setting: Setting, size: int) -> Any:
    """The server's state before it has heard of any client, for cohorts of this size."""
    template = setting.template
    shared = hide_local(template, setting.algorithm)
    wide = {f: empty_union(getattr(template, f), size) for f in pools(setting)}
    gathered = select(type(template), lambda p: p.merge == "rows")
    widen = lambda value: jax.tree.map(lambda a: jnp.broadcast_to(a, (size, *jnp.shape(a))), value)
    return shared._replace(**wide, **{f: widen(getattr(template, f)) for f in gathered})


def merge_starts(
    setting: Setting,
    shared: Any,
    first: dict[str, Any],
    cohort: Cohort,
    crew: Crew,
    noise: PRNGKeyArray | None = None,
    known: dict[str, Any] | None = None,
) -> Any:
    """The server's state after all clients have sent their starts; `noise` and `known` as in `server_part`."""
    algorithm = setting.algorithm
    merged = merged_of(setting, sent_at_start(setting), shared, first, cohort, crew, noise, known)
    now = at_time(algorithm, Clock.at(0, steps_of(algorithm)), setting.dtype)
    start = lambda merged: now.server_start(setting.problem, merged, cohort)
    return server_sight(f"{type(algorithm).__name__}.server_start", start, shared._replace(**merged))


def pool_again(setting: Setting, empty: Any, merged: Any, pooled: dict[str, Any], cohort: Cohort, crew: Crew) -> Any:
    """The server's state after `client_start`: the pools hold what it made of them."""
    anew = {f: merge("union", getattr(empty, f), pooled[f], cohort, crew) for f in pools(setting)}
    return merged._replace(**anew)


def pools(setting: Setting) -> tuple[str, ...]:
    return tuple(f for f in setting.template._fields if isinstance(getattr(setting.template, f), Pool))


def sent_at_start(setting: Setting) -> tuple[str, ...]:
    """What clients send before round 0, if anything is merged then."""
    return select(type(setting.template), lambda p: p.up) if setting.algorithm.merge_at_init else ()


def received_at_start(merged: Any) -> dict[str, Any]:
    """What `client_start` sees of the others."""
    return {f: getattr(show_server(merged), f) for f in select(type(merged), lambda p: p.down)}


def starts_twice(algorithm: Algorithm) -> bool:
    """Whether clients go on from what was merged at the start."""
    return algorithm.merge_at_init and type(algorithm).client_start is not Algorithm.client_start


def own_fields(setting: Setting, key: PRNGKeyArray) -> tuple[str, ...]:
    """The fields that a client of the first cohort does not start from as the server has them."""
    if type(setting.algorithm).init_client is Algorithm.init_client or setting.algorithm.merge_at_init:
        return ()
    moved = _moved(setting, key)
    return tuple(f for f in select(type(setting.template), lambda p: p.down and p.merge == "mean") if f in moved)


def begin_local(setting: Setting, key: PRNGKeyArray, clients: int, spread: Spread | None, merged: Any) -> dict:
    """The Local fields of all clients before round 0, whose data are all in `setting.flat`."""
    crew, fields, flat = everybody(clients, spread), local_fields(type(setting.template)), setting.flat
    local = {f: stack_local(getattr(setting.template, f), crew.ids.shape[0], flat) for f in fields}
    local = local if spread is None else spread.cut(local)
    if not fields or not starts_differ(setting.algorithm):
        return local
    rows = local_rows(setting, key, crew, min(CHUNK, crew.ids.shape[0]), merged)
    rows = crew.settled(rows, read_local(local, flat, crew))
    return write_local(local, rows, flat, crew)


def starts_differ(algorithm: Algorithm) -> bool:
    """Whether clients say how their own fields begin."""
    return type(algorithm).init_client is not Algorithm.init_client or algorithm.merge_at_init


def local_rows(setting: Setting, key: PRNGKeyArray, crew: Crew, execution: Any, merged: Any) -> dict[str, Any]:
    """How the Local fields of these clients begin, stacked."""
    fields = local_fields(type(setting.template))
    each = partial(starts_of, setting, key, crew, execution, fields)
    return each(init_one) if merged is None else each(start_one, merged)


def starts_of(
    setting: Setting, key: PRNGKeyArray, crew: Crew, execution: Any, wanted: Any, function: Callable, *given: Any
) -> dict[str, Any]:
    """Some fields of function(setting, member, *given) for every slot, stacked."""

    def one(flat: Flat, given: Any, who: tuple[Array, Array]) -> dict[str, Any]:
        setting, key, *more = given
        state = function(setting._replace(flat=flat), member_of(flat, *who, key, 0), *more)
        return {f: getattr(state, f) for f in wanted}

    common = (setting._replace(flat={}), key, *given)
    return over_clients(one, setting.flat, common, (crew.ids, crew.places), crew, execution)


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


def sent_one(setting: Setting, member: Member) -> Any:
    """The same as it leaves the client before round 0: a private one's change from the template is clipped."""
    state = init_one(setting, member)
    if setting.privacy is None:
        return state
    return setting.privacy.clipped(state, untold(setting.template), sent_at_start(setting))


def start_one(setting: Setting, member: Member, received: dict[str, Any]) -> Any:
    """`client_start` of one client, which knows what was merged."""
    algorithm, oracle, clock = setting.algorithm, *_oracle(setting, member)
    own = init_one(setting, member)
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
