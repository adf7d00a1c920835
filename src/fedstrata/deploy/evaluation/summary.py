"""The measures of a solution over all sites, from their replies."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedstrata.core.vector import Vector
from fedstrata.deploy.agreement import Agreement
from fedstrata.deploy.evaluation.request import Reply, Request
from fedstrata.problems.pairwise import columns as ranking
from fedstrata.problems.pairwise.problem import Pairwise
from fedstrata.report.format import human_number

if TYPE_CHECKING:
    import rich.console

Values = Mapping[str, Mapping[str, float]]  # by site and "split/measure"
Counts = Mapping[str, Mapping[str, int]]  # by site and split


class Summary(NamedTuple):
    """The evaluation of one solution. Measures are named "split/measure"; NaN: undefined at this site."""

    round: int  # finished rounds
    by_site: dict[str, dict[str, float]]
    rows: dict[str, dict[str, int]]  # by site and split
    means: dict[str, float]  # over the sites where they are defined, weighted as in the run
    objective: float | None  # of all sites, if it follows from the sites' values
    pooled: dict[str, float]  # over the scores of all sites together
    missing: dict[str, str]  # by site without a reply: the reason
    unavailable: dict[str, str]  # by "objective" or pooled measure that could not be computed: the reason

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON values, with None for NaN."""
        plain = lambda values: {n: v if math.isfinite(v) else None for n, v in values.items()}
        out = self._asdict() | {"by_site": {site: plain(values) for site, values in self.by_site.items()}}
        objective = None if self.objective is None else plain({"": self.objective})[""]
        return out | {"means": plain(self.means), "pooled": plain(self.pooled), "objective": objective}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Summary":
        """The summary in the JSON values of `as_json`; further keys are left out."""
        number = lambda values: {n: math.nan if v is None else v for n, v in values.items()}
        by_site = {site: number(values) for site, values in row["by_site"].items()}
        fields = {name: row[name] for name in cls._fields}
        return cls(**{**fields, "by_site": by_site, "means": number(row["means"]), "pooled": number(row["pooled"])})

    def rich(self) -> "rich.console.Group":
        """A table for the terminal, with notes below it."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        header, body = self._cells()
        table = Table(title=f"after {self.round} rounds", title_justify="left")
        for number, name in enumerate(header):
            table.add_column(Text(name), justify="right" if number else "left")
        for line in body:
            table.add_row(*map(Text, line))
        return Group(table, *map(Text, self._notes())) if body else Group(*map(Text, self._notes()))

    def __str__(self) -> str:
        header, body = self._cells()
        widths = [max(len(line[i]) for line in [header, *body]) for i in range(len(header))]
        lines = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in [header, *body]]
        return "\n".join([f"after {self.round} rounds", *("  ".join(line) for line in lines), *self._notes()])

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        rows: list[tuple[str, Mapping[str, float]]] = list(self.by_site.items())  # a site may have any name
        rows += [("mean over sites", self.means)] if self.by_site else []
        rows += [("all scores together", self.pooled)] if self.pooled else []
        columns = list(dict.fromkeys(name for _, row in rows for name in row))
        show = lambda value: "–" if math.isnan(value) else human_number(value)
        return ["site", *columns], [[n, *(show(row.get(c, math.nan)) for c in columns)] for n, row in rows]

    def _notes(self) -> list[str]:
        found = [] if self.objective is None else [f"objective of all sites: {human_number(self.objective)}"]
        lost = [f"{site} is missing: {why}" for site, why in self.missing.items()]
        return [*found, *lost, *(f"{name} is not available: {why}" for name, why in self.unavailable.items())]


def summarise(
    agreement: Agreement,
    request: Request,
    x: Vector,
    round: int,
    replies: Mapping[str, Reply],
    missing: Mapping[str, str],
) -> Summary:
    """The summary of the replies of sites. What needs all sites is not computed if some are missing.

    Args:
        agreement: of the run.
        request: what the sites were to send.
        x: the solution.
        round: finished rounds.
        replies: by site.
        missing: by site without a reply, the reason.
    """
    names = [f"{split}/{measure}" for split, measures in request.measures.items() for measure in measures]
    by_site = {site: {name: float(reply.values[name]) for name in names} for site, reply in replies.items()}
    rows = {site: {split: int(n) for split, n in reply.counts.items()} for site, reply in replies.items()}
    means = {name: _mean(agreement, name, by_site, rows) for name in names}
    unavailable: dict[str, str] = {}
    objective = _objective(agreement, x, by_site, rows, missing)
    if isinstance(objective, str):
        unavailable["objective"], objective = objective, None
    pooled: dict[str, float] = {}
    for split in request.scores:
        found = _pooled(agreement, split, replies, missing)
        if isinstance(found, str):
            unavailable[f"{split}/auc"] = found
        else:
            pooled |= found
    return Summary(
        round=round,
        by_site=by_site,
        rows=rows,
        means=means,
        objective=objective,
        pooled=pooled,
        missing=dict(missing),
        unavailable=unavailable,
    )


def _share(agreement: Agreement, counts: Sequence[int]) -> np.ndarray:
    """The weights of sites with these numbers of rows: by size or uniform, as in the run; zero without rows."""
    rows = np.array(counts)
    weights = (rows > 0 if agreement.context.counts is None else rows).astype(float)
    return weights / max(weights.sum(), 1)


def _mean(agreement: Agreement, name: str, by_site: Values, rows: Counts) -> float:
    split = name.rpartition("/")[0]
    defined = [site for site in by_site if rows[site][split] and not math.isnan(by_site[site][name])]
    share = _share(agreement, [rows[site][split] for site in defined])
    return float(share @ [by_site[site][name] for site in defined]) if defined else math.nan


def _objective(
    agreement: Agreement, x: Vector, by_site: Values, rows: Counts, missing: Mapping[str, str]
) -> float | str:
    """The objective of all sites, or the reason why it is not available."""
    kind, name = type(agreement.context.problem).__name__, "train/objective"
    if missing:
        return f"no reply from {', '.join(missing)}"
    if not by_site or name not in next(iter(by_site.values())):
        return f"no site has {name!r}: this {kind} problem has no objective per site, or 'train' was not requested"
    counts = [rows[site]["train"] for site in by_site]
    values = np.where(np.array(counts) > 0, [by_site[site][name] for site in by_site], 0)
    numbers = (jnp.asarray(a, x.scalar_dtype) for a in (values, _share(agreement, counts)))
    found = agreement.context.problem.from_clients(x, *numbers)
    return f"that of this {kind} problem is not a mean over sites" if found is None else float(found)


def _pooled(
    agreement: Agreement, split: str, replies: Mapping[str, Reply], missing: Mapping[str, str]
) -> dict[str, float] | str:
    """The AUC over the rows of all sites, and a pairwise problem's other metrics; or why they are not available."""
    if missing:
        return f"no reply from {', '.join(missing)}"
    if closed := [site for site, reply in replies.items() if reply.withheld]:
        return f'{", ".join(closed)} sent no scores; to allow it, a site sets tells="scores" in its settings'
    scores = jnp.asarray(np.concatenate([reply.scores[split] for reply in replies.values()]))
    labels = jnp.asarray(np.concatenate([reply.labels[split] for reply in replies.values()]))
    problem = agreement.context.problem
    names = dict.fromkeys(["auc", *(problem.metrics if isinstance(problem, Pairwise) else ())])
    found = {name: ranking.parse(name)(scores, labels) for name in names}
    return {f"{split}/{name}": float(value) for name, value in found.items()}
