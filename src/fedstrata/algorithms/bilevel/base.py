"""Shared parts of methods for bilevel problems: checks, streams of samples, and columns that a simulation records."""

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fedstrata.algorithms.nested.base import CouplingWarning
from fedstrata.core.algorithm import Algorithm, Phase, StateWithX, steps_of
from fedstrata.core.hyperparameters import is_number
from fedstrata.core.vector import Vector
from fedstrata.problems.bilevel import Bilevel, BilevelOracle
from fedstrata.problems.rows import Full


class BilevelMethod(Algorithm):
    """A method for `fs.Bilevel`, whose upper variable is a field `x` and whose lower variable is a field `y`."""

    oracle: ClassVar[type] = BilevelOracle
    solves: ClassVar[Literal["client", "global"]] = "client"  # the lower_level of `fs.Bilevel` that it is made for

    def check(self, problem: Bilevel) -> None:
        if problem.lower_level != self.solves:
            warnings.warn(
                f"{type(self).__name__} is made for lower_level={self.solves!r} and this problem has "
                f"lower_level={problem.lower_level!r}: where clients differ it converges to another point",
                CouplingWarning,
                stacklevel=2,
            )
        step = getattr(self, "step_size", None)
        if is_number(step):
            problem.regularizer.check_step(step)

    def solution(self, problem: Bilevel, state: StateWithX) -> Vector:
        return state.x


class LocalLowerMethod(BilevelMethod):
    """A method whose clients each solve a separate lower problem beside the common x, and never send y."""

    if TYPE_CHECKING:  # at run time the subclasses' field `hypergradient`

        def __getattr__(self, name: str) -> Any: ...

    def check(self, problem: Bilevel) -> None:
        super().check(problem)
        self.hypergradient.check(problem)

    def phases(self, problem: Bilevel) -> list[Phase]:
        streams = ("upper", "lower", "cross", *["hessian"] * self.hypergradient.hessian_batches)
        begin, end, server = self.local_begin, self.local_end, self.server_step
        return [Phase(self.local_step, steps_of(self), begin=begin, end=end, server_step=server, streams=streams)]

    def observe(self, problem: Bilevel, local: Mapping[str, Vector], x: Vector, full: Full) -> dict[str, Any]:
        return problem.observed(x, local["y"], full)
