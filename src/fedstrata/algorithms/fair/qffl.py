"""q-FFL: clients with a larger loss have more weight; q sets how much."""

from typing import ClassVar, NamedTuple

from fedstrata.core.algorithm import Algorithm, Cohort
from fedstrata.core.hyperparameters import real, whole
from fedstrata.core.placement import Broadcast, Reported
from fedstrata.core.vector import Scalar, Vector, where
from fedstrata.problems.base import Problem, SmoothOracle


class QFFL(Algorithm):
    r"""q-fair federated learning with local steps (q-FedAvg): FedAvg whose clients pull in proportion to their loss^q.

    $$ x_i \gets x_i - \eta \nabla f_i(x_i; \xi_i) \quad (Q \text{ times from } x), \qquad
       D_i = F_i^q \, L (x - x_i), \qquad h_i = q F_i^{q-1} \| L (x - x_i) \|^2 + L F_i^q $$
    $$ x \gets x - \frac{\sum_i p_i D_i}{\sum_i p_i h_i}, \qquad F_i = f_i(x) $$

    Args:
        step_size: η, the step of the clients; constant within a round (schedule it `fs.per_round`) where L is 1/η.
        local_steps: Q, the steps of a client in a round.
        q: how much fairness; 0 is FedAvg, and as q grows the worst client alone decides.
        lipschitz: L, an upper estimate of the curvature of f_i; None is 1/η. It cancels for q = 0.

    - *Converges to* a stationary point of $\sum_i p_i f_i^{q+1} / (q+1)$ with Q = 1, without another step size for
      every q: h_i bounds the curvature of f_i^{q+1}/(q+1) from L.
    - *Does not* with Q > 1 and clients that differ, where it drifts as FedAvg does.
    - *Does not* take negative losses: one stops the run as not finite.
    - F_i is the loss at the start of the round over all of the client's data, whatever the batches of the local steps
      are. This is one more pass over the data that `samples` does not count.
    - D_i and h_i are merged as weighted means, so aggregation may be secured; a lone h_i would reveal the client's
      loss.

    >>> QFFL(step_size=0.1, local_steps=10, q=2.0).lipschitz is None
    True

    Reference: li2020qffl, Algorithm 2; that F_i is taken over all data is from memory.
    """

    oracle: ClassVar[type] = SmoothOracle

    step_size: float = real(above=0)
    local_steps: int = whole(1, at_least=1)
    q: float = real(1.0, at_least=0)
    lipschitz: float | None = real(None, above=0)

    class State(NamedTuple):
        x: Broadcast[Vector]
        D: Reported[Vector]
        h: Reported[Scalar]

    def init_server(self, problem: Problem, x0: Vector) -> State:
        return self.State(x=x0, D=x0.zeros(), h=0.0)

    def local_step(self, oracle: SmoothOracle, start: State, state: State) -> State:
        return state._replace(x=state.x - self.step_size * oracle.grad(state.x))

    def local_end(self, oracle: SmoothOracle, start: State, state: State) -> State:
        F = oracle.fresh(0, batch_size="all").value(start.x).astype(start.x.scalar_dtype)
        # A client with zero loss has no weight, but F^(q-1) must stay finite. Powers of negative losses are undefined.
        F = where(F < 0, float("nan") * F, where(F == 0, F + 1e-10, F))
        L = 1 / self.step_size if self.lipschitz is None else self.lipschitz
        gradient = L * (start.x - state.x)
        h = self.q * F ** (self.q - 1) * gradient.norm_squared() + L * F**self.q
        return state._replace(D=F**self.q * gradient, h=h)

    def server_step(self, problem: Problem, start: State, merged: State, cohort: Cohort) -> State:
        return merged._replace(x=start.x - merged.D / merged.h)

    def solution(self, problem: Problem, state: State) -> Vector:
        return state.x
