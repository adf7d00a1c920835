"""FedNest for compositions: y tracks the mean of the inner level; and the same with both means of the gradient."""

from abc import abstractmethod
from typing import NamedTuple, TypeVar

from fedstrata.algorithms.nested.base import NestedMethod, check_two_levels
from fedstrata.core.algorithm import Cohort, Phase, StateWithX
from fedstrata.core.hyperparameters import is_number, real, whole
from fedstrata.core.placement import Averaged, Broadcast, Reported
from fedstrata.core.vector import Vector, where
from fedstrata.problems.nested import Nested, NestedOracle

S = TypeVar("S", "CompositionalFedNest.State", "LevelwiseFedNest.State")  # the state of either method


class TwoLevelFedNest(NestedMethod):
    """What CompositionalFedNest and LevelwiseFedNest share: FedInn, and the steps of FedOut along h."""

    step_size: float = real(above=0)
    value_momentum: float = real(1.0, above=0, at_most=1)
    local_steps: int = whole(1, at_least=1)
    inner_rounds: int = whole(1, at_least=1)

    def check(self, problem: Nested) -> None:
        check_two_levels(self, problem, "TrackedSCGD")
        super().check(problem)
        if is_number(self.step_size):
            problem.regularizer.check_step(self.step_size * self.local_steps)

    def phases(self, problem: Nested) -> list[Phase]:
        looks = {k: (f"level{k}",) if problem.samples_at(k - 1) else () for k in (1, 2)}
        inner = lambda **what: Phase(
            self.value, sends=("r",), server_step=self.inner_steps, streams=looks[1], fresh=True, **what
        )
        again = [inner(receives=(), repeat=self.inner_rounds - 1)] if self.inner_rounds > 1 else []
        return [inner(receives=("x",)), *again, *self.outer_phases(looks)]

    @abstractmethod
    def outer_phases(self, looks: dict[int, tuple[str, ...]]) -> list[Phase]:
        """The exchanges of FedOut.

        Args:
            looks: the samples of levels 1 and 2.
        """

    def value(self, oracle: NestedOracle, start: S, state: S) -> S:
        return state._replace(r=oracle.value(1, state.x))

    def inner_steps(self, problem: Nested, start: S, merged: S, cohort: Cohort) -> S:
        weight = where(cohort.clock.round == 0, 1.0, 1 - (1 - self.value_momentum) ** self.local_steps)
        return merged._replace(y=start.y + weight * (merged.r - start.y))

    def outer_steps(self, problem: Nested, start: S, merged: S, cohort: Cohort) -> S:
        step = self.local_steps * self.step_size
        return merged._replace(x=problem.prox(start.x - step * merged.h, step))

    def solution(self, problem: Nested, state: StateWithX) -> Vector:
        return state.x


class CompositionalFedNest(TwoLevelFedNest):
    r"""FedNest where the lower problem tracks a mean, $g_i = \frac12 |y - r_i(x)|^2$; for K = 2.

    With $r_i$ the first and $f_i$ the second level of client i, FedInn T times and then FedOut:

    $$ y_i \gets y_i - b \Big( y_i - \sum_j p_j r_j(x; \xi_j) \Big) \quad (\tau \text{ times from } y), \qquad
       y \gets \sum_i p_i y_i $$
    $$ h = \sum_i p_i \, \nabla r_i(x; \xi')^\top \nabla f_i(y; \zeta), \qquad
       x_i \gets x_i - \alpha h \quad (\tau \text{ times from } x), \qquad x \gets \sum_i p_i x_i $$

    The Hessian of g is I, so no series is needed. The correction of the local steps cancels their client-specific part:
    every client takes the same τ steps, which amount to $1 - (1-b)^\tau$ of the way to the mean in y and to one step τα
    in x. Here the server takes them, which gives the same numbers and T + 1 exchanges where the published form has
    2T + 2. In the first round y is the mean itself. With a regulariser the step τα is a proximal one, which is not in
    the paper. The rules are from memory of the paper.

    Args:
        step_size: α.
        value_momentum: b, the weight of the new mean; 1 forgets the past.
        local_steps: τ.
        inner_rounds: T.

    Converges to:
        - a stationary point of $\sum_i p_i f_i(\sum_j p_j r_j(x))$ with all data where all clients have the same $f_i$
          (a last level without data, say) or the same $\nabla r_i$; it is then gradient descent for b = 1.

    Does not:
        - converge to it where both differ, at any step size: h is a mean of products, and the gradient is the product
          of the means, which `LevelwiseFedNest` uses.

    >>> CompositionalFedNest(step_size=0.1, value_momentum=0.5, local_steps=4).inner_rounds
    1

    Reference: tarzanagh2022, the compositional case, from memory.
    """

    class State(NamedTuple):
        x: Broadcast[Vector]
        y: Broadcast[Vector]
        r: Reported[Vector]
        h: Reported[Vector]

    def init_server(self, problem: Nested, x0: Vector) -> State:
        y = problem.zeros(1)
        return self.State(x=x0, y=y, r=y, h=x0.zeros())

    def outer_phases(self, looks: dict[int, tuple[str, ...]]) -> list[Phase]:
        given = {"sends": ("h",), "receives": ("y",), "server_step": self.outer_steps}
        return [Phase(self.product, streams=(*looks[1], *looks[2]), fresh=True, **given)]

    def product(self, oracle: NestedOracle, start: State, state: State) -> State:
        return state._replace(h=oracle.pull(1, state.x, oracle.pull(2, state.y)))


class LevelwiseFedNest(TwoLevelFedNest):
    r"""CompositionalFedNest with the product of the means: one more exchange, and the right direction.

    $$ p = \sum_i p_i \nabla f_i(y; \zeta), \qquad h = \sum_i p_i \, \nabla r_i(x; \xi')^\top p $$

    with y and the steps of `CompositionalFedNest`.

    It is what `FedNest` for bilevel problems becomes with $g_i = \frac12 |y - r_i(x)|^2$ (N = 1, η = 1): there p is
    averaged before it meets $\nabla r_i$. A round has T + 2 exchanges.

    Args:
        step_size: α.
        value_momentum: b, the weight of the new mean; 1 forgets the past.
        local_steps: τ.
        inner_rounds: T.

    Converges to:
        - a stationary point of $\sum_i p_i f_i(\sum_j p_j r_j(x))$ with constant steps and all data, however different
          the clients are; with b = 1 it is gradient descent on it with the step τα.

    Does not:
        - converge to it exactly on samples: y and J are drawn independently, so that the direction is unbiased given y,
          but y lags behind r(x) for b < 1 and is noisy for b = 1.

    >>> LevelwiseFedNest(step_size=0.1, local_steps=4).value_momentum
    1.0

    Reference: tarzanagh2022, whose bilevel rule is applied to a composition.
    """

    variant_of = CompositionalFedNest

    class State(NamedTuple):
        x: Broadcast[Vector]
        y: Broadcast[Vector]
        r: Reported[Vector]
        p: Averaged[Vector]
        h: Reported[Vector]

    def init_server(self, problem: Nested, x0: Vector) -> State:
        y = problem.zeros(1)
        return self.State(x=x0, y=y, r=y, p=y, h=x0.zeros())

    def outer_phases(self, looks: dict[int, tuple[str, ...]]) -> list[Phase]:
        given = {"sends": ("h",), "receives": ("p",), "server_step": self.outer_steps}
        return [
            Phase(self.slope, sends=("p",), receives=("y",), streams=looks[2], fresh=True),
            Phase(self.product, streams=looks[1], fresh=True, **given),
        ]

    def slope(self, oracle: NestedOracle, start: State, state: State) -> State:
        return state._replace(p=oracle.pull(2, state.y))

    def product(self, oracle: NestedOracle, start: State, state: State) -> State:
        return state._replace(h=oracle.pull(1, state.x, state.p))
