"""FedReg: FedAvg with a fairness penalty that every client computes from its own samples."""

from typing import ClassVar, NamedTuple

from fedstrata.algorithms.average.fedavg import FedAvg
from fedstrata.core.algorithm import Algorithm
from fedstrata.core.hyperparameters import real, whole
from fedstrata.core.placement import Averaged
from fedstrata.core.vector import Vector
from fedstrata.problems.fair import Fair, FairOracle


class FedReg(Algorithm):
    r"""FedAvg on the loss plus a smoothed gap in equal opportunity of the client's own sample.

    $$ x_i \gets x_i - \eta \, \nabla \big( f_i(x_i; \xi_i) + \lambda D_i(x_i; \xi_i) \big) \quad (Q \text{ times from }
       x), \qquad x \gets \sum_i p_i x_i $$
    $$ D_i(x; \xi) = \max_a m_a - \min_a m_a, \qquad
       m_a = \operatorname{mean} \, \sigma(s \, z_x(\xi_j)) \text{ over } \xi_j \text{ of group } a \text{, label } 1 $$

    Args:
        step_size: η, the step of the clients.
        local_steps: Q, the steps of a client in a round.
        strength: λ, the weight of the gap; 0 is FedAvg.
        sharpness: s, which multiplies the logit z; 1 is the model's probability, 10 (FCFL's code) nearer to decisions.

    - *Converges to* a point near the minimum of the mean of local losses and *local* gaps, as FedAvg does.
    - *Does not* minimise the gap of all data. A client where one group is rare sees a noisy gap, and a group without
      positives in the sample is left out of it, so small batches and uneven groups bias what is minimised.
    - *Does not* promise a fairer model.
    - The paper that compares with it states only that the term "could be any fairness metrics" and gives λ = 0.1. Equal
      opportunity counts decisions, which have no gradient, so the sigmoid form is a choice of this library.

    >>> FedReg(step_size=0.1, local_steps=5).strength
    0.1

    Reference: li2022, Section 6 and Appendix 11 (a baseline there, without a listing).
    """

    oracle: ClassVar[type] = FairOracle
    variant_of = FedAvg

    step_size: float = real(above=0)
    local_steps: int = whole(1, at_least=1)
    strength: float = real(0.1, at_least=0)
    sharpness: float = real(1.0, above=0)

    class State(NamedTuple):
        x: Averaged[Vector]

    def check(self, problem: Fair) -> None:
        if not problem.decides:
            raise TypeError(
                f"FedReg compares decisions of a model, and the loss {type(problem.loss).__name__} of this problem has "
                "none; use fs.Fair(fs.losses.Classification(model))"
            )

    def init_server(self, problem: Fair, x0: Vector) -> State:
        return self.State(x=x0)

    def local_step(self, oracle: FairOracle, start: State, state: State) -> State:
        g = oracle.grad(state.x) + self.strength * oracle.disparity_grad(state.x, self.sharpness)
        return self.State(x=state.x - self.step_size * g)

    def solution(self, problem: Fair, state: State) -> Vector:
        return state.x
