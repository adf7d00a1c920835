"""What methods for bilevel problems have in common: checks, which samples they draw, and what a simulation can see."""

import warnings
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fedstrata.algorithm import Algorithm, Phase, steps_of
from fedstrata.algorithms.nested.base import CouplingWarning
from fedstrata.vector import Vector


class BilevelMethod(Algorithm):
    """A method for `fs.Bilevel`, whose lower variable is a field `y`."""

    solves: ClassVar[Literal["client", "global"]] = "client"  # whose lower problem it solves (see `fs.Bilevel`)

    def check(self, problem: Any) -> None:
        if problem.lower_level != self.solves:
            warnings.warn(
                f"{type(self).__name__} is made for lower_level={self.solves!r} and this problem has "
                f"lower_level={problem.lower_level!r}: where clients differ it settles at another point",
                CouplingWarning,
                stacklevel=2,
            )
        step = getattr(self, "step_size", None)
        if isinstance(step, float | int):
            problem.regularizer.check_step(step)


class LocalLowerMethod(BilevelMethod):
    """A method whose clients each solve their own lower problem beside the common x, and never send y."""

    if TYPE_CHECKING:  # at run time the subclasses' field `hypergradient`

        def __getattr__(self, name: str) -> Any: ...

    def check(self, problem: Any) -> None:
        super().check(problem)
        self.hypergradient.check(problem)

    def phases(self, problem: Any) -> list[Phase]:
        streams = ("upper", "lower", "cross", *["hessian"] * self.hypergradient.hessian_batches)
        begin, end, server = self.local_begin, self.local_end, self.server_step
        return [Phase(self.local_step, steps_of(self), begin=begin, end=end, server_step=server, streams=streams)]

    def observe(self, problem: Any, local: Any, x: Vector, full: Any) -> dict[str, Any]:
        return problem.observed(x, local["y"], full)

    def solution(self, problem: Any, state: Any) -> Vector:
        return state.x
