"""Run an experiment: compare methods on a federation, with a table, pictures and trained models.

examples:
  fedstrata run digits                                          the experiment's methods; prints the table
  fedstrata run digits --out out/digits                         also writes histories, table, picture, models
  fedstrata run digits --algorithm FedAvg --set step_size=0.1 --rounds 50
  fedstrata run digits --algorithm FedAvg --sweep step_size=0.01,0.1,1 --seeds 5    one program for all 15 runs
  fedstrata run digits --algorithm my_package.methods:MyMethod --set step_size=0.1    your own method
  fedstrata run my_experiment.py                                a file that defines EXPERIMENT
  fedstrata run digits --data alpha=0.1 --cohort 5              more skew, five clients per round
  fedstrata run digits --out out/digits --resume                resume after an interruption, bit-identically
  fedstrata run mnist --dry-run                                 memory, traffic and time, without running
  fedstrata run mnist --mesh all                                clients over all devices (see `fedstrata launch`)

In --out: METHOD.jsonl (history), METHOD.npz (model, for fs.load_model), table.md, table.json, picture.png,
config.json and checkpoints/. Exit code 3: a method diverged (the others finished).
"""

import argparse
import os
import warnings

from fedstrata.cli.parsing import (
    Mistake,
    assignments,
    batch,
    json_option,
    mesh,
    numbers,
    seconds,
    seeds,
    typed_all,
    whole,
)

_SHAPE = (
    '{"experiment", "settings", "table": {"columns", "rows": [{"label", "setting", "seeds", "values": {COLUMN: '
    '{"mean", "std", "best"}}}], "notes"}, "diverged": [notes, also on runs that got worse], "out", '
    '"files"}; with --profile also "profiles": {METHOD: '
    '{"data", "compile", "seconds": {PART: s}, "folder"}}; with --dry-run {"experiment", "methods": '
    '[{"method", "memory_bytes", "up_bytes", "down_bytes", "seconds", "compile_seconds", "execution", "why"}]}'
)


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "experiment",
        metavar="EXPERIMENT",
        help="a name from `fedstrata list experiments`, or a Python file that defines EXPERIMENT",
    )
    method = "a method to run: a name from `fedstrata list algorithms`, package.module:Class or file.py:Class; may be "
    add("--algorithm", action="append", metavar="A", help=f"{method}repeated (default: those of the experiment)")
    values = "a hyper-parameter of every method that has it, or METHOD.NAME=VALUE; may be repeated"
    add("--set", action="append", default=[], metavar="NAME=VALUE", help=values)
    add("--sweep", action="append", default=[], metavar="NAME=V1,V2", help="run all these values in one program")
    add("--data", action="append", default=[], metavar="NAME=VALUE", help="how the data are made, e.g. clients=50")
    add("--rounds", type=whole(1), metavar="N", help="communication rounds")
    add("--seeds", type=seeds, metavar="K", help="how many seeds, or which (4,5,6)")
    add("--cohort", type=whole(1), metavar="M", help="clients that take part in a round, drawn at random")
    add("--batch-size", type=batch, metavar="B", help="examples per client and local step, or all")
    add("--evaluate-every", type=whole(1), metavar="K", help="rounds between evaluations (default: 100 in all)")
    add("--local-steps", type=whole(1), metavar="Q", help="the same as --set local_steps=Q")
    add("--mesh", type=mesh, metavar="D", help="spread the clients over so many devices, or all")
    add(
        "--stream",
        action="store_true",
        default=None,
        help="leave data and clients' state on the host",
    )
    add("--join", action="store_true", help="share the run with the other processes that a cluster's launcher started")
    add("--out", metavar="DIR", help="folder for everything the run leaves")
    add("--resume", action="store_true", help="continue the run in --out, or start it")
    add("--force", action="store_true", help="replace the run in --out")
    add("--checkpoint-every", type=seconds, default=30.0, metavar="S", help="seconds between checkpoints (default: 30)")
    add("--profile", action="store_true", help="show where the time goes, from a trace of a few rounds")
    add("--dry-run", action="store_true", help="estimate memory, traffic and time, and run nothing")
    add(
        "--no-cache",
        action="store_true",
        help="compile afresh, instead of keeping compiled programs in the user's cache",
    )
    add("--quiet", action="store_true", help="no progress bar")
    json_option(parser, _SHAPE)


def execute(options: argparse.Namespace) -> int:
    from fedstrata import experiments
    from fedstrata.cli.run_folder import Folder

    experiment = experiments.get(options.experiment)
    words = assignments(options.set, "--set")
    if options.local_steps is not None:
        words = assignments([*options.set, f"local_steps={options.local_steps}"], "--set")
    sweep = {k: numbers(v, f"--sweep {k}") for k, v in assignments(options.sweep, "--sweep").items()}
    data = assignments(options.data, "--data")
    data = typed_all(data, experiment.options(), "--data", f"data option of {experiment.name}")
    if both := sorted(words.keys() & sweep.keys()):
        raise Mistake(f"{both[0]} is both set and swept; choose one of --set and --sweep")
    if options.resume and options.force:
        raise Mistake("--resume continues a run and --force replaces it; choose one")
    if options.out is None and (options.resume or options.force):
        raise Mistake(f"--{'resume' if options.resume else 'force'} needs --out, the folder of the run")
    if options.join or "FEDSTRATA_COORDINATOR" in os.environ:
        from fedstrata.simulate import multiprocess as processes

        processes.join()
    folder = None if options.out is None else Folder(options.out, resume=options.resume, force=options.force)
    if folder is not None and folder.resume and folder.saved is not None and options.evaluate_every is None:
        options.evaluate_every = folder.saved["settings"].get(
            "evaluate_every"
        )  # as before, also if the run is extended

    from fedstrata.base.compilation import configure  # from here on everything needs JAX
    from fedstrata.base.errors import SetupWarning
    from fedstrata.cli import run_methods

    configure(cache=not options.no_cache)
    plan = run_methods.Plan.of(experiment, options, words, sweep, data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SetupWarning)  # the plan has printed them
        return run_methods.estimate(plan, options.json) if options.dry_run else run_methods.run(plan, folder, options)
