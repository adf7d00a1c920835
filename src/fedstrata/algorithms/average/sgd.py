"""The two references: FedSGD (one gradient a round) and SGD on pooled data (no federation at all)."""

from typing import Any, ClassVar, NamedTuple

from fedstrata.algorithm import Algorithm, Cohort, real
from fedstrata.algorithms.average.fedavg import FedAvg
from fedstrata.placement import Broadcast, Reported
from fedstrata.problems.base import SmoothOracle
from fedstrata.vector import Vector


class FedSGD(Algorithm):
    r"""One gradient per client and round; the server takes the step.

    $$ g_i = \nabla f_i(x; \xi_i), \qquad x \gets x - \eta \sum_i p_i g_i $$

    step_size: η.

    Converges like SGD on the whole objective, however different the clients are: there is no local work that could
    drift. Does not save communication: every step is a round.

    >>> FedSGD(step_size=0.5).local_steps
    1

    Reference: mcmahan2017, Section 2 ("FederatedSGD"; FedAvg with one full-batch step).
    """

    step_size: float = real(above=0)
    local_steps: ClassVar[int] = 1

    class State(NamedTuple):
        x: Broadcast[Vector]
        g: Reported[Vector]

    def init_server(self, problem: Any, x0: Vector) -> State:
        return self.State(x=x0, g=x0.zeros())

    def local_step(self, oracle: SmoothOracle, start: State, state: State) -> State:
        return state._replace(g=oracle.grad(state.x))

    def server_step(self, problem: Any, start: State, merged: State, cohort: Cohort) -> State:
        return merged._replace(x=start.x - self.step_size * merged.g)

    def solution(self, problem: Any, state: State) -> Vector:
        return state.x


class CentralSGD(FedAvg):
    r"""SGD on the pooled data of all clients: the reference that every federated method is compared to.

    $$ x \gets x - \eta \nabla f(x; \xi), \qquad \xi \sim \textstyle\sum_i p_i D_i $$

    step_size: η. local_steps: steps that are counted as one "round".

    Converges to the minimum of the federated objective up to the noise of its samples: a client is drawn by its
    weight, then an example of it. Does not describe anything deployable: it moves all data to one place, sends
    nothing, and its batch size is the total, not per client.

    >>> CentralSGD(step_size=0.1).centralised
    True

    Reference: robbins1951.
    """

    centralised: ClassVar[bool] = True
