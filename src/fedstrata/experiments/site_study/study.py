"""An experiment whose seeds are divisions of the data, with every site alone as a reference."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.experiments.base import Experiment, Setup
from fedstrata.experiments.site_study import methods
from fedstrata.experiments.site_study.sites import Sites, prepared

if TYPE_CHECKING:
    from fedstrata.core.algorithm import Algorithm
    from fedstrata.data.federation import Federation
    from fedstrata.problems.base import Problem
    from fedstrata.simulate.result import Result

ALONE = "PairSGD"  # the method of a site alone; on all sites' data, the reference
AXIS, ALL = "trained_on", "all"


@dataclass(frozen=True)
class Study(Experiment):
    """Seed s runs on division s; `PairSGD` is also run on each site's rows alone (axis "trained_on").

    alone_step: the step size of a site alone, chosen like those of the methods. site: the word for a client.
    """

    panels: tuple[str, ...] = ("test/auc", "test/pauc_0.3", "test/mean_local_auc")
    more_files: tuple[str, ...] = ("sites.md", "sites.png")
    alone_step: float = 0.1
    site: str = "site"

    def problem_for(self, algorithm: "Algorithm", setup: Setup) -> "Problem":
        from fedstrata.algorithms.pairwise.base import PairwiseMethod

        if not (isinstance(algorithm, PairwiseMethod) and isinstance(setup, Sites)):
            return setup.problem
        return setup.pairwise(methods.pair_loss(algorithm), self.batch_size)

    def run_options(self, algorithm: "Algorithm", setup: Setup, **changed: Any) -> dict[str, Any]:
        """All methods draw equally many rows: a pairwise step draws a batch of positives and one of negatives.

        FedAvg weighs hospitals by their sizes, as the pairwise objectives do.
        """
        found = super().run_options(algorithm, setup, **changed)
        if self.problem_for(algorithm, setup) is setup.problem:
            found["weights"] = "size"
            found["batch_size"] = 2 * found["batch_size"] if isinstance(found["batch_size"], int) else "all"
        return {"stationarity": False, **found}

    def simulate(self, algorithm: "Algorithm", setup: Setup, **options: Any) -> "Result":
        """`fs.run` on the division of every seed."""
        from fedstrata.report.progress import Progress
        from fedstrata.simulate.sweep import seed_list

        if not isinstance(setup, Sites):
            return super().simulate(algorithm, setup, **options)
        seeds, shown = seed_list(options.pop("seeds", 1)), options.pop("progress", False)
        alone = range(setup.federation.clients) if type(algorithm).__name__ == ALONE else ()
        label = options.get("label") or type(algorithm).__name__
        with Progress(len(seeds) * (1 + len(alone)), f"{label}, divisions", quiet=not shown) as bar:
            done = 0
            parts: dict[str, list[Result]] = {}
            for site in (None, *alone):
                name = ALL if site is None else setup.federation.name(site)
                for seed in seeds:
                    parts.setdefault(name, []).append(self._one(algorithm, setup, site, seed, dict(options)))
                    done += 1
                    bar.update(done)
        return _together(parts, seeds)

    def _one(self, algorithm: Any, setup: Sites, site: int | None, seed: int, options: dict[str, Any]) -> "Result":
        """One run; with a site, only that one takes part, prepared with its own statistics."""
        from fedstrata.simulate.run import run

        where = "all" if site is None else f"site_{site}"
        if options.get("checkpoint") is not None:
            options["checkpoint"] = Path(options["checkpoint"]) / f"{where}_division_{seed}"
        if site is not None:
            from fedstrata.algorithms import LocalPair
            from fedstrata.engine.participation import Given

            chosen = algorithm.step_size == self.methods.get(ALONE, {}).get("step_size")
            algorithm = LocalPair(self.alone_step if chosen else algorithm.step_size, algorithm.local_steps)
            options["cohort"] = Given([[site]])
            if isinstance(options["batch_size"], int):
                options["batch_size"] = max(1, options["batch_size"] // setup.federation.clients)
        options = {"execution": "vmap", **options}
        federation = prepared(setup.divide(seed), site)
        return run(self.problem_for(algorithm, setup), algorithm, federation, seeds=[seed], **options)

    def trained_on(self, setup: Setup, **labels: Any) -> "Federation":
        if not isinstance(setup, Sites):
            return super().trained_on(setup, **labels)
        alone = labels.get(AXIS, ALL)
        return prepared(setup.divide(labels["seed"]), None if alone == ALL else setup.federation.names.index(alone))

    def pictures(self, results: "Mapping[str, Result]", data: Mapping[str, Any], folder: Any) -> None:
        from fedstrata.base.files import replacing
        from fedstrata.experiments.site_study import outcome

        rows = outcome.rows({name: result.history for name, result in results.items()}, self.site)
        with replacing(Path(folder) / "sites.md") as temporary:
            temporary.write_text(outcome.table(rows, self.site))
        outcome.picture(rows, self.name, self.site, Path(folder) / "sites.png")


def _together(parts: "Mapping[str, Sequence[Result]]", seeds: Sequence[int]) -> "Result":
    """Runs of single seeds as one result; if sites ran alone, a first axis "trained_on" has their names."""
    import jax

    first = parts[ALL][0]
    before = first.history
    at = len(before.axes) - 1  # of the seeds
    axes = {**before.axes, "seed": list(seeds)}

    def joined(of: Any) -> Any:
        rows = [jax.tree.map(lambda *a: np.concatenate(a, axis=at), *map(of, runs)) for runs in parts.values()]
        return rows[0] if len(rows) == 1 else jax.tree.map(lambda *a: np.stack(a), *rows)

    columns = {name: joined(lambda r, name=name: r.history[name]) for name in before.columns}
    if len(parts) > 1:
        axes = {AXIS: list(parts), **axes}
        for name in ("bytes_up", "bytes_down"):  # a site alone sends nothing
            columns[name] = np.zeros_like(columns[name])
    every: Iterable[Result] = [run for runs in parts.values() for run in runs]
    return dataclasses.replace(
        first,
        history=dataclasses.replace(before, axes=axes, columns=columns, per_client={}),
        solutions=joined(lambda r: r.solutions),
        endings=joined(lambda r: r.endings),
        notes=[note for run in every for note in run.notes],
        seconds=sum(run.seconds for run in every),
        compile_seconds=sum(run.compile_seconds for run in every),
        federation=None,  # every run has its own
    )
