"""`fs.run`: federated training in simulation, from arguments to result."""

import inspect
import itertools
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np

from fedstrata.algorithm import Algorithm, steps_of, with_values
from fedstrata.data.federation import Federation
from fedstrata.data.sampling import sampler
from fedstrata.directions import Mode, sign
from fedstrata.errors import unknown
from fedstrata.problems.base import Problem
from fedstrata.report.progress import Progress
from fedstrata.runtime import checks
from fedstrata.runtime.checkpoint import CheckpointError, Checkpoints
from fedstrata.runtime.counting import check_counted
from fedstrata.runtime.describe import fingerprint
from fedstrata.runtime.evaluate import measure, modes_of
from fedstrata.runtime.execution import settle
from fedstrata.runtime.job import Job, ledger_of, repeat_runs, seed_list, spread, start_points
from fedstrata.runtime.mesh import mesh_of
from fedstrata.runtime.prepare import Weights, check_parameters, check_sizes, check_solves, streams, world_of
from fedstrata.runtime.processes import agreed, leads, together
from fedstrata.runtime.progress import Callback, Run
from fedstrata.runtime.result import DivergenceWarning, Result
from fedstrata.runtime.resume import config_of, restore
from fedstrata.runtime.runs import threads_for
from fedstrata.runtime.streamed import Streamed
from fedstrata.runtime.world import Plan
from fedstrata.transport.privacy import Privacy

RECORDS = 64  # evaluations that one segment may hold


def prepare(
    problem: Problem,
    algorithm: Algorithm,
    federation: Federation,
    *,
    rounds: int,
    params: Any = None,
    batch_size: Any = 32,
    sampling: str = "replacement",
    cohort: Any = None,
    weights: Weights = "uniform",
    seeds: int | Sequence[int] = 1,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    evaluate_every: int | None = None,
    evaluate: Sequence[str] | None = None,
    monitor: Problem | None = None,
    stationarity: bool = True,
    per_client: bool = False,
    select: str | None = None,
    mode: Mode = "auto",
    patience: int | None = None,
    explosion: float = 1e6,
    execution: Any = "auto",
    mesh: Any = None,
    stream: bool | None = None,
    privacy: Privacy | None = None,
) -> Job:
    """Check everything that can be checked without running, and lay out the program. `fs.run` calls it."""
    check_solves(algorithm, problem)
    checks.check_federation(federation)
    given = {"evaluate_every": evaluate_every, "patience": patience}
    checks.check_whole(rounds=rounds, **{name: value for name, value in given.items() if value is not None})
    checks.check_evaluation(evaluate, monitor, select, explosion)
    if patience is not None and select is None:
        raise ValueError('patience needs select, the column to watch, e.g. select="valid/loss"')
    if mode != "auto" and select is None:
        raise ValueError(f'mode={mode!r} needs select, the column that it is about, e.g. select="valid/loss"')
    listed = seed_list(seeds)
    points = start_points(problem, params, listed)
    x0 = jax.tree.map(lambda a: a[0], points)
    check_parameters(points)
    check_sizes(federation)
    checks.check_fit(problem, x0)
    problem.check(x0, federation)
    said = lambda problem: "" if problem is None else fingerprint(problem, federation, weights)
    minimised = said(problem), said(monitor)
    rule = sampler(batch_size, sampling)
    problem = problem.bind(x0, federation, rule)
    drawn = [federation[split].counts for split in problem.streams.values() if split in federation.splits]
    rule.check_length(rounds, steps_of(algorithm), max((int(np.max(counts)) for counts in drawn), default=0))
    over = mesh_of(mesh)
    host = streams(stream, algorithm, federation, over)
    dtype = x0.scalar_dtype
    given = (rule, cohort, weights, monitor, evaluate, dtype, over, host, privacy)
    world = world_of(problem, algorithm, federation, *given)
    if not algorithm.centralised:
        checks.warn_of_large_batch(problem, federation, rule)
    values, rest, axes = spread(algorithm, sweep or {}, listed, x0.scalar_dtype)
    for setting in itertools.product(*(sweep or {}).values()):
        with_values(algorithm, **dict(zip(sweep or {}, setting, strict=True))).check(problem)
    all_x0, keys = repeat_runs(points, listed, int(np.prod([len(v) for v in axes.values()])))
    every = evaluate_every or max(1, -(-rounds // 100))
    plan = Plan(
        records=8 if per_client else RECORDS,
        stationarity=stationarity,
        per_client=per_client,
        patience=patience,
        explosion=float(explosion),
    )
    check_counted(world, algorithm, {name: split.size for name, split in federation.splits.items()})
    kind, paid = Streamed if host else Job, ledger_of(world, algorithm, x0)
    job = kind(world, plan, values, rest, all_x0, keys, axes, paid, int(rounds), int(every), minimised=minimised)
    if over is not None:
        job = job.over(over)
    elif not host:
        job = job._replace(threads=threads_for(job.runs // job.seeds, job.seeds))
    if select is not None:
        single = [name for name, value in recorded(job).items() if not value.shape]
        if select not in single:
            raise unknown("column to select by", select, single)
        to_max = sign(select, mode, modes_of(problem, algorithm, monitor))
        job = job._replace(plan=plan._replace(select=select, sign=to_max))
    return settle(job, execution)


def recorded(job: Job) -> dict[str, Any]:
    """Shapes and dtypes of the columns that an evaluation of one run records."""
    carry = job._replace(plan=job.plan._replace(select=None)).shapes()
    local = {} if job.world.streamed else carry.local
    state = jax.tree.map(lambda a: jax.numpy.zeros(a.shape[1:], a.dtype), (carry.shared, local))
    algorithm = eqx.combine(jax.tree.map(lambda a: a[0], job.values), job.rest)
    return jax.eval_shape(lambda: measure(job.world, algorithm, job.plan, *state)[1])


def run(
    problem: Problem,
    algorithm: Algorithm,
    federation: Federation,
    *,
    rounds: int,
    label: str | None = None,
    checkpoint: Any = None,
    checkpoint_every: float = 30.0,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    progress: bool = False,
    **options: Any,
) -> Result:
    """Train on a federation, in simulation; the whole run is one compiled program.

    problem, algorithm, federation: what to minimise, how, on whose data. rounds: communication rounds.
    params: start values (a pytree, which may be an equinox module, or a function of a key); None asks the problem's
    model.
    batch_size: examples per local step, "all" for whole shards, or a Sampler. sampling: "replacement" or "epochs".
    cohort: clients per round: None for all, a number, or a rule (`fs.cohort.Weighted`, `fs.cohort.Given`).
    weights: "uniform" (every client the same, as in the papers) or "size".
    seeds, sweep: `seeds=10`, `sweep={"step_size": [0.1, 0.01]}` run as one program; the history has labelled axes.
    evaluate_every: rounds between exact evaluations (default: about 100 in all). evaluate: extra splits (default: all).
    monitor: another problem to evaluate on. per_client: record every client's metrics too.
    select, patience: keep the solution that is best on a column ("valid/loss"), and stop when it no longer improves.
    mode: whether that column is best at its "max" or its "min"; "auto": as it declares (`fs.Metric` declares your own).
    execution: clients by "vmap", "map", a chunk size, or "auto".
    mesh: spread the clients, with their data and state, over "all" devices or so many, in one process or several.
    stream: leave data and clients' own state on the host, where only the cohort's travel (default: if they are large).
    privacy: clip what clients change and noise its mean (`fs.Privacy`); `Result.privacy` says the ε.
    checkpoint, checkpoint_every, resume: a folder, seconds between checkpoints, and whether to go on from the last.
    callbacks: functions of (round, row), called for every recorded round. progress: show a progress bar.

    Warns (`fs.SetupWarning`) of an algorithm that sends nothing up and of a batch that is more than 20 times the rows
    of a client; (`fs.DivergenceWarning`) of runs that diverge, or end above their start by more than
    10 × max(|start|, 1).
    """
    for_prepare(options, "fs.run")
    if not all(map(callable, callbacks if np.iterable(callbacks) else [None])):
        raise TypeError(f"callbacks={callbacks!r} must be a list of functions of (round, row)")
    checks.check_checkpoint(checkpoint, checkpoint_every)
    store = None if checkpoint is None else Checkpoints(checkpoint)
    if store is not None and not resume and store.rounds():
        raise CheckpointError(
            f"{store.folder} already holds checkpoints; give resume=True (on the command line --resume) to continue "
            "that run, or choose another folder"
        )
    saved = store.config() if store and resume else {}
    if saved:  # what was chosen for it, by its length or on another machine, is kept
        options["evaluate_every"] = options.get("evaluate_every") or saved["every"]
        options["execution"] = (
            saved["execution"] if options.get("execution", "auto") == "auto" else options["execution"]
        )
    job = prepare(problem, algorithm, federation, rounds=rounds, **options)
    if job.world.spread is None and not job.world.streamed:
        job = job._replace(threads=saved.get("threads", job.threads))
    config = config_of(job, problem, algorithm, federation, options) if store else {}
    config |= {"threads": saved["threads"]} if saved else {}  # another machine may go on with it
    if store is not None:
        if leads():
            store.prepare(job.state_bytes())
        together("prepared")
    began = time.perf_counter()
    state = restore(job, store, config) if store and resume else None
    state = state or Run.start(job)
    name = label or type(algorithm).__name__
    compile_seconds = time.perf_counter() - began + state.compile()
    with Progress(job.rounds, name, start=state.round, quiet=not (progress and leads())) as bar:
        last_save = time.perf_counter()
        while not state.finished():
            state.segment(callbacks)
            bar.update(state.round, state.objective(), state.bytes_sent())
            if store and (state.finished() or agreed(time.perf_counter() - last_save) > checkpoint_every):
                arrays = state.arrays()
                try:
                    if leads():
                        store.save(state.round, arrays, config)
                except CheckpointError as error:
                    error.result = state.result(name, algorithm, compile_seconds)
                    raise
                last_save = time.perf_counter()
    result = state.result(name, algorithm, compile_seconds)
    result.privacy, result.federation = job.spent(result.rounds), federation
    if result.notes:
        warnings.warn("\n".join(result.notes), DivergenceWarning, stacklevel=2)
    return result


def for_prepare(options: Mapping[str, Any], who: str) -> dict[str, Any]:
    """The options that lay out a program, without those of `fs.run` alone; an unknown one is refused."""
    known = inspect.signature(prepare).parameters
    every = {*known, *inspect.signature(run).parameters} - {"options"}
    for name in options:
        if name not in every:
            raise unknown(f"option of {who}", name, every)
    return {name: value for name, value in options.items() if name in known}
