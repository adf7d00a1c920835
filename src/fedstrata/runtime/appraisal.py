"""What is known of a solution once the sites have said what it does on their data."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedstrata.problems import ranking
from fedstrata.problems.pairwise import Pairwise
from fedstrata.report.format import human_number
from fedstrata.runtime.question import Question, Said
from fedstrata.vector import Vector

if TYPE_CHECKING:
    import rich.table

    from fedstrata.runtime.site import Terms


class Appraisal(NamedTuple):
    """Measures are named "split/measure"; they are NaN at a site where they have no meaning."""

    round: int  # rounds done
    by_site: dict[str, dict[str, float]]
    rows: dict[str, dict[str, int]]  # by site and split
    means: dict[str, float]  # over the sites where they have a meaning, weighted as the run is
    objective: float | None  # of all sites together, where it follows from theirs
    pooled: dict[str, float]  # of all sites' scores together
    missing: dict[str, str]  # sites without an answer, and why
    unavailable: dict[str, str]  # "objective" and pooled measures that are not known, and why

    def as_json(self) -> dict[str, Any]:
        """The same for programs; None for what has no meaning."""
        plain = lambda values: {n: v if math.isfinite(v) else None for n, v in values.items()}
        out = self._asdict() | {"by_site": {site: plain(values) for site, values in self.by_site.items()}}
        objective = None if self.objective is None else plain({"": self.objective})[""]
        return out | {"means": plain(self.means), "pooled": plain(self.pooled), "objective": objective}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Appraisal":
        number = lambda values: {n: math.nan if v is None else v for n, v in values.items()}
        by_site = {site: number(values) for site, values in row["by_site"].items()}
        known = {name: row[name] for name in cls._fields}
        return cls(**{**known, "by_site": by_site, "means": number(row["means"]), "pooled": number(row["pooled"])})

    def rich(self) -> "rich.table.Table":
        """A table for the terminal; what it cannot show stands below it."""
        from rich.table import Table
        from rich.text import Text

        header, body = self._cells()
        table = Table(title=f"after {self.round} rounds", caption="\n".join(self._notes()), caption_justify="left")
        for number, name in enumerate(header):
            table.add_column(Text(name), justify="right" if number else "left")
        for line in body:
            table.add_row(*map(Text, line))
        return table

    def __str__(self) -> str:
        header, body = self._cells()
        widths = [max(len(line[i]) for line in [header, *body]) for i in range(len(header))]
        lines = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in [header, *body]]
        return "\n".join([f"after {self.round} rounds", *("  ".join(line) for line in lines), *self._notes()])

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        rows = {**self.by_site, "mean over sites": self.means} if self.by_site else {}
        if self.pooled:
            rows["all scores together"] = self.pooled
        columns = list(dict.fromkeys(name for row in rows.values() for name in row))
        show = lambda value: "–" if math.isnan(value) else human_number(value)
        return ["site", *columns], [[n, *(show(row.get(c, math.nan)) for c in columns)] for n, row in rows.items()]

    def _notes(self) -> list[str]:
        known = [] if self.objective is None else [f"objective of all sites: {human_number(self.objective)}"]
        lost = [f"{site} is missing: {why}" for site, why in self.missing.items()]
        return [*known, *lost, *(f"{name} is not known: {why}" for name, why in self.unavailable.items())]


def of(
    terms: "Terms", asked: Question, x: Vector, round: int, said: Mapping[str, Said], missing: Mapping[str, str]
) -> Appraisal:
    """What follows from the answers of sites; nothing is computed from some of them as if they were all."""
    names = [f"{split}/{measure}" for split, measures in asked.measures.items() for measure in measures]
    by_site = {site: {name: float(s.values[name]) for name in names} for site, s in said.items()}
    rows = {site: {split: int(n) for split, n in s.counts.items()} for site, s in said.items()}
    means = {name: _mean(terms, name, by_site, rows) for name in names}
    unavailable: dict[str, str] = {}
    objective = _objective(terms, x, by_site, rows, missing)
    if isinstance(objective, str):
        unavailable["objective"], objective = objective, None
    pooled: dict[str, float] = {}
    for split in asked.scores:
        found = _pooled(terms, split, said, missing)
        if isinstance(found, str):
            unavailable[f"{split}/auc"] = found
        else:
            pooled |= found
    return Appraisal(round, by_site, rows, means, objective, pooled, dict(missing), unavailable)


def _share(terms: "Terms", counts: np.ndarray) -> np.ndarray:
    """How much sites with so many rows count: all that have any alike, or by their rows, as the run says."""
    weights = (counts > 0 if terms.world.counts is None else counts).astype(float)
    return weights / max(weights.sum(), 1)


def _mean(terms: "Terms", name: str, by_site: Mapping[str, Any], rows: Mapping[str, Any]) -> float:
    split = name.rpartition("/")[0]
    told = [site for site in by_site if rows[site][split] and not math.isnan(by_site[site][name])]
    share = _share(terms, np.array([rows[site][split] for site in told]))
    return float(share @ [by_site[site][name] for site in told]) if told else math.nan


def _objective(
    terms: "Terms", x: Vector, by_site: Mapping[str, Any], rows: Mapping[str, Any], missing: Mapping[str, str]
) -> float | str:
    """The objective of all sites, or why it is not known."""
    kind, name = type(terms.world.problem).__name__, "train/objective"
    if missing:
        return f"no answer from {', '.join(missing)}"
    if not by_site or name not in next(iter(by_site.values())):
        return f"no site says {name!r}: this {kind} problem has none of its own, or split 'train' was not asked for"
    counts = np.array([rows[site]["train"] for site in by_site])
    values = np.where(counts > 0, [by_site[site][name] for site in by_site], 0)
    numbers = (jnp.asarray(a, x.scalar_dtype) for a in (values, _share(terms, counts)))
    found = terms.world.problem.from_clients(x, *numbers)
    return f"that of this {kind} problem is no mean over sites" if found is None else float(found)


def _pooled(terms: "Terms", split: str, said: Mapping[str, Said], missing: Mapping[str, str]) -> dict[str, float] | str:
    """The AUC of all sites' rows together, and what else a pairwise problem measures; or why it is not known."""
    if missing:
        return f"no answer from {', '.join(missing)}"
    if closed := [site for site, s in said.items() if s.withheld]:
        return f'{", ".join(closed)} let no scores leave; a site that does has tells="scores" among its own settings'
    scores, labels = (
        jnp.asarray(np.concatenate(rows))
        for rows in ([s.scores[split] for s in said.values()], [s.labels[split] for s in said.values()])
    )
    problem = terms.world.problem
    names = dict.fromkeys(["auc", *(problem.metrics if isinstance(problem, Pairwise) else ())])
    found = {name: ranking.parse(name)(scores, labels) for name in names}
    return {f"{split}/{name}": float(value) for name, value in found.items()}
