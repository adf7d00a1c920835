"""The server of a deployed run: it writes to sites, merges what they answer, and keeps the run's state."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.algorithm import Cohort
from fedstrata.runtime import start as starting
from fedstrata.runtime.crew import Crew
from fedstrata.runtime.round import received_by, server_part
from fedstrata.runtime.simulate import cohort_at
from fedstrata.runtime.site import Terms
from fedstrata.transport.ledger import Exchange, exchanges
from fedstrata.transport.letters import BEGIN, START, Letter, Stage, pack, unpack
from fedstrata.vector import Vector

# Letters by the site's number, and the answers that came in time; whoever is missing among them is absent.
Link = Callable[[Mapping[int, Letter]], Mapping[int, Letter]]


class Progress(NamedTuple):
    """All that the server of a run remembers between rounds."""

    round: int  # the next one
    shared: Any
    after: dict[int, Stage]  # by site: the last stage of its own that is part of this state


class QuorumError(RuntimeError):
    """Too few sites answered."""


class Conductor:
    """Runs rounds over a link. `names`: the sites, in the order of their numbers."""

    def __init__(self, terms: Terms, names: tuple[str, ...], link: Link, quorum: float = 1.0):
        self.terms, self.names, self.link, self.quorum = terms, names, link, quorum
        self.setting, self.problem = terms.setting(), terms.world.problem
        self.phases = terms.algorithm.phases(self.problem)
        self.plans = exchanges(terms.algorithm, self.phases)

    def begin(self) -> Progress:
        """Every site prepares its own fields; the first cohort's starts are merged where the algorithm says so."""
        cohort = self.cohort(0)
        everyone, first = list(range(len(self.names))), [int(i) for i in np.asarray(cohort.ids)]
        shared = starting.blank(self.setting, len(first))
        said = self._ask(everyone, Stage(-1, BEGIN), {}, {}, starting.sent_at_start(self.setting))
        if not self.terms.algorithm.merge_at_init:
            return Progress(0, shared, dict.fromkeys(said, Stage(-1, BEGIN)))
        cohort = _present(cohort, said)
        merged = _merge_starts(self.terms, shared, self._stack(said, first), cohort)
        if not starting.starts_twice(self.terms.algorithm):
            return Progress(0, merged, dict.fromkeys(said, Stage(-1, BEGIN)))
        fields = starting.received_at_start(merged)
        said = self._ask(list(said), Stage(-1, START), fields, {}, starting.pools(self.setting))
        shared = _pool_again(self.terms, shared, merged, self._stack(said, first), _present(cohort, said))
        return Progress(0, shared, dict.fromkeys(said, Stage(-1, START)))

    def cohort(self, round: int) -> Cohort:
        return cohort_at(
            self.terms.world, self.terms.algorithm, self.terms.key, jnp.array(round, jnp.int32), self.setting.dtype
        )

    def round(self, now: Progress) -> Progress:
        """One round. A site that misses an exchange is absent from then on, and keeps what it had."""
        cohort, shared, done = self.cohort(now.round), now.shared, 0
        ids, here = [int(i) for i in np.asarray(cohort.ids)], [bool(p) for p in np.asarray(cohort.present)]
        left = [i for i, p in zip(ids, here, strict=True) if p and i in now.after]
        needed = max(1, int(np.ceil(self.quorum * len(left))))
        for number, (phase, plan) in enumerate(zip(self.phases, self.plans, strict=True)):
            for repetition in range(phase.repeat):
                if phase.when is not None and not bool(phase.when(shared, cohort, jnp.array(repetition, jnp.int32))):
                    continue
                stage = Stage(now.round, done, number, repetition)
                said = self._ask(left, stage, received_by(plan, shared), now.after, plan.sends)
                left = [i for i in left if i in said]
                if len(left) < needed:
                    raise QuorumError(
                        f"round {now.round}, phase {number}: {len(left)} of {len(ids)} sites answered, and "
                        f"{needed} must; the run stays where it was, before this round"
                    )
                cohort = _present(cohort, said)
                shared = _settle(self.terms, plan, number, shared, self._stack(said, ids), cohort)
                done += 1
        took = Stage(now.round, done - 1)
        return Progress(now.round + 1, shared, now.after | dict.fromkeys(left, took))

    def solution(self, now: Progress) -> Vector:
        from fedstrata.runtime.sight import show_server

        return self.terms.algorithm.solution(self.problem, show_server(now.shared))

    def _ask(
        self, sites: list[int], stage: Stage, fields: Mapping[str, Any], after: Mapping[int, Stage], wanted: Any
    ) -> dict[int, dict[str, Any]]:
        """What these sites send; an answer that is not what was asked for counts as none."""
        arrays, pools = pack(fields)
        calls = {i: Letter(self.terms.run, stage, self.names[i], arrays, after.get(i), pools or None) for i in sites}
        said: dict[int, dict[str, Any]] = {}
        for i, reply in self.link(calls).items():
            said[i] = self.checked(calls[i], reply, wanted)
        return dict(sorted(said.items()))

    def checked(self, call: Letter, reply: Letter, wanted: tuple[str, ...]) -> dict[str, Any]:
        """The fields of a reply; a ValueError names what is wrong with it."""
        if (reply.run, reply.site, reply.stage) != (call.run, call.site, call.stage):
            raise ValueError(
                f"{call.site} was asked for {call.stage} of run {call.run!r} and answers as {reply.site!r} with "
                f"{reply.stage} of run {reply.run!r}"
            )
        fields = unpack(reply.arrays, self.setting.template, wanted)
        for name, array in reply.arrays.items():
            if np.issubdtype(array.dtype, np.inexact) and not np.all(np.isfinite(array)):
                raise ValueError(f"{call.site} sends {name} with values that are not finite")
        return fields

    def _stack(self, said: Mapping[int, dict[str, Any]], ids: list[int]) -> dict[str, Any]:
        """What was sent, by slot of the cohort; zeros in the slots of those who sent nothing."""
        some = next(iter(said.values()))
        nothing = jax.tree.map(jnp.zeros_like, some)
        rows = [said.get(i, nothing) for i in ids]
        return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(a) for a in leaves]), *rows)


def _present(cohort: Cohort, said: Mapping[int, Any]) -> Cohort:
    """The cohort, less those who did not answer; the others' weights sum to one."""
    here = np.array([int(i) in said for i in np.asarray(cohort.ids)]) & np.asarray(cohort.present)
    if here.all():
        return cohort
    weights = jnp.where(here, cohort.weights, 0)
    return cohort._replace(present=jnp.asarray(here), weights=weights / jnp.sum(weights))


def _crew(cohort: Cohort) -> Crew:
    return Crew(cohort.ids, cohort.present, cohort.weights, False, False)


@eqx.filter_jit
def _settle(terms: Terms, plan: Exchange, number: int, shared: Any, sent: dict[str, Any], cohort: Cohort) -> Any:
    return server_part(terms.setting(), plan, number, shared, sent, cohort, _crew(cohort))


@eqx.filter_jit
def _merge_starts(terms: Terms, shared: Any, sent: dict[str, Any], cohort: Cohort) -> Any:
    return starting.merge_starts(terms.setting(), shared, sent, cohort, _crew(cohort))


@eqx.filter_jit
def _pool_again(terms: Terms, empty: Any, merged: Any, sent: dict[str, Any], cohort: Cohort) -> Any:
    return starting.pool_again(terms.setting(), empty, merged, sent, cohort, _crew(cohort))
