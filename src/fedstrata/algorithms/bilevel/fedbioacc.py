"""FedBiOAcc: FedBiO with recursive estimates of both directions; and AnchoredBiOAcc, its corrected form."""

from typing import Any, NamedTuple, TypeVar

from fedstrata.algorithms.bilevel.base import LocalLowerMethod
from fedstrata.core.hyperparameters import instance, is_number, real, whole
from fedstrata.core.placement import Averaged, Local
from fedstrata.core.vector import Scalar, Vector, where
from fedstrata.problems.bilevel import Bilevel, BilevelOracle
from fedstrata.problems.hypergradients import Exact, Hypergradient

S = TypeVar("S", "FedBiOAcc.State", "AnchoredBiOAcc.State")  # the state of either method


class RecursiveBiO(LocalLowerMethod):
    """What FedBiOAcc and AnchoredBiOAcc share: everything but the point at which ω is corrected."""

    step_size: float = real(above=0)
    lower_step_size: float = real(above=0)
    local_steps: int = whole(1, at_least=1)
    momentum: float = real(1.0, at_least=0)
    lower_momentum: float = real(1.0, at_least=0)
    delta: float = real(0.1, above=0)
    offset: float = real(1.0, above=0)
    sigma: float = real(0.0, at_least=0)
    hypergradient: Hypergradient = instance(Hypergradient, Exact())
    warm_up: int = whole(0, at_least=0)
    sync_offset: int = whole(0, at_least=0)

    def check(self, problem: Bilevel) -> None:
        super().check(problem)
        name = type(self).__name__
        if self.hypergradient.remembers:
            raise ValueError(
                f"{name} needs hypergradients at two points of one step, so its estimator must depend on the sample "
                f"alone; {self.hypergradient!r} starts from the step before: use fs.hypergradients.Neumann or Exact"
            )
        first = [self.delta, self.offset, self.sigma, self.momentum, self.lower_momentum]
        if all(map(is_number, first)):
            largest = max(self.momentum, self.lower_momentum) * self.alpha(1.0) ** 2
            if largest > 1:
                raise ValueError(
                    f"{name}: the weight c α² of a new sample is {largest:.3g} in the first step and must be at most "
                    "1; take a larger offset, or a smaller delta or momentum"
                )

    def start_values(self, problem: Bilevel, x0: Vector) -> dict[str, Vector]:
        """The start of the fields that both methods have.

        Args:
            problem: the problem.
            x0: the start of x.
        """
        y = problem.lower_start()
        return {"x": x0, "nu": x0.zeros(), "before": x0, "y": y, "old_y": y, "omega": y.zeros()}

    def init_client(self, oracle: BilevelOracle, view: S) -> S:
        y = oracle.descend(view.x, view.y, self.lower_step_size, self.warm_up)
        return view._replace(y=y, old_y=y, omega=oracle.lower_grad(view.x, y))  # for a client whose first round is late

    def alpha(self, t: Scalar) -> Any:
        """α_t = δ / (u + σ² t)^(1/3).

        Args:
            t: the step, from 1.
        """
        return self.delta / (self.offset + self.sigma**2 * t) ** (1 / 3)

    def accelerated(self, oracle: BilevelOracle, state: S, anchor: Vector) -> S:
        """The state after one step.

        Args:
            oracle: of this step.
            state: the state before it.
            anchor: the point of x at which ω is corrected.
        """
        t = (oracle.clock.step + 1 - self.sync_offset).astype(state.x.scalar_dtype)
        keep = lambda c: where(t == 1, 0.0, 1 - c * self.alpha(t - 1) ** 2)  # nothing is kept before the first step
        phi = lambda x, y: self.hypergradient(oracle, x, y, y)[0]
        x, y, old_y = state.x, state.y, state.old_y
        omega = oracle.lower_grad(x, y) + keep(self.lower_momentum) * (state.omega - oracle.lower_grad(anchor, old_y))
        nu = phi(x, y) + keep(self.momentum) * (state.nu - phi(state.before, old_y))
        step, lower_step = self.step_size * self.alpha(t), self.lower_step_size * self.alpha(t)
        moved = {"x": oracle.prox(x - step * nu, step), "y": y - lower_step * omega}
        moved = state._replace(**moved, nu=nu, before=x, old_y=y, omega=omega)
        if self.sync_offset == 0:
            return moved
        return where(oracle.clock.step < self.sync_offset, state, moved)


class FedBiOAcc(RecursiveBiO):
    r"""FedBiO whose directions are recursive (STORM) estimates, with steps that fall like $t^{-1/3}$.

    $$ \omega_t = \partial_y g(x_t, y_t; B_y) + (1 - c_\omega \alpha_{t-1}^2)
       \big( \omega_{t-1} - \partial_y g(X_{t-1}, y_{t-1}; B_y) \big) $$
    $$ \hat\nu_t = \Phi(x_t, y_t; B_x) + (1 - c_\nu \alpha_{t-1}^2)
       \big( \nu_{t-1} - \Phi(X_{t-1}, y_{t-1}; B_x) \big) $$
    $$ y_{t+1} = y_t - \gamma \alpha_t \omega_t, \qquad \hat x_{t+1} = x_t - \eta \alpha_t \hat\nu_t, \qquad
       \alpha_t = \delta / (u + \sigma^2 t)^{1/3} $$

    with Φ the hypergradient. In the last of I steps $X_t$, $\nu_t$ and $x_{t+1}$ are the means over the clients of
    $x_t$, $\hat\nu_t$ and $\hat x_{t+1}$, otherwise the client's. It sends three times the numbers of x (two would do,
    as the mean of $\hat x$ follows from the others); y and ω stay with the client. About the name and regularisers see
    `FedBiO`.

    Args:
        step_size: η, the step of x.
        lower_step_size: γ, the step of y.
        local_steps: I, the steps of a client in a round.
        momentum: c_ν, the rate at which ν forgets.
        lower_momentum: c_ω, the rate at which ω forgets.
        delta: δ of the step factor α_t; 0.1 in the paper.
        offset: u of α_t; 1 in the paper.
        sigma: σ of α_t (0: constant steps); the paper does not give its value.
        hypergradient: the estimator Φ, one of `fs.hypergradients`; it must depend on the sample alone.
        warm_up: steps of y alone before round 0.
        sync_offset: 1 makes the first round one step shorter, as the published test "t + 1 mod I".

    - *Converges to* a stationary point when clients are alike; with all data it is then `FedBiO` with steps
      $\eta\alpha_t$ and $\gamma\alpha_t$.
    - *Does not* when they differ and I > 1: it stops as far from the optimum as `FedBiO`. $\omega_t$ is measured at the
      client's $x_t$ but corrected at the mean $X_t$. Since ω is never averaged, each averaging leaves an error in it
      that only $c_\omega \alpha^2$ forgets. `AnchoredBiOAcc` corrects at the client's point.
    - The recursion does reduce noise.

    >>> FedBiOAcc(step_size=0.1, lower_step_size=0.5, local_steps=5).momentum
    1.0

    Reference: li2022, Algorithm 2.
    """

    class State(NamedTuple):
        x: Averaged[Vector]
        nu: Averaged[Vector]
        before: Averaged[Vector]  # X_{t−1}
        y: Local[Vector]
        old_y: Local[Vector]
        omega: Local[Vector]

    def init_server(self, problem: Bilevel, x0: Vector) -> State:
        return self.State(**self.start_values(problem, x0))

    def local_step(self, oracle: BilevelOracle, start: State, state: State) -> State:
        return self.accelerated(oracle, state, state.before)


class AnchoredBiOAcc(RecursiveBiO):
    r"""FedBiOAcc with ω corrected where it was measured: at the client's $x_{t-1}$, not at the mean.

    $$ \omega_t = \partial_y g(x_t, y_t; B_y) + (1 - c_\omega \alpha_{t-1}^2)
       \big( \omega_{t-1} - \partial_y g(x_{t-1}, y_{t-1}; B_y) \big) $$

    The repair is ours. It sends as many numbers as `FedBiOAcc`.

    Args:
        step_size: η, the step of x.
        lower_step_size: γ, the step of y.
        local_steps: I, the steps of a client in a round.
        momentum: c_ν, the rate at which ν forgets.
        lower_momentum: c_ω, the rate at which ω forgets.
        delta: δ of the step factor α_t.
        offset: u of α_t.
        sigma: σ of α_t (0: constant steps).
        hypergradient: the estimator Φ, one of `fs.hypergradients`; it must depend on the sample alone.
        warm_up: steps of y alone before round 0.
        sync_offset: 1 makes the first round one step shorter, as the published test "t + 1 mod I".

    - *Converges to* a point closer to the optimum than `FedBiOAcc` when clients differ. The distance is proportional to
      $c_\nu \alpha^2$, by which ν forgets the others' directions.
    - *Converges to* the optimum exactly with $c_\nu = c_\omega = 0$ and all data.
    - *Does not* forget noise with $c_\nu = c_\omega = 0$.

    >>> AnchoredBiOAcc(step_size=0.1, lower_step_size=0.5).delta
    0.1

    Reference: li2022, Algorithm 2, with another point in one line.
    """

    variant_of = FedBiOAcc

    class State(NamedTuple):
        x: Averaged[Vector]
        nu: Averaged[Vector]
        before: Averaged[Vector]
        own: Local[Vector]  # x_{t−1} of the client
        y: Local[Vector]
        old_y: Local[Vector]
        omega: Local[Vector]

    def init_server(self, problem: Bilevel, x0: Vector) -> State:
        return self.State(**self.start_values(problem, x0), own=x0)

    def local_step(self, oracle: BilevelOracle, start: State, state: State) -> State:
        return self.accelerated(oracle, state, state.own)._replace(own=state.x)
