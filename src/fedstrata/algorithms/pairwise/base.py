"""Shared parts of methods for pairwise problems: checks, pools, and the start of u."""

from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any, ClassVar, Literal

from fedstrata.core.algorithm import Algorithm, Phase
from fedstrata.core.hyperparameters import choice, flag, real, whole
from fedstrata.core.memory import PerExample, Pool
from fedstrata.core.vector import Vector
from fedstrata.problems.pairwise.oracle import PairwiseOracle
from fedstrata.problems.pairwise.partners import Draws, Partners
from fedstrata.problems.pairwise.problem import Pairwise

UStart = Literal["pool", 1, 0]


class PairwiseMethod(Algorithm):
    """A method for `fs.Pairwise`."""

    oracle: ClassVar[type] = PairwiseOracle

    def solution(self, problem: Pairwise, state: Any) -> Vector:
        return state.x

    def memory(self, problem: Pairwise, start: UStart) -> PerExample:
        """u of every example of the first set: 0, or 1 until "pool" replaces it; logarithms where `in_logs`.

        Args:
            problem: whose u it is.
            start: the hyper-parameter `u_start`.
        """
        zero = problem.blank("u")
        if problem.in_logs:
            return PerExample(zero - float("inf") if start == 0 else zero, problem.first)
        return PerExample(zero + (0 if start == 0 else 1), problem.first)


class PoolingMethod(PairwiseMethod):
    """A method whose clients pool scores: fields `first` and `second`, one row per example that was scored.

    Args:
        step_size: η.
        local_steps: K, the steps of a client in a round.
        history: τ, the number of rounds whose scores are partners.
        pool_size: scores of each set that a client sends per round, a random sample (None: all).
        draws: "shuffled" uses every score of the pool once before any twice; "replacement" draws independently.
        shared_partners: all active examples of a step have the same partners; otherwise each has separate ones.
        extra_samples: scores for the pool come from separate samples ẑ, at twice the cost; otherwise from the
            examples of the step.
    """

    merge_at_init: ClassVar[bool] = True
    privacy: ClassVar[str] = (
        "prediction scores of single training examples leave the client and are seen by the server and by all clients, "
        "with the set that each example is in; whoever holds a model can compare them with its scores. A client sends "
        "pool_size scores of each set; ceil(local_steps / clients) is the least that gives every step new ones"
    )

    step_size: float = real(above=0)
    local_steps: int = whole(1, at_least=1)
    _: KW_ONLY
    history: int = whole(1, at_least=1)
    pool_size: int | None = whole(None, at_least=1)
    draws: Draws = choice("shuffled", "replacement")
    shared_partners: bool = flag(True)
    extra_samples: bool = flag(False)

    def check(self, problem: Pairwise) -> None:
        name = type(self).__name__
        if not problem.bound:
            return
        if problem.may_idle:
            raise ValueError(
                f"{name}: with Epochs(per_round=...) a client may finish before the others and would pool too few "
                'scores; use sampling="epochs" or "replacement"'
            )
        most = self.local_steps * min(problem.steps_rows)
        if self.pool_size is not None and (problem.whole or self.pool_size > most):
            limit = 'batch_size="all" pools every row' if problem.whole else f"a round has {most} scores of each set"
            raise ValueError(f"{name}: pool_size={self.pool_size}: {limit}; omit it or choose a smaller one")

    def phases(self, problem: Pairwise) -> list[Phase]:
        streams = ("first", "second") * (2 if self.extra_samples else 1)
        begin, end, server = self.local_begin, self.local_end, self.server_step
        return [Phase(self.local_step, self.local_steps, begin=begin, end=end, server_step=server, streams=streams)]

    def pool(self, problem: Pairwise, side: int, row: Mapping[str, Any]) -> Pool:
        """An empty pool of one set, with room for all rows of a round or for `pool_size` of them.

        Args:
            problem: whose rows it holds.
            side: 0 for the first set, 1 for the second.
            row: a zero row.
        """
        everything = self.local_steps * problem.steps_rows[side]
        return Pool.empty(row, everything if self.pool_size is None else self.pool_size, self.history)

    def partners(self, oracle: PairwiseOracle, first: Pool, second: Pool) -> Partners:
        """ξ and ζ of this step, from the pools of earlier rounds.

        Args:
            oracle: of this step.
            first: the received pool of the first set.
            second: the received pool of the second set.
        """
        return oracle.partners(first, second, self.draws, self.shared_partners)
