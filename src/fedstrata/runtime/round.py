"""The round: the only loop over clients, and the server's half of it. No algorithm has such a loop."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from fedstrata.algorithm import Cohort, Phase, at_time
from fedstrata.memory import Pool
from fedstrata.placement import field_of, part, placements, with_parts
from fedstrata.runtime.crew import Crew, over_clients
from fedstrata.runtime.layout import Flat, flat_union, push_union
from fedstrata.runtime.local import Setting, client_part, kept, member_of, part_of_time
from fedstrata.runtime.sight import server_sight, show_server
from fedstrata.transport.ledger import Exchange, exchanges
from fedstrata.transport.privacy import noise_key, told, untold
from fedstrata.vector import widest


class Round(NamedTuple):
    """One round as it stands before its first exchange."""

    setting: Setting
    cohort: Cohort
    crew: Crew
    key: PRNGKeyArray  # the run's key for samples
    starts: Mapping[str, Any]  # per-client values of fields that are else received: only in a first round that has them
    noise: PRNGKeyArray | None = None  # the run's key for what hides single clients
    pools: Mapping[str, Pool] = {}  # those of all clients before round 0, while their history lasts


def run_round(this: Round, shared: Any, rows: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """One round: `shared` is the server's state, `rows` the Local fields of the cohort, stacked."""
    phases = this.setting.algorithm.phases(this.setting.problem)
    plans = exchanges(this.setting.algorithm, phases)
    copies, known = {**rows, **this.starts}, frozenset(this.starts)
    reference = None if this.setting.privacy is None else untold(this.setting.template)
    for number, (phase, plan) in enumerate(zip(phases, plans, strict=True)):
        step = partial(_exchange, this, plan, number, known)
        if phase.repeat == 1 and phase.when is None:
            shared, copies, reference = step(shared, copies, reference, jnp.array(0, jnp.int32))
        else:
            shared, copies, reference = _repeat(this, phase, step, shared, copies, reference)
        known = known | {field_of(path) for path in (*plan.receives, *plan.sends)}
    return shared, {field: copies[field] for field in rows}


def _repeat(this: Round, phase: Phase, step: Callable, shared: Any, copies: dict[str, Any], reference: Any) -> Any:
    """An exchange several times over, or under a condition, as one loop of the program."""
    # A loop needs the same copies before and after: what a client has not got yet starts as the server's.
    missing = [f for f, p in placements(type(shared)).items() if p.down and p.merge != "union" and f not in copies]
    wide = lambda a: jnp.broadcast_to(a, (this.crew.ids.shape[0], *a.shape))
    copies = {**{f: jax.tree.map(wide, getattr(shared, f)) for f in missing}, **copies}

    def once(state: tuple, repetition: Array) -> tuple:
        if phase.when is None:
            return step(*state, repetition), None
        go = phase.when(state[0], this.cohort, repetition)
        return jax.lax.cond(go, lambda: step(*state, repetition), lambda: state), None

    return jax.lax.scan(once, (shared, copies, reference), jnp.arange(phase.repeat, dtype=jnp.int32))[0]


def _exchange(
    this: Round,
    plan: Exchange,
    number: int,
    known: frozenset[str],
    shared: Any,
    copies: Any,
    reference: Any,
    repetition: Array,
) -> tuple[Any, dict[str, Any], Any]:
    """Clients receive, work and send; the server merges and steps.

    Returns its state, the clients' copies, and what the server has told them so far where their changes are clipped.
    """
    setting, cohort, crew = this.setting, this.cohort, this.crew
    own = frozenset(this.starts) if number == 0 else frozenset()
    received, noise = received_by(plan, shared, this.pools, own), None
    if setting.privacy is not None and this.noise is not None:
        reference = told(reference, received)
        noise = noise_key(this.noise, cohort.clock.round, number, repetition)

    def client(flat: Flat, given: Any, mine: tuple[Array, Array, dict[str, Any]]) -> dict[str, Any]:
        (setting, cohort, received, reference, repetition, key), (id, place, copy) = given, mine
        member = member_of(flat, id, place, key, cohort.clock.round)
        size, setting = cohort.ids.shape[0], setting._replace(flat=flat)
        return client_part(setting, plan, number, known, member, copy, received, repetition, size, reference)

    given = (setting._replace(flat={}), cohort, received, reference, repetition, this.key)
    with part_of_time("local"):
        done = over_clients(client, setting.flat, given, (crew.ids, crew.places, copies), crew, setting.execution)
    after = server_part(setting, plan, number, shared, done, cohort, crew, noise)
    return after, {f: done[f] for f in kept(type(shared))}, reference


def received_by(
    plan: Exchange, shared: Any, first: Mapping[str, Pool], own: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """What every client gets at the start of an exchange; nothing of fields that it has a start of its own for.

    first: the pools of all clients before round 0, while their history lasts.
    """
    values = {f: part(shared, f) for f in plan.receives if field_of(f) not in own}
    return {f: flat_union(v, first.get(f)) if isinstance(v, Pool) else v for f, v in values.items()}


def server_part(
    setting: Setting,
    plan: Exchange,
    number: int,
    shared: Any,
    sent: Mapping[str, Any],
    cohort: Cohort,
    crew: Crew,
    noise: PRNGKeyArray | None = None,
    known: Mapping[str, Any] | None = None,
) -> Any:
    """What the server does in an exchange: merge what was sent, and step.

    noise: the key of this exchange's noise, if clients are private. known: what came merged already.
    """
    with part_of_time("merge"):
        merged = merged_of(setting, plan.sends, shared, sent, cohort, crew, noise, known)
    after = with_parts(shared, merged)
    algorithm = at_time(setting.algorithm, cohort.clock, setting.dtype)
    server_step = algorithm.phases(setting.problem)[number].server_step
    if server_step is None:
        return after
    before, where = show_server(shared), f"{type(algorithm).__name__}.{getattr(server_step, '__name__', 'server')}"
    with part_of_time("server"):
        return server_sight(where, lambda merged: server_step(setting.problem, before, merged, cohort), after)


def merged_of(
    setting: Setting,
    paths: tuple[str, ...],
    shared: Any,
    sent: Mapping[str, Any],
    cohort: Cohort,
    crew: Crew,
    noise: PRNGKeyArray | None,
    known: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What was sent, merged by placement, with noise where clients are private."""
    places, known = placements(type(shared)), known or {}
    one = lambda f: merge(places[field_of(f)].merge, part(shared, f), sent[f], cohort, crew)
    merged = {f: known[f] if f in known else one(f) for f in paths}
    if setting.privacy is None:
        return merged
    if noise is None:
        raise ValueError("a private run merges nothing without a key for its noise")
    weights = jnp.where(cohort.present, cohort.weights, 0)
    return setting.privacy.noised(merged, type(shared), weights, noise)


def merge(how: str | None, old: Any, stacked: Any, cohort: Cohort, crew: Crew) -> Any:
    if how == "union":
        return push_union(old, crew.in_order(stacked), cohort.ids, cohort.present)
    return crew.in_order(stacked) if how == "rows" else jax.tree.map(lambda a: weighted_mean(a, crew), stacked)


def weighted_mean(stacked: Array, crew: Crew) -> Array:
    """Σ_i w_i a_i over the clients that are present, in the dtype of a."""
    if not jnp.issubdtype(stacked.dtype, jnp.inexact):
        raise TypeError(f"a field of dtype {stacked.dtype} cannot be averaged; keep counts as floats, or use Gathered")
    # What an empty slot computed must not matter, even where it is not finite.
    present = crew.present.reshape((-1,) + (1,) * (stacked.ndim - 1))
    wide = widest(stacked.dtype, crew.weights.dtype)  # narrow floats are summed in float32
    # GPUs round the factors of a float32 product to ten bits unless told otherwise: the weights would no longer sum to
    # one, and methods that sum such means up (control variates) would drift.
    weights, values = crew.weights.astype(wide), jnp.where(present, stacked, 0).astype(wide)
    mean = jnp.tensordot(weights, values, axes=1, precision="highest")
    return mean.astype(stacked.dtype)
