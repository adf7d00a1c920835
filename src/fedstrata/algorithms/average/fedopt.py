"""FedOpt, FedAdam and FedYogi: the average model change is a gradient for an optimizer at the server."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import optax

from fedstrata.core.algorithm import Algorithm, Cohort
from fedstrata.core.hyperparameters import instance, real, whole
from fedstrata.core.placement import Broadcast, Reported, Server
from fedstrata.core.vector import Scalar, Vector
from fedstrata.problems.base import Problem, SmoothOracle


class OptimizerState(NamedTuple):
    """The state of a method whose server runs an optimizer."""

    x: Broadcast[Vector]
    delta: Reported[Vector]
    memory: Server[Any]  # of the optimizer


class ServerOptimized(Algorithm):
    """Base class of FedOpt and FedAdam: local SGD steps and the report of their total. Subclasses add the server."""

    oracle: ClassVar[type] = SmoothOracle

    step_size: float = real(above=0)
    local_steps: int = whole(1, at_least=1)
    server_step_size: float = real(1.0, above=0)

    def local_step(self, oracle: SmoothOracle, start: OptimizerState, state: OptimizerState) -> OptimizerState:
        return state._replace(x=state.x - self.step_size * oracle.grad(state.x))

    def local_end(self, oracle: SmoothOracle, start: OptimizerState, state: OptimizerState) -> OptimizerState:
        return state._replace(delta=state.x - start.x)

    def solution(self, problem: Problem, state: OptimizerState) -> Vector:
        return state.x


class FedOpt(ServerOptimized):
    r"""Local SGD steps; the server feeds the average change to any optax optimizer.

    $$ x_i \gets x_i - \eta_a \nabla f_i(x_i; \xi_i) \quad (Q \text{ times from } x), \qquad
       \Delta = \sum_i p_i (x_i - x), \qquad x \gets x + \mathrm{optimizer}(-\Delta) $$

    Args:
        step_size: η_a, the step of the clients.
        local_steps: Q, the steps of a client in a round.
        server_step_size: η_s, the learning rate of the optimizer.
        optimizer: an optax optimizer as a function of η_s: `optax.sgd` (FedAvg for η_s = 1), `optax.yogi`, …

    - *Converges to* what its server optimizer reaches with Δ for a gradient.
    - *Does not* remove the drift of FedAvg. Δ is a biased gradient when clients differ and Q > 1, and an adaptive
      server only changes the metric.

    >>> FedOpt(step_size=0.1, local_steps=5, server_step_size=0.01, optimizer=optax.adam).local_steps
    5

    Reference: reddi2021, Algorithm 1.
    """

    State = OptimizerState

    optimizer: Callable[[Scalar], optax.GradientTransformation] = instance(Callable, optax.sgd)

    def init_server(self, problem: Problem, x0: Vector) -> OptimizerState:
        rule: Any = self.optimizer(self.server_step_size)
        return self.State(x=x0, delta=x0.zeros(), memory=rule.init(x0))

    def server_step(
        self, problem: Problem, start: OptimizerState, merged: OptimizerState, cohort: Cohort
    ) -> OptimizerState:
        rule: Any = self.optimizer(self.server_step_size)
        change, memory = rule.update(-merged.delta, start.memory, start.x)
        return merged._replace(x=start.x + change, memory=memory)


class Moments(NamedTuple):
    """The moments of Adam and Yogi."""

    m: Vector
    v: Vector


class FedAdam(ServerOptimized):
    r"""FedOpt with Adam's moments as published: without bias correction, unlike `optax.adam`.

    $$ m \gets \beta_1 m + (1-\beta_1)\Delta, \quad v \gets \beta_2 v + (1-\beta_2)\Delta^2, \quad
       x \gets x + \eta_s \, m / (\sqrt{v} + \tau), \qquad \Delta \text{ as in FedOpt} $$

    Args:
        step_size: η_a, the step of the clients.
        local_steps: Q, the steps of a client in a round.
        server_step_size: η_s, the step of the server.
        beta1: β₁, the decay of m.
        beta2: β₂, the decay of v.
        adaptivity: τ; v starts at τ², the smallest start that the paper allows.

    - *Converges to* the neighbourhood of the minimum also where gradients differ much in scale between coordinates
      and FedAvg does not converge.
    - *Does not* remove drift.

    >>> FedAdam(step_size=0.1, server_step_size=0.01).beta2
    0.99

    Reference: reddi2021, Algorithm 2.
    """

    State = OptimizerState

    beta1: float = real(0.9, at_least=0, below=1)
    beta2: float = real(0.99, at_least=0, below=1)
    adaptivity: float = real(1e-3, above=0)

    def init_server(self, problem: Problem, x0: Vector) -> OptimizerState:
        zero = x0.zeros()
        return self.State(x=x0, delta=zero, memory=Moments(zero, zero + self.adaptivity**2))

    def second_moment(self, v: Vector, square: Vector) -> Vector:
        return self.beta2 * v + (1 - self.beta2) * square

    def server_step(
        self, problem: Problem, start: OptimizerState, merged: OptimizerState, cohort: Cohort
    ) -> OptimizerState:
        m = self.beta1 * start.memory.m + (1 - self.beta1) * merged.delta
        v = self.second_moment(start.memory.v, merged.delta**2)
        x = start.x + self.server_step_size * m / (v.sqrt() + self.adaptivity)
        return merged._replace(x=x, memory=Moments(m, v))


class FedYogi(FedAdam):
    r"""FedAdam with Yogi's second moment, which moves by a bounded step and so forgets slowly.

    $$ m \gets \beta_1 m + (1-\beta_1)\Delta, \quad v \gets v - (1-\beta_2) \Delta^2 \, \mathrm{sign}(v - \Delta^2),
       \quad x \gets x + \eta_s \, m / (\sqrt{v} + \tau) $$

    Args:
        step_size: η_a, the step of the clients.
        local_steps: Q, the steps of a client in a round.
        server_step_size: η_s, the step of the server.
        beta1: β₁, the decay of m.
        beta2: β₂; a step changes v by at most (1 − β₂) Δ².
        adaptivity: τ; v starts at τ², the smallest start that the paper allows.

    - *Converges to* the neighbourhood of the minimum also where FedAdam's second moment would vanish after a burst of
      small changes.
    - *Does not* remove drift.

    >>> FedYogi(step_size=0.1, server_step_size=0.01).adaptivity
    0.001

    Reference: reddi2021, Algorithm 2.
    """

    def second_moment(self, v: Vector, square: Vector) -> Vector:
        return v - (1 - self.beta2) * square * (v - square).sign()
