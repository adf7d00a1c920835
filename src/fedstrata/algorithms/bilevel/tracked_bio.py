"""TrackedBiO: FedBiO whose clients add the difference between the mean hypergradient and theirs."""

from typing import NamedTuple

from fedstrata.algorithms.bilevel.base import LocalLowerMethod
from fedstrata.core.algorithm import Cohort
from fedstrata.core.hyperparameters import instance, real, whole
from fedstrata.core.placement import Averaged, Broadcast, Local, Reported
from fedstrata.core.vector import Vector
from fedstrata.problems.bilevel import Bilevel, BilevelOracle
from fedstrata.problems.hypergradients import Exact, Hypergradient


class TrackedBiO(LocalLowerMethod):
    r"""Local hypergradients, memoryless or recursive, corrected by the mean over clients.

    $$ \nu_i \gets \Phi_i(x_i, y_i; \xi) + (1-a) \big( \nu_i - \Phi_i(x_i^{old}, y_i^{old}; \xi) \big), \qquad
       \omega_i \text{ alike} $$
    $$ y_i \gets y_i - \gamma \omega_i, \qquad x_i \gets x_i - \eta (\nu_i + c_i) \quad (I \text{ times}), \qquad
       x \gets \sum_i p_i x_i, \qquad c_i = \bar\nu - \nu_i $$

    with Φ the hypergradient and $\bar\nu$ the mean over all clients of their last ν. An average never overwrites a
    client's estimate. Under partial participation $\bar\nu$ moves by the weight of the clients that took part, so it
    stays the mean over all clients and $\sum_i p_i c_i = 0$, whatever the weights. It sends twice the numbers of x; y
    and ω stay with the client. This method is ours; no paper publishes it.

    Args:
        step_size: η, the step of x.
        lower_step_size: γ, the step of y.
        local_steps: I, the steps of a client in a round.
        momentum: a, the weight of the new sample (None: 1, no memory).
        hypergradient: the estimator Φ, one of `fs.hypergradients`; with a momentum it must depend on the sample alone.
        warm_up: steps of y alone before round 0.

    - *Converges to* a stationary point of $\sum_i p_i f_i(x, y_i(x))$ with constant steps, for any I, however different
      the clients are (with all data exactly, as far as tried; there is no proof).
    - *Does not* when the hypergradient is truncated: that moves the limit.
    - *Does not* improve on FedBiO where noise, not drift, is the limit (docs/guides/bilevel.md).

    >>> TrackedBiO(step_size=0.1, lower_step_size=0.5, local_steps=5, momentum=0.1).warm_up
    0

    Reference: li2022, whose hypergradient steps it corrects; the method is this library's.
    """

    step_size: float = real(above=0)
    lower_step_size: float = real(above=0)
    local_steps: int = whole(1, at_least=1)
    momentum: float | None = real(None, above=0, at_most=1)
    hypergradient: Hypergradient = instance(Hypergradient, Exact())
    warm_up: int = whole(0, at_least=0)

    class State(NamedTuple):
        x: Averaged[Vector]
        mean: Broadcast[Vector]  # of ν over all clients
        change: Reported[Vector]  # of the client's ν since it last took part
        said: Local[Vector]  # its ν then
        nu: Local[Vector]
        omega: Local[Vector]
        y: Local[Vector]
        v: Local[Vector]
        old_x: Local[Vector]
        old_y: Local[Vector]

    def check(self, problem: Bilevel) -> None:
        super().check(problem)
        if self.hypergradient.remembers and self.momentum is not None:
            raise ValueError(
                "TrackedBiO: with a momentum a step needs hypergradients at two points, and "
                f"{self.hypergradient!r} starts from the step before: use fs.hypergradients.Neumann or Exact, or "
                "momentum=None"
            )

    def init_server(self, problem: Bilevel, x0: Vector) -> State:
        y, zero = problem.lower_start(), x0.zeros()
        local = {"said": zero, "nu": zero, "omega": y.zeros(), "y": y, "v": y.zeros(), "old_x": x0, "old_y": y}
        return self.State(x=x0, mean=zero, change=zero, **local)

    def init_client(self, oracle: BilevelOracle, view: State) -> State:
        y = oracle.descend(view.x, view.y, self.lower_step_size, self.warm_up)
        nu, _ = self.hypergradient(oracle, view.x, y, view.v)
        return view._replace(y=y, old_y=y, nu=nu, omega=oracle.lower_grad(view.x, y))

    def local_step(self, oracle: BilevelOracle, start: State, state: State) -> State:
        x, y = state.x, state.y
        nu, v = self.hypergradient(oracle, x, y, state.v)
        omega = oracle.lower_grad(x, y)
        if self.momentum is not None:
            keep, old = 1 - self.momentum, (state.old_x, state.old_y)
            nu = nu + keep * (state.nu - self.hypergradient(oracle, *old, state.v)[0])
            omega = omega + keep * (state.omega - oracle.lower_grad(*old))
        direction = nu + start.mean - start.said
        moved = oracle.prox(x - self.step_size * direction, self.step_size)
        state = state._replace(x=moved, y=y - self.lower_step_size * omega, old_x=x, old_y=y)
        return state._replace(nu=nu, omega=omega, v=v)

    def local_end(self, oracle: BilevelOracle, start: State, state: State) -> State:
        return state._replace(change=state.nu - start.said, said=state.nu)

    def server_step(self, problem: Bilevel, start: State, merged: State, cohort: Cohort) -> State:
        return merged._replace(mean=start.mean + cohort.share * merged.change)
