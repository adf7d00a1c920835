"""MFCGD: recursive estimates of a client's own two levels; and the same with corrected client drift."""

from typing import Any, NamedTuple

from fedstrata.algorithm import Cohort, real
from fedstrata.algorithms.nested.base import NestedMethod, next_value
from fedstrata.placement import Averaged, Broadcast, Local, Reported
from fedstrata.problems.nested import Jacobian, NestedOracle
from fedstrata.vector import Vector, where


class MFCGD(NestedMethod):
    r"""Momentum-based compositional gradient descent: each client tracks its own level and Jacobian, for K = 2.

    With $g_i$ the first and $f_i$ the second level of client i,

    $$ h_i \gets g_i(x_i; \zeta) + (1-\alpha) \big( h_i - g_i(x_i^{old}; \zeta) \big) $$
    $$ u_i \gets \Pi_{C_g} \big[ \nabla g_i(x_i; \zeta)
       + (1-\beta) \big( u_i - \nabla g_i(x_i^{old}; \zeta) \big) \big] $$
    $$ v_i \gets \Pi_{C_f} \big[ \nabla f_i(h_i; \xi) + (1-\varrho) \big( v_i - \nabla f_i(h_i^{old}; \xi) \big) \big],
       \qquad w_i = u_i^\top v_i, \qquad x_i \gets x_i - \gamma\eta \, w_i $$

    and in the last of q such steps $x \gets \bar x - \gamma\eta \, \bar w$, with the means over the clients, instead.

    step_size: γη. local_steps: q. value_momentum: α, the weight of the new sample; 1 forgets the past.
    jacobian_momentum, gradient_momentum: β and ϱ (None: as value_momentum). jacobian_radius, gradient_radius: C_g, of a
    ball of Frobenius norm, and C_f (None: no projection). init_batch_size: examples for the first estimates (None:
    those of a step; the paper has q).

    Converges to a stationary point of the client-coupled objective $\sum_i p_i f_i(g_i(x))$ for q = 1 (with all data
    exactly, for any momenta: it is then gradient descent). For q > 1 and clients that differ it stops, with a constant
    step, at a distance in proportion to that step: plain client drift, of the size of FedAvg's, which the paper's proof
    misses where it takes u and v for averaged; `TrackedMFCGD` removes it. With all data it is `ComFedL`. After an
    averaging the estimates move on from the client's own last point $x_i^{old}$, as the listing says: from the mean
    they would be wrong by the drift. Keeps the Jacobian u_i as numbers, one matrix a client. With a regulariser every
    step in x is a proximal one; the paper has none.

    >>> MFCGD(step_size=0.1, local_steps=5, value_momentum=0.2).value_momentum
    0.2

    Reference: huang2022, Algorithm 1 with A = I.
    """

    step_size: float = real(above=0)
    local_steps: int = 1
    value_momentum: float = real(0.1, above=0, at_most=1)
    jacobian_momentum: float | None = real(None, above=0, at_most=1)
    gradient_momentum: float | None = real(None, above=0, at_most=1)
    jacobian_radius: float | None = real(None, above=0)
    gradient_radius: float | None = real(None, above=0)
    init_batch_size: int | None = None

    solves = "client"
    stores_jacobians = True

    class State(NamedTuple):
        x: Averaged[Vector]
        w: Reported[Vector]
        old: Local[Vector]  # the client's own x where h, u and v were last evaluated
        h: Local[Vector]
        u: Local[Jacobian]
        v: Local[Vector]

    def check(self, problem: Any) -> None:
        if len(problem.levels) != 2:
            raise ValueError(
                f"{type(self).__name__} is made for two levels, and this problem has {len(problem.levels)}; use "
                "ComFedL, which takes any number"
            )
        super().check(problem)

    def init_server(self, problem: Any, x0: Vector) -> Any:
        return self.State(**self.start_values(problem, x0))

    def start_values(self, problem: Any, x0: Vector) -> dict[str, Any]:
        h = problem.zeros(1)
        return {"x": x0, "w": x0.zeros(), "old": x0, "h": h, "u": problem.zero_jacobian(1), "v": h}

    def init_client(self, oracle: NestedOracle, view: Any) -> Any:
        sample = oracle if self.init_batch_size is None else oracle.fresh(0, self.init_batch_size)
        h, u = sample.value(1, view.x), sample.jacobian(1, view.x)
        v = sample.pull(2, h)
        return view._replace(h=h, u=u, v=v, w=u.pull(v))

    def local_step(self, oracle: NestedOracle, start: Any, state: Any) -> Any:
        state = where(oracle.clock.step == 0, state, self.track(oracle, state))  # at t = 1 `init_client` has done it
        w = state.u.pull(state.v)
        x = oracle.prox(state.x - self.step_size * self.direction(start, w), self.step_size)
        last = oracle.clock.local_step == self.local_steps - 1  # then the server takes the step
        return state._replace(x=where(last, state.x, x), old=state.x, **self.message(start, w))

    def track(self, oracle: NestedOracle, state: Any) -> Any:
        """h, u and v at x."""
        alpha, old, x = self.value_momentum, state.old, state.x
        beta = alpha if self.jacobian_momentum is None else self.jacobian_momentum
        varrho = alpha if self.gradient_momentum is None else self.gradient_momentum
        h = next_value(oracle, 1, alpha, state.h, old, x)
        u = oracle.jacobian(1, x) + (1 - beta) * (state.u - oracle.jacobian(1, old))
        v = oracle.pull(2, h) + (1 - varrho) * (state.v - oracle.pull(2, state.h))
        u = u if self.jacobian_radius is None else u.clip_to_ball(self.jacobian_radius)
        v = v if self.gradient_radius is None else v.clip_to_ball(self.gradient_radius)
        return state._replace(h=h, u=u, v=v)

    def direction(self, start: Any, w: Vector) -> Vector:
        """Where a client goes that has the estimate w."""
        return w

    def message(self, start: Any, w: Vector) -> dict[str, Vector]:
        return {"w": w}

    def server_step(self, problem: Any, start: Any, merged: Any, cohort: Cohort) -> Any:
        x = problem.prox(merged.x - self.step_size * merged.w, self.step_size)
        return merged._replace(x=x)

    def solution(self, problem: Any, state: Any) -> Vector:
        return state.x

    @classmethod
    def theory(
        cls,
        *,
        k: float,
        n: float,
        c1: float,
        c2: float,
        c3: float,
        gamma: float = 1.0,
        local_steps: int = 1,
        **options: Any,
    ) -> Any:
        r"""The schedule of Theorems 1 and 2: $\eta_t = k/(n+t)^{1/3}$ and $\alpha_{t+1} = c_1 \eta_t^2$, at t = 1, 2 …

        β has $c_2$ and ϱ has $c_3$ where α has $c_1$. The user supplies k, n, c1, c2, c3 and gamma, which the theorems
        bound in terms of smoothness, bounds of the gradients and q; the paper's orders are n = O(q³) with q = T^{1/3},
        and O(1) for the others. The first batch is q. options: other hyper-parameters (radii; ρ of `AdaMFCGD`).

        >>> method = MFCGD.theory(k=1.0, n=8.0, c1=2.0, c2=2.0, c3=2.0, local_steps=2)
        >>> round(method.value_momentum(0), 9), method.init_batch_size
        (0.5, 2)
        """
        name = f"{cls.__name__}.theory"
        given = {"k": k, "n": n, "c1": c1, "c2": c2, "c3": c3, "gamma": gamma}
        for constant, value in given.items():
            if not value > 0:
                raise ValueError(f"{name}: {constant}={value!r} must be > 0")
        number = lambda t: t.astype(float) if hasattr(t, "astype") else t  # int32 would give single precision
        eta = lambda t: k / (n + number(t)) ** (1 / 3)
        momentum = lambda c: lambda step: c * eta(step) ** 2  # step counts from 0: α_t at t = step + 1
        for constant in ("c1", "c2", "c3"):
            first = given[constant] * eta(0) ** 2
            if first > 1:
                raise ValueError(
                    f"{name}: the first momentum {constant} η_0² = {first:g} must be at most 1; take n >= "
                    f"{k**3 * given[constant] ** 1.5:g}, or a smaller {constant} or k"
                )
        schedules: dict[str, Any] = {
            "step_size": lambda step: gamma * eta(step + 1),
            "value_momentum": momentum(c1),
            "jacobian_momentum": momentum(c2),
            "gradient_momentum": momentum(c3),
        }
        return cls(local_steps=local_steps, **schedules, **{"init_batch_size": local_steps, **options})


class TrackedMFCGD(MFCGD):
    r"""MFCGD with corrected local steps: exact with constant steps, however different the clients are.

    $$ x_i \gets x_i - \gamma\eta \, (w_i + c_i), \qquad c_i = \bar w - w_i \text{ at the last averaging} $$

    with h, u, v, w and the averaging of `MFCGD`; c starts from zero.

    step_size, local_steps, momenta, radii and init_batch_size: as in `MFCGD`.

    Converges to a stationary point of the client-coupled objective with constant steps, for any q and any momenta (with
    all data exactly, as far as it was tried; no proof is printed). This method is ours: no paper has it. A client's
    estimates are never overwritten; the mean enters as a control variate. The server keeps the mean of what all
    clients last sent, so that $\sum_i p_i c_i = 0$ with any cohort and any weights. Sends two vectors up as
    MFCGD does, x and the change of w; down go two, x and w̄, where MFCGD has one.

    >>> TrackedMFCGD(step_size=0.1, local_steps=5).local_steps
    5

    Reference: huang2022, whose recursions it corrects; the method is this library's.
    """

    class State(NamedTuple):  # pyright: ignore[reportIncompatibleVariableOverride]
        x: Averaged[Vector]
        w: Reported[Vector]  # the change of w_i since the client last sent it
        mean: Broadcast[Vector]  # w̄ over all clients, as they last sent it
        w_i: Local[Vector]
        old: Local[Vector]
        h: Local[Vector]
        u: Local[Jacobian]
        v: Local[Vector]

    def start_values(self, problem: Any, x0: Vector) -> dict[str, Any]:
        return {**super().start_values(problem, x0), "mean": x0.zeros(), "w_i": x0.zeros()}

    def direction(self, start: Any, w: Vector) -> Vector:
        return super().direction(start, w + start.mean - start.w_i)

    def message(self, start: Any, w: Vector) -> dict[str, Vector]:
        return {"w": w - start.w_i, "w_i": w}

    def server_step(self, problem: Any, start: Any, merged: Any, cohort: Cohort) -> Any:
        moved = super().server_step(problem, start, merged._replace(w=start.mean + merged.w), cohort)
        return moved._replace(mean=start.mean + cohort.share * merged.w)
