"""AFL: a game between the model and weights on the clients, for the lowest worst loss."""

from typing import Any, ClassVar, NamedTuple

from fedstrata.core.algorithm import Algorithm, Cohort, Phase
from fedstrata.core.hyperparameters import flag, real
from fedstrata.core.placement import Broadcast, Gathered, Local, Reported, Server
from fedstrata.core.vector import Scalar, Vector, where
from fedstrata.problems.base import Problem, SmoothOracle
from fedstrata.solvers.gathered import shared_level


class AFL(Algorithm):
    r"""Agnostic federated learning: gradient descent on the model, projected ascent on the weights of the clients.

    $$ x \gets x - \eta \sum_i \lambda_i \nabla f_i(x; \xi_i), \qquad
       \lambda \gets P_\Delta\big( \lambda + \gamma \, (f_1(x; \xi_1), \dots, f_N(x; \xi_N)) \big) $$

    with $P_\Delta$ the projection to weights that are not negative and sum to one.

    Args:
        step_size: η, the step on the model.
        weight_step_size: γ, the step on the weights.
        average_iterates: whether the solution is the mean of all x so far, for which the theory holds, or the last x.

    - *Converges to* the smallest worst loss $\min_x \max_i f_i(x)$ for convex f: the mean of the iterates at the rate
      1/√T with steps of that order, and also the last x where the losses are strongly convex and both steps small (else
      the two players may circle).
    - *Does not* minimise the average: the weights leave every client whose loss is below the worst.
    - *Does not* take local steps: one gradient per round, as in the paper. Local steps would need another method.
    - λ_i stays with its client, as N λ_i. To project, a client needs only the level by which all of them come down. So
      λ costs two numbers up and two down in a second short exchange. The server sees gradients as a sum only, and
      losses and weights one by one.
    - The paper has all clients in every round. With a cohort, its members share out among themselves the weight they
      held and the others keep theirs. $\sum_i \lambda_i = 1$ holds throughout, the step on x is right on average, and
      a point where no cohort changes anything is a saddle point.
    - With clients weighted by size the step on x weighs client i by $p_i \lambda_i$, which changes the path and not the
      limit.

    >>> AFL(step_size=0.1, weight_step_size=0.01).local_steps
    1

    Reference: mohri2019, Stochastic-AFL, from memory of the paper.
    """

    oracle: ClassVar[type] = SmoothOracle

    step_size: float = real(above=0)
    weight_step_size: float = real(0.1, above=0)
    average_iterates: bool = flag(False)
    local_steps: ClassVar[int] = 1

    class State(NamedTuple):
        x: Broadcast[Vector]
        g: Reported[Vector]  # N λ_i ∇f_i
        f: Gathered[Any]  # one number per client
        held: Gathered[Any]  # N λ_i as the round began
        gain: Broadcast[Scalar]  # N γ
        level: Broadcast[Scalar]  # by how much N λ_i + N γ f_i is too large
        f_i: Local[Scalar]
        weight: Local[Scalar]  # N λ_i
        mean: Server[Vector]  # of all x so far

    def init_server(self, problem: Problem, x0: Vector) -> State:
        return self.State(
            x=x0, g=x0.zeros(), f=0.0, held=0.0, gain=0.0, level=0.0, f_i=0.0, weight=1.0, mean=x0.zeros()
        )

    def local_step(self, oracle: SmoothOracle, start: State, state: State) -> State:
        f, g = oracle.value_and_grad(state.x)
        f = f.astype(state.x.scalar_dtype)
        return state._replace(g=state.weight * g, f=f, held=state.weight, f_i=f)

    def play(self, problem: Problem, start: State, merged: State, cohort: Cohort) -> State:
        gain = cohort.clients * self.weight_step_size
        level = shared_level(merged.held + gain * merged.f, merged.held, cohort.present)
        x = start.x - self.step_size * merged.g
        count = cohort.clock.round.astype(x.scalar_dtype) + 1
        return merged._replace(x=x, gain=gain, level=level, mean=start.mean + (x - start.mean) / count)

    def project(self, oracle: SmoothOracle, start: State, state: State) -> State:
        weight = state.weight + start.gain * state.f_i - start.level
        return state._replace(weight=where(weight > 0, weight, 0.0))

    def phases(self, problem: Problem) -> list[Phase]:
        return [
            Phase(self.local_step, sends=("g", "f", "held"), receives=("x",), server_step=self.play),
            Phase(self.project, sends=(), receives=("gain", "level"), streams=()),
        ]

    def solution(self, problem: Problem, state: State) -> Vector:
        return state.mean if self.average_iterates else state.x
