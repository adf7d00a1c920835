"""An experiment: data and a problem, the methods to compare, and how long to run them."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

from fedstrata.base.errors import unknown

if TYPE_CHECKING:
    from fedstrata.core.algorithm import Algorithm
    from fedstrata.data.federation import Federation
    from fedstrata.problems.base import Problem
    from fedstrata.simulate.result import Result


class Setup(NamedTuple):
    """A problem and its data."""

    problem: "Problem"
    federation: "Federation"


@dataclass(frozen=True)
class Experiment:
    """A federation, a problem and settings under which methods are compared.

    Args:
        name: on the command line.
        summary: one line for `fedstrata list`.
        build: creates problem and data; its keyword options have defaults and types.
        rounds: communication rounds.
        methods: the default methods, with hyper-parameters that were all chosen in the same way.
        common: hyper-parameters of every other algorithm.
        batch_size: examples per client and local step.
        cohort: clients that take part in a round; None: all.
        seeds: how many.
        panels: columns to draw and to show in the short table.
        more_files: names of the files that `pictures` draws.
        grids: values to try for each method, for `fedstrata.experiments.tuning`.
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
    panels: tuple[str, ...] = ("objective", "test/accuracy")
    more_files: tuple[str, ...] = ()
    grids: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """The types of the options of `build`, by name."""
        hints = get_type_hints(self.build)
        return {name: hints[name] for name in inspect.signature(self.build).parameters}

    def settings(self, algorithm: "type[Algorithm]") -> dict[str, Any]:
        """Hyper-parameters for an algorithm: those listed for it or for the method it varies, or the common ones.

        Args:
            algorithm: its class.
        """
        listed = next((name for name in _relatives(algorithm) if name in self.methods), None)
        given = {**self.common, **(self.methods[listed] if listed else {})}
        fields = {f.name for f in dataclasses.fields(algorithm)}
        return {name: value for name, value in given.items() if name in fields}

    def algorithm(self, method: "str | type[Algorithm]", **values: Any) -> "Algorithm":
        """An algorithm with this experiment's hyper-parameters unless others are given.

        Args:
            method: its name, or its class, which may be outside the library.
            **values: hyper-parameters.
        """
        from fedstrata.algorithms import known

        if isinstance(method, str) and method not in known():
            raise unknown("algorithm", method, known())
        cls = known()[method] if isinstance(method, str) else method
        name = cls.__name__
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
        """The options of `fs.run`.

        A centralised method takes as many examples per step as the clients of a round do together, so that the
        reference uses the same number of gradients.

        Args:
            algorithm: the method.
            setup: problem and data.
            **changed: options that replace the experiment's; None keeps it.
        """
        chosen = {"rounds": self.rounds, "batch_size": self.batch_size, "cohort": self.cohort, "seeds": self.seeds}
        chosen |= {name: value for name, value in changed.items() if value is not None}
        if algorithm.centralised:
            cohort, size = chosen.pop("cohort"), chosen["batch_size"]
            clients = cohort if isinstance(cohort, int) else setup.federation.clients
            chosen["batch_size"] = size * clients if isinstance(size, int) else size
        return chosen

    def run(self, algorithm: "str | Algorithm", setup: Setup | None = None, **options: Any) -> "Result":
        """`fs.run` on this experiment: `get("digits").run("FedAvg", rounds=50, seeds=1)`.

        Args:
            algorithm: a name, or an algorithm with its hyper-parameters.
            setup: problem and data; None: those of `build`.
            **options: those of `fs.run` that differ from the experiment's.
        """
        setup = self.build() if setup is None else setup
        method = self.algorithm(algorithm) if isinstance(algorithm, str) else algorithm
        return self.simulate(method, setup, **self.run_options(method, setup, **options))

    def problem_for(self, algorithm: "Algorithm", setup: Setup) -> "Problem":
        """The problem of this algorithm. An experiment may have several forms of the same task.

        Args:
            algorithm: the method.
            setup: problem and data.
        """
        return setup.problem

    def simulate(self, algorithm: "Algorithm", setup: Setup, **options: Any) -> "Result":
        """`fs.run` with these options; an experiment may do more.

        Args:
            algorithm: the method.
            setup: problem and data.
            **options: those of `fs.run`.
        """
        from fedstrata.simulate.run import run

        return run(self.problem_for(algorithm, setup), algorithm, setup.federation, **options)

    def trained_on(self, setup: Setup, **labels: Any) -> "Federation":
        """The training data of one run.

        Args:
            setup: problem and data.
            **labels: the seed and the swept values of the run.
        """
        return setup.federation

    def pictures(self, results: "Mapping[str, Result]", data: Mapping[str, Any], folder: Any) -> None:
        """Draw `more_files`, beside the usual picture.

        Args:
            results: the result of each method.
            data: the options of `build`.
            folder: where they are saved.
        """


def grids(
    steps: tuple[float, ...], *, mu: tuple[float, ...], server_step_size: tuple[float, ...]
) -> dict[str, dict[str, tuple[float, ...]]]:
    """The grid of each method: the same steps for all, and the other hyper-parameters of FedProx and FedAdam.

    Args:
        steps: step sizes, for every method.
        mu: values of FedProx.
        server_step_size: values of FedAdam.
    """
    alike = {name: {"step_size": steps} for name in ("CentralSGD", "FedAvg", "FedProx", "SCAFFOLD", "FedAdam")}
    own = {"FedProx": {"mu": mu}, "FedAdam": {"server_step_size": server_step_size}}
    return {name: {**grid, **own.get(name, {})} for name, grid in alike.items()}


def _relatives(algorithm: "type[Algorithm] | None") -> Iterator[str]:
    """The names of an algorithm, of the classes it extends, and of the method that it is a variant of."""
    while algorithm is not None:
        yield from (cls.__name__ for cls in algorithm.__mro__)
        algorithm = algorithm.variant_of


def _needed(entry: Any) -> bool:
    return entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
