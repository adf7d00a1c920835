"""The work of `fedstrata run` after its options are read: run the methods, then write table, picture and models."""

import argparse
import json
import sys
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedstrata.base.errors import SetupWarning
from fedstrata.cli import methods
from fedstrata.cli.output import console, print_json, print_table
from fedstrata.cli.parsing import Mistake
from fedstrata.cli.run_folder import Folder
from fedstrata.core.algorithm import Algorithm
from fedstrata.core.fingerprint import describe
from fedstrata.core.hyperparameters import hyperparameters
from fedstrata.experiments import Experiment, Setup
from fedstrata.problems.base import model_of
from fedstrata.report import Comparison, compare
from fedstrata.simulate.multiprocess import lead, leads, together
from fedstrata.simulate.options import RunOptions
from fedstrata.simulate.result import DivergenceWarning, Result
from fedstrata.simulate.run import prepare


class Plan(NamedTuple):
    """The checked plan of a run, before it starts."""

    experiment: Experiment
    methods: dict[str, tuple[Algorithm, dict[str, list[float]]]]
    setup: Setup
    given: dict[str, Any]  # options of `fs.run` that differ from the experiment's
    data: dict[str, Any]

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        options: argparse.Namespace,
        words: Mapping[str, str],
        sweep: Mapping[str, list[float]],
        data: dict[str, Any],
    ) -> "Plan":
        named = methods.chosen(experiment, options.algorithm, words, sweep)
        given = {k: getattr(options, k) for k in ("rounds", "seeds", "cohort", "batch_size", "evaluate_every")}
        given["evaluate_every"] = given["evaluate_every"] or -(-(given["rounds"] or experiment.rounds) // 100)
        setup = experiment.build(**data)
        if options.algorithm is None:  # the experiment's methods that can solve this form of it
            named = {name: method for name, method in named.items() if _able(name, method[0], experiment, setup)}
        plan = cls(experiment, named, setup, given, data)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", SetupWarning)
            for name, (algorithm, _) in named.items():  # check every method before the first run
                problem = experiment.problem_for(algorithm, setup)
                where = {"mesh": options.mesh, "stream": stream_of(algorithm, options)}
                all_options = RunOptions(**plan.options(name), execution="vmap", **where)
                prepare(problem, algorithm, setup.federation, all_options)
        for text in dict.fromkeys(str(warning.message) for warning in caught):
            print(f"warning: {text}", file=sys.stderr)
        return plan

    def options(self, name: str) -> dict[str, Any]:
        """The options of `fs.run` for one method.

        Args:
            name: the method.
        """
        algorithm, sweep = self.methods[name]
        return self.experiment.run_options(algorithm, self.setup, **self.given, sweep=sweep or None)

    @property
    def model(self) -> Any:
        """The problem's model, if it has one."""
        return model_of(self.setup.problem)

    def settings(self) -> dict[str, Any]:
        """Everything that determines the result, as plain JSON."""
        own = self.experiment
        shared = {k: getattr(own, k, None) if v is None else v for k, v in self.given.items()}
        values = {n: describe(hyperparameters(a)) | s for n, (a, s) in self.methods.items()}
        return json.loads(json.dumps({"experiment": own.name, **shared, "data": self.data, "methods": values}))


def stream_of(algorithm: Algorithm, options: argparse.Namespace) -> bool | None:
    """--stream applies to federated methods. A centralised reference beside them runs without it.

    Args:
        algorithm: the method.
        options: those of the command line.
    """
    return None if algorithm.centralised else options.stream


def _able(name: str, algorithm: Algorithm, experiment: Experiment, setup: Setup) -> bool:
    try:
        algorithm.check(experiment.problem_for(algorithm, setup))
    except ValueError as error:
        print(f"warning: {name} is left out: {error}", file=sys.stderr)
        return False
    return True


def estimate(plan: Plan, as_json: bool) -> int:
    """Memory, traffic and time of every method, without running any.

    Args:
        plan: what would be run.
        as_json: print JSON.
    """
    from fedstrata.report.format import human_bytes, human_seconds
    from fedstrata.simulate.estimate import estimate as guess

    fields = ("memory_bytes", "up_bytes", "down_bytes", "seconds", "compile_seconds", "execution", "why")
    rows = []
    for name, (algorithm, _) in plan.methods.items():
        problem = plan.experiment.problem_for(algorithm, plan.setup)
        found = guess(problem, algorithm, plan.setup.federation, **plan.options(name))
        rows.append({"method": name, **{field: getattr(found, field) for field in fields}})
    if as_json:
        print_json({"experiment": plan.experiment.name, "methods": rows})
        return 0
    size, time = human_bytes, human_seconds
    show = lambda r: [size(r["memory_bytes"]), size(r["up_bytes"]), size(r["down_bytes"]), time(r["compile_seconds"])]
    table = [[r["method"], *show(r), time(r["seconds"]), f"{r['execution']}: {r['why']}"] for r in rows]
    columns = ["method", ">memory", ">up", ">down", ">compile", ">run", "clients by"]
    print_table(f"{plan.experiment.name}: estimates, nothing was run", columns, table)
    return 0


def run(plan: Plan, folder: Folder | None, options: argparse.Namespace) -> int:
    """Every method in turn; a diverged one is reported, and the others still run.

    Args:
        plan: what is run.
        folder: where files go; None writes none.
        options: those of the command line.
    """
    together("looked")  # every process has read the folder before it changes
    failed = Mistake("the first process could not write the run's files; it printed why")
    if folder is not None:
        lead(lambda: folder.begin(plan.settings(), _files(plan)), failed)
    profiles = _profiles(plan, folder, options) if options.profile else {}  # first, so that compilation is measured
    results = {}
    for name, (algorithm, _) in plan.methods.items():
        extra: dict[str, Any] = {"label": name, "progress": not options.quiet, "mesh": options.mesh}
        extra["stream"] = stream_of(algorithm, options)
        if folder is not None:
            extra |= {"checkpoint": folder.checkpoint(name), "checkpoint_every": options.checkpoint_every}
            extra |= {"resume": folder.resume}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DivergenceWarning)  # the notes are printed below
            results[name] = plan.experiment.simulate(algorithm, plan.setup, **plan.options(name), **extra)
        for note in results[name].notes:
            print(f"warning: {note}", file=sys.stderr)
        if folder is not None:
            lead(partial(_keep, results[name], plan, folder), failed)
    table = compare(results)
    if folder is not None:
        lead(partial(_write, plan, results, table, folder), failed)
    if leads():
        _tell(plan, results, table, folder, options.json, profiles)
    return 3 if any(result.diverged for result in results.values()) else 0


def _profiles(plan: Plan, folder: Folder | None, options: argparse.Namespace) -> dict[str, Any]:
    """A profile of every method, with the trace of a few rounds."""
    from fedstrata.simulate.profile import profile

    found = {}
    for name, (algorithm, _) in plan.methods.items():
        problem = plan.experiment.problem_for(algorithm, plan.setup)
        where = {"mesh": options.mesh, "stream": stream_of(algorithm, options)}
        trace = None if folder is None else folder.profile(name)
        found[name] = profile(problem, algorithm, plan.setup.federation, **plan.options(name), folder=trace, **where)
    return found


def _files(plan: Plan) -> list[str]:
    suffixes = (".jsonl",) if plan.model is None else (".jsonl", ".npz")
    kept = [f"{name}{suffix}" for name in plan.methods for suffix in suffixes]
    return ["config.json", *kept, "table.md", "table.json", "picture.png", *plan.experiment.more_files]


def _keep(result: Result, plan: Plan, folder: Folder) -> None:
    """History and model of one method: of its best setting, first seed."""
    from fedstrata.engine.saving import save_trained

    result.history.to_jsonl(folder.path / f"{result.label}.jsonl")
    if plan.model is None:
        return
    settings = list(result.history.settings())
    ends = [float(runs.last("objective")[0]) for _, runs in settings]
    best = settings[int(np.argmin(np.where(np.isfinite(ends), ends, np.inf)))][0]
    seed = result.history.seeds[0]
    about = {"experiment": plan.experiment.name, "algorithm": result.label, "rounds": result.rounds, "seed": seed}
    about["hyperparameters"] = describe(hyperparameters(result.algorithm)) | best
    run = {**best, "seed": seed}
    trained_on = plan.experiment.trained_on(plan.setup, **run)
    save_trained(folder.path / f"{result.label}.npz", result.problem, result.solution(**run), about, trained_on)


def _write(plan: Plan, results: Mapping[str, Result], table: Comparison, folder: Folder) -> None:
    """Table and pictures of all methods."""
    folder.write("table.md", table.markdown())
    folder.write("table.json", json.dumps(table.json(), indent=2, allow_nan=False) + "\n")
    _draw(plan, results, folder.path / "picture.png")
    plan.experiment.pictures(results, plan.data, folder.path)


def _draw(plan: Plan, results: Mapping[str, Result], path: Path) -> None:
    from fedstrata.experiments.picture import picture

    clients, seeds = plan.setup.federation.clients, len(next(iter(results.values())).history.seeds)
    cohort = plan.given["cohort"] or plan.experiment.cohort
    who = f"{clients} clients" if cohort is None else f"{cohort} of {clients} clients per round"
    title = f"{plan.experiment.name}: {who}, {seeds} seed{'s' * (seeds > 1)}"
    picture({n: r.history for n, r in results.items()}, plan.experiment.panels, title, path=path)


def _tell(
    plan: Plan,
    results: Mapping[str, Result],
    table: Comparison,
    folder: Folder | None,
    as_json: bool,
    profiles: Mapping[str, Any],
) -> None:
    notes = [note for result in results.values() for note in result.notes]
    out = None if folder is None else str(folder.path)
    if as_json:
        files = [] if folder is None else _files(plan)
        about = {"experiment": plan.experiment.name, "settings": plan.settings(), "table": table.json()}
        timed = {"profiles": {name: found._asdict() for name, found in profiles.items()}} if profiles else {}
        print_json({**about, "diverged": notes, "out": out, "files": files, **timed})
        return
    short = [c for c in (*plan.experiment.panels, "bytes_up", "bytes_down", "seconds") if c in table.columns]
    console().print(compare(results, short).rich())
    for name, found in profiles.items():
        console().print(found.rich(name))
        print(f"the trace is in {found.folder}: open its .trace.json.gz in a browser with Perfetto (ui.perfetto.dev)")
    if out is not None:
        print(f"in {out}: {', '.join(f for f in _files(plan) if not f.endswith(('.jsonl', '.npz')))}, and for each")
        print("  method its history (.jsonl: `fedstrata plot`) and model (.npz: `fs.load_model`)")
