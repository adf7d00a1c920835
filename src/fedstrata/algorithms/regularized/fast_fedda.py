"""Fast-FedDA: dual averaging for strongly convex f, with a growing pull towards all iterates so far."""

from typing import NamedTuple

from fedstrata.algorithms.regularized.base import Composite, ProximalMethod
from fedstrata.core.algorithm import Cohort
from fedstrata.core.hyperparameters import real, whole
from fedstrata.core.placement import Averaged, Local, Server
from fedstrata.core.vector import Scalar, Vector
from fedstrata.problems.base import CompositeOracle
from fedstrata.problems.composite import CompositeProblem


class FastFedDA(ProximalMethod):
    r"""Each step minimises a model of f + φ made of all gradients so far, and of how far all iterates so far lie.

    $$ w_t = \arg\min_w \Big\langle \tfrac{g}{t}, w \Big\rangle + \varphi(w) + \frac{\mu}{4t} \sum_{s<t} \|w - w_s\|^2
       + \frac{\beta}{2t} \|w - x_0\|^2 $$
    $$ w_t = \mathrm{prox}_{\frac{t}{b} \varphi} \Big( \frac{-g + \frac{\mu}{2} X + \beta x_0}{b} \Big), \qquad
       b = \frac{\mu t}{2} + \beta $$
    $$ g \gets g + \nabla f_i(w_t; \xi_i), \qquad X \gets X + w_t \qquad (Q \text{ steps, then } g \text{ and } X
       \text{ are averaged}) $$

    Args:
        strong_convexity: μ of f, which must be given; a smaller value is safe and slower.
        beta: β (γ in the paper), the weight of the start; the first step has length about 1/β.
        local_steps: Q, the steps of a client in a round.

    - *Converges to* the optimum of f + φ for strongly convex f, slowly: its steps fall like 1/t, and so does the
      distance (drift included, since the steps that cause it vanish).
    - *Does not* take any nonconvex φ: φ must be convex, or ρ < μ/2.
    - Any cohort is allowed: a client that was absent takes the averages as they are.
    - Two vectors go up and two down, and every client keeps x_0.
    - The rule comes from a public script by the paper's group, which calls it "our proposal" with uniform weights, not
      from the paper's listing. That script also adds each round's last local point, at which no gradient is taken, to
      X. Here it is left out.

    >>> FastFedDA(strong_convexity=0.1, beta=10.0, local_steps=10).local_steps
    10

    Reference: bao2022 (as in its group's public code).
    """

    strong_convexity: float = real(above=0)
    beta: float = real(1.0, above=0)
    local_steps: int = whole(1, at_least=1)

    class State(NamedTuple):
        g: Averaged[Vector]  # the sum of all gradients
        X: Averaged[Vector]  # the sum of all points at which they were taken
        x0: Local[Vector]
        start: Server[Vector]  # x0 again, for the server
        t: Server[Scalar]  # steps so far

    def prox_steps(self) -> dict[str, float]:
        return {"the prox weight up to 2 / strong_convexity": 2 / self.strong_convexity}

    def init_server(self, problem: CompositeProblem, x0: Vector) -> State:
        return self.State(g=x0.zeros(), X=x0.zeros(), x0=x0, start=x0, t=0.0)

    def point(self, problem: Composite, g: Vector, X: Vector, x0: Vector, t: Scalar) -> Vector:
        b = self.strong_convexity * t / 2 + self.beta
        return problem.prox((self.strong_convexity / 2 * X + self.beta * x0 - g) / b, t / b)

    def local_step(self, oracle: CompositeOracle, start: State, state: State) -> State:
        t = oracle.clock.step.astype(state.g.scalar_dtype)
        w = self.point(oracle, state.g, state.X, state.x0, t)
        return state._replace(g=state.g + oracle.grad(w), X=state.X + w)

    def server_step(self, problem: CompositeProblem, start: State, merged: State, cohort: Cohort) -> State:
        return merged._replace(t=start.t + self.local_steps)

    def solution(self, problem: CompositeProblem, state: State) -> Vector:
        return self.point(problem, state.g, state.X, state.start, state.t)
