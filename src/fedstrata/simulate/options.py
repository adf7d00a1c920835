"""The options of a run, declared once: `fs.run` documents them, `estimate`, `profile` and `tune` share them."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

from fedstrata.base.directions import Mode
from fedstrata.base.errors import unknown
from fedstrata.data.sampling import Sampler
from fedstrata.engine.context import Execution
from fedstrata.engine.participation import Selection
from fedstrata.engine.privacy import Privacy
from fedstrata.problems.base import Problem
from fedstrata.problems.weighting import Weights

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options that determine the program of a run, shared by `fs.run`, `estimate`, `profile` and `tune`.

    Args:
        rounds: communication rounds.
        params: start values, or a function of a key.
        batch_size: examples per local step, "all", or a Sampler.
        sampling: with "replacement" or in "epochs".
        cohort: clients per round: None for all, a number, or a rule.
        weights: "uniform" or "size".
        seeds: how many, or which.
        sweep: values of real hyper-parameters to run in the same program.
        evaluate_every: rounds between exact evaluations.
        evaluate: splits to evaluate on.
        monitor: another problem to evaluate on.
        stationarity: record the exact stationarity measure.
        per_client: record every client's metrics.
        select: keep the solution that is best on this column.
        mode: the better end of that column, "max" or "min".
        patience: stop after this many evaluations without improvement.
        explosion: an objective that grows by this factor counts as diverged.
        execution: "vmap", "map", a chunk size, or "auto".
        mesh: devices to spread the clients over.
        stream: keep data and `Local` fields on the host.
        privacy: clip and add noise (`fs.Privacy`).
    """

    rounds: int
    params: Any = None
    batch_size: int | Literal["all"] | Sampler = 32
    sampling: Literal["replacement", "epochs"] = "replacement"
    cohort: int | Selection | None = None
    weights: Weights = "uniform"
    seeds: int | Sequence[int] = 1
    sweep: Mapping[str, Sequence[Any]] | None = None
    evaluate_every: int | None = None
    evaluate: Sequence[str] | None = None
    monitor: Problem | None = None
    stationarity: bool = True
    per_client: bool = False
    select: str | None = None
    mode: Mode = "auto"
    patience: int | None = None
    explosion: float = 1e6
    execution: Execution = "auto"
    mesh: Any = None
    stream: bool | None = None
    privacy: Privacy | None = None

    @classmethod
    def of(cls, who: str, given: Mapping[str, Any]) -> "RunOptions":
        """Options by name. Those of `fs.run` alone are ignored; unknown ones are refused.

        >>> RunOptions.of("fs.run", {"rounds": 3, "sedes": 2})
        Traceback (most recent call last):
        ValueError: unknown option of fs.run 'sedes'; did you mean seeds ...
        """
        names = [f.name for f in dataclasses.fields(cls)]
        for name in given:
            if name not in names and name not in RUN_ONLY:
                raise unknown(f"option of {who}", name, [*names, *RUN_ONLY])
        if "rounds" not in given:
            raise TypeError(f"{who} needs rounds, the number of communication rounds: rounds=100")
        return cls(**{name: value for name, value in given.items() if name in names})

    def as_saved(self, saved: Mapping[str, Any]) -> "RunOptions":
        """Fill in the values chosen for a saved run, by its length or on another machine, unless they are given."""
        if not saved:
            return self
        execution = saved["execution"] if self.execution == "auto" else self.execution
        return dataclasses.replace(self, evaluate_every=self.evaluate_every or saved["every"], execution=execution)

    def given(self) -> dict[str, Any]:
        """All options by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


# The other arguments of `fs.run`. They do not change the program.
RUN_ONLY = ("label", "checkpoint", "checkpoint_every", "resume", "callbacks", "progress")


def defaults() -> dict[str, Any]:
    """The default values of options that have one."""
    return {f.name: f.default for f in dataclasses.fields(RunOptions) if f.default is not dataclasses.MISSING}


def takes_run_options(function: F) -> F:
    """Decorate a function whose `**options` are those of a run: its signature shows them all."""
    own = inspect.signature(function)
    named = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    taken = {p.name for p in named}
    default_of = lambda f: inspect.Parameter.empty if f.default is dataclasses.MISSING else f.default
    shared = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=default_of(f), annotation=f.type)
        for f in dataclasses.fields(RunOptions)
        if f.name not in taken
    ]

    @functools.wraps(function)
    def with_options(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    shown = cast(Any, with_options)
    shown.__signature__ = own.replace(parameters=[*named, *shared])
    return shown
