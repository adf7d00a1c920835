"""A site: one client of a deployed run, on its own data. It answers letters, and remembers what it must."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from fedstrata.algorithm import Algorithm, Cohort
from fedstrata.clock import domain
from fedstrata.data.federation import Federation
from fedstrata.placement import Hidden, field_of, select
from fedstrata.runtime import question
from fedstrata.runtime import start as starting
from fedstrata.runtime.layout import local_fields, window
from fedstrata.runtime.local import Setting, client_part, kept, member_of
from fedstrata.runtime.simulate import cohort_at, everyone_at, setting_of
from fedstrata.runtime.world import Plan, World
from fedstrata.transport.codec import from_named_arrays
from fedstrata.transport.ledger import exchanges
from fedstrata.transport.letters import BEGIN, EVALUATE, Letter, Stage, pack, unpack
from fedstrata.transport.privacy import check_rows, told, untold
from fedstrata.transport.secure_sum import SecureSum, digest, split
from fedstrata.vector import Vector

TOLD = "told "  # before the name of a field on the shelf: what the server last said of it


class Terms(NamedTuple):
    """What the server and every site of a run agree on. `world.flat` has nobody's data, or a site's own."""

    run: str
    world: World
    algorithm: Algorithm
    x0: Vector
    key: PRNGKeyArray
    shapes: Mapping[str, Any] = {}  # of one example, by split: what an evaluation can look at

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
    """Answers the calls of one run as one client of it; `terms.world.flat` holds its data alone.

    data: all its splits, to evaluate on. tells: what the site lets leave in an evaluation: "nothing"; "measures", which
    are means over its own rows; or "scores", the score and label of every row as well, where the server asks for them.
    None is "measures", but "nothing" in a run that is private or sums in secret: evaluations are no part of what those
    promise. secure: hides its part of every mean.
    """

    def __init__(
        self,
        terms: Terms,
        name: str,
        number: int,
        shelf: Shelf,
        data: Federation | None = None,
        tells: question.Tells | None = None,
        secure: SecureSum | None = None,
    ):
        self.terms, self.name, self.number, self.shelf = terms, name, number, shelf
        self.tells: question.Tells | None = tells
        self.data, self.secure = data, secure
        check_secure(terms, secure)
        self.plans = exchanges(terms.algorithm, terms.algorithm.phases(terms.world.problem))
        self.setting = terms.setting()
        self.view = jax.eval_shape(lambda: window(self.setting.template, terms.world.flat))
        self.starts = starting.own_fields(self.setting, domain(terms.key, "start"))
        self.own = local_fields(type(self.view))

    def answer(self, call: Letter) -> Letter:
        """Do what the server asks. Nothing is remembered of a call that fails."""
        if call.run != self.terms.run or call.site != self.name:
            raise ValueError(f"{self.name}: this call is for {call.site!r} in run {call.run!r}, not {self.terms.run!r}")
        if call.stage.exchange == EVALUATE:
            return Letter(call.run, call.stage, self.name, self._evaluate(call))
        if call.stage.round < 0:
            copies, sent = self._begin(call)
            keep = {call.stage[:2], (-1, BEGIN)}
        else:
            copies, sent = self._work(call)
            before = (call.after or Stage(-1, BEGIN))[:2]
            keep = {before, call.stage[:2], (call.stage.round, call.stage.exchange - 1)}
        arrays = self._concealed(call, pack(sent)[0])
        self.shelf.write(call.stage, pack(copies)[0])
        self.shelf.keep(keep)
        return Letter(call.run, call.stage, self.name, arrays)

    def _concealed(self, call: Letter, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What leaves the site: its part of every sum hidden, if there is something to hide it."""
        if self.secure is None:
            return arrays
        summed, rows = split(type(self.view), arrays)
        weights = weights_at(self.terms, call.stage.round)
        own = {name: weights[self.number] * a.astype(np.float64) for name, a in summed.items()}
        return {**rows, **self.secure.conceal(call.stage, digest(call), list(weights), own)}

    def _evaluate(self, call: Letter) -> dict[str, np.ndarray]:
        if self.data is None:
            raise ValueError(f"{self.name}: this site was given nothing to evaluate on; give Site(..., data=) its data")
        secret = self.terms.world.privacy is not None or self.secure is not None
        tells = self.tells or ("nothing" if secret else "measures")
        return question.answer(self.terms, self.data, call.arrays, tells, self.name)

    def _begin(self, call: Letter) -> tuple[dict[str, Any], dict[str, Any]]:
        """How the site's own fields begin, and what it sends of its start."""
        if call.stage.exchange == BEGIN:
            received, sends = None, starting.sent_at_start(self.setting)
        else:
            down = select(type(self.view), lambda p: p.down)
            received = unpack(call.arrays, self.setting.template, down, call.pools or {})
            sends = starting.pools(self.setting)
        state = _start(self.terms._replace(run=""), _whole(self.number), received)
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
        reference = None if self.setting.privacy is None else told(self._reference(stage), received)
        done = _work(self.terms._replace(run=""), when, stage.phase, frozenset(known), copies, received, reference)
        return {f: done[f] for f in kept(type(self.view))} | _by_name(reference), {f: done[f] for f in plan.sends}

    def fields(self, stage: Stage) -> dict[str, Any]:
        """The site's copies of fields after a stage of its own."""
        return {f: v for f, v in self._held(stage).items() if not f.startswith(TOLD)}

    def _reference(self, stage: Stage) -> Any:
        """What the server has told of fields in this round before this stage."""
        begin = untold(self.setting.template)
        if stage.exchange == 0:
            return begin
        held = self._held(Stage(stage.round, stage.exchange - 1))
        return begin._replace(**{f.removeprefix(TOLD): v for f, v in held.items() if f.startswith(TOLD)})

    def _held(self, stage: Stage) -> dict[str, Any]:
        found, of = self.shelf.read(stage), {}
        for name, array in found.items():
            of.setdefault(re.split(r"[.\[]", name)[0], {})[name] = array
        like = lambda f: getattr(self.view, f.removeprefix(TOLD))
        return {f: from_named_arrays(like(f), arrays, f) for f, arrays in of.items()}

    def _copies(self, call: Letter) -> dict[str, Any]:
        """What the site has of its own when an exchange begins."""
        round, exchange = call.stage[:2]
        if exchange > 0:
            return self.fields(Stage(round, exchange - 1))
        held = self.fields(call.after or Stage(-1, BEGIN))
        # What it received in an earlier round has passed; what it started from counts in the first round only.
        return held if round == 0 else {f: v for f, v in held.items() if f in self.own}


def check_secure(terms: Terms, secure: SecureSum | None) -> None:
    """A secure sum hides no rows: they must have been accepted."""
    if secure is not None:
        check_rows(terms.algorithm, terms.world.problem, secure.accept, "a secure sum does not hide", "its `accept`")


def weights_at(terms: Terms, round: int) -> dict[int, float]:
    """The weight of every client of a round, by its number; before round 0, of all clients."""
    known = terms._replace(run="", world=dataclasses.replace(terms.world, flat={}))  # one program for all
    cohort = _everyone(known) if round < 0 else _cohort(known, _whole(round))
    slots = zip(np.asarray(cohort.ids), np.asarray(cohort.present), np.asarray(cohort.weights), strict=True)
    return {int(i): float(w) for i, here, w in slots if here}


@eqx.filter_jit
def _cohort(terms: Terms, round: Array) -> Cohort:
    return cohort_at(terms.world, terms.algorithm, terms.key, round, terms.x0.scalar_dtype)


@eqx.filter_jit
def _everyone(terms: Terms) -> Cohort:
    return everyone_at(terms.world, terms.algorithm, terms.key, terms.x0.scalar_dtype)


def _by_name(reference: Any) -> dict[str, Any]:
    fields = {} if reference is None else reference._asdict()
    return {TOLD + f: value for f, value in fields.items() if not isinstance(value, Hidden)}


def _whole(value: int) -> Array:
    return jnp.asarray(value, jnp.int32)


@eqx.filter_jit
def _start(terms: Terms, number: Array, received: dict[str, Any] | None) -> Any:
    setting = terms.setting()
    if not starting.starts_differ(terms.algorithm):
        return window(setting.template, setting.flat)
    member = member_of(setting.flat, number, _whole(0), domain(terms.key, "start"), 0)
    one = starting.sent_one if received is None else starting.start_one
    return one(setting, member, *(() if received is None else (received,)))


@eqx.filter_jit
def _work(
    terms: Terms,
    when: tuple[Array, Array, Array],
    phase: int,
    known: frozenset[str],
    copies: Any,
    received: Any,
    reference: Any,
) -> dict[str, Any]:
    (number, round, repetition), setting = when, terms.setting()
    plan = exchanges(terms.algorithm, terms.algorithm.phases(terms.world.problem))[phase]
    member = member_of(setting.flat, number, _whole(0), domain(terms.key, "sample"), round)
    size = terms.world.selection.size(terms.world.clients)
    return client_part(setting, plan, phase, known, member, copies, received, repetition, size, reference)
