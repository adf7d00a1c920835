"""A site: one client of a deployed run, on its own data. It answers calls and stores the fields that it must keep."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from fedstrata.base.clock import domain
from fedstrata.core.grid import Noise
from fedstrata.core.memory import Pool
from fedstrata.core.placement import Hidden, field_of, part, select
from fedstrata.data.federation import Federation
from fedstrata.deploy.agreement import Agreement, has_stage
from fedstrata.deploy.evaluation import request
from fedstrata.deploy.journal import Answered
from fedstrata.deploy.messages import BEGIN, EVALUATE, START, Message, Stage, pack, unpack
from fedstrata.deploy.privacy_accountant import PrivacyAccountant
from fedstrata.deploy.secure_sum import SecureSum, check_secure, digest, split, weights_at
from fedstrata.deploy.site_store import DiskStore, SiteStore
from fedstrata.engine import initialise
from fedstrata.engine.client import Client, kept_fields, run_client
from fedstrata.engine.codec import from_named_arrays
from fedstrata.engine.layout import local_fields, window
from fedstrata.engine.privacy import Spent, first_reference, means, next_reference, own_noise

REFERENCE = "told "  # the prefix in the store of a field's reference value: what the server last sent of it

Fields = dict[str, Any]  # by name


class Site:
    """Answers the calls of one run as one of its clients."""

    def __init__(
        self,
        agreement: Agreement,
        name: str,
        number: int,
        store: SiteStore,
        *,
        data: Federation | None = None,
        tells: request.Tells | None = None,
        scores: Sequence[str] | None = None,
        secure: SecureSum | None = None,
        noise_key: PRNGKeyArray | None = None,
        answered: Answered | None = None,
    ):
        """A site that has not been called yet, or one that resumes from its store.

        Args:
            agreement: of the run, with this site's data (`with_data`).
            name: of the site.
            number: of the site in the run.
            store: where its fields are kept.
            data: all splits of the site, for evaluations.
            tells: what may leave the site in an evaluation: "nothing"; "measures", which are means over its rows; or
                "scores", which adds the score and label of every row if the server requests them. None: "measures",
                but "nothing" in a private run or with a secure sum, which do not protect evaluations.
            scores: splits whose scores the app requests; those of others do not leave. None: of any split.
            secure: conceals this site's part of every mean.
            noise_key: of the noise that sites add in a private run; None: noise from the operating system's generator.
            answered: by the site's log in this run; its count of spent privacy must then be in the store, and not less.
        """
        check_secure(agreement, secure)
        self.agreement, self.name, self.number, self.store = agreement, name, number, store
        self.data, self.secure = data, secure
        self.tells: request.Tells | None = tells
        self.scores = scores
        self.context = agreement.started()
        self.view = jax.eval_shape(lambda: window(self.context.template, self.context.data))
        self.first_round_starts = initialise.own_fields(self.context, agreement.key)
        self.local_fields = local_fields(self.context.state)
        self.accountant = PrivacyAccountant(self.context.privacy, noise_key)
        if isinstance(store, DiskStore):
            begun = bool(store.stages()) or bool(answered and answered.has_numbers())
            self.accountant.keep_in(store.folder, begun=begun, least={name: self._releases(answered)})

    def answer(self, call: Message) -> Message:
        """The reply to a call of the server. A call that fails leaves the store unchanged.

        Args:
            call: the server's message.

        Raises:
            ValueError: the call is for another site or run, or it is malformed.
        """
        if call.run != self.agreement.run or call.site != self.name:
            raise ValueError(
                f"{self.name}: this call is for {call.site!r} in run {call.run!r}, not {self.agreement.run!r}"
            )
        if not has_stage(self.context, call.stage, call.after):
            after = "" if call.after is None else f" after {tuple(call.after)}"
            method = type(self.context.algorithm).__name__
            raise ValueError(f"{self.name}: {method} has no stage {tuple(call.stage)}{after}")
        if call.stage.exchange == EVALUATE:
            return Message(call.run, call.stage, self.name, self._evaluate(call))
        if call.stage.round < 0:
            kept, sent = self._begin(call)
            stages = {call.stage[:2], (-1, BEGIN)}
        else:
            kept, sent = self._work(call)
            before = (call.after or Stage(-1, BEGIN))[:2]
            stages = {before, call.stage[:2], (call.stage.round, call.stage.exchange - 1)}
        arrays = self._concealed(call, pack(sent)[0])
        self.store.write(call.stage, pack(kept)[0])
        self.store.keep(stages)
        return Message(call.run, call.stage, self.name, arrays)

    def _concealed(self, call: Message, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What leaves the site: with a secure sum, its part of every mean is concealed."""
        if self.secure is None:
            return arrays
        summed, rows = split(self.context.state, arrays)
        weights = weights_at(self.agreement, call.stage.round)
        weighted = {name: weights[self.number] * a.astype(np.float64) for name, a in summed.items()}
        return {**rows, **self.secure.conceal(call.stage, digest(call), list(weights), weighted)}

    def _evaluate(self, call: Message) -> dict[str, np.ndarray]:
        if self.data is None:
            raise ValueError(f"{self.name}: this site has no data to evaluate on; give Site(..., data=) its splits")
        secret = self.context.privacy is not None or self.secure is not None
        tells: request.Tells = self.tells or ("nothing" if secret else "measures")
        return request.answer(self.agreement, self.data, call.arrays, tells, self.name, self.scores)

    def _begin(self, call: Message) -> tuple[Fields, Fields]:
        """The fields that the site keeps before round 0, and those that it sends."""
        if call.stage.exchange == BEGIN:
            received, sends = None, initialise.sent_at_start(self.context)
        else:
            down = select(self.context.state, lambda p: p.down)
            received = self._unpacked(call, down)
            sends = initialise.pools(self.context)
        noise = self._noise(call.stage, sends) if received is None else None
        state = _start(self.agreement.unnamed(), _int32(self.number), received, noise)
        kept = (*self.local_fields, *self.first_round_starts)
        return {f: getattr(state, f) for f in kept}, {f: getattr(state, f) for f in sends}

    def _work(self, call: Message) -> tuple[Fields, Fields]:
        """The fields that the site keeps after an exchange, and those that it sends."""
        stage, exchange = call.stage, self.context.exchanges[call.stage.phase]
        received = self._unpacked(call, exchange.receives)
        copies = self._copies(call)
        received_fields = {f for earlier in self.context.exchanges[: stage.phase] for f in earlier.fields}
        if stage.exchange == 0:
            received = {f: v for f, v in received.items() if field_of(f) not in copies}
            received_fields |= set(copies) - set(self.local_fields)
        when = (_int32(self.number), _int32(stage.round), _int32(stage.repetition))
        reference = None if self.context.privacy is None else next_reference(self._reference(stage), received)
        agreement, fields, noise = (
            self.agreement.unnamed(),
            frozenset(received_fields),
            self._noise(stage, exchange.sends),
        )
        after = _work(agreement, when, stage.phase, fields, copies, received, reference, noise=noise)
        kept = {f: after[f] for f in kept_fields(self.context.state)} | _stored_reference(reference)
        return kept, {f: after[f] for f in exchange.sends}

    def _unpacked(self, call: Message, paths: tuple[str, ...]) -> Fields:
        """What the server sent. Pools of a size that the run does not have are refused: each would be compiled anew."""
        context, pools = self.context, call.pools or {}
        cohort, clients = context.cohort_size, context.clients
        for path in paths:
            if isinstance(pool := part(context.template, path), Pool):
                writers, before = len(pools.get(path, ())), pool.history - 1
                # In a round, in the first rounds of a run with cohorts, and before round 0.
                sizes = {cohort + before * cohort, clients + before * cohort, clients + before * clients}
                if writers not in sizes:
                    raise ValueError(
                        f"{self.name}: a call with rows of {writers} writers in {path!r}; in this run there are "
                        f"{' or '.join(map(str, sorted(sizes)))}"
                    )
        return unpack(call.arrays, context.template, paths, pools)

    def _noise(self, stage: Stage, sends: tuple[str, ...]) -> Noise | None:
        """The noise that this site adds, counted before its reply exists: a repeated call costs again."""
        privacy = self.context.privacy
        released = bool(means(self.context.state, sends))
        grid = self.context.grid(sends) if privacy is not None and privacy.where == "sites" else None
        return self.accountant.noise_for(stage, [self.name], released, grid)

    def count_again(self, stage: Stage) -> None:
        """Count a reply that is sent again: a server that adds the noise may release it once more, with other noise.

        Args:
            stage: of the reply. One with noise of the site itself tells nothing new.
        """
        privacy = self.context.privacy
        if privacy is None or privacy.where == "sites" or stage.exchange == EVALUATE or stage[:2] == (-1, START):
            return
        sends = initialise.sent_at_start(self.context) if stage.round < 0 else self.context.exchanges[stage.phase].sends
        self._noise(stage, sends)

    def _releases(self, answered: Answered | None) -> int:
        """How many replies with means have left, by the log. With noise of the site, the same reply counts once."""
        privacy, sent = self.context.privacy, Counter[str]()
        if answered is None or privacy is None:
            return 0
        for field in means(self.context.state, self.context.state._fields):
            sent |= answered.fields.get(field, Counter())
        return len(sent) if privacy.where == "sites" else sent.total()

    def privacy(self) -> Spent | None:
        """The privacy that this site has spent, by its own count of replies; None if the run is not private.

        Where the server adds the noise, its count may be lower: a reply that was lost is released to nobody.
        """
        return self.accountant.spent()

    def fields(self, stage: Stage) -> Fields:
        """The site's fields after one of its stages."""
        return {f: v for f, v in self._stored(stage).items() if not f.startswith(REFERENCE)}

    def _reference(self, stage: Stage) -> Any:
        """The reference values before this stage: what the server sent earlier in the round."""
        first = first_reference(self.context.template)
        if stage.exchange == 0:
            return first
        stored = self._stored(Stage(stage.round, stage.exchange - 1))
        return first._replace(**{f.removeprefix(REFERENCE): v for f, v in stored.items() if f.startswith(REFERENCE)})

    def _stored(self, stage: Stage) -> Fields:
        by_field: dict[str, dict[str, np.ndarray]] = {}
        for name, array in self.store.read(stage).items():
            by_field.setdefault(re.split(r"[.\[]", name)[0], {})[name] = array
        like = lambda f: getattr(self.view, f.removeprefix(REFERENCE))
        return {f: from_named_arrays(like(f), arrays, f) for f, arrays in by_field.items()}

    def _copies(self, call: Message) -> Fields:
        """The site's copies of fields when an exchange begins."""
        round, exchange = call.stage[:2]
        if exchange > 0:
            return self.fields(Stage(round, exchange - 1))
        stored = self.fields(call.after or Stage(-1, BEGIN))
        # Copies of what the server sent end with their round; a start that differs from the server's serves round 0.
        return stored if round == 0 else {f: v for f, v in stored.items() if f in self.local_fields}


def _stored_reference(reference: Any) -> Fields:
    fields = {} if reference is None else reference._asdict()
    return {REFERENCE + f: value for f, value in fields.items() if not isinstance(value, Hidden)}


def _int32(value: int) -> Array:
    return jnp.asarray(value, jnp.int32)


@eqx.filter_jit
def _start(agreement: Agreement, number: Array, received: Fields | None, noise: Noise | None) -> Any:
    context = agreement.started()
    if not initialise.starts_differ(context.algorithm):
        return window(context.template, context.data)
    client = Client.of(context.data, number, _int32(0), domain(agreement.key, "start"), 0)
    if received is None:
        return initialise.sent_one(context, client, noise)
    return initialise.start_one(context, client, received)


@eqx.filter_jit
def _work(
    agreement: Agreement,
    when: tuple[Array, Array, Array],
    phase: int,
    received_fields: frozenset[str],
    copies: Fields,
    received: Fields,
    reference: Any,
    *,
    noise: Noise | None,
) -> Fields:
    (number, round, repetition), context = when, agreement.started()
    client = Client.of(context.data, number, _int32(0), domain(agreement.key, "sample"), round)
    return run_client(
        context,
        context.exchanges[phase],
        client,
        copies=copies,
        received=received,
        received_fields=received_fields,
        repetition=repetition,
        reference=reference,
        noise=own_noise(noise, number),
    )
