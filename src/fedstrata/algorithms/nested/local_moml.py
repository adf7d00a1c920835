"""LocalMOML: meta-learning with a memory of the client's adapted model."""

from typing import NamedTuple

from fedstrata.algorithms.nested.base import NestedMethod, check_two_levels, first_sample
from fedstrata.core.algorithm import Cohort, Phase
from fedstrata.core.hyperparameters import flag, real, whole
from fedstrata.core.placement import Averaged, Local
from fedstrata.core.vector import Vector, where
from fedstrata.problems.nested import Nested, NestedOracle


class LocalMOML(NestedMethod):
    r"""Each client tracks its adapted model by a moving average that restarts in every round; for K = 2.

    $$ u_i = g_i(w; S_0), \quad \text{then H times} \quad u_i \gets (1-b) u_i + b \, g_i(w_i; S), \qquad
       w_i \gets w_i - \eta \, \nabla g_i(w_i; S')^\top \nabla f_i(u_i; S'') $$

    and $w \gets \sum_i p_i w_i$ over the cohort; in meta-learning $g_i(w) = w - a \nabla f_i(w)$ (`fs.maml`).

    The loop is that of the public code; the Jacobian is from memory of the paper. The samples $S, S', S''$ are
    independent. With a regulariser every step is a proximal one; the last prox of a round is that of the mean, at the
    server.

    Args:
        step_size: η.
        local_steps: H.
        value_momentum: b, the weight of the new sample; 1 forgets the past.
        init_batch_size: K_0, examples of $S_0$ (None: as in a step).
        first_order: leave out the Jacobian, as both public versions of the authors' code do; for meta-learning, where u
            has the structure of w.

    Converges to:
        - a stationary point of the client-coupled objective with all data, H = 1 and the Jacobian, where it is gradient
          descent.

    Does not:
        - converge to it for H > 1: the drift of clients and the lag of u both shift the limit in proportion to η.
        - converge to it on samples: each round begins from an estimate whose noise is that of $S_0$, so that the
          resulting bias does not fall below that of a batch of about K_0.
        - converge to it with first_order: it stops where $\sum_i p_i \nabla f_i(g_i(w)) = 0$, another point.

    >>> LocalMOML(step_size=0.1, local_steps=4).value_momentum
    0.9

    Reference: wang2023, the local method, and its public code.
    """

    step_size: float = real(above=0)
    local_steps: int = whole(1, at_least=1)
    value_momentum: float = real(0.9, above=0, at_most=1)
    init_batch_size: int | None = whole(None, at_least=1)
    first_order: bool = flag(False)

    solves = "client"

    class State(NamedTuple):
        w: Averaged[Vector]
        u: Local[Vector]  # only within a round

    def check(self, problem: Nested) -> None:
        check_two_levels(self, problem, "ComFedL")
        if self.first_order and problem.shapes is not None:
            inside, outside = ((tree, [leaf.shape for leaf in leaves]) for tree, leaves in problem.shapes[:2])
            if inside != outside:
                raise ValueError(
                    "LocalMOML: first_order=True takes the identity for the Jacobian of level 1, so its output must "
                    f"look like the parameters; it has {outside[1]} and the parameters {inside[1]}"
                )
        super().check(problem)

    def phases(self, problem: Nested) -> list[Phase]:
        wanted = ("level1", "level2") if self.first_order else ("level1", "level2", "jacobian1")
        streams = tuple(stream for stream in problem.streams if stream in wanted)
        begin, server = self.local_begin, self.server_step
        return [Phase(self.local_step, self.local_steps, begin=begin, server_step=server, streams=streams)]

    def init_server(self, problem: Nested, x0: Vector) -> State:
        return self.State(w=x0, u=problem.zeros(1))

    def local_begin(self, oracle: NestedOracle, start: State, state: State) -> State:
        return state._replace(u=first_sample(oracle, self.init_batch_size).value(1, state.w))

    def local_step(self, oracle: NestedOracle, start: State, state: State) -> State:
        b = self.value_momentum
        u = (1 - b) * state.u + b * oracle.value(1, state.w)
        direction = oracle.pull(2, u)
        if not self.first_order:
            direction = oracle.pull(1, state.w, direction, separate=True)
        w = state.w - self.step_size * direction
        last = oracle.clock.local_step == self.local_steps - 1
        return state._replace(u=u, w=where(last, w, oracle.prox(w, self.step_size)))

    def server_step(self, problem: Nested, start: State, merged: State, cohort: Cohort) -> State:
        return merged._replace(w=problem.prox(merged.w, self.step_size))

    def solution(self, problem: Nested, state: State) -> Vector:
        return state.w
