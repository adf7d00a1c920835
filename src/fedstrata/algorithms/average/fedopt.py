"""FedOpt: the average model change is a gradient for an optimizer at the server."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from fedstrata.algorithm import Algorithm, Cohort, real
from fedstrata.placement import Broadcast, Reported, Server
from fedstrata.problems.base import SmoothOracle
from fedstrata.vector import Vector


class FedOpt(Algorithm):
    r"""Local SGD steps; the server feeds the average change to any optax optimizer.

    $$ x_i \gets x_i - \eta_a \nabla f_i(x_i; \xi_i) \quad (Q \text{ times from } x), \qquad
       \Delta = \sum_i p_i (x_i - x), \qquad x \gets x + \mathrm{optimizer}(-\Delta) $$

    step_size: η_a. local_steps: Q. server_step_size: η_s, given to `optimizer(η_s)`. optimizer: an optax optimizer
    as a function of its learning rate, such as `optax.sgd` (η_s = 1: FedAvg) or `optax.yogi`.

    Converges as its server optimizer does on Δ, which is a biased gradient when clients differ and Q > 1: an adaptive
    server changes the metric and does not remove the drift of FedAvg.

    >>> FedOpt(step_size=0.1, local_steps=5, server_step_size=0.01, optimizer=optax.adam).local_steps
    5

    Reference: reddi2021, Algorithm 1.
    """

    step_size: float = real(above=0)
    local_steps: int = 1
    server_step_size: float = real(1.0, above=0)
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd

    class State(NamedTuple):
        x: Broadcast[Vector]
        delta: Reported[Vector]
        memory: Server[Any]  # the optimizer's own state

    def init_server(self, problem: Any, x0: Vector) -> State:
        rule: Any = self.optimizer(self.server_step_size)
        return self.State(x=x0, delta=x0.zeros(), memory=rule.init(x0))

    def local_step(self, oracle: SmoothOracle, start: State, state: State) -> State:
        return state._replace(x=state.x - self.step_size * oracle.grad(state.x))

    def local_end(self, oracle: SmoothOracle, start: State, state: State) -> State:
        return state._replace(delta=state.x - start.x)

    def server_step(self, problem: Any, start: State, merged: State, cohort: Cohort) -> State:
        rule: Any = self.optimizer(self.server_step_size)
        change, memory = rule.update(-merged.delta, start.memory, start.x)
        return merged._replace(x=start.x + change, memory=memory)

    def solution(self, problem: Any, state: State) -> Vector:
        return state.x


class Moments(NamedTuple):
    m: Vector
    v: Vector


class FedAdam(FedOpt):
    r"""FedOpt with Adam's moments as the paper prints them: without bias correction, unlike `optax.adam`.

    $$ m \gets \beta_1 m + (1-\beta_1)\Delta, \quad v \gets \beta_2 v + (1-\beta_2)\Delta^2, \quad
       x \gets x + \eta_s \, m / (\sqrt{v} + \tau) $$

    step_size: η_a. local_steps: Q. server_step_size: η_s. beta1, beta2: decay of the moments. adaptivity: τ; v starts
    at τ² (the paper asks for at least that). `optimizer` is not used.

    Converges where gradients differ much in scale between coordinates and FedAvg does not; it is no remedy for drift.

    >>> FedAdam(step_size=0.1, server_step_size=0.01).beta2
    0.99

    Reference: reddi2021, Algorithm 2.
    """

    beta1: float = real(0.9, at_least=0, below=1)
    beta2: float = real(0.99, at_least=0, below=1)
    adaptivity: float = real(1e-3, above=0)

    def init_server(self, problem: Any, x0: Vector) -> FedOpt.State:
        zero = x0.zeros()
        return self.State(x=x0, delta=zero, memory=Moments(zero, zero + self.adaptivity**2))

    def second_moment(self, v: Vector, square: Vector) -> Vector:
        return self.beta2 * v + (1 - self.beta2) * square

    def server_step(self, problem: Any, start: FedOpt.State, merged: FedOpt.State, cohort: Cohort) -> FedOpt.State:
        m = self.beta1 * start.memory.m + (1 - self.beta1) * merged.delta
        v = self.second_moment(start.memory.v, merged.delta**2)
        x = start.x + self.server_step_size * m / (v.sqrt() + self.adaptivity)
        return merged._replace(x=x, memory=Moments(m, v))


class FedYogi(FedAdam):
    r"""FedAdam with Yogi's second moment, which moves by a bounded step and so forgets slowly.

    $$ v \gets v - (1-\beta_2) \Delta^2 \, \mathrm{sign}(v - \Delta^2), \quad
       x \gets x + \eta_s \, m / (\sqrt{v} + \tau) $$

    Hyper-parameters as in FedAdam.

    Converges where FedAdam's second moment would vanish after a burst of small changes; it does not remove drift.

    >>> FedYogi(step_size=0.1, server_step_size=0.01).adaptivity
    0.001

    Reference: reddi2021, Algorithm 2.
    """

    def second_moment(self, v: Vector, square: Vector) -> Vector:
        return v - (1 - self.beta2) * square * (v - square).sign()
