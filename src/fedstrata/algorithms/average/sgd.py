"""The two references: FedSGD (one gradient per round) and SGD on pooled data (centralised)."""

from typing import ClassVar, NamedTuple

from fedstrata.algorithms.average.fedavg import FedAvg
from fedstrata.core.algorithm import Algorithm, Cohort
from fedstrata.core.hyperparameters import real
from fedstrata.core.placement import Broadcast, Reported
from fedstrata.core.vector import Vector
from fedstrata.problems.base import Problem, SmoothOracle


class FedSGD(Algorithm):
    r"""One gradient per client and round; the server takes the step.

    $$ g_i = \nabla f_i(x; \xi_i), \qquad x \gets x - \eta \sum_i p_i g_i $$

    Args:
        step_size: η, the step of the server.

    - *Converges to* the minimum like SGD on the whole objective, however different the clients are: there is no local
      work that could drift.
    - *Does not* save communication: every step is a round.

    >>> FedSGD(step_size=0.5).local_steps
    1

    Reference: mcmahan2017, Section 2 ("FederatedSGD"; FedAvg with one full-batch step).
    """

    oracle: ClassVar[type] = SmoothOracle

    step_size: float = real(above=0)
    local_steps: ClassVar[int] = 1

    class State(NamedTuple):
        x: Broadcast[Vector]
        g: Reported[Vector]

    def init_server(self, problem: Problem, x0: Vector) -> State:
        return self.State(x=x0, g=x0.zeros())

    def local_step(self, oracle: SmoothOracle, start: State, state: State) -> State:
        return state._replace(g=oracle.grad(state.x))

    def server_step(self, problem: Problem, start: State, merged: State, cohort: Cohort) -> State:
        return merged._replace(x=start.x - self.step_size * merged.g)

    def solution(self, problem: Problem, state: State) -> Vector:
        return state.x


class CentralSGD(FedAvg):
    r"""SGD on the pooled data of all clients: the reference that every federated method is compared to.

    $$ x \gets x - \eta \nabla f(x; \xi), \qquad \xi \sim \textstyle\sum_i p_i D_i $$

    Args:
        step_size: η, the step.
        local_steps: the steps that are counted as one "round".

    - *Converges to* the minimum of the federated objective up to the noise of its samples: a client is drawn by its
      weight, then one of its examples.
    - *Does not* describe anything deployable. It moves all data to one place and sends nothing; its batch size is the
      total, not per client.

    >>> CentralSGD(step_size=0.1).centralised
    True

    Reference: robbins1951.
    """

    oracle: ClassVar[type] = SmoothOracle

    centralised: ClassVar[bool] = True
