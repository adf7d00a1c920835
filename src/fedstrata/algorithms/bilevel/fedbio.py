"""FedBiO: local steps on the hypergradient; the lower variable stays with the client."""

from typing import NamedTuple

from fedstrata.algorithms.bilevel.base import LocalLowerMethod
from fedstrata.core.hyperparameters import instance, real, whole
from fedstrata.core.placement import Averaged, Local
from fedstrata.core.vector import Vector, where
from fedstrata.problems.bilevel import Bilevel, BilevelOracle
from fedstrata.problems.hypergradients import Exact, Hypergradient


class FedBiO(LocalLowerMethod):
    r"""FedAvg on the hypergradient; each client follows the solution of its lower problem by gradient steps.

    $$ \omega = \partial_y g_i(x_i, y_i), \qquad
       \nu = \partial_x f_i - \partial^2_{xy} g_i \, (\partial^2_{yy} g_i)^{-1} \partial_y f_i \; (x_i, y_i) $$
    $$ y_i \gets y_i - \gamma \omega, \qquad x_i \gets x_i - \eta \nu \quad (I \text{ times}), \qquad
       x \gets \sum_i p_i x_i $$

    Only x travels, up and down. With a regulariser every step in x is a proximal one; the paper has none. This is the
    method of 2022, with one lower problem per client. A paper of 2023 (arXiv 2302.06701) gives the same name to another
    method, for one common lower problem.

    Args:
        step_size: η, the step of x.
        lower_step_size: γ, the step of y.
        local_steps: I, the steps of a client in a round.
        hypergradient: the estimator of ν, one of `fs.hypergradients`: `Exact` is eq. (3); `Neumann` is eq. (4), which
            the paper uses with mini-batches.
        warm_up: steps of y alone before round 0; a y far from y(x) makes the first hypergradients large and wrong.
        sync_offset: 1 makes the first round one step shorter, as the published test "t + 1 mod I"; the proofs and the
            text have 0.

    - *Converges to* a stationary point of $\sum_i p_i f_i(x, y_i(x))$ for I = 1 and all data exactly.
    - *Does not* for I > 1 when clients differ: with constant steps it stops at a distance proportional to η (client
      drift). `TrackedBiO` removes the drift.
    - *Does not* when the hypergradient is truncated: that moves the limit.

    >>> FedBiO(step_size=0.1, lower_step_size=0.5, local_steps=5).warm_up
    0

    Reference: li2022, Algorithm 1.
    """

    step_size: float = real(above=0)
    lower_step_size: float = real(above=0)
    local_steps: int = whole(1, at_least=1)
    hypergradient: Hypergradient = instance(Hypergradient, Exact())
    warm_up: int = whole(0, at_least=0)
    sync_offset: int = whole(0, at_least=0)

    class State(NamedTuple):
        x: Averaged[Vector]
        y: Local[Vector]
        v: Local[Vector]  # ≈ (∂²_yy g)⁻¹ ∂_y f, for estimators that start from the previous one

    def init_server(self, problem: Bilevel, x0: Vector) -> State:
        y = problem.lower_start()
        return self.State(x=x0, y=y, v=y.zeros())

    def init_client(self, oracle: BilevelOracle, view: State) -> State:
        return view._replace(y=oracle.descend(view.x, view.y, self.lower_step_size, self.warm_up))

    def local_step(self, oracle: BilevelOracle, start: State, state: State) -> State:
        omega = oracle.lower_grad(state.x, state.y)
        nu, v = self.hypergradient(oracle, state.x, state.y, state.v)
        x = oracle.prox(state.x - self.step_size * nu, self.step_size)
        moved = state._replace(x=x, y=state.y - self.lower_step_size * omega, v=v)
        return moved if self.sync_offset == 0 else where(oracle.clock.step < self.sync_offset, state, moved)
