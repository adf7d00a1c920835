"""What methods for pairwise problems share: checks, pools, and how u begins."""

from typing import Any, ClassVar, Literal

import equinox as eqx

from fedstrata.algorithm import Algorithm, Phase, real
from fedstrata.memory import PerExample, Pool
from fedstrata.problems.pairwise_oracle import PairwiseOracle
from fedstrata.problems.partners import Lazy
from fedstrata.vector import Vector

UStart = Literal["pool"] | int


class PairwiseMethod(Algorithm):
    """A method for `fs.Pairwise` whose model is the field `x`."""

    def solution(self, problem: Any, state: Any) -> Vector:
        return state.x

    def memory(self, problem: Any, start: UStart) -> PerExample:
        """u of every example of the first set: 0 or 1, as logarithms where the problem keeps those."""
        if start not in ("pool", 0, 1) or isinstance(start, bool):
            raise ValueError(f'{type(self).__name__}: u_start={start!r} must be "pool", 1 or 0')
        zero = problem.blank("u")
        if problem.in_logs:
            return PerExample(zero - float("inf") if start == 0 else zero, problem.first)
        return PerExample(zero + (0 if start == 0 else 1), problem.first)


class PoolingMethod(PairwiseMethod):
    """A method whose clients pool scores: fields `first` and `second`, one row per example that was looked at."""

    merge_at_init: ClassVar[bool] = True
    privacy: ClassVar[str] = (
        "prediction scores of single training examples leave the client and are seen by the server and by all clients, "
        "with the set that each example is in; whoever holds a model can compare them with its scores. pool_size says "
        "how many a client sends; ceil(local_steps / clients) for each set is the least that serves every step anew"
    )

    step_size: float = real(above=0)
    local_steps: int = 1
    history: int = eqx.field(default=1, kw_only=True)
    pool_size: int | None = eqx.field(default=None, kw_only=True)
    draws: Literal["shuffled", "replacement"] = eqx.field(default="shuffled", kw_only=True)
    shared_partners: bool = eqx.field(default=True, kw_only=True)
    extra_samples: bool = eqx.field(default=False, kw_only=True)

    def __check_init__(self) -> None:
        name = type(self).__name__
        for field, value in (("history", self.history), ("pool_size", 1 if self.pool_size is None else self.pool_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: {field}={value!r} must be a whole number >= 1")
        if self.draws not in ("shuffled", "replacement"):
            raise ValueError(f'{name}: draws={self.draws!r} must be "shuffled" or "replacement"')

    def check(self, problem: Any) -> None:
        name = type(self).__name__
        if not problem.bound:
            return
        if problem.may_idle:
            raise ValueError(
                f"{name}: with Epochs(per_round=...) a client may be done before the others and would pool too few "
                'scores; use sampling="epochs" or "replacement"'
            )
        most = self.local_steps * min(problem.steps_rows)
        if self.pool_size is not None and (problem.whole or self.pool_size > most):
            limit = "whole shards are pooled whole" if problem.whole else f"a round has {most} scores of each set"
            raise ValueError(f"{name}: pool_size={self.pool_size}: {limit}; leave it out or choose a smaller one")

    def phases(self, problem: Any) -> list[Phase]:
        streams = ("first", "second") * (2 if self.extra_samples else 1)
        begin, end, server = self.local_begin, self.local_end, self.server_step
        return [Phase(self.local_step, self.local_steps, begin=begin, end=end, server_step=server, streams=streams)]

    def pool(self, problem: Any, side: int, row: Any) -> Pool:
        """An empty pool of one set: as many rows as the steps of a round have, or as many as are sent."""
        everything = self.local_steps * problem.steps_rows[side]
        return Pool.empty(row, everything if self.pool_size is None else self.pool_size, self.history)

    def lazy(self, oracle: PairwiseOracle, start: Any) -> Lazy:
        """The partners of this step, out of the pools of the rounds before."""
        return oracle.partners(start.first, start.second, self.draws, self.shared_partners)
