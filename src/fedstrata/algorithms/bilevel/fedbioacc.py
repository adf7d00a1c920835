"""FedBiOAcc: FedBiO with recursive estimates of both directions; and the same with its correction put right."""

from typing import Any, NamedTuple

from fedstrata.algorithm import real
from fedstrata.algorithms.bilevel.base import LocalLowerMethod
from fedstrata.hypergradients import Exact, Hypergradient
from fedstrata.placement import Averaged, Local
from fedstrata.problems.bilevel import BilevelOracle
from fedstrata.vector import Vector, where


class FedBiOAcc(LocalLowerMethod):
    r"""FedBiO whose directions are recursive (STORM) estimates, with steps that fall like $t^{-1/3}$.

    $$ \omega_t = \partial_y g(x_t, y_t; B_y) + (1 - c_\omega \alpha_{t-1}^2)
       \big( \omega_{t-1} - \partial_y g(X_{t-1}, y_{t-1}; B_y) \big) $$
    $$ \hat\nu_t = \Phi(x_t, y_t; B_x) + (1 - c_\nu \alpha_{t-1}^2)
       \big( \nu_{t-1} - \Phi(X_{t-1}, y_{t-1}; B_x) \big) $$
    $$ y_{t+1} = y_t - \gamma \alpha_t \omega_t, \qquad \hat x_{t+1} = x_t - \eta \alpha_t \hat\nu_t, \qquad
       \alpha_t = \delta / (u + \sigma^2 t)^{1/3} $$

    with Φ the hypergradient. In the last of I steps $X_t$, $\nu_t$ and $x_{t+1}$ are the means over the clients of
    $x_t$, $\hat\nu_t$ and $\hat x_{t+1}$, otherwise the client's own.

    step_size: η. lower_step_size: γ. local_steps: I. momentum: c_ν. lower_momentum: c_ω. delta, offset, sigma: δ, u, σ
    (σ = 0: constant steps; the paper has δ = 0.1, u = 1 and does not say its σ). hypergradient, warm_up, sync_offset:
    as in `FedBiO`.

    Converges where clients are alike (with all data it is then `FedBiO` with steps $\eta\alpha_t$, $\gamma\alpha_t$).
    Where they differ and I > 1 it stops as far from the optimum as `FedBiO` does: $\omega_t$ is taken at the client's
    own $x_t$ but corrected at the mean $X_t$, and since ω is never averaged, each averaging leaves an error in it that
    only $c_\omega \alpha^2$ forgets. Against noise the recursion does help. `AnchoredBiOAcc` takes the correction at
    the client's own point. Sends three times the numbers of x (two would do, as the mean of $\hat x$ follows from the
    others); y and ω stay with the client. About names and regularisers see `FedBiO`.

    >>> FedBiOAcc(step_size=0.1, lower_step_size=0.5, local_steps=5).momentum
    1.0

    Reference: li2022, Algorithm 2.
    """

    step_size: float = real(above=0)
    lower_step_size: float = real(above=0)
    local_steps: int = 1
    momentum: float = real(1.0, at_least=0)
    lower_momentum: float = real(1.0, at_least=0)
    delta: float = real(0.1, above=0)
    offset: float = real(1.0, above=0)
    sigma: float = real(0.0, at_least=0)
    hypergradient: Hypergradient = Exact()
    warm_up: int = 0
    sync_offset: int = 0

    class State(NamedTuple):
        x: Averaged[Vector]
        nu: Averaged[Vector]
        before: Averaged[Vector]  # X_{t−1}
        y: Local[Vector]
        old_y: Local[Vector]
        omega: Local[Vector]

    def check(self, problem: Any) -> None:
        super().check(problem)
        name = type(self).__name__
        if self.hypergradient.remembers:
            raise ValueError(
                f"{name} asks for hypergradients at two points of one step, so its estimator must depend on the sample "
                f"alone; {self.hypergradient!r} goes on from the step before: use fs.hypergradients.Neumann or Exact"
            )
        first = [self.delta, self.offset, self.sigma, self.momentum, self.lower_momentum]
        if all(isinstance(value, float | int) for value in first):
            largest = max(self.momentum, self.lower_momentum) * self.alpha(1.0) ** 2
            if largest > 1:
                raise ValueError(
                    f"{name}: the weight c α² of a new sample is {largest:.3g} in the first step and must be at most "
                    "1; take a larger offset, or a smaller delta or momentum"
                )

    def init_server(self, problem: Any, x0: Vector) -> Any:
        return self.State(**self.start_values(problem, x0))

    def start_values(self, problem: Any, x0: Vector) -> dict[str, Vector]:
        y = problem.lower_start()
        return {"x": x0, "nu": x0.zeros(), "before": x0, "y": y, "old_y": y, "omega": y.zeros()}

    def init_client(self, oracle: BilevelOracle, view: Any) -> Any:
        y = oracle.descend(view.x, view.y, self.lower_step_size, self.warm_up)
        return view._replace(y=y, old_y=y, omega=oracle.lower_grad(view.x, y))  # for a client whose first round is late

    def alpha(self, t: Any) -> Any:
        return self.delta / (self.offset + self.sigma**2 * t) ** (1 / 3)

    def local_step(self, oracle: BilevelOracle, start: Any, state: Any) -> Any:
        t = (oracle.clock.step + 1 - self.sync_offset).astype(state.x.scalar_dtype)
        x, y, previous, alpha = state.x, state.y, self.alpha(t - 1), self.alpha(t)
        at = lambda x, y: self.hypergradient(oracle, x, y, y)[0]
        a, b = self.lower_momentum * previous**2, self.momentum * previous**2
        stale_omega = state.omega - oracle.lower_grad(self.own_before(state), state.old_y)
        stale_nu = state.nu - at(state.before, state.old_y)
        first = t == 1
        omega = oracle.lower_grad(x, y) + where(first, y.zeros(), (1 - a) * stale_omega)
        nu = at(x, y) + where(first, x.zeros(), (1 - b) * stale_nu)
        step = self.step_size * alpha
        moved = {"x": oracle.prox(x - step * nu, step), "y": y - self.lower_step_size * alpha * omega}
        moved = self.remember(state, **moved, nu=nu, before=x, old_y=y, omega=omega)
        return moved if self.sync_offset == 0 else where(oracle.clock.step < self.sync_offset, state, moved)

    def own_before(self, state: Any) -> Vector:
        """Where ω was last evaluated, or what the listing takes for it."""
        return state.before

    def remember(self, state: Any, **values: Vector) -> Any:
        return state._replace(**values)

    @classmethod
    def theory(
        cls,
        *,
        clients: int,
        sigma: float,
        mu: float,
        smoothness: float,
        h_smoothness: float,
        rho: float,
        local_steps: int = 1,
        **options: Any,
    ) -> Any:
        r"""The constants of Theorem 10.1, with the largest steps γ and η that it allows.

        clients: M. sigma: σ, of the samples. mu, smoothness: μ and L of g. h_smoothness: $L_h$. rho: ρ, the Lipschitz
        constant of y(x). options: other hyper-parameters.

        >>> method = FedBiOAcc.theory(clients=4, sigma=1.0, mu=1.0, smoothness=2.0, h_smoothness=3.0, rho=1.0)
        >>> round(method.delta, 4), round(method.momentum * method.alpha(1.0) ** 2, 4) <= 1
        (0.8399, True)
        """
        given = {"clients": clients, "sigma": sigma, "mu": mu, "smoothness": smoothness, "h_smoothness": h_smoothness}
        for name, value in given.items():
            if not value > 0:
                raise ValueError(f"{cls.__name__}.theory: {name}={value!r} must be > 0")
        steps, short = local_steps, 1 - 1e-9  # the theorem's inequalities are strict
        delta = (clients * sigma) ** (2 / 3) / h_smoothness
        extra = sigma**2 / (24 * delta**3 * h_smoothness * steps)
        c_nu, c_omega = 160 * h_smoothness**2 + extra, 160 * smoothness**2 + extra
        offset = max(
            2 * sigma**2,
            delta**3,
            c_nu**1.5 * delta**3,
            c_omega**1.5 * delta**3,
            16**3 * steps**3 * clients**2 * sigma**2,
        )
        gamma = short * min(mu, 1 / (6 * h_smoothness))
        wide = 12 * (1 + rho**2) / steps**2 + 97 / 256 + gamma**2 / (2 * mu**2) + (1 + 16 / (mu * gamma)) * steps
        eta = short / max(4 * gamma / mu + 1 / (4 * steps), wide, 240 * h_smoothness**2 / (mu * gamma), mu / gamma)
        constants = {"momentum": c_nu, "lower_momentum": c_omega, "delta": delta, "offset": offset, "sigma": sigma}
        return cls(eta, gamma, steps, **{**constants, **options})


class AnchoredBiOAcc(FedBiOAcc):
    r"""FedBiOAcc with ω corrected where it was measured: at the client's own $x_{t-1}$, not at the mean.

    $$ \omega_t = \partial_y g(x_t, y_t; B_y) + (1 - c_\omega \alpha_{t-1}^2)
       \big( \omega_{t-1} - \partial_y g(x_{t-1}, y_{t-1}; B_y) \big) $$

    step_size, lower_step_size, local_steps, momentum, lower_momentum, delta, offset, sigma, hypergradient, warm_up,
    sync_offset: as in `FedBiOAcc`.

    Converges closer to the optimum than `FedBiOAcc` where clients differ, in proportion to $c_\nu \alpha^2$ of what ν
    forgets of the others' directions; with $c_\nu = c_\omega = 0$ and all data exactly, but then noise is never
    forgotten. The repair is ours. Sends what `FedBiOAcc` sends.

    >>> AnchoredBiOAcc(step_size=0.1, lower_step_size=0.5).delta
    0.1

    Reference: li2022, Algorithm 2, with another point in one line.
    """

    class State(NamedTuple):  # pyright: ignore[reportIncompatibleVariableOverride]
        x: Averaged[Vector]
        nu: Averaged[Vector]
        before: Averaged[Vector]
        own: Local[Vector]  # x_{t−1} of the client
        y: Local[Vector]
        old_y: Local[Vector]
        omega: Local[Vector]

    def start_values(self, problem: Any, x0: Vector) -> dict[str, Vector]:
        return {**super().start_values(problem, x0), "own": x0}

    def own_before(self, state: Any) -> Vector:
        return state.own

    def remember(self, state: Any, **values: Vector) -> Any:
        return state._replace(**values, own=state.x)
