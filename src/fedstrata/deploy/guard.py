"""The guard of a site: it compares every call with the site's data, its policy and its log before anything runs."""

import hashlib
import math
from typing import Any, NamedTuple

import numpy as np

from fedstrata.core.placement import field_of, placements
from fedstrata.deploy.agreement import Agreement
from fedstrata.deploy.data_summary import DataSummary
from fedstrata.deploy.messages import EVALUATE, Message
from fedstrata.deploy.policy import Policy, Refused
from fedstrata.deploy.site_log import SiteLog
from fedstrata.deploy.terms import Terms, count_keys
from fedstrata.engine import initialise
from fedstrata.engine.ledger import ledger_of

SPARE = 1.25  # times the calls that a run needs: rounds may be repeated after a failure
MOST_REPEATS = 10  # answers to the same call, on average
MOST_LINES = 1000  # about refusals in one run, and about summaries: a flood of them does not fill the disk


class Answered(NamedTuple):
    """What a site has answered in one run."""

    calls: set[str]  # hashes of different calls
    evaluations: set[str]  # those of them that were evaluations
    answers: int = 0  # repeated ones included
    bytes: int = 0
    refusals: int = 0


class Guard:
    """Decides what a site answers. What it has answered is read from the site's log, so a restart forgets nothing."""

    def __init__(self, policy: Policy, log: SiteLog):
        """A guard that continues where the log ends.

        Args:
            policy: the site's.
            log: the site's.
        """
        self.policy, self.log = policy, log
        self.runs: dict[str, Answered] = {}
        self.summaries = sum(line["kind"] == "summary" for line in log.lines)
        for line in log.lines:
            self._count(line)

    def check_terms(self, terms: Terms, own: DataSummary) -> None:
        """Refuse the terms of a run that contradict this site's data or its policy.

        Args:
            terms: as the server proposes them.
            own: the summary of this site's data, computed here.

        Raises:
            Refused: with the reason and the remedy.
        """
        site, policy, listed = own.site, self.policy, terms.sites[terms.number(own.site)]
        if changed := listed.difference(own):
            raise Refused(f"{site} refuses run {terms.run!r}: its terms contradict this site's data: {changed}")
        if not policy.allows_run(terms.run):
            names = ", ".join(policy.runs)
            raise Refused(f"{site} takes part in runs of other names ({names}); its owner may add {terms.run!r}")
        begun = {line["run"] for line in self.log.lines if line["kind"] == "terms"}
        if terms.run not in begun and len(begun) >= policy.runs_at_most:
            raise Refused(f"{site} has taken part in {len(begun)} runs; its owner may raise runs_at_most")
        if (found := count_keys(terms.sites)) < policy.sites_at_least:
            raise Refused(
                f"{site} takes part in runs of at least {policy.sites_at_least} sites, and {terms.run!r} has {found} "
                "with different keys; its owner may lower sites_at_least"
            )
        for name in ("rounds", "evaluations"):
            if getattr(terms, name) > getattr(policy, name):
                raise Refused(
                    f"{site} allows {getattr(policy, name)} {name} in a run, and {terms.run!r} wants "
                    f"{getattr(terms, name)}; its owner may raise {name}"
                )

    def check_agreement(self, terms: Terms, agreement: Agreement, site: str) -> None:
        """Refuse a run that would send fields or bytes which the policy does not allow.

        Args:
            terms: of the run.
            agreement: of the run, computed here from the approved app and the terms.
            site: this site's name.
        """
        policy, context, size = self.policy, agreement.context, _bytes_of(agreement, terms.rounds)
        if size > policy.bytes:
            raise Refused(
                f"{site} lets {policy.bytes / 1e6:,.1f} MB leave in a run, and {terms.run!r} would send "
                f"{size / 1e6:,.1f} MB; its owner may raise bytes"
            )
        places = placements(context.state)
        for field in sorted(_sent_fields(agreement)):
            if not policy.allows_field(field, places[field].merge):
                how = "merged by a mean" if places[field].merge == "mean" else "rows that the server sees one by one"
                raise Refused(
                    f"{type(context.algorithm).__name__} sends the field {field!r} ({how}), which {site} does not "
                    f"allow; its owner may add {field!r} to fields"
                )

    def check(self, terms: Terms, agreement: Agreement, call: Message) -> None:
        """Refuse a call beyond the run's terms or this site's policy.

        Args:
            terms: of the run.
            agreement: of the run.
            call: the server's message.
        """
        site, policy, done = call.site, self.policy, self.answered(terms.run)
        for name, array in call.arrays.items():
            if np.issubdtype(array.dtype, np.inexact) and not np.all(np.isfinite(np.asarray(array, np.float64))):
                raise Refused(f"{site}: {name} has values that are not finite")
        if call.stage.round >= (terms.rounds + (call.stage.exchange == EVALUATE)):
            raise Refused(f"{site}: the run has {terms.rounds} rounds, and this call is for round {call.stage.round}")
        allowed = policy.parameters or _needed(terms, agreement)
        if (new := digest(call) not in done.calls) and len(done.calls) >= allowed:
            raise Refused(
                f"{site} has answered {len(done.calls)} different calls in run {terms.run!r}, and its policy allows "
                f"{allowed}; its owner may raise parameters"
            )
        if new and call.stage.exchange == EVALUATE and len(done.evaluations) >= policy.evaluations:
            raise Refused(
                f"{site} has answered {len(done.evaluations)} evaluations in run {terms.run!r}, as many as its policy "
                "allows; its owner may raise evaluations"
            )
        if done.answers >= MOST_REPEATS * allowed:
            raise Refused(f"{site} has answered {done.answers} calls in run {terms.run!r}, most of them repeated")

    def check_bytes(self, run: str, site: str, reply: bytes) -> None:
        """Refuse to let a reply leave if the run's bytes are used up."""
        done, limit = self.answered(run), self.policy.bytes
        if done.bytes + len(reply) > limit:
            raise Refused(
                f"{site} has sent {done.bytes / 1e6:,.1f} MB in run {run!r}, and its policy allows "
                f"{limit / 1e6:,.1f} MB; its owner may raise bytes"
            )

    def answered(self, run: str) -> Answered:
        """What the site has answered in a run."""
        return self.runs.get(run, Answered(set(), set()))

    def write_summary(self, own: DataSummary) -> None:
        """Write down that the summary of this site's data was sent."""
        counts = self.summaries = self.summaries + 1
        if counts <= MOST_LINES:
            self.log.add("summary", way="out", counts=dict(own.counts), data=own.data, versions=dict(own.versions))

    def write_terms(self, terms: Terms) -> None:
        """Write down that the site takes part in a run under these terms."""
        fixed, wanted = terms.digest(), [terms.rounds, terms.evaluations]
        self._add(
            "terms", run=terms.run, letter=fixed, sites=len(terms.sites), program=terms.program, wanted=wanted,
            verdict="agreed",
        )  # fmt: skip

    def write_answer(self, call: Message, reply: Message, body: bytes) -> None:
        """Write down an answer, before it leaves.

        Args:
            call: the server's message.
            reply: the site's.
            body: the reply in bytes.
        """
        fields: dict[str, int] = {}
        for name, array in reply.arrays.items():
            field = name.replace("[", ".").partition(".")[0]
            fields[field] = fields.get(field, 0) + array.nbytes
        self._add(
            "answer", run=call.run, stage=list(call.stage), way="out", call=digest(call), bytes=len(body),
            letter=hashlib.sha256(body).hexdigest(), fields=fields, verdict="sent",
        )  # fmt: skip

    def write_refusal(self, run: str, stage: Any, why: str) -> None:
        """Write down that a call was refused; a flood of them is not written line by line."""
        if self.answered(run).refusals < MOST_LINES:
            self.log.refused(run, stage, why)
            self._count(self.log.lines[-1])

    def _add(self, kind: str, **entries: Any) -> None:
        self._count(self.log.add(kind, **entries))

    def _count(self, line: dict[str, Any]) -> None:
        run = line.get("run")
        if run is None:
            return
        done = self.runs.setdefault(run, Answered(set(), set()))
        if line["kind"] == "refused":
            self.runs[run] = done._replace(refusals=done.refusals + 1)
        elif line["kind"] == "answer":
            done.calls.add(line["call"])
            if line["stage"][1] == EVALUATE:
                done.evaluations.add(line["call"])
            self.runs[run] = done._replace(answers=done.answers + 1, bytes=done.bytes + line["bytes"])


def digest(call: Message) -> str:
    """A hash of a call. The same question twice has the same hash, and the same answer."""
    return hashlib.sha256(call.encode()).hexdigest()


def _sent_fields(agreement: Agreement) -> set[str]:
    context = agreement.context
    sent = {field_of(path) for exchange in context.exchanges for path in exchange.sends}
    return sent | {field_of(path) for path in initialise.sent_at_start(agreement.started())}


def _needed(terms: Terms, agreement: Agreement) -> int:
    """The different calls that a run of these terms may need, with some to spare."""
    per_round = sum(exchange.repeat for exchange in agreement.context.exchanges)
    return math.ceil(SPARE * (2 + terms.rounds * per_round + terms.evaluations)) + MOST_REPEATS


def _bytes_of(agreement: Agreement, rounds: int) -> int:
    """The bytes of arrays that leave a site in this many rounds."""
    context = agreement.started()
    found = ledger_of(context.algorithm, context.exchanges, context.template, context.cohort_size, context.clients)
    return sum(e.bytes * (e.repeat * rounds if e.repeat else 1) for e in found.entries if e.direction == "up")
