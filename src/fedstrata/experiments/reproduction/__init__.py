"""A reproduction of a paper: its figures as functions, and each claim with our result and a verdict."""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fedstrata.base.errors import unknown
from fedstrata.base.files import replacing
from fedstrata.experiments.base import Setup

if TYPE_CHECKING:
    from fedstrata.core.algorithm import Algorithm
    from fedstrata.report.history import History

Verdict = Literal["holds", "holds in part", "does not hold", "not tested"]


class Claim(NamedTuple):
    """A sentence of the paper (never a number read off a figure), our result, and the verdict."""

    figure: int
    claim: str
    ours: str
    verdict: Verdict


class Outcome(NamedTuple):
    claims: list[Claim]
    files: list[Path]


class Desk:
    """The workspace of a reproduction: a folder, a scale, and finished runs, which are stored and never repeated.

    A killed reproduction resumes with the first missing run. Runs from another machine, such as one with a GPU, can be
    copied into the folder; then only the pictures are drawn.
    """

    def __init__(self, folder: str | Path, scale: str = "small", quiet: bool = False) -> None:
        self.folder, self.scale, self.quiet = Path(folder), scale, quiet
        self.done: dict[str, History] = {}
        self.runs = self.folder / "runs"
        self.runs.mkdir(parents=True, exist_ok=True)

    def run(
        self, name: str, build: Callable[..., Setup], data: Mapping[str, Any], algorithm: "Algorithm", **options: Any
    ) -> "History":
        """The history of `fs.run` on `build(**data)`; if a run of this name and settings is stored, its history.

        Args:
            name: of the file that keeps the history.
            build: makes problem and data.
            data: the options of `build`.
            algorithm: the method.
            **options: those of `fs.run`.
        """
        from fedstrata.core.fingerprint import describe
        from fedstrata.core.hyperparameters import hyperparameters
        from fedstrata.report.history import History
        from fedstrata.simulate.result import DivergenceWarning
        from fedstrata.simulate.run import run

        method = {"algorithm": type(algorithm).__name__, **describe(hyperparameters(algorithm))}
        settings = json.loads(json.dumps({"method": method, "data": data, "options": describe(options)}))
        path = self.runs / f"{name}.json"
        if path.exists():
            kept = json.loads(path.read_text())
            if kept["settings"] == settings:
                self.done[name] = History.from_json(kept["history"])
                return self.done[name]
        setup = build(**data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DivergenceWarning)  # the history and the claim show it
            result = run(setup.problem, algorithm, setup.federation, label=name, progress=not self.quiet, **options)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps({"settings": settings, "history": result.history.to_json()}))
        self.done[name] = result.history
        return result.history

    def cost(self) -> dict[str, float]:
        """The cost of all runs without compilation: seconds, and examples over all seeds and clients."""
        histories = self.done.values()
        seconds = float(sum(h.last("seconds").max() for h in histories))
        samples = float(sum(h.last("samples").sum() for h in histories))
        return {"runs": len(self.done), "seconds": seconds, "samples": samples}


@dataclass(frozen=True)
class Reproduction:
    """A paper's figures by number; each draws its pictures at a desk and returns claims with verdicts."""

    paper: str  # the name on the command line
    title: str
    reference: str  # a key of docs/papers.bib
    figures: Mapping[int, Callable[[Desk], Outcome]]
    scales: Mapping[str, str]  # name -> what it costs, the default first

    def reproduce(
        self,
        figure: int | None = None,
        out: str | Path = "out/reproduce",
        scale: str | None = None,
        quiet: bool = False,
    ) -> dict[str, Any]:
        """Run what is missing, draw, and write claims.md and claims.json.

        Args:
            figure: its number; None: all.
            out: the folder for figures, claims and runs.
            scale: a name of `scales`; None: the first.
            quiet: show no progress bar.
        """
        scale = next(iter(self.scales)) if scale is None else scale
        if scale not in self.scales:
            raise unknown(f"scale of {self.paper}", scale, self.scales)
        if figure is not None and figure not in self.figures:
            raise unknown(f"figure of {self.paper}", str(figure), map(str, self.figures))
        desk = Desk(Path(out) / self.paper / scale, scale, quiet)
        outcomes = [draw(desk) for number, draw in self.figures.items() if figure in (None, number)]
        claims = [claim._asdict() for outcome in outcomes for claim in outcome.claims]
        files = [str(path) for outcome in outcomes for path in outcome.files]
        name = "claims" if figure is None else f"claims_figure_{figure}"
        table = desk.folder / f"{name}.md"
        with replacing(table) as temporary:
            temporary.write_text(markdown(self.title, claims))
        with replacing(table.with_suffix(".json")) as temporary:
            temporary.write_text(json.dumps(claims, indent=2, ensure_ascii=False) + "\n")
        return {"claims": claims, "cost": desk.cost(), "files": [*files, str(table)]}


def markdown(title: str, claims: list[dict[str, Any]]) -> str:
    """The table *claim / ours / verdict*.

    Args:
        title: the heading.
        claims: figure, claim, ours and verdict of each.
    """
    cell = lambda value: str(value).replace("|", r"\|")
    rows = [f"| {' | '.join(cell(c[k]) for k in ('figure', 'claim', 'ours', 'verdict'))} |" for c in claims]
    return "\n".join([f"# {title}", "", "| figure | claim | ours | verdict |", "|---|---|---|---|", *rows, ""])
