"""The server of a deployed run: it calls sites, merges their replies, and holds the run's state."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from fedstrata.base.text import listed
from fedstrata.core.algorithm import Cohort
from fedstrata.core.grid import Grid, Noise
from fedstrata.core.memory import Pool
from fedstrata.core.placement import field_of, part
from fedstrata.core.vector import Vector
from fedstrata.deploy.agreement import Agreement
from fedstrata.deploy.evaluation.request import Reply, Request
from fedstrata.deploy.evaluation.summary import Summary, summarise
from fedstrata.deploy.link import Caller, Link, Report
from fedstrata.deploy.magnitudes import check_magnitudes, largest, no_longer_finite
from fedstrata.deploy.messages import BEGIN, EVALUATE, START, Message, Stage, pack, unpack
from fedstrata.deploy.privacy_accountant import PrivacyAccountant
from fedstrata.deploy.secure_sum import SecureSum, SecureSumError, check_secure, too_coarse, weights_at, with_dtype
from fedstrata.deploy.server_program import merge_and_step, merge_starts, pool_again, present, stack
from fedstrata.engine import initialise
from fedstrata.engine.checkpoint import CheckpointError, Checkpoints
from fedstrata.engine.codec import from_named_arrays, named_arrays
from fedstrata.engine.layout import newest
from fedstrata.engine.privacy import Spent, first_reference, means, next_reference
from fedstrata.engine.server import broadcast
from fedstrata.engine.visibility import show_server

POOLS = "pools"  # the prefix of the first pools' names in a checkpoint
OUTLIER = 1e6  # a site whose numbers are so many times as large as all others' has broken a state that is not finite

Sent = dict[int, dict[str, Any]]  # by site number: fields by path


class ServerState(NamedTuple):
    """Everything that the server of a run keeps between rounds."""

    round: int  # the next one
    shared: Any  # the algorithm's state
    after: dict[int, Stage]  # by site: its last stage that is part of this state
    pools: Mapping[str, Pool] = {}  # the rows that all sites pooled before round 0, while their history lasts


class QuorumError(RuntimeError):
    """Too few sites replied."""


class DivergedError(RuntimeError):
    """The server's state is no longer finite. It is not used: the state before the round stays valid."""


class Server:
    """Runs the rounds of one run over a link to its sites."""

    def __init__(
        self,
        agreement: Agreement,
        names: tuple[str, ...],
        link: Link,
        *,
        quorum: float = 1.0,
        on_report: Callable[[Report], None] = lambda report: None,
        noise_key: PRNGKeyArray | None = None,
        secure: SecureSum | None = None,
    ):
        """A server that has not called any site yet.

        Args:
            agreement: of the run.
            names: of the sites, in the order of their numbers.
            link: carries calls to sites and their replies back.
            quorum: the share of a round's sites that must reply in each of its exchanges.
            on_report: called after every exchange.
            noise_key: of the noise in a private run; None: noise from the operating system's generator.
            secure: sums what sites have concealed, if they do.
        """
        if not 0 < quorum <= 1:
            raise ValueError(f"quorum={quorum} must be a share of the sites: > 0 and <= 1")
        if len(set(names)) != len(names) or len(names) != agreement.context.clients:
            raise ValueError(f"a run of {agreement.context.clients} sites needs as many different names, not {names}")
        check_secure(agreement, secure)
        self.agreement, self.names, self.quorum, self.on_report = agreement, names, quorum, on_report
        self.caller = Caller(link)
        self.missing: Mapping[str, str] = {}  # in the last exchange, by site: the reason
        self.context = agreement.started()
        self.algorithm, self.problem = self.context.algorithm, self.context.problem
        self.phases = self.algorithm.phases(self.problem)
        self.accountant, self.secure = PrivacyAccountant(self.context.privacy, noise_key), secure
        self.reply_like = self.context.template if secure is None else with_dtype(self.context.template, np.uint64)

    def begin(self) -> ServerState:
        """The state before round 0: every site prepares its fields, and their starts are merged where needed."""
        sites, stage, starts = list(range(len(self.names))), Stage(-1, BEGIN), initialise.sent_at_start(self.context)
        sent = self._call(sites, stage, {}, {}, starts)
        self._check_start(sent)
        if not self.algorithm.merge_at_init:
            shared = initialise.blank(self.context, self.context.cohort_size)
            return ServerState(0, shared, dict.fromkeys(sent, stage))
        everyone = self.context.everyone(self.agreement.key)
        empty = initialise.blank(self.context, len(sites))
        reference = self._first_reference()
        rows, summed = self._reveal(stage, sent, reference)
        noise = self._noise(stage, sites, starts)
        merged = merge_starts(self.agreement, empty, stack(rows, sites), everyone, noise, summed)
        self._check_finite(stage, sent, empty, merged)
        if initialise.starts_twice(self.algorithm):
            stage, fields = Stage(-1, START), initialise.received_at_start(merged)
            sent = self._call(sites, stage, fields, {}, initialise.pools(self.context))
            self._check_start(sent)
            merged = pool_again(self.agreement, empty, merged, stack(sent, sites), everyone)
        start = initialise.narrowed(self.context, merged, everyone)
        return ServerState(0, start.shared, dict.fromkeys(sent, stage), start.first_round_starts)

    def cohort(self, round: int) -> Cohort:
        """The sites of a round."""
        return self.context.cohort(self.agreement.key, jnp.array(round, jnp.int32))

    def round(self, now: ServerState) -> ServerState:
        """The state after one more round. A site that misses an exchange is absent for the rest of the round.

        Raises:
            QuorumError: too few sites replied; `now` stays valid, and the round can be repeated.
            DivergedError: the state is not finite; likewise. A site that has caused it is called no more.
        """
        cohort, shared, done = self.cohort(now.round), now.shared, 0
        ids, here = [int(i) for i in np.asarray(cohort.ids)], [bool(p) for p in np.asarray(cohort.present)]
        left = [i for i, p in zip(ids, here, strict=True) if p]
        needed, reference = max(1, int(np.ceil(self.quorum * len(left)))), self._first_reference()
        for exchange, phase in zip(self.context.exchanges, self.phases, strict=True):
            for repetition in range(phase.repeat):
                if phase.when is not None and not bool(phase.when(shared, cohort, jnp.array(repetition, jnp.int32))):
                    continue
                stage = Stage(now.round, done, exchange.number, repetition)
                fields = broadcast(exchange, shared, now.pools)
                reference = self._next_reference(reference, stage, fields)
                sent = self._call(left, stage, fields, now.after, exchange.sends)
                left = [i for i in left if i in sent]
                self._check_quorum(left, needed, stage)
                cohort = present(cohort, sent)
                rows, summed = self._reveal(stage, sent, reference)
                noise = self._noise(stage, list(sent), exchange.sends)
                given = {"reference": reference, "noise": noise, "merged_already": summed}
                merged = merge_and_step(self.agreement, exchange, shared, stack(rows, ids), cohort, **given)
                self._check_finite(stage, sent, shared, merged)
                shared = merged
                done += 1
        last = dict.fromkeys(left, Stage(now.round, done - 1)) if done else {}  # a round may have no exchange
        pools = now.pools if now.round + 1 < initialise.first_rounds(now.pools) else {}
        return ServerState(now.round + 1, shared, now.after | last, pools)

    def _check_quorum(self, left: list[int], needed: int, stage: Stage) -> None:
        if len(left) < needed:
            why = listed([f"{name}: {why}" for name, why in self.missing.items()], 3)
            raise QuorumError(
                f"round {stage.round}, phase {stage.phase}: {len(left)} sites replied, and {needed} must ({why}); "
                "nothing of this round is kept: put the missing sites right, and resume the run"
            )

    def _check_start(self, sent: Sent) -> None:
        """A site without a start could never take part."""
        if len(sent) < len(self.names):
            why = listed([f"{name}: {why}" for name, why in self.missing.items()], 3)
            raise QuorumError(
                f"the run cannot begin: {len(sent)} of {len(self.names)} sites have prepared their start ({why}); put "
                "the others right, or start a run without them (another --name)"
            )

    def _check_finite(self, stage: Stage, sent: Sent, before: Any, after: Any) -> None:
        """Refuse a state that is not finite, and quarantine the site whose numbers stand out, if there is one."""
        if not (name := no_longer_finite(before, after)):
            return
        privacy = self.context.privacy
        # Under a secure sum, what sites send tells no size. With noise of the server, the merge bounds what a site
        # adds, and sizes of single replies must not get out.
        hidden = self.secure is not None or (privacy is not None and privacy.noise > 0 and privacy.where == "server")
        seen = {} if hidden else sent
        sizes = sorted(((largest(fields), i) for i, fields in seen.items()), reverse=True)
        worst = listed([f"{self.names[i]} up to {size:.1e}" for size, i in sizes], 3)
        if len(sizes) > 2 and sizes[0][0] > OUTLIER * sizes[1][0]:  # of two, nobody can tell which one is wrong
            self.caller.quarantine(
                self.names[sizes[0][1]], f"because the merged state is not finite; sites sent: {worst}"
            )
        sent_values = f"sites sent values: {worst}; " if worst else ""
        raise DivergedError(
            f"round {stage.round}, phase {stage.phase}: {name} of the merged state is not finite; {sent_values}nothing "
            "of this round is kept. If no site is wrong, start a run with smaller steps"
        )

    def _first_reference(self) -> Any:
        return None if self.context.privacy is None else first_reference(self.context.template)

    def _next_reference(self, reference: Any, stage: Stage, fields: Mapping[str, Any]) -> Any:
        """The values around which sites clip: their own starts, in the first exchange, replace what is sent to them."""
        if reference is None:
            return None
        own = self.own_starts if stage[:2] == (0, 0) else ()
        return next_reference(reference, {path: v for path, v in fields.items() if field_of(path) not in own})

    @functools.cached_property
    def own_starts(self) -> tuple[str, ...]:
        """The fields whose starts differ by site."""
        return initialise.own_fields_unseen(self.context, self.agreement.key, self.agreement.shapes)

    def _grid(self, round: int, sent: tuple[str, ...]) -> Grid | None:
        """The grid of the noise that the server adds."""
        privacy = self.context.privacy
        if privacy is None or privacy.where == "sites":
            return None
        return self.context.grid(sent, len(self.names) if round < 0 else None)

    def _noise(self, stage: Stage, sites: list[int], sent: tuple[str, ...]) -> Noise | None:
        """The noise that the server adds to the means, which is counted."""
        grid = self._grid(stage.round, sent)
        return None if grid is None else self._counted(stage, sites, sent, grid)

    def _counted(self, stage: Stage, sites: Iterable[int], sent: tuple[str, ...], grid: Grid | None) -> Noise | None:
        released, names = bool(means(self.context.state, sent)), [self.names[i] for i in sites]
        return self.accountant.noise_for(stage, names, released, grid)

    def _reveal(self, stage: Stage, sent: Sent, reference: Any) -> tuple[Sent, dict[str, Any]]:
        """What was sent in the open, and the means of what was concealed; integers, if noise is added to them."""
        paths = means(self.context.state, tuple(next(iter(sent.values()))))
        if self.secure is None or not paths:
            return sent, {}
        weights = weights_at(self.agreement, stage.round)
        parts = {i: pack({p: fields[p] for p in paths})[0] for i, fields in sent.items() if i in weights}
        total = self.secure.reveal(stage, list(weights), parts)
        share = sum(weights[i] for i in parts)
        mean = {name: total[name] / share for name in total}
        rows = {i: {p: v for p, v in fields.items() if p not in paths} for i, fields in sent.items()}
        if (grid := self._grid(stage.round, paths)) and (privacy := self.context.privacy):
            around = pack({p: part(reference, p) for p in paths})[0]
            step = privacy.clip * max(weights[i] for i in parts) / share / grid.bound
            if too_coarse(self.secure.bits, step * share):  # weights are public, and so is who has replied
                raise SecureSumError(
                    f"round {stage.round}, exchange {stage.exchange}: the sites that replied have so small weights "
                    f"that {self.secure.bits} bits are coarser than the grid of the noise; use more bits, or repeat "
                    "the round when the others are back"
                )
            mean = {name: grid.nearest(array, around[name], step) for name, array in mean.items()}
            return rows, unpack(mean, with_dtype(self.context.template, np.int32), paths)
        like = pack({p: part(self.context.template, p) for p in paths})[0]
        return rows, unpack({n: a.astype(like[n].dtype) for n, a in mean.items()}, self.context.template, paths)

    def privacy(self) -> Spent | None:
        """The privacy spent so far; None if the run is not private. A repeated round counts again."""
        return self.accountant.spent()

    def save(self, store: Checkpoints, now: ServerState) -> None:
        """Write a checkpoint.

        Args:
            store: where to.
            now: the state.
        """
        self.accountant.keep_in(store.folder)
        after = {self.names[i]: list(stage) for i, stage in now.after.items()}
        counts = self.accountant.counts
        config = {"run": self.agreement.run, "sites": list(self.names), "after": after, "mechanisms": counts}
        arrays = {**named_arrays(now.shared, "shared"), **named_arrays(dict(now.pools), POOLS)}
        store.save(now.round, arrays, config)

    def load(self, store: Checkpoints) -> ServerState | None:
        """The state of the last checkpoint; None if there is none.

        Args:
            store: where from.

        Raises:
            CheckpointError: the checkpoint is of another run, or of other sites.
        """
        if (saved := store.load()) is None:
            self.accountant.keep_in(store.folder)
            return None
        for name, expected in (("run", self.agreement.run), ("sites", list(self.names))):
            if saved.config[name] != expected:
                raise CheckpointError(f"{store.folder} holds {name} {saved.config[name]!r}, and this is {expected!r}")
        self.accountant.keep_in(store.folder, saved.config.get("mechanisms", {}))
        like = jax.eval_shape(lambda: initialise.blank(self.context, self.context.cohort_size))
        pools = {name: array for name, array in saved.arrays.items() if name.startswith(POOLS)}
        state = {name: array for name, array in saved.arrays.items() if name not in pools}
        shared = jax.tree.map(jnp.asarray, from_named_arrays(like, state, "shared"))
        after = {i: Stage(*saved.config["after"][name]) for i, name in enumerate(self.names)}
        return ServerState(saved.round, shared, after, self._first_pools(pools) if pools else {})

    def _first_pools(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Pool]:
        blank = lambda: initialise.blank(self.context, len(self.names))
        like = jax.eval_shape(lambda: {f: newest(getattr(blank(), f)) for f in initialise.pools(self.context)})
        return jax.tree.map(jnp.asarray, from_named_arrays(like, arrays, POOLS))

    def solution(self, now: ServerState) -> Vector:
        """The parameters that the algorithm returns in this state."""
        return self.algorithm.solution(self.problem, show_server(now.shared))

    def evaluate(self, now: ServerState, splits: Sequence[str] | None = None, scores: Sequence[str] = ()) -> Summary:
        """The quality of the solution, measured by every site on its data. No state changes.

        Args:
            now: the state.
            splits: to evaluate on; None: all that the problem can evaluate.
            scores: splits of which sites send the score and label of every row, for the AUC over the rows of all
                sites. A site may withhold them; then there is no such AUC.
        """
        x, stage = self.solution(now), Stage(now.round, EVALUATE)
        request = Request.of(self.agreement, splits, scores)
        arrays = request.packed(self.agreement, x)
        replies: dict[str, Reply] = {}
        missing: dict[str, str] = {}
        if request.measures:
            calls = {i: Message(self.agreement.run, stage, name, arrays) for i, name in enumerate(self.names)}
            read = lambda reply: request.read(self.agreement, self.names.index(reply.site), reply.arrays)
            received, report = self.caller.collect(stage, calls, read)
            self.on_report(report)
            replies, missing = {self.names[i]: reply for i, reply in received.items()}, report.missing
        return summarise(self.agreement, request, x, now.round, replies, missing)

    def _call(
        self,
        sites: list[int],
        stage: Stage,
        fields: Mapping[str, Any],
        after: Mapping[int, Stage],
        wanted: tuple[str, ...],
    ) -> Sent:
        """What these sites send, in the order of their numbers; an invalid reply counts as missing."""
        arrays, pools = pack(fields)
        message = lambda i: Message(self.agreement.run, stage, self.names[i], arrays, after.get(i), pools or None)
        calls = {i: message(i) for i in sites}
        received, report = self.caller.collect(stage, calls, lambda reply: self._fields(reply, wanted))
        if self.context.privacy is not None and self.context.privacy.where == "sites":
            self._counted(stage, received, wanted, None)  # the server has seen them, whatever becomes of the exchange
        self.missing = report.missing
        self.on_report(report)
        return received

    def _fields(self, reply: Message, wanted: tuple[str, ...]) -> dict[str, Any]:
        """The fields of a reply; a ValueError if it is invalid."""
        fields = unpack(reply.arrays, self.reply_like, wanted)
        check_magnitudes(reply.arrays)
        return fields
