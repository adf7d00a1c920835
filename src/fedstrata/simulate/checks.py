"""Checks of the arguments of `fs.run`, before compilation. Every message names the argument and the remedy."""

import warnings
from collections.abc import Sequence
from numbers import Real
from os import PathLike
from typing import Any

import numpy as np

from fedstrata.base.errors import SetupWarning
from fedstrata.data.federation import Federation
from fedstrata.data.sampling import Sampler, WithReplacement
from fedstrata.problems.base import Problem
from fedstrata.simulate.options import RunOptions

FAR = 20  # a batch of more than this many times a client's rows is reported


def check_whole(**given: Any) -> None:
    """Whole numbers of at least one."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number >= 1")


def warn_of_large_batch(problem: Problem, federation: Federation, rule: Sampler) -> None:
    """A batch drawn with replacement should not be far larger than a client's shard: its rows would only come again."""
    if not isinstance(rule, WithReplacement):
        return
    for split in sorted({*problem.streams.values()}):
        counts = np.asarray(federation[split].counts)
        counts = np.where(counts > 0, counts, counts.max())  # clients without rows draw none
        client = int(counts.argmin())
        if rule.batch_size > FAR * counts[client]:
            few = int((rule.batch_size > FAR * counts).sum())
            warnings.warn(
                f"batch_size={rule.batch_size} is more than {FAR} times the {counts[client]} rows of "
                f"{federation.names[client]!r} in {split!r}, the smallest of {few} such clients: with replacement "
                'every row is drawn many times in one step; choose a smaller batch, or batch_size="all"',
                SetupWarning,
                stacklevel=4,
            )


def check_options(options: RunOptions) -> None:
    """Refuse options that have the wrong type or do not go together."""
    given = {"evaluate_every": options.evaluate_every, "patience": options.patience}
    check_whole(rounds=options.rounds, **{name: value for name, value in given.items() if value is not None})
    evaluate, monitor, select, explosion = options.evaluate, options.monitor, options.select, options.explosion
    if isinstance(evaluate, str) or not isinstance(evaluate, Sequence | set | None):
        raise TypeError(f"evaluate={evaluate!r} must be a list of splits, e.g. ['test'] (default: all)")
    if not isinstance(monitor, Problem | None):
        raise TypeError(f"monitor={monitor!r} is not a Problem; give one to evaluate on, e.g. fs.Average(loss)")
    if not isinstance(select, str | None):
        raise TypeError(f"select={select!r} must name a column of the history, e.g. 'valid/loss'")
    if not isinstance(explosion, Real) or not float(explosion) > 0:
        raise ValueError(f"explosion={explosion!r} must be a number > 0, the factor by which an objective may grow")
    if options.patience is not None and select is None:
        raise ValueError('patience needs select, the column to watch, e.g. select="valid/loss"')
    if options.mode != "auto" and select is None:
        raise ValueError(f'mode={options.mode!r} needs select, the column it applies to, e.g. select="valid/loss"')


def check_checkpoint(checkpoint: Any, every: Any) -> None:
    """`checkpoint` must be a folder or None, `checkpoint_every` a number of seconds."""
    if not isinstance(checkpoint, str | PathLike | None):
        raise TypeError(f"checkpoint={checkpoint!r} must be a folder, or None for no checkpoints")
    if not isinstance(every, Real) or not float(every) >= 0:
        raise ValueError(f"checkpoint_every={every!r} must be a number of seconds >= 0")
