"""FedAvg, and FedProx, which differs from it by one term."""

from typing import ClassVar, NamedTuple

from fedstrata.core.algorithm import Algorithm
from fedstrata.core.hyperparameters import real, whole
from fedstrata.core.placement import Averaged
from fedstrata.core.vector import Vector
from fedstrata.problems.base import Problem, SmoothOracle


class FedAvg(Algorithm):
    r"""Local SGD steps at every client, then the average of their models.

    $$ x_i \gets x_i - \eta \nabla f_i(x_i; \xi_i) \quad (Q \text{ times from } x), \qquad x \gets \sum_i p_i x_i $$

    Args:
        step_size: η, the step of the clients.
        local_steps: Q, the steps of a client in a round.

    - *Converges to* the minimum when clients are alike, when Q = 1, or when η falls to zero.
    - *Does not* when clients differ, Q > 1 and η is constant. Local models drift towards their own minima, and the
      limit is off by O(ηQ); use SCAFFOLD.

    >>> FedAvg(step_size=0.1, local_steps=10)
    FedAvg(step_size=0.1, local_steps=10)

    Reference: mcmahan2017, Algorithm 1 (there in epochs: `batch_size=fs.Epochs(B, per_round=E)`).
    """

    oracle: ClassVar[type] = SmoothOracle

    step_size: float = real(above=0)
    local_steps: int = whole(1, at_least=1)

    class State(NamedTuple):
        x: Averaged[Vector]

    def init_server(self, problem: Problem, x0: Vector) -> State:
        return self.State(x=x0)

    def local_step(self, oracle: SmoothOracle, start: State, state: State) -> State:
        return self.State(x=state.x - self.step_size * oracle.grad(state.x))

    def solution(self, problem: Problem, state: State) -> Vector:
        return state.x


class FedProx(FedAvg):
    r"""FedAvg with a pull towards the round's starting point.

    $$ x_i \gets x_i - \eta \big( \nabla f_i(x_i; \xi_i) + \mu (x_i - x) \big) \quad (Q \text{ times from } x), \qquad
       x \gets \sum_i p_i x_i $$

    Args:
        step_size: η, the step of the clients.
        local_steps: Q, the steps of a client in a round.
        mu: μ, the strength of the pull; 0 is FedAvg.

    - *Converges to* a biased point when clients differ, as FedAvg does, but more stably.
    - *Does not* reach the minimum then: the pull shortens the drift and does not remove it.
    - The paper solves the local problem inexactly. Here that is Q gradient steps.

    >>> FedProx(step_size=0.1, local_steps=10, mu=0.01).mu
    0.01

    Reference: li2020fedprox, Algorithm 2.
    """

    mu: float = real(0.1, at_least=0)

    def local_step(self, oracle: SmoothOracle, start: FedAvg.State, state: FedAvg.State) -> FedAvg.State:
        pull = self.mu * (state.x - start.x)
        return self.State(x=state.x - self.step_size * (oracle.grad(state.x) + pull))
