"""The guard of a site: it compares every call with the site's data, its policy and its log before anything runs."""

import hashlib
import math
from collections import Counter
from pathlib import Path

import numpy as np

from fedstrata.base.memory import machine_memory
from fedstrata.core.placement import field_of, part, placements
from fedstrata.data.federation import Federation
from fedstrata.deploy.agreement import Agreement
from fedstrata.deploy.data_summary import DataSummary
from fedstrata.deploy.journal import Journal, digest
from fedstrata.deploy.messages import EVALUATE, Message, Stage
from fedstrata.deploy.policy import FILE, REMEDY, Policy, Refused
from fedstrata.deploy.site_log import SiteLog
from fedstrata.deploy.state_files import DamagedFile
from fedstrata.deploy.terms import Terms, count_keys
from fedstrata.engine import initialise
from fedstrata.engine.context import RoundContext
from fedstrata.engine.ledger import ledger_of, nbytes
from fedstrata.problems.base import Problem

SPARE = 1.25  # times the calls that a run needs: rounds may be repeated after a failure
MOST_REPEATS = 10  # answers to the same call, on average


class Guard:
    """Decides what a site answers."""

    def __init__(self, policy: Policy, log: SiteLog):
        """A guard that continues where the log ends.

        Args:
            policy: the site's.
            log: the site's.
        """
        self.policy, self.log, self.journal = policy, log, Journal(log)
        self.too_large: dict[tuple, int] = {}  # by run and kind of call: the bytes of a reply that did not leave
        self.unsent = Counter[str]()  # by run: replies that did not leave

    def set_policy(self, kept: Policy | None, folder: Path) -> bool:
        """Hold to this policy from now on, and write it down; returns whether it is another one than before.

        Args:
            kept: the policy in the site's folder; None: there is none.
            folder: the site's state.

        Raises:
            DamagedFile: there was one, and the defaults may allow more.
        """
        last = self.journal.policy
        if kept is None and last is not None and last["source"] == FILE:
            raise DamagedFile(f"{self.log.site}: {folder / FILE} is missing; {REMEDY}")
        before, self.policy = self.policy, kept or Policy()
        entries = {n: list(v) if isinstance(v, tuple) else v for n, v in self.policy._asdict().items()}
        self.journal.write_policy("defaults" if kept is None else FILE, entries)
        return before != self.policy

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
            raise Refused(
                f"{site} refuses run {terms.run!r}: its terms contradict this site's data: {changed}; if the site has "
                "changed, restore it and start it again; if not, the server must use the summary that this site sent"
            )
        if not policy.allows_run(terms.run):
            names = ", ".join(policy.runs)
            raise Refused(f"{site} takes part in runs of other names ({names}); its owner may add {terms.run!r}")
        if terms.run not in self.journal.agreed and len(self.journal.agreed) >= policy.runs_at_most:
            raise Refused(f"{site} has taken part in {len(self.journal.agreed)} runs; its owner may raise runs_at_most")
        if (found := count_keys(terms.sites)) < policy.sites_at_least:
            raise Refused(
                f"{site} takes part in runs of at least {policy.sites_at_least} sites, and {terms.run!r} has {found} "
                "with different keys; its owner may lower sites_at_least"
            )
        for split, rows in own.counts.items():
            if 0 < rows < policy.rows_at_least:
                raise Refused(
                    f"{site} has {rows} rows of split {split!r}, and its policy wants at least {policy.rows_at_least}: "
                    "a mean over few rows reveals them; hold out more rows, or its owner may lower rows_at_least"
                )
        for other in terms.sites:
            if other.site != site and (most := max(other.counts.values())) > policy.rows_at_most:
                raise Refused(
                    f"{site} takes part in runs of sites with at most {policy.rows_at_most:,} rows of a split, and "
                    f"{other.site} reports {most:,}, for which memory would be reserved here; its owner may raise "
                    "rows_at_most"
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
        if 0 < policy.parameters < (calls := _calls(terms, context)):
            raise Refused(
                f"{site} answers {policy.parameters} different calls in a run, and {terms.run!r} needs {calls}; its "
                "owner may raise parameters"
            )
        if (call := agreement.largest("down")) > policy.call_bytes:
            raise Refused(
                f"{site} receives calls of at most {policy.call_bytes:,} bytes, and {terms.run!r} may need "
                f"{call:,}; its owner may raise call_bytes"
            )
        most = max(terms.sites, key=lambda summary: max(summary.counts.values()))
        if most.site != site and (need := _batch_bytes(agreement)) > machine_memory() / 2:
            raise Refused(
                f"{site}: {most.site} reports {max(most.counts.values()):,} rows of a split, and for batches of them "
                f"{need / 1e9:,.1f} GB would be reserved here, of {machine_memory() / 1e9:,.1f} GB; if that is right, "
                "the app needs a smaller batch_size"
            )
        if size > policy.bytes:
            raise Refused(
                f"{site} lets {policy.bytes:,} bytes leave in a run, and {terms.run!r} would send {size:,}; its owner "
                "may raise bytes"
            )
        private = context.privacy
        if policy.noise_at_least > (private.noise if private is not None and private.where == "sites" else 0.0):
            raise Refused(
                f"{site} takes part in runs in which it adds noise of at least {policy.noise_at_least:g} × the clip to "
                f"its replies, and {terms.run!r} has less: the app needs privacy=fs.Privacy(…, where='sites'); the "
                "site's owner may lower noise_at_least"
            )
        places = placements(context.state)
        for field in sorted(_sent_fields(agreement)):
            if policy.noise_at_least and places[field].merge != "mean":
                raise Refused(
                    f"{type(context.algorithm).__name__} sends the field {field!r}, rows without noise, and {site} "
                    "wants noise in all that leaves; its owner may set noise_at_least = 0"
                )
            if not policy.allows_field(field, places[field].merge):
                how = "merged by a mean" if places[field].merge == "mean" else "rows that the server sees one by one"
                raise Refused(
                    f"{type(context.algorithm).__name__} sends the field {field!r} ({how}), which {site} does not "
                    f"allow; its owner may add {field!r} to fields"
                )

    def check_parts(self, problem: Problem, data: Federation, site: str) -> None:
        """Refuse a run with means over a few rows of this site: those of one of its groups.

        Args:
            problem: what is minimised.
            data: of this site.
            site: its name.
        """
        least = self.policy.rows_at_least
        for split, sizes in problem.parts(data).items():
            if np.any((sizes > 0) & (sizes < least)):
                raise Refused(
                    f"{site} has fewer than {least} rows of a group in split {split!r}, or of one label in it, and a "
                    "mean over few rows reveals them; leave such groups out, or its owner may lower rows_at_least"
                )

    def check(self, terms: Terms, context: RoundContext, call: Message, kept: bool = False) -> None:
        """Refuse a call beyond the run's terms or this site's policy.

        Args:
            terms: of the run.
            context: of the run, at its start point.
            call: the server's message.
            kept: whether the reply to this call is still there, so that it is sent again without any work.
        """
        site, policy, done = self.log.site, self.policy, self.journal.answered(terms.run)
        evaluates = call.stage.exchange == EVALUATE
        for name, array in call.arrays.items():
            if array.dtype.kind not in "biu" and not np.all(np.isfinite(array)):
                raise Refused(f"{site}: {name} has values that are not finite; a run that diverges needs smaller steps")
        if call.stage.round >= terms.rounds + evaluates:
            raise Refused(
                f"{site}: run {terms.run!r} has {terms.rounds} rounds by its terms, and this call is for round "
                f"{call.stage.round}; a longer run needs new terms"
            )
        allowed, private = self._allowed(terms, context), context.privacy
        noisy = private is not None and private.where == "sites" and not evaluates  # to which no noise is added
        new = digest(call) not in done.calls or (noisy and not kept)
        if new and (found := max(len(done.calls), len(done.replies) if noisy else 0)) >= allowed:
            raise Refused(
                f"{site} has answered {found} different calls in run {terms.run!r}, and its policy allows {allowed}; "
                "its owner may raise parameters"
            )
        if new and evaluates:
            found = len(done.evaluations)
            if found >= policy.evaluations:
                raise Refused(
                    f"{site} has answered {found} evaluations in run {terms.run!r}, as many as its policy allows; its "
                    "owner may raise evaluations"
                )
            if found >= math.ceil(SPARE * terms.evaluations) + MOST_REPEATS + self._extended(terms.run):
                raise Refused(
                    f"{site} has answered {found} evaluations in run {terms.run!r}, whose terms have "
                    f"{terms.evaluations}; more of them need new terms"
                )
        if (found := done.answers + self.unsent[terms.run]) >= MOST_REPEATS * allowed:
            raise Refused(
                f"{site} has answered {found} calls in run {terms.run!r}, most of them repeated; its owner may raise "
                "parameters"
            )
        # Again when the reply is known. Where its size varies, what was too large before is not computed once more.
        self._check_bytes(terms.run, max(_least_bytes(context, call.stage), self.too_large.get(_kind(call), 0)))

    def check_reply(self, terms: Terms, context: RoundContext, call: Message, sent: bytes) -> None:
        """Refuse to let a reply leave: it is too large, or the same calls have had too many different replies.

        Args:
            terms: of the run.
            context: of the run, at its start point.
            call: the server's message.
            sent: the reply in bytes.
        """
        done, allowed = self.journal.answered(terms.run), self._allowed(terms, context)
        if len(done.replies) >= allowed and hashlib.sha256(sent).hexdigest() not in done.replies:
            self.unsent[terms.run] += 1
            raise Refused(
                f"{self.log.site} has sent {len(done.replies)} different replies in run {terms.run!r}, and its policy "
                f"allows {allowed}; its owner may raise parameters"
            )
        try:
            self._check_bytes(terms.run, len(sent))
        except Refused:
            self.unsent[terms.run] += 1
            self.too_large[_kind(call)] = len(sent)
            raise

    def _allowed(self, terms: Terms, context: RoundContext) -> int:
        """The different calls that are answered in a run, and the different replies to them."""
        needed = math.ceil(SPARE * _calls(terms, context)) + MOST_REPEATS
        return self.policy.parameters or needed + self._extended(terms.run)

    def _extended(self, run: str) -> int:
        """How often a run was extended: each time, it has one more evaluation than by its terms."""
        return self.journal.counts.get(("extended", run), 0)

    def _check_bytes(self, run: str, size: int) -> None:
        """Refuse to let so many bytes leave if the policy allows fewer in the run."""
        done, limit = self.journal.answered(run), self.policy.bytes
        if done.bytes + size > limit:
            raise Refused(
                f"{self.log.site} has sent {done.bytes:,} bytes in run {run!r}, and with this reply it would be more "
                f"than the {limit:,} that its policy allows; its owner may raise bytes"
            )


def _kind(call: Message) -> tuple:
    """What the size of a reply depends on: the run, the exchange, and whether rows are requested in an evaluation."""
    rows = call.arrays.get("scores")
    return call.run, min(call.stage.round, 0), call.stage.exchange, rows is not None and rows.size > 0


def _batch_bytes(agreement: Agreement) -> int:
    """The bytes of the examples of one step, at a site with as many rows as the largest."""
    context = agreement.context
    drawn = lambda split: context.sampler.rows(context.data[split].capacity)
    return sum(drawn(split) * nbytes(agreement.shapes[split]) for split in context.problem.streams.values())


def _sent_fields(agreement: Agreement) -> set[str]:
    context = agreement.context
    sent = {field_of(path) for exchange in context.exchanges for path in exchange.sends}
    started = agreement.started()
    twice = initialise.pools(started) if initialise.starts_twice(started.algorithm) else ()
    return sent | {field_of(path) for path in (*initialise.sent_at_start(started), *twice)}


def _calls(terms: Terms, context: RoundContext) -> int:
    """The different calls that a run of these terms needs, at most."""
    per_round = sum(exchange.repeat for exchange in context.exchanges)
    begins = 1 + initialise.starts_twice(context.algorithm)
    return begins + terms.rounds * per_round + terms.evaluations


def _least_bytes(context: RoundContext, stage: Stage) -> int:
    """The bytes of arrays in the reply to a call; of evaluations and starts, which vary, at least one."""
    if min(stage) < 0 or stage.phase >= len(context.exchanges):  # there may be no such stage: `Site` refuses it
        return 1
    return sum(nbytes(part(context.template, path)) for path in context.exchanges[stage.phase].sends)


def _bytes_of(agreement: Agreement, rounds: int) -> int:
    """The bytes of arrays that leave a site in this many rounds."""
    context = agreement.started()
    found = ledger_of(context.algorithm, context.exchanges, context.template, context.cohort_size, context.clients)
    return sum(e.bytes * (e.repeat * rounds if e.repeat else 1) for e in found.entries if e.direction == "up")
