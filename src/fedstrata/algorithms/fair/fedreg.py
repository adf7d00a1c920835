"""FedReg: FedAvg with a fairness penalty that every client works out from its own samples."""

from typing import Any

from fedstrata.algorithm import real
from fedstrata.algorithms.average.fedavg import FedAvg
from fedstrata.problems.fair import FairOracle


class FedReg(FedAvg):
    r"""FedAvg on the loss plus a smoothed gap in equal opportunity of the client's own sample.

    $$ x_i \gets x_i - \eta \, \nabla \big( f_i(x_i; \xi_i) + \lambda D_i(x_i; \xi_i) \big) \quad (Q \text{ times from }
       x), \qquad x \gets \sum_i p_i x_i $$
    $$ D_i(x; \xi) = \max_a m_a - \min_a m_a, \qquad
       m_a = \operatorname{mean} \, \sigma(s \, z_x(\xi_j)) \text{ over } \xi_j \text{ of group } a \text{, label } 1 $$

    step_size: η. local_steps: Q. strength: λ; 0 is FedAvg. sharpness: s, by which the logit z is multiplied before the
    sigmoid; 1 is the probability that the model gives, 10 (as in FCFL's code) is nearer to its decisions.

    Converges, as FedAvg does, near the minimum of the mean of local losses and *local* gaps. That is not the gap of all
    data: a client where one group is rare sees a noisy one, and a group without positives in the sample is left out of
    it, so small batches and uneven groups bias what is minimised. A fairer model is not promised. The paper that
    compares with it says only that the term "could be any fairness metrics" and gives λ = 0.1; equal opportunity counts
    decisions, which have no gradient, so the sigmoid form is a choice of this library.

    >>> FedReg(step_size=0.1, local_steps=5).strength
    0.1

    Reference: li2022, Section 6 and Appendix 11 (a baseline there, without a listing).
    """

    strength: float = real(0.1, at_least=0)
    sharpness: float = real(1.0, above=0)

    def check(self, problem: Any) -> None:
        if not problem.decides:
            raise TypeError(
                f"FedReg compares decisions of a model, and the loss {type(problem.loss).__name__} of this problem has "
                "none; use fs.Fair(fs.losses.Classification(model))"
            )

    def local_step(  # pyright: ignore[reportIncompatibleMethodOverride] (it asks for more than FedAvg does)
        self, oracle: FairOracle, start: FedAvg.State, state: FedAvg.State
    ) -> FedAvg.State:
        g = oracle.grad(state.x) + self.strength * oracle.disparity_grad(state.x, self.sharpness)
        return self.State(x=state.x - self.step_size * g)
