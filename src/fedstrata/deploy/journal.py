"""What a site has answered so far, by its own log. A restart forgets nothing."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from fedstrata.base.text import one_line
from fedstrata.deploy.data_summary import DataSummary
from fedstrata.deploy.evaluation.request import REPLY
from fedstrata.deploy.messages import EVALUATE, Message
from fedstrata.deploy.site_log import SiteLog
from fedstrata.deploy.terms import Terms

LONGEST_REASON = 1000  # characters of a refusal
MOST_LINES = 1000  # about summaries, refusals in a run, and refusals of others; of more, the 1024th, 2048th, … only


class Answered(NamedTuple):
    """What a site has answered in one run."""

    calls: set[str]  # hashes of different calls
    evaluations: set[str]  # those of them that were evaluations
    replies: set[str]  # hashes of different replies: with noise of the site, a repeated call has another one
    fields: dict[str, Counter[str]]  # by field that was sent: how often each reply with it left; no evaluations
    answers: int = 0  # repeated ones included
    bytes: int = 0

    def has_numbers(self) -> bool:
        """Whether anything but empty replies before the first round has left."""
        return bool(self.fields or self.evaluations)


class Journal:
    """Writes the lines of a site's log, and counts what they say."""

    def __init__(self, log: SiteLog):
        """A journal that continues where the log ends.

        Args:
            log: the site's.
        """
        self.log = log
        self.runs: dict[str, Answered] = {}
        self.agreed: dict[str, dict[str, Any]] = {}  # by run: the last line about its terms
        self.files: dict[str, str] = {}  # by name: the hash of a file that identifies the site
        self.policy: dict[str, Any] | None = None  # the last line about the site's policy
        self.counts: dict[tuple[str, str], int] = {}  # by kind and run: also those without a line
        for line in log.found:
            self._count(line)
        log.found = []  # a log is longer than what is remembered of it

    def answered(self, run: str) -> Answered:
        """What the site has answered in a run."""
        return self.runs.get(run, Answered(set(), set(), set(), {}))

    def write_policy(self, source: str, entries: Mapping[str, Any]) -> None:
        """Write down the policy that holds from now on, if it is another one than before.

        Args:
            source: where it is from.
            entries: the policy, as JSON values.
        """
        if self.policy is None or (self.policy["source"], self.policy["policy"]) != (source, entries):
            self._add("policy", source=source, policy=dict(entries))

    def write_summary(self, own: DataSummary, files: Mapping[str, str]) -> None:
        """Write down that the summary of this site's data was sent.

        Args:
            own: the summary.
            files: by name, the hash of a file that identifies the site.
        """
        about = {"data": own.data, "versions": dict(own.versions), "files": dict(files)}
        self._add_some("summary", "", way="out", counts=dict(own.counts), **about)

    def write_terms(self, terms: Terms, settings: str, new: bool) -> None:
        """Write down that the site takes part in a run under these terms.

        Args:
            terms: of the run.
            settings: a hash of the settings of the app.
            new: whether the site agrees now; otherwise it did before this log began.
        """
        fixed, wanted = terms.digest(), [terms.rounds, terms.evaluations]
        self._add(
            "terms", run=terms.run, message=fixed, sites=len(terms.sites), program=terms.program, wanted=wanted,
            settings=settings, verdict="agreed" if new else "agreed before this log began",
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
            parts = name.replace("[", ".").split(".")
            field = ".".join(parts[: 1 + (parts[0] == REPLY)])  # of an evaluation: measures or rows
            fields[field] = fields.get(field, 0) + array.nbytes
        self._add(
            "answer", run=call.run, stage=list(call.stage), way="out", call=digest(call), bytes=len(body),
            message=hashlib.sha256(body).hexdigest(), fields=fields, verdict="sent",
        )  # fmt: skip

    def write_refusal(self, run: str, stage: Any, why: str) -> None:
        """Write down that a call was refused.

        Args:
            run: the name of the run, or what the server gave for one.
            stage: of the call.
            why: the reason.
        """
        why = one_line(why, LONGEST_REASON)
        self._add_some("refused", one_line(run, 128), stage=stage, way="in", why=why, verdict="refused")

    def _add_some(self, kind: str, run: str, **entries: Any) -> None:
        """Write a line that a server can cause as often as it likes: a flood of them does not fill the disk."""
        key = self._counted_as(kind, run)
        count = self.counts.get(key, 0) + 1
        if count <= MOST_LINES or count.bit_count() == 1:
            self._add(kind, run=run, count=count, **entries)
        self.counts[key] = count

    def _counted_as(self, kind: str, run: str) -> tuple[str, str]:
        """Runs that the site has not agreed to count as one: a server may invent their names."""
        return kind, run if run in self.agreed else ""

    def _add(self, kind: str, **entries: Any) -> None:
        self._count(self.log.add(kind, **entries))

    def _count(self, line: dict[str, Any]) -> None:
        kind = line["kind"]
        if kind in ("summary", "refused"):
            key = self._counted_as(kind, line.get("run", ""))
            self.counts[key] = line.get("count", self.counts.get(key, 0) + 1)
            self.files = line.get("files", self.files)
        elif kind == "policy":
            self.policy = line
        elif kind == "terms":
            self.agreed[line["run"]] = line
            kind = "extended" if self.answered(line["run"]).has_numbers() else "begun"
            self.counts[kind, line["run"]] = self.counts.get((kind, line["run"]), 0) + 1
        elif kind == "answer":
            done = self.runs.setdefault(line["run"], Answered(set(), set(), set(), {}))
            done.calls.add(line["call"])
            done.replies.add(line["message"])
            if line["stage"][1] == EVALUATE:
                done.evaluations.add(line["call"])
            else:
                for field in line["fields"]:
                    done.fields.setdefault(field, Counter())[line["message"]] += 1
            self.runs[line["run"]] = done._replace(answers=done.answers + 1, bytes=done.bytes + line["bytes"])


def digest(call: Message) -> str:
    """A hash of a call: the same for the same question."""
    return hashlib.sha256(call.encode()).hexdigest()
