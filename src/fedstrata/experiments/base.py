"""What an experiment is: data and a problem, the methods to compare, and how long to run them."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

from fedstrata.errors import unknown

if TYPE_CHECKING:
    from fedstrata.algorithm import Algorithm
    from fedstrata.data.federation import Federation
    from fedstrata.problems.base import Problem
    from fedstrata.runtime.result import Result


class Setup(NamedTuple):
    """What is minimised, and on whose data."""

    problem: "Problem"
    federation: "Federation"


@dataclass(frozen=True)
class Experiment:
    """A federation, a problem and settings under which methods are compared.

    `build` takes keyword options with defaults (how data are made and divided). `methods` are run unless others are
    asked for, with hyper-parameters that were all chosen in the same way; `common` is for every other algorithm.
    """

    name: str
    summary: str
    build: Callable[..., Setup]
    rounds: int
    methods: Mapping[str, Mapping[str, Any]]
    common: Mapping[str, Any]
    batch_size: int | str = 32
    cohort: int | None = None
    seeds: int = 3
    panels: tuple[str, ...] = ("objective", "test/accuracy")  # columns to draw and to show in the short table
    more_files: tuple[str, ...] = ()  # names of what `pictures` draws
    grids: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)  # for `experiments.tuning`

    def options(self) -> dict[str, Any]:
        """The types of `build`'s options by name."""
        hints = get_type_hints(self.build)
        return {name: hints[name] for name in inspect.signature(self.build).parameters}

    def settings(self, algorithm: "type[Algorithm]") -> dict[str, Any]:
        """Hyper-parameters for an algorithm: its own, those of the method it extends, or the common ones."""
        extended = next((cls.__name__ for cls in algorithm.__mro__ if cls.__name__ in self.methods), None)
        given = {**self.common, **(self.methods[extended] if extended else {})}
        fields = {f.name for f in dataclasses.fields(algorithm)}
        return {name: value for name, value in given.items() if name in fields}

    def algorithm(self, name: str, **values: Any) -> "Algorithm":
        """An algorithm by name, with this experiment's hyper-parameters unless others are given."""
        from fedstrata.algorithms import known

        if name not in known():
            raise unknown("algorithm", name, known())
        cls = known()[name]
        fields = {f.name: f for f in dataclasses.fields(cls)}
        for value in values:
            if value not in fields:
                raise unknown(f"hyper-parameter of {name}", value, fields)
        given = {**self.settings(cls), **values}
        missing = [n for n, f in fields.items() if n not in given and _needed(f)]
        if missing:
            raise ValueError(
                f"{name}: {self.name} has no default for {', '.join(missing)}; give a value (--set {missing[0]}=...)"
            )
        return cls(**given)

    def run_options(self, algorithm: "Algorithm", setup: Setup, **changed: Any) -> dict[str, Any]:
        """The options of `fs.run`, where `changed` overrides those that are not None.

        A centralised method takes as many examples per step as the clients of a round do together, so that the
        reference uses the same number of gradients.
        """
        chosen = {"rounds": self.rounds, "batch_size": self.batch_size, "cohort": self.cohort, "seeds": self.seeds}
        chosen |= {name: value for name, value in changed.items() if value is not None}
        if algorithm.centralised:
            cohort, size = chosen.pop("cohort"), chosen["batch_size"]
            clients = cohort if isinstance(cohort, int) else setup.federation.clients
            chosen["batch_size"] = size * clients if isinstance(size, int) else size
        return chosen

    def run(self, algorithm: "str | Algorithm", setup: Setup | None = None, **options: Any) -> "Result":
        """`fs.run` on this experiment: `get("digits").run("FedAvg", rounds=50, seeds=1)`."""
        setup = self.build() if setup is None else setup
        method = self.algorithm(algorithm) if isinstance(algorithm, str) else algorithm
        return self.simulate(method, setup, **self.run_options(method, setup, **options))

    def problem_for(self, algorithm: "Algorithm", setup: Setup) -> "Problem":
        """What this algorithm is run on; an experiment may have several views of the same task."""
        return setup.problem

    def simulate(self, algorithm: "Algorithm", setup: Setup, **options: Any) -> "Result":
        """`fs.run` with these options; an experiment may do more."""
        from fedstrata.runtime.run import run

        return run(self.problem_for(algorithm, setup), algorithm, setup.federation, **options)

    def trained_on(self, setup: Setup, **labels: Any) -> "Federation":
        """The training data of one run, named by its seed and swept values."""
        return setup.federation

    def pictures(self, results: "Mapping[str, Result]", data: Mapping[str, Any], folder: Any) -> None:
        """Draw `more_files` into the folder, beside the usual picture."""


def grids(
    steps: tuple[float, ...], *, mu: tuple[float, ...], server_step_size: tuple[float, ...]
) -> dict[str, dict[str, tuple[float, ...]]]:
    """What is tried for each method: the same steps for all, and what only FedProx and FedAdam have beside them."""
    alike = {name: {"step_size": steps} for name in ("CentralSGD", "FedAvg", "FedProx", "Scaffold", "FedAdam")}
    own = {"FedProx": {"mu": mu}, "FedAdam": {"server_step_size": server_step_size}}
    return {name: {**grid, **own.get(name, {})} for name, grid in alike.items()}


def _needed(entry: Any) -> bool:
    return entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
