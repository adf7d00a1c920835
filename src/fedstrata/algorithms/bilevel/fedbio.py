"""FedBiO: local steps on the hypergradient, with a lower variable that stays at home."""

from typing import Any, NamedTuple

from fedstrata.algorithm import real
from fedstrata.algorithms.bilevel.base import LocalLowerMethod
from fedstrata.hypergradients import Exact, Hypergradient
from fedstrata.placement import Averaged, Local
from fedstrata.problems.bilevel import BilevelOracle
from fedstrata.vector import Vector, where


class FedBiO(LocalLowerMethod):
    r"""FedAvg on the hypergradient; each client follows the solution of its own lower problem by gradient steps.

    $$ \omega = \partial_y g_i(x_i, y_i), \qquad
       \nu = \partial_x f_i - \partial^2_{xy} g_i \, (\partial^2_{yy} g_i)^{-1} \partial_y f_i \; (x_i, y_i) $$
    $$ y_i \gets y_i - \gamma \omega, \qquad x_i \gets x_i - \eta \nu \quad (I \text{ times}), \qquad
       x \gets \sum_i p_i x_i $$

    step_size: η. lower_step_size: γ. local_steps: I. hypergradient: how ν is estimated, of `fs.hypergradients`: `Exact`
    is eq. (3), `Neumann` eq. (4), which the paper uses with mini-batches. warm_up: steps of y alone before round 0; a y
    far from y(x) makes the first hypergradients large and wrong. sync_offset: 1 makes the first round a step shorter,
    as the printed test "t + 1 mod I" has it; the proofs and the text have 0.

    Converges, for I = 1 and all data exactly, to a stationary point of $\sum_i p_i f_i(x, y_i(x))$; for I > 1 and
    clients that differ it stops, with constant steps, at a distance in proportion to η (client drift). A truncated
    hypergradient moves the limit too. `TrackedBiO` removes the drift. This is the method of 2022 with a lower problem
    per client; a paper of 2023 (arXiv 2302.06701) calls another one, for a lower problem in common, by the same name.
    With a regulariser every step in x is a proximal one; the paper has none. Up and down go the numbers of x alone.

    >>> FedBiO(step_size=0.1, lower_step_size=0.5, local_steps=5).warm_up
    0

    Reference: li2022, Algorithm 1.
    """

    step_size: float = real(above=0)
    lower_step_size: float = real(above=0)
    local_steps: int = 1
    hypergradient: Hypergradient = Exact()
    warm_up: int = 0
    sync_offset: int = 0

    class State(NamedTuple):
        x: Averaged[Vector]
        y: Local[Vector]
        v: Local[Vector]  # ≈ (∂²_yy g)⁻¹ ∂_y f, for estimators that go on from it

    def init_server(self, problem: Any, x0: Vector) -> State:
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

    @classmethod
    def theory(
        cls,
        *,
        steps: int,
        local_steps: int,
        mu: float,
        smoothness: float,
        h_smoothness: float,
        lower_step_size: float | None = None,
        **options: Any,
    ) -> "FedBiO":
        r"""The constant steps of Theorem 5.1: $\eta = \delta / T^{1/3}$ with the largest δ that it allows.

        steps: T. mu, smoothness: μ and L of g. h_smoothness: $L_h$ of h and of the hypergradient. lower_step_size: γ,
        below 1/L (None: 0.9/L). options: other hyper-parameters.

        >>> method = FedBiO.theory(steps=1000, local_steps=5, mu=1.0, smoothness=2.0, h_smoothness=3.0)
        >>> method.lower_step_size, round(method.step_size, 6)
        (0.45, 0.000249)
        """
        for name, value in {"steps": steps, "mu": mu, "smoothness": smoothness, "h_smoothness": h_smoothness}.items():
            if not value > 0:
                raise ValueError(f"FedBiO.theory: {name}={value!r} must be > 0")
        if mu > smoothness:
            raise ValueError(f"FedBiO.theory: mu={mu!r} is above smoothness={smoothness!r}; no function has that")
        gamma = 0.9 / smoothness if lower_step_size is None else lower_step_size
        if not 0 < gamma < 1 / smoothness:
            raise ValueError(f"FedBiO.theory: lower_step_size={gamma!r} must be between 0 and 1/L = {1 / smoothness:g}")
        q, q1, q1_bar = 1 - mu * gamma / 2, 1 + mu * gamma / 4, 1 + 4 / (mu * gamma)
        stale = q1 * q**local_steps
        drift = ((1 - q) * (1 - stale)) ** 0.5 / (2 * h_smoothness**2 * local_steps * (q1_bar * stale) ** 0.5)
        delta = min(drift, 1 / (12 * h_smoothness * local_steps), mu * gamma / 2, 1.0)
        return cls(delta / steps ** (1 / 3), gamma, local_steps, **options)
