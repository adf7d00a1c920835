"""What methods with a proximal operator have in common: the steps at which they take it are checked."""

import math
from typing import Any

from fedstrata.algorithm import Algorithm, reals


class ProximalMethod(Algorithm):
    """A method that takes proximal steps of φ. Subclasses say at which steps, so that bad ones are refused early."""

    def prox_steps(self) -> dict[str, Any]:
        """The largest steps at which the prox is taken, by what they are made of; infinite where they keep growing."""
        raise TypeError(f"{type(self).__name__} must define prox_steps() -> dict[str, float]")

    def check(self, problem: Any) -> None:
        if any(callable(getattr(self, name)) for name in reals(self)):
            return  # a schedule's steps are known only in the run, where a step out of range gives NaN and stops it
        for name, step in self.prox_steps().items():
            self.check_step(problem, name, step)

    def check_step(self, problem: Any, name: str, step: float) -> None:
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
