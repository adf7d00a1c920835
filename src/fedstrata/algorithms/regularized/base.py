"""Base class of methods with a proximal operator: it checks the steps of the prox."""

import math
from typing import ClassVar

from fedstrata.core.algorithm import Algorithm
from fedstrata.core.hyperparameters import reals
from fedstrata.problems.base import CompositeOracle
from fedstrata.problems.composite import CompositeProblem

Composite = CompositeOracle | CompositeProblem  # a client's view of f + φ and the server's: both have the prox of φ


class ProximalMethod(Algorithm):
    """A method that takes proximal steps of φ. Subclasses declare how long these get, so that bad ones are refused."""

    oracle: ClassVar[type] = CompositeOracle

    def prox_steps(self) -> dict[str, float]:
        """The largest steps at which the prox is taken, by what they are made of; infinite where they keep growing."""
        raise TypeError(f"{type(self).__name__} must define prox_steps() -> dict[str, float]")

    def check(self, problem: CompositeProblem) -> None:
        if any(callable(getattr(self, name)) for name in reals(self)):
            return  # a schedule's steps are known only in the run, where a step out of range gives NaN and stops it
        for name, step in self.prox_steps().items():
            self.check_step(problem, name, step)

    def check_step(self, problem: CompositeProblem, name: str, step: float) -> None:
        who, phi = type(self).__name__, problem.regularizer
        if math.isfinite(step):
            try:
                phi.check_step(step)
            except ValueError as error:
                raise ValueError(f"{who}: the prox is taken at {name} = {step:g}. {error}") from None
        elif not phi.convex:
            raise ValueError(
                f"{who}: {name} has no bound, so the regulariser must be convex, and {phi!r} is not; use FedNMap"
            )
