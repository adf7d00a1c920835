"""MFCGD: recursive estimates of a client's own two levels; and the same with corrected client drift."""

from typing import Any, NamedTuple, TypeVar

from fedstrata.algorithms.nested.base import NestedMethod, check_two_levels, first_sample
from fedstrata.core.algorithm import Cohort, StateWithX
from fedstrata.core.hyperparameters import real, whole
from fedstrata.core.placement import Averaged, Broadcast, Local, Reported
from fedstrata.core.vector import Vector, where
from fedstrata.problems.nested import Jacobian, Nested, NestedOracle

S = TypeVar("S", bound=StateWithX)


class Estimates(NamedTuple):
    """What a client tracks.

    Args:
        h: ≈ g_i(x).
        u: ≈ ∇g_i(x).
        v: ≈ ∇f_i(h).
    """

    h: Vector
    u: Jacobian
    v: Vector


class RecursiveMethod(NestedMethod):
    """What MFCGD and its variants share: a client's recursive estimates; the last step of a round is the server's."""

    step_size: float = real(above=0)
    local_steps: int = whole(1, at_least=1)
    value_momentum: float = real(0.1, above=0, at_most=1)
    jacobian_momentum: float | None = real(None, above=0, at_most=1)
    gradient_momentum: float | None = real(None, above=0, at_most=1)
    jacobian_radius: float | None = real(None, above=0)
    gradient_radius: float | None = real(None, above=0)
    init_batch_size: int | None = whole(None, at_least=1)

    solves = "client"
    stores_jacobians = True

    def check(self, problem: Nested) -> None:
        check_two_levels(self, problem, "ComFedL")
        super().check(problem)

    def start_values(self, problem: Nested, x0: Vector) -> dict[str, Any]:
        """The start of the fields that all of them have."""
        h = problem.zeros(1)
        return {"x": x0, "w": x0.zeros(), "old": x0, "h": h, "u": problem.zero_jacobian(1), "v": h}

    def init_client(self, oracle: NestedOracle, view: S) -> S:
        sample = first_sample(oracle, self.init_batch_size)
        h, u = sample.value(1, view.x), sample.jacobian(1, view.x)
        v = sample.pull(2, h)
        return view._replace(h=h, u=u, v=v, w=u.pull(v))

    def track(self, oracle: NestedOracle, x: Vector, old: Vector, last: Estimates) -> Estimates:
        """Lines 17 to 19: h, u and v at x, from the last ones, which were made at `old`."""
        alpha = self.value_momentum
        beta = alpha if self.jacobian_momentum is None else self.jacobian_momentum
        varrho = alpha if self.gradient_momentum is None else self.gradient_momentum
        h = (1 - alpha) * (last.h - oracle.value(1, old)) + oracle.value(1, x)
        u = oracle.jacobian(1, x) + (1 - beta) * (last.u - oracle.jacobian(1, old))
        v = oracle.pull(2, h) + (1 - varrho) * (last.v - oracle.pull(2, last.h))
        u = u if self.jacobian_radius is None else u.clip_to_ball(self.jacobian_radius)
        v = v if self.gradient_radius is None else v.clip_to_ball(self.gradient_radius)
        return where(oracle.clock.step == 0, last, Estimates(h, u, v))  # at t = 1 `init_client` has done it

    def move(self, oracle: NestedOracle, x: Vector, direction: Vector) -> Vector:
        """x after a local step; unchanged in the last of a round, where the server takes the step."""
        moved = oracle.prox(x - self.step_size * direction, self.step_size)
        return where(oracle.clock.local_step == self.local_steps - 1, x, moved)

    def solution(self, problem: Nested, state: StateWithX) -> Vector:
        return state.x


class MFCGD(RecursiveMethod):
    r"""Momentum-based compositional gradient descent: each client tracks its own level and Jacobian, for K = 2.

    With $g_i$ the first and $f_i$ the second level of client i,

    $$ h_i \gets g_i(x_i; \zeta) + (1-\alpha) \big( h_i - g_i(x_i^{old}; \zeta) \big) $$
    $$ u_i \gets \Pi_{C_g} \big[ \nabla g_i(x_i; \zeta)
       + (1-\beta) \big( u_i - \nabla g_i(x_i^{old}; \zeta) \big) \big] $$
    $$ v_i \gets \Pi_{C_f} \big[ \nabla f_i(h_i; \xi) + (1-\varrho) \big( v_i - \nabla f_i(h_i^{old}; \xi) \big) \big],
       \qquad w_i = u_i^\top v_i, \qquad x_i \gets x_i - \gamma\eta \, w_i $$

    and in the last of q such steps $x \gets \bar x - \gamma\eta \, \bar w$, with the means over the clients, instead.
    After an averaging the estimates continue from the client's own last point $x_i^{old}$, as in the listing: from the
    mean they would be wrong by the drift. Each client keeps the Jacobian u_i as numbers, one matrix. With a regulariser
    every step in x is a proximal one; the paper has none.

    Args:
        step_size: γη.
        local_steps: q.
        value_momentum: α, the weight of the new sample; 1 forgets the past.
        jacobian_momentum: β (None: as value_momentum).
        gradient_momentum: ϱ (None: as value_momentum).
        jacobian_radius: C_g, the radius of a ball in the Frobenius norm (None: no projection).
        gradient_radius: C_f, the radius of a ball (None: no projection).
        init_batch_size: examples for the first estimates (None: those of a step; the paper has q).

    Converges to:
        - a stationary point of the client-coupled objective $\sum_i p_i f_i(g_i(x))$ for q = 1 (with all data exactly,
          for any momenta: it is then gradient descent);
        - with all data it is `ComFedL`.

    Does not:
        - converge to it for q > 1 and clients that differ: with a constant step it stops at a distance in proportion to
          that step. This is plain client drift, of the size of FedAvg's. The paper's proof misses it where it takes u
          and v as averaged; `TrackedMFCGD` removes it.

    >>> MFCGD(step_size=0.1, local_steps=5, value_momentum=0.2).value_momentum
    0.2

    Reference: huang2022, Algorithm 1 with A = I.
    """

    class State(NamedTuple):
        x: Averaged[Vector]
        w: Reported[Vector]
        old: Local[Vector]  # the client's own x at which h, u and v were last evaluated
        h: Local[Vector]
        u: Local[Jacobian]
        v: Local[Vector]

    def init_server(self, problem: Nested, x0: Vector) -> State:
        return self.State(**self.start_values(problem, x0))

    def local_step(self, oracle: NestedOracle, start: State, state: State) -> State:
        h, u, v = self.track(oracle, state.x, state.old, Estimates(state.h, state.u, state.v))
        w = u.pull(v)
        return state._replace(x=self.move(oracle, state.x, w), w=w, old=state.x, h=h, u=u, v=v)

    def server_step(self, problem: Nested, start: State, merged: State, cohort: Cohort) -> State:
        return merged._replace(x=problem.prox(merged.x - self.step_size * merged.w, self.step_size))


class TrackedMFCGD(RecursiveMethod):
    r"""MFCGD with corrected local steps: exact with constant steps, however different the clients are.

    $$ x_i \gets x_i - \gamma\eta \, (w_i + c_i), \qquad c_i = \bar w - w_i \text{ at the last averaging} $$

    with h, u, v, w and the averaging of `MFCGD`; c starts from zero.

    This method is the library's: no paper has it. A client's estimates are never overwritten; the mean enters as a
    control variate. The server keeps the mean of what all clients last sent, so that $\sum_i p_i c_i = 0$ with any
    cohort and any weights. Clients send two vectors as in MFCGD, x and the change of w. They receive two, x and w̄,
    where MFCGD has one.

    Args:
        step_size: γη.
        local_steps: q.
        value_momentum: α, the weight of the new sample; 1 forgets the past.
        jacobian_momentum: β (None: as value_momentum).
        gradient_momentum: ϱ (None: as value_momentum).
        jacobian_radius: C_g, the radius of a ball in the Frobenius norm (None: no projection).
        gradient_radius: C_f, the radius of a ball (None: no projection).
        init_batch_size: examples for the first estimates (None: those of a step; the paper has q).

    Converges to:
        - a stationary point of the client-coupled objective with constant steps, for any q and any momenta (with all
          data exactly, in all experiments so far; there is no published proof).

    Does not:
        - solve problems whose inner level is the mean of all clients; use `TrackedSCGD`.

    >>> TrackedMFCGD(step_size=0.1, local_steps=5).local_steps
    5

    Reference: huang2022, whose recursions it corrects; the method is this library's.
    """

    variant_of = MFCGD

    class State(NamedTuple):
        x: Averaged[Vector]
        w: Reported[Vector]  # the change of w_i since the client last sent it
        mean: Broadcast[Vector]  # w̄ over all clients, as they last sent it
        w_i: Local[Vector]
        old: Local[Vector]
        h: Local[Vector]
        u: Local[Jacobian]
        v: Local[Vector]

    def init_server(self, problem: Nested, x0: Vector) -> State:
        return self.State(**self.start_values(problem, x0), mean=x0.zeros(), w_i=x0.zeros())

    def local_step(self, oracle: NestedOracle, start: State, state: State) -> State:
        h, u, v = self.track(oracle, state.x, state.old, Estimates(state.h, state.u, state.v))
        w = u.pull(v)
        x = self.move(oracle, state.x, w + start.mean - start.w_i)
        return state._replace(x=x, w=w - start.w_i, w_i=w, old=state.x, h=h, u=u, v=v)

    def server_step(self, problem: Nested, start: State, merged: State, cohort: Cohort) -> State:
        w = start.mean + merged.w
        x = problem.prox(merged.x - self.step_size * w, self.step_size)
        return merged._replace(x=x, w=w, mean=start.mean + cohort.share * merged.w)
