"""A site: one client of a deployed run, on its own data. It answers letters, and remembers what it must."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from fedstrata.algorithm import Algorithm
from fedstrata.clock import domain
from fedstrata.placement import field_of, select
from fedstrata.runtime import start as starting
from fedstrata.runtime.layout import local_fields, window
from fedstrata.runtime.local import Setting, client_part, kept, member_of
from fedstrata.runtime.simulate import setting_of
from fedstrata.runtime.world import Plan, World
from fedstrata.transport.codec import from_named_arrays
from fedstrata.transport.ledger import exchanges
from fedstrata.transport.letters import BEGIN, Letter, Stage, pack, unpack
from fedstrata.vector import Vector


class Terms(NamedTuple):
    """What the server and every site of a run agree on. `world.flat` has nobody's data, or a site's own."""

    run: str
    world: World
    algorithm: Algorithm
    x0: Vector
    key: PRNGKeyArray

    def setting(self) -> Setting:
        return setting_of(self.world, self.algorithm, Plan(records=1), self.x0)


class Shelf(Protocol):
    """Where a site keeps its fields by stage, so that a stage that the server never took is forgotten."""

    def read(self, stage: Stage) -> Mapping[str, np.ndarray]: ...

    def write(self, stage: Stage, arrays: Mapping[str, np.ndarray]) -> None: ...

    def keep(self, stages: set[tuple[int, int]]) -> None:
        """Forget all others."""
        ...


class Site:
    """Answers the calls of one run as one client of it; `terms.world.flat` holds its data alone."""

    def __init__(self, terms: Terms, name: str, number: int, shelf: Shelf):
        self.terms, self.name, self.number, self.shelf = terms, name, number, shelf
        self.plans = exchanges(terms.algorithm, terms.algorithm.phases(terms.world.problem))
        self.setting = terms.setting()
        self.view = jax.eval_shape(lambda: window(self.setting.template, terms.world.flat))
        self.starts = starting.own_fields(self.setting, domain(terms.key, "start"))
        self.own = local_fields(type(self.view))

    def answer(self, call: Letter) -> Letter:
        """Do what the server asks. Nothing is remembered of a call that fails."""
        if call.run != self.terms.run or call.site != self.name:
            raise ValueError(f"{self.name}: this call is for {call.site!r} in run {call.run!r}, not {self.terms.run!r}")
        if call.stage.round < 0:
            copies, sent = self._begin(call)
            keep = {call.stage[:2], (-1, BEGIN)}
        else:
            copies, sent = self._work(call)
            before = (call.after or Stage(-1, BEGIN))[:2]
            keep = {before, call.stage[:2], (call.stage.round, call.stage.exchange - 1)}
        self.shelf.write(call.stage, pack(copies)[0])
        self.shelf.keep(keep)
        return Letter(call.run, call.stage, self.name, pack(sent)[0])

    def _begin(self, call: Letter) -> tuple[dict[str, Any], dict[str, Any]]:
        """How the site's own fields begin, and what it sends of its start."""
        if call.stage.exchange == BEGIN:
            received, sends = None, starting.sent_at_start(self.setting)
        else:
            down = select(type(self.view), lambda p: p.down)
            received = unpack(call.arrays, self.setting.template, down, call.pools or {})
            sends = starting.pools(self.setting)
        state = _start(self.terms, _whole(self.number), received)
        return {f: getattr(state, f) for f in (*self.own, *self.starts)}, {f: getattr(state, f) for f in sends}

    def _work(self, call: Letter) -> tuple[dict[str, Any], dict[str, Any]]:
        stage, plan = call.stage, self.plans[call.stage.phase]
        received = unpack(call.arrays, self.setting.template, plan.receives, call.pools or {})
        copies = self._copies(call)
        known = {field_of(path) for p in self.plans[: stage.phase] for path in (*p.receives, *p.sends)}
        if stage.exchange == 0:
            received = {f: v for f, v in received.items() if field_of(f) not in copies}
            known |= set(copies) - set(self.own)
        when = (_whole(self.number), _whole(stage.round), _whole(stage.repetition))
        done = _work(self.terms, when, stage.phase, frozenset(known), copies, received)
        return {f: done[f] for f in kept(type(self.view))}, {f: done[f] for f in plan.sends}

    def fields(self, stage: Stage) -> dict[str, Any]:
        """The site's copies of fields after a stage of its own."""
        found, of = self.shelf.read(stage), {}
        for name, array in found.items():
            of.setdefault(re.split(r"[.\[]", name)[0], {})[name] = array
        return {f: from_named_arrays(getattr(self.view, f), arrays, f) for f, arrays in of.items()}

    def _copies(self, call: Letter) -> dict[str, Any]:
        """What the site has of its own when an exchange begins."""
        round, exchange = call.stage[:2]
        if exchange > 0:
            return self.fields(Stage(round, exchange - 1))
        held = self.fields(call.after or Stage(-1, BEGIN))
        # What it received in an earlier round has passed; what it started from counts in the first round only.
        return held if round == 0 else {f: v for f, v in held.items() if f in self.own}


def _whole(value: int) -> Array:
    return jnp.asarray(value, jnp.int32)


@eqx.filter_jit
def _start(terms: Terms, number: Array, received: dict[str, Any] | None) -> Any:
    setting = terms.setting()
    if not starting.starts_differ(terms.algorithm):
        return window(setting.template, setting.flat)
    member = member_of(setting.flat, number, _whole(0), domain(terms.key, "start"), 0)
    one = starting.init_one if received is None else starting.start_one
    return one(setting, member, *(() if received is None else (received,)))


@eqx.filter_jit
def _work(
    terms: Terms, when: tuple[Array, Array, Array], phase: int, known: frozenset[str], copies: Any, received: Any
) -> dict[str, Any]:
    (number, round, repetition), setting = when, terms.setting()
    plan = exchanges(terms.algorithm, terms.algorithm.phases(terms.world.problem))[phase]
    member = member_of(setting.flat, number, _whole(0), domain(terms.key, "sample"), round)
    size = terms.world.selection.size(terms.world.clients)
    return client_part(setting, plan, phase, known, member, copies, received, repetition, size)
