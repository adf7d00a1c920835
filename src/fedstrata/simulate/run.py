"""`fs.run`: federated training in simulation, from arguments to result."""

import itertools
import time
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, Never

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedstrata.base.directions import Mode, sign
from fedstrata.base.errors import unknown
from fedstrata.core.algorithm import Algorithm, steps_of
from fedstrata.core.fingerprint import fingerprint
from fedstrata.core.hyperparameters import with_values
from fedstrata.data.federation import Federation
from fedstrata.data.sampling import Sampler, sampler
from fedstrata.data.validation import check_federation
from fedstrata.engine.checkpoint import CheckpointError, Checkpoints
from fedstrata.engine.checks import check_grid, check_parameters, check_sizes, check_solves
from fedstrata.engine.context import Execution
from fedstrata.engine.counting import check_counted
from fedstrata.engine.ledger import ledger
from fedstrata.engine.mesh import mesh_of
from fedstrata.engine.participation import Selection
from fedstrata.engine.privacy import Privacy
from fedstrata.engine.start_points import check_fit, start_points
from fedstrata.problems.base import Problem
from fedstrata.problems.weighting import Weights
from fedstrata.report.progress import Progress
from fedstrata.simulate import checks
from fedstrata.simulate.autotune import choose_execution
from fedstrata.simulate.batching import Runs, threads_for
from fedstrata.simulate.driver import Callback, Driver
from fedstrata.simulate.evaluate import measure, modes_of
from fedstrata.simulate.executable import Executable
from fedstrata.simulate.inputs import inputs_of, out_of_core
from fedstrata.simulate.multiprocess import agreed, lead, leads
from fedstrata.simulate.options import RunOptions
from fedstrata.simulate.out_of_core.executable import OutOfCoreExecutable
from fedstrata.simulate.result import DivergenceWarning, Result
from fedstrata.simulate.resume import restore, settings_of
from fedstrata.simulate.state import ProgramOptions
from fedstrata.simulate.sweep import repeat_runs, seed_list, stacked_settings

RECORDS = 64  # evaluations that one segment may hold


def run(
    problem: Problem,
    algorithm: Algorithm,
    federation: Federation,
    *,
    # what to run
    rounds: int,
    params: Any = None,
    seeds: int | Sequence[int] = 1,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    label: str | None = None,
    # data and sampling
    batch_size: int | Literal["all"] | Sampler = 32,
    sampling: Literal["replacement", "epochs"] = "replacement",
    cohort: int | Selection | None = None,
    weights: Weights = "uniform",
    privacy: Privacy | None = None,
    # evaluation
    evaluate_every: int | None = None,
    evaluate: Sequence[str] | None = None,
    monitor: Problem | None = None,
    stationarity: bool = True,
    per_client: bool = False,
    select: str | None = None,
    mode: Mode = "auto",
    patience: int | None = None,
    explosion: float = 1e6,
    callbacks: Sequence[Callback] = (),
    progress: bool = False,
    # where to run
    execution: Execution = "auto",
    mesh: int | Literal["all"] | Mesh | None = None,
    stream: bool | None = None,
    # checkpoints
    checkpoint: str | PathLike[str] | None = None,
    checkpoint_every: float = 30.0,
    resume: bool = False,
    **unknown_options: Never,
) -> Result:
    """Train on a federation, in simulation; the whole run is one compiled program.

    Warns (`fs.SetupWarning`) if an algorithm sends nothing up or a batch has more than 20 times the rows of a client;
    warns (`fs.DivergenceWarning`) if runs diverge, or end above their start by more than 10 × max(|start|, 1).

    Args:
        problem: what to minimise.
        algorithm: how.
        federation: on whose data.
        rounds: communication rounds.
        params: start values: a pytree, which may be an equinox module, or a function of a key. None: the start of the
            problem's model.
        seeds: how many, or which: `seeds=10` runs seeds 0 … 9 in one program.
        sweep: values of real hyper-parameters to run in the same program, `{"step_size": [0.1, 0.01]}`; the history
            has labelled axes.
        label: the name of the result in tables and plots; the algorithm's, if left out.
        batch_size: examples per local step, "all" for whole shards, or a Sampler.
        sampling: draw examples with "replacement" or in "epochs".
        cohort: clients per round: None for all, a number, or a rule such as `fs.participation.Weighted`.
        weights: "uniform" (every client counts the same, as in the papers) or "size".
        privacy: clip what clients change and add noise to its mean (`fs.Privacy`); `Result.privacy` has the ε.
        evaluate_every: rounds between exact evaluations; about 100 evaluations in all, if left out.
        evaluate: splits to evaluate on beside those that are trained on; all, if left out.
        monitor: another problem to evaluate on.
        stationarity: record the exact stationarity measure too.
        per_client: record every client's metrics too.
        select: keep the solution that is best on this column, say "valid/loss".
        mode: the better end of that column, "max" or "min"; "auto": as the column declares.
        patience: stop after this many evaluations without improvement of `select`.
        explosion: an objective that grows by this factor counts as diverged.
        callbacks: functions of (round, row), called for every recorded round.
        progress: show a progress bar.
        execution: run a round's clients by "vmap", "map" or in chunks of a given size; "auto" measures.
        mesh: spread the clients, with their data and state, over "all" devices or a number of them, in one process or
            several.
        stream: keep data and `Local` fields on the host, and copy only the cohort's; if left out, only if the data
            would fill half of the device.
        checkpoint: a folder for checkpoints.
        checkpoint_every: seconds between them.
        resume: continue from the newest checkpoint in the folder.
        **unknown_options: refused, with the nearest known name.

    Returns:
        The history, the solutions, the last state and how every run ended.
    """
    given = dict(locals())
    options = RunOptions.of("fs.run", {n: v for n, v in given.items() if n not in _POSITIONAL} | unknown_options)
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
    options = options.as_saved(saved)
    executable = prepare(problem, algorithm, federation, options)
    if executable.context.spread is None and not executable.inputs.out_of_core:
        executable = executable._replace(threads=saved.get("threads", executable.threads))
    settings = settings_of(executable, problem, algorithm, federation, options) if store else {}
    settings |= {"threads": saved["threads"]} if saved else {}  # another machine may continue it
    if store is not None:
        size = executable.state_bytes()
        lead(lambda: store.prepare(size), CheckpointError(f"the first process cannot write to {store.folder}"))
    began = time.perf_counter()
    driver = restore(executable, store, settings) if store and resume else None
    driver = driver or Driver.start(executable)
    name = label or type(algorithm).__name__
    compile_seconds = time.perf_counter() - began + driver.compile()
    with Progress(executable.rounds, name, start=driver.round, quiet=not (progress and leads())) as bar:
        last_save = time.perf_counter()
        while not driver.finished():
            driver.segment(callbacks)
            bar.update(driver.round, driver.objective(), driver.bytes_sent())
            if store and (driver.finished() or agreed(time.perf_counter() - last_save) > checkpoint_every):
                try:
                    _save(store, driver, settings)
                except CheckpointError as error:
                    error.result = driver.result(name, algorithm, compile_seconds)
                    raise
                last_save = time.perf_counter()
    result = driver.result(name, algorithm, compile_seconds)
    result.privacy, result.federation = executable.spent(result.rounds), federation
    if result.notes:
        warnings.warn("\n".join(result.notes), DivergenceWarning, stacklevel=2)
    return result


def _save(store: Checkpoints, driver: Driver, settings: Mapping[str, Any]) -> None:
    """Write a checkpoint: every process gathers the state, and the first one writes it."""
    arrays, paths = driver.saved()
    failed = CheckpointError(f"the first process could not write the checkpoint of round {driver.round}")
    lead(lambda: store.save(driver.round, arrays, settings, paths), failed)


_POSITIONAL = ("problem", "algorithm", "federation", "unknown_options")


def prepare(problem: Problem, algorithm: Algorithm, federation: Federation, options: RunOptions) -> Executable:
    """Check everything that can be checked without running, and build the executable."""
    exchanges = check_solves(algorithm, problem)
    check_federation(federation)
    checks.check_options(options)
    seeds, sweep = seed_list(options.seeds), options.sweep or {}
    points = start_points(problem, options.params, seeds)
    x0 = jax.tree.map(lambda a: a[0], points)
    dtype = x0.scalar_dtype
    check_parameters(points)
    check_sizes(federation)
    check_fit(problem, x0)
    problem.check(x0, federation)
    name = lambda problem: "" if problem is None else fingerprint(problem, federation, options.weights)
    minimised = name(problem), name(options.monitor)
    rule = sampler(options.batch_size, options.sampling)
    problem = problem.bind(x0, federation, rule)
    drawn = [federation[split].counts for split in problem.streams.values() if split in federation.splits]
    rule.check_length(options.rounds, steps_of(algorithm), max((int(np.max(c)) for c in drawn), default=0))
    mesh = mesh_of(options.mesh)
    host = out_of_core(options.stream, algorithm, federation, mesh)
    inputs = inputs_of(
        problem, algorithm, federation, options, exchanges=exchanges, rule=rule, dtype=dtype, mesh=mesh, host=host
    )
    if not algorithm.centralised:
        checks.warn_of_large_batch(problem, federation, rule)
    values, static, axes = stacked_settings(algorithm, sweep, seeds, dtype)
    for setting in itertools.product(*sweep.values()):
        with_values(algorithm, **dict(zip(sweep, setting, strict=True))).check(problem)
    check_counted(inputs.context, {name: split.size for name, split in federation.splits.items()})
    every = options.evaluate_every or max(1, -(-options.rounds // 100))
    fixed = ProgramOptions(
        records=8 if options.per_client else RECORDS,
        stationarity=options.stationarity,
        per_client=options.per_client,
        patience=options.patience,
        explosion=float(options.explosion),
    )
    all_x0, keys = repeat_runs(points, seeds, int(np.prod([len(v) for v in axes.values()])))
    runs = Runs(inputs.with_algorithm(static), fixed, values, all_x0, keys, len(seeds))
    template = runs.template()
    check_grid(runs.inputs.context, template)
    sent = ledger(runs.inputs.context, template)
    kind = OutOfCoreExecutable if host else Executable
    executable = kind(runs, axes, sent, int(options.rounds), int(every), minimised=minimised)
    if mesh is not None:
        executable = executable.on_mesh(mesh)
    elif not host:
        executable = executable._replace(threads=threads_for(executable.settings, len(seeds)))
    if options.select is not None:
        single = [name for name, value in recorded(executable).items() if not value.shape]
        if options.select not in single:
            raise unknown("column to select by", options.select, single)
        to_max = sign(options.select, options.mode, modes_of(problem, algorithm, options.monitor))
        fixed = fixed._replace(select=options.select, sign=to_max)
        executable = executable.with_options(fixed)
    return choose_execution(executable, options.execution)


def recorded(executable: Executable) -> dict[str, Any]:
    """Shapes and dtypes of the columns that an evaluation of one run records."""
    plain = executable.with_options(executable.runs.options._replace(select=None))
    carry = plain.shapes()
    local = {} if plain.inputs.out_of_core else carry.local
    state = jax.tree.map(lambda a: jnp.zeros(a.shape[1:], a.dtype), (carry.shared, local))
    runs = plain.runs
    return jax.eval_shape(lambda: measure(runs.inputs, runs.options, runs.first_context(), *state)[1])
