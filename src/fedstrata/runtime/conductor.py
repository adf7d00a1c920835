"""The server of a deployed run: it writes to sites, merges what they answer, and keeps the run's state."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from fedstrata.algorithm import Cohort
from fedstrata.memory import Pool
from fedstrata.placement import part
from fedstrata.runtime import appraisal
from fedstrata.runtime import start as starting
from fedstrata.runtime.checkpoint import CheckpointError, Checkpoints
from fedstrata.runtime.layout import newest
from fedstrata.runtime.noise import Noise
from fedstrata.runtime.question import Question
from fedstrata.runtime.round import received_by
from fedstrata.runtime.settle import merge_starts, pool_again, present, settle, stack
from fedstrata.runtime.sight import show_server
from fedstrata.runtime.simulate import cohort_at, everyone_at
from fedstrata.runtime.site import Terms, check_secure, weights_at
from fedstrata.transport.codec import from_named_arrays, named_arrays
from fedstrata.transport.ledger import exchanges
from fedstrata.transport.letters import BEGIN, EVALUATE, START, Letter, Stage, pack, unpack
from fedstrata.transport.privacy import Spent, means
from fedstrata.transport.secure_sum import SecureSum, concealed_like
from fedstrata.vector import Vector

# Letters by the site's number → the answers that came in time, or in their place why there is none.
Link = Callable[[Mapping[int, Letter]], Mapping[int, "Letter | str"]]

log = logging.getLogger("fedstrata")
POOLS = "pools"  # before the names of the first pools in a checkpoint


class Report(NamedTuple):
    """How an exchange went."""

    stage: Stage
    received: tuple[str, ...]  # names of sites
    missing: dict[str, str]  # name: why

    def __str__(self) -> str:
        lost = "; ".join(f"{name}: {why}" for name, why in self.missing.items())
        part = "evaluation" if self.stage.exchange == EVALUATE else f"phase {self.stage.phase}"
        return f"round {self.stage.round}, {part}: {len(self.received)} answered" + (
            f", {len(self.missing)} did not ({lost})" if lost else ""
        )


class Progress(NamedTuple):
    """All that the server of a run remembers between rounds."""

    round: int  # the next one
    shared: Any
    after: dict[int, Stage]  # by site: the last stage of its own that is part of this state
    pools: Mapping[str, Pool] = {}  # those of all sites before round 0, while their history lasts


class QuorumError(RuntimeError):
    """Too few sites answered."""


class Conductor:
    """Runs rounds over a link. `names`: the sites, in the order of their numbers."""

    def __init__(
        self,
        terms: Terms,
        names: tuple[str, ...],
        link: Link,
        quorum: float = 1.0,
        on_report: Callable[[Report], None] = lambda report: None,
        noise_key: PRNGKeyArray | None = None,
        secure: SecureSum | None = None,
    ):
        """quorum: the share of a round's sites that must answer in every exchange of it.

        noise_key: of a private run's noise; None takes a fresh one for every merge from the operating system. secure:
        what gives the sums of what sites have hidden, if they do.
        """
        if not 0 < quorum <= 1:
            raise ValueError(f"quorum={quorum} must be a share of the sites: > 0 and <= 1")
        if len(set(names)) != len(names) or len(names) != terms.world.clients:
            raise ValueError(f"a run of {terms.world.clients} sites needs as many different names, not {names}")
        self.terms, self.names, self.link, self.quorum, self.on_report = terms, names, link, quorum, on_report
        self.setting, self.problem = terms.setting(), terms.world.problem
        self.phases = terms.algorithm.phases(self.problem)
        self.plans = exchanges(terms.algorithm, self.phases)
        self.noise, self.secure = Noise(terms.world.privacy, noise_key), secure
        check_secure(terms, secure)
        self.like = self.setting.template if secure is None else concealed_like(self.setting.template)

    def begin(self) -> Progress:
        """Every site prepares its own fields; the starts of all are merged where the algorithm says so."""
        sites, stage = list(range(len(self.names))), Stage(-1, BEGIN)
        said = self._ask(sites, stage, {}, {}, starting.sent_at_start(self.setting))
        self._enough(list(said), len(sites), stage)  # a site that never began has nothing to go on from
        size = self.terms.world.selection.size(len(sites))
        if not self.terms.algorithm.merge_at_init:
            return Progress(0, starting.blank(self.setting, size), dict.fromkeys(said, stage))
        everyone = everyone_at(self.terms.world, self.terms.algorithm, self.terms.key, self.setting.dtype)
        empty = starting.blank(self.setting, len(sites))
        rows, known = self._summed(stage, said)
        noise = self._noise(stage, sites, starting.sent_at_start(self.setting))
        merged = merge_starts(self.terms, empty, stack(rows, sites), everyone, noise, known)
        if starting.starts_twice(self.terms.algorithm):
            fields = starting.received_at_start(merged)
            said = self._ask(sites, stage := Stage(-1, START), fields, {}, starting.pools(self.setting))
            self._enough(list(said), len(sites), stage)
            merged = pool_again(self.terms, empty, merged, stack(said, sites), everyone)
        start = starting.narrowed(self.setting, merged, everyone, size)
        return Progress(0, start.shared, dict.fromkeys(said, stage), start.own)

    def cohort(self, round: int) -> Cohort:
        return cohort_at(
            self.terms.world, self.terms.algorithm, self.terms.key, jnp.array(round, jnp.int32), self.setting.dtype
        )

    def round(self, now: Progress) -> Progress:
        """One round. A site that misses an exchange is absent from then on, and keeps what it had."""
        cohort, shared, done = self.cohort(now.round), now.shared, 0
        ids, here = [int(i) for i in np.asarray(cohort.ids)], [bool(p) for p in np.asarray(cohort.present)]
        left = [i for i, p in zip(ids, here, strict=True) if p]
        needed = max(1, int(np.ceil(self.quorum * len(left))))
        for number, (phase, plan) in enumerate(zip(self.phases, self.plans, strict=True)):
            for repetition in range(phase.repeat):
                if phase.when is not None and not bool(phase.when(shared, cohort, jnp.array(repetition, jnp.int32))):
                    continue
                stage = Stage(now.round, done, number, repetition)
                said = self._ask(left, stage, received_by(plan, shared, now.pools), now.after, plan.sends)
                left = [i for i in left if i in said]
                self._enough(left, needed, stage)
                cohort = present(cohort, said)
                rows, known = self._summed(stage, said)
                noise = self._noise(stage, list(said), plan.sends)
                shared = settle(self.terms, plan, number, shared, stack(rows, ids), cohort, noise, known)
                done += 1
        took = dict.fromkeys(left, Stage(now.round, done - 1)) if done else {}  # a round may ask nobody anything
        pools = now.pools if now.round + 1 < starting.first_rounds(now.pools) else {}
        return Progress(now.round + 1, shared, now.after | took, pools)

    def _enough(self, left: list[int], needed: int, stage: Stage) -> None:
        if len(left) < needed:
            raise QuorumError(
                f"round {stage.round}, phase {stage.phase}: {len(left)} sites answered, and {needed} must; the run "
                "stays as it was before this round"
            )

    def _noise(self, stage: Stage, sites: list[int], sent: tuple[str, ...]) -> PRNGKeyArray | None:
        released = bool(means(type(self.setting.template), sent))
        return self.noise.at(stage, [self.names[i] for i in sites], released)

    def _summed(
        self, stage: Stage, said: Mapping[int, dict[str, Any]]
    ) -> tuple[Mapping[int, dict[str, Any]], dict[str, Any]]:
        """What was said beside means that were hidden, and these means."""
        paths = means(type(self.setting.template), tuple(next(iter(said.values()))))
        if self.secure is None or not paths:
            return said, {}
        weights = weights_at(self.terms, stage.round)
        parts = {i: pack({p: fields[p] for p in paths})[0] for i, fields in said.items() if i in weights}
        total = self.secure.reveal(stage, list(weights), parts)
        share = sum(weights[i] for i in parts)
        like = pack({p: part(self.setting.template, p) for p in paths})[0]
        mean = {name: (total[name] / share).astype(a.dtype) for name, a in like.items()}
        rows = {i: {p: v for p, v in fields.items() if p not in paths} for i, fields in said.items()}
        return rows, unpack(mean, self.setting.template, paths)

    def privacy(self) -> Spent | None:
        """What the run has cost its sites so far, where they are private; repeated rounds count again."""
        return self.noise.spent()

    def save(self, store: Checkpoints, now: Progress) -> None:
        self.noise.keep_in(store.folder)
        after = {self.names[i]: list(stage) for i, stage in now.after.items()}
        config = {"run": self.terms.run, "sites": list(self.names), "after": after, "mechanisms": self.noise.counts}
        arrays = {**named_arrays(now.shared, "shared"), **named_arrays(dict(now.pools), POOLS)}
        store.save(now.round, arrays, config)

    def load(self, store: Checkpoints) -> Progress | None:
        """Where the run was when it was last saved; None: nowhere yet."""
        if (saved := store.load()) is None:
            self.noise.keep_in(store.folder)
            return None
        for name, now in (("run", self.terms.run), ("sites", list(self.names))):
            if saved.config[name] != now:
                raise CheckpointError(f"{store.folder} holds {name} {saved.config[name]!r}, and this is {now!r}")
        self.noise.keep_in(store.folder, saved.config.get("mechanisms", {}))
        size = self.terms.world.selection.size(self.terms.world.clients)
        like = jax.eval_shape(lambda: starting.blank(self.setting, size))
        pools = {name: array for name, array in saved.arrays.items() if name.startswith(POOLS)}
        state = {name: array for name, array in saved.arrays.items() if name not in pools}
        shared = jax.tree.map(jnp.asarray, from_named_arrays(like, state, "shared"))
        after = {i: Stage(*saved.config["after"][name]) for i, name in enumerate(self.names)}
        return Progress(saved.round, shared, after, self._first_pools(pools) if pools else {})

    def _first_pools(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Pool]:
        """Those of all sites before round 0, from a checkpoint."""
        blank = lambda: starting.blank(self.setting, len(self.names))
        like = jax.eval_shape(lambda: {f: newest(getattr(blank(), f)) for f in starting.pools(self.setting)})
        return jax.tree.map(jnp.asarray, from_named_arrays(like, arrays, POOLS))

    def solution(self, now: Progress) -> Vector:
        return self.terms.algorithm.solution(self.problem, show_server(now.shared))

    def evaluate(
        self, now: Progress, splits: Sequence[str] | None = None, scores: Sequence[str] = ()
    ) -> appraisal.Appraisal:
        """How good the solution is, by what every site says of its own data; nobody's state changes.

        splits: those to evaluate on (None: all that mean something to the problem). scores: the splits of which sites
        are asked for the score and label of every row, for the AUC of all sites' rows together. A site that does not
        let them leave says so, and there is then no such AUC.
        """
        x, stage = self.solution(now), Stage(now.round, EVALUATE)
        asked = Question.of(self.terms, splits, scores)
        arrays = asked.packed(self.terms, x)
        calls = {i: Letter(self.terms.run, stage, name, arrays) for i, name in enumerate(self.names)}
        read = lambda reply: asked.read(self.terms, reply.arrays)
        said, missing = self._collect(stage, calls, read) if asked.measures else ({}, {})
        return appraisal.of(self.terms, asked, x, now.round, {self.names[i]: s for i, s in said.items()}, missing)

    def _ask(
        self, sites: list[int], stage: Stage, fields: Mapping[str, Any], after: Mapping[int, Stage], wanted: Any
    ) -> dict[int, dict[str, Any]]:
        """What these sites send, in the order of their numbers; an answer that is wrong counts as none."""
        arrays, pools = pack(fields)
        calls = {i: Letter(self.terms.run, stage, self.names[i], arrays, after.get(i), pools or None) for i in sites}
        return self._collect(stage, calls, lambda reply: self._fields(reply, wanted))[0]

    def _collect(
        self, stage: Stage, calls: Mapping[int, Letter], read: Callable[[Letter], Any]
    ) -> tuple[dict[int, Any], dict[str, str]]:
        """What the answers say, and by site why there is none."""
        replies = self.link(calls)
        said: dict[int, Any] = {}
        missing: dict[str, str] = {}
        for i, call in sorted(calls.items()):
            reply = replies.get(i, "no answer")
            try:
                said[i] = read(_about(call, reply))
            except ValueError as error:
                missing[call.site] = str(error)
        report = Report(stage, tuple(self.names[i] for i in said), missing)
        if missing:
            log.warning("%s", report)
        self.on_report(report)
        return said, missing

    def _fields(self, reply: Letter, wanted: tuple[str, ...]) -> dict[str, Any]:
        """The fields of a reply; a ValueError says what is wrong with it."""
        fields = unpack(reply.arrays, self.like, wanted)
        for name, array in reply.arrays.items():
            if np.issubdtype(array.dtype, np.inexact) and not np.all(np.isfinite(array)):
                raise ValueError(f"{name} has values that are not finite")
        return fields


def _about(call: Letter, reply: Letter | str) -> Letter:
    """The reply, if it is one to this call; a ValueError otherwise."""
    if isinstance(reply, str):
        raise ValueError(reply)
    asked, got = (call.run, call.site, call.stage), (reply.run, reply.site, reply.stage)
    if asked != got:
        raise ValueError(f"the answer is about {got}, and was asked about {asked}")
    return reply
