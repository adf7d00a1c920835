"""TrackedBiO: FedBiO whose clients add what the mean hypergradient differs by from their own."""

from typing import Any, NamedTuple

from fedstrata.algorithm import Cohort, real
from fedstrata.algorithms.bilevel.base import LocalLowerMethod
from fedstrata.hypergradients import Exact, Hypergradient
from fedstrata.placement import Averaged, Broadcast, Local, Reported
from fedstrata.problems.bilevel import BilevelOracle
from fedstrata.vector import Vector


class TrackedBiO(LocalLowerMethod):
    r"""Hypergradients of a client's own, memoryless or recursive, corrected by the mean over clients.

    $$ \nu_i \gets \Phi_i(x_i, y_i; \xi) + (1-a) \big( \nu_i - \Phi_i(x_i^{old}, y_i^{old}; \xi) \big), \qquad
       \omega_i \text{ alike} $$
    $$ y_i \gets y_i - \gamma \omega_i, \qquad x_i \gets x_i - \eta (\nu_i + c_i) \quad (I \text{ times}), \qquad
       x \gets \sum_i p_i x_i, \qquad c_i = \bar\nu - \nu_i $$

    with Φ the hypergradient and $\bar\nu$ the mean over all clients of their last ν.

    step_size: η. lower_step_size: γ. local_steps: I. momentum: a, the weight of the new sample (None: 1, no memory).
    hypergradient, warm_up: as in `FedBiO` (with memory the estimator must depend on the sample alone).

    Converges to a stationary point of $\sum_i p_i f_i(x, y_i(x))$ with constant steps, for any I, however different the
    clients are (with all data exactly, as far as it was tried; no proof is printed, and a truncated hypergradient moves
    the limit). A client's estimate is never overwritten by an average. This method is ours: no paper has it. Does
    not gain on FedBiO where noise and not drift is the limit (docs/bilevel.md). With a cohort $\bar\nu$ moves by the
    weight of the clients that changed, so that it stays the mean over all clients, $\sum_i p_i c_i = 0$, whatever the
    weights. Sends twice the numbers of x; y and ω stay with the client.

    >>> TrackedBiO(step_size=0.1, lower_step_size=0.5, local_steps=5, momentum=0.1).warm_up
    0

    Reference: li2022, whose hypergradient steps it corrects; the method is this library's.
    """

    step_size: float = real(above=0)
    lower_step_size: float = real(above=0)
    local_steps: int = 1
    momentum: float | None = real(None, above=0, at_most=1)
    hypergradient: Hypergradient = Exact()
    warm_up: int = 0

    class State(NamedTuple):
        x: Averaged[Vector]
        mean: Broadcast[Vector]  # of ν over all clients
        change: Reported[Vector]  # of the client's own ν, since it last said
        said: Local[Vector]  # its ν then
        nu: Local[Vector]
        omega: Local[Vector]
        y: Local[Vector]
        v: Local[Vector]
        old_x: Local[Vector]
        old_y: Local[Vector]

    def check(self, problem: Any) -> None:
        super().check(problem)
        if self.hypergradient.remembers and self.momentum is not None:
            raise ValueError(
                f"TrackedBiO: with a momentum hypergradients are asked for at two points of one step, and "
                f"{self.hypergradient!r} goes on from the step before: use fs.hypergradients.Neumann or Exact, or "
                "momentum=None"
            )

    def init_server(self, problem: Any, x0: Vector) -> State:
        y, zero = problem.lower_start(), x0.zeros()
        at_home = {"said": zero, "nu": zero, "omega": y.zeros(), "y": y, "v": y.zeros(), "old_x": x0, "old_y": y}
        return self.State(x=x0, mean=zero, change=zero, **at_home)

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

    def server_step(self, problem: Any, start: State, merged: State, cohort: Cohort) -> State:
        return merged._replace(mean=start.mean + cohort.share * merged.change)
