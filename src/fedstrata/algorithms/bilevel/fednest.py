"""FedNest: one lower problem for all clients, and the inverse of its mean Hessian by one exchange a factor."""

from typing import Any, Literal, NamedTuple

from fedstrata.algorithm import Cohort, Phase, real
from fedstrata.algorithms.bilevel.base import BilevelMethod
from fedstrata.errors import unknown
from fedstrata.hypergradients import Neumann
from fedstrata.placement import Averaged, Server
from fedstrata.problems.bilevel import BilevelOracle
from fedstrata.random import bits
from fedstrata.vector import Vector, where

SERIES = ("random", "sum")


class FedNest(BilevelMethod):
    r"""Corrected local steps in y and in x, and in between a Neumann series whose products are averaged one by one.

    FedInn, T times, with $q = \sum_i p_i \partial_y g_i(x, y)$; FedIHGP, from
    $p = N \eta \sum_i p_i \partial_y f_i$, with $N' \sim U\{0, \dots, N-1\}$ exchanges; FedOut, with
    $h = \sum_i p_i (\partial_x f_i - \partial^2_{xy} g_i \, p)$; $p_i$ are weights of clients, p is a vector:

    $$ y_i \gets y_i - \beta \big( \partial_y g_i(x, y_i; \xi) - \partial_y g_i(x, y; \xi) + q \big)
       \quad (\tau \text{ times from } y), \qquad y \gets \sum_i p_i y_i $$
    $$ p \gets \sum_i p_i (I - \eta \, \partial^2_{yy} g_i) \, p $$
    $$ x_i \gets x_i - \alpha \big( h - \partial_x f_i(x, y; \xi) + \partial_x f_i(x_i, y; \xi) \big)
       \quad (\tau \text{ times from } x), \qquad x \gets \sum_i p_i x_i $$

    step_size: α. lower_step_size: β. neumann_step: η, the paper's 1/L of the mean lower objective; below 2/L.
    local_steps: τ, of both levels. inner_rounds: T. terms: N. series: "random" as above, or "sum", the whole truncated
    sum $p = \eta \sum_{n<N} (I - \eta H)^n \partial_y f$ with H the mean Hessian, which is what "random" is on average.

    Converges, with "sum" and all data, to the point where the truncated hypergradient vanishes, for any T, τ, α and β
    that are stable, however different the clients are. From a stationary point that is as far as N says and nothing
    else: the error of p falls like $(1 - \eta\mu)^N$. With "random" p has that error on average only; it is another
    term of the sum in every round, all data or not, so x does not settle with a constant α. Since products are
    averaged before the next one, it is the mean Hessian that is inverted; the public code keeps a factor for every
    client and inverts something else, and it takes α for η. 2T + N' + 3 exchanges a round (with "sum" N' = N − 1). The
    ledger counts N − 1 of them for N' always, the most that may come. One cohort works for the whole round, where the
    paper draws one for each exchange. Exchanges draw samples of their own. With a regulariser every step in x is a
    proximal one; the paper has none. The rules are from memory of the paper; its text was not at hand.

    >>> FedNest(step_size=0.1, lower_step_size=0.2, neumann_step=0.5, local_steps=5).series
    'random'

    Reference: tarzanagh2022, from memory, and its public code.
    """

    step_size: float = real(above=0)
    lower_step_size: float = real(above=0)
    neumann_step: float = real(above=0)
    local_steps: int = 1
    inner_rounds: int = 1
    terms: int = 5
    series: Literal["random", "sum"] = "random"

    solves = "global"

    class State(NamedTuple):
        x: Averaged[Vector]
        y: Averaged[Vector]
        q: Averaged[Vector]  # ∂_y g where FedInn begins
        p: Averaged[Vector]  # ≈ (∂²_yy g)⁻¹ ∂_y f
        h: Averaged[Vector]  # the hypergradient where FedOut begins
        first: Server[Vector]  # η ∂_y f, which "sum" adds after every product

    def __check_init__(self) -> None:
        name = type(self).__name__
        for field in ("inner_rounds", "terms"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: {field}={value!r} must be a whole number >= 1")
        if self.series not in SERIES:
            raise unknown(f"series of {name}", str(self.series), SERIES)

    def check(self, problem: Any) -> None:
        super().check(problem)
        if isinstance(self.neumann_step, float | int):  # a schedule's values are known only in the run
            Neumann(self.neumann_step, self.terms - 1).check(problem)

    def init_server(self, problem: Any, x0: Vector) -> Any:
        y = problem.lower_start()
        zero = y.zeros()
        return self.State(x=x0, y=y, q=zero, p=zero, h=x0.zeros(), first=zero)

    def phases(self, problem: Any) -> list[Phase]:
        on = lambda *streams, **what: {"streams": streams, "fresh": True, **what}
        phases = []
        for t in range(self.inner_rounds):
            heard = ("x", "y") if t == 0 else ("y",)
            phases += [
                Phase(self.inner_gradient, **on("lower", receives=heard, sends=("q",))),
                Phase(self.inner_step, self.local_steps, **on("lower", receives=("q",), sends=("y",))),
            ]
        phases.append(Phase(self.series_start, **on("upper", receives=("y",), sends=("p",), server_step=self.scale)))
        if self.terms > 1:
            when = self.continues if self.series == "random" else None
            more = {"repeat": self.terms - 1, "when": when, "server_step": self.add}
            phases.append(Phase(self.series_step, **on("hessian", receives=("p",), sends=("p",), **more)))
        return [
            *phases,
            Phase(self.outer_gradient, **on("upper", "cross", receives=("p",), sends=("h",))),
            Phase(self.outer_step, self.local_steps, **on("upper", receives=("h",), sends=("x",))),
        ]

    def inner_gradient(self, oracle: BilevelOracle, start: State, state: State) -> State:
        return state._replace(q=oracle.lower_grad(state.x, state.y))

    def inner_step(self, oracle: BilevelOracle, start: Any, state: Any) -> Any:
        q_i = oracle.lower_grad(start.x, state.y) - oracle.lower_grad(start.x, start.y) + start.q
        return state._replace(y=state.y - self.lower_step_size * q_i)

    def series_start(self, oracle: BilevelOracle, start: State, state: State) -> State:
        return state._replace(p=oracle.upper_grads(state.x, state.y)[1])

    def scale(self, problem: Any, start: State, merged: State, cohort: Cohort) -> State:
        first = self.neumann_step * merged.p
        return merged._replace(p=self.terms * first if self.series == "random" else first, first=first)

    def continues(self, state: State, cohort: Cohort, repetition: Any) -> Any:
        """Whether this product is one of the N'."""
        return repetition < drawn(cohort.key, self.terms).astype(repetition.dtype)

    def series_step(self, oracle: BilevelOracle, start: State, state: State) -> State:
        return state._replace(p=state.p - self.neumann_step * oracle.hvp(state.x, state.y, state.p))

    def add(self, problem: Any, start: State, merged: State, cohort: Cohort) -> State:
        return merged if self.series == "random" else merged._replace(p=merged.p + start.first)

    def outer_gradient(self, oracle: BilevelOracle, start: State, state: State) -> State:
        direct, _ = oracle.upper_grads(state.x, state.y)
        return state._replace(h=direct - oracle.cross(state.x, state.y, state.p))

    def outer_step(self, oracle: BilevelOracle, start: Any, state: Any) -> Any:
        (here, _), (there, _) = oracle.upper_grads(state.x, state.y), oracle.upper_grads(start.x, state.y)
        return state._replace(x=oracle.prox(state.x - self.step_size * (start.h - there + here), self.step_size))

    def solution(self, problem: Any, state: Any) -> Vector:
        return state.x


class LFedNest(FedNest):
    r"""FedNest with everything at the client: plain local steps in y, and in x along the client's own hypergradient.

    $$ y_i \gets y_i - \beta \, \partial_y g_i(x, y_i; \xi) \quad (\tau \text{ times}), \qquad
       y \gets \sum_i p_i y_i \qquad (T \text{ rounds}) $$
    $$ x_i \gets x_i - \alpha \Big( \partial_x f_i - \eta \, \partial^2_{xy} g_i
       \sum_{n<N} (I - \eta \, \partial^2_{yy} g_i)^n \, \partial_y f_i \Big)(x_i, y) \quad (\tau \text{ times}), \qquad
       x \gets \sum_i p_i x_i $$

    step_size, lower_step_size, neumann_step, local_steps, inner_rounds, terms: as in `FedNest`. series: "random" puts
    $N (I - \eta \, \partial^2_{yy} g_i)^{N'}$ for the sum, with an $N'$ of the client's own in every step.

    Converges to a stationary point where clients are alike. Where they differ it stops elsewhere, however small the
    steps and however long the series: each client inverts its own Hessian and multiplies it with its own ∂_y f, while
    the hypergradient of one common lower problem has the inverse of the mean of the one and the mean of the other. With
    τ > 1 both variables drift as well, in proportion to their steps. The price of a round is T + 1 exchanges. The step
    η must suit every client's Hessian, of which some may be larger than the mean's. That the hypergradient is taken
    anew in each of the τ steps is what the public code does.

    >>> LFedNest(step_size=0.1, lower_step_size=0.2, neumann_step=0.5, local_steps=5, series="sum").terms
    5

    Reference: tarzanagh2022, as its public code has it.
    """

    class State(NamedTuple):  # pyright: ignore[reportIncompatibleVariableOverride]
        x: Averaged[Vector]
        y: Averaged[Vector]

    def init_server(self, problem: Any, x0: Vector) -> State:
        return self.State(x=x0, y=problem.lower_start())

    def phases(self, problem: Any) -> list[Phase]:
        inner = lambda **what: Phase(
            self.inner_step, self.local_steps, sends=("y",), streams=("lower",), fresh=True, **what
        )
        again = [inner(receives=("y",), repeat=self.inner_rounds - 1)] if self.inner_rounds > 1 else []
        looks = ("upper", "cross", *["hessian"] * (self.terms - 1))
        outer = Phase(self.outer_step, self.local_steps, sends=("x",), receives=("y",), streams=looks, fresh=True)
        return [inner(receives=("x", "y")), *again, outer]

    def inner_step(self, oracle: BilevelOracle, start: Any, state: Any) -> Any:
        return state._replace(y=state.y - self.lower_step_size * oracle.lower_grad(state.x, state.y))

    def outer_step(self, oracle: BilevelOracle, start: Any, state: Any) -> Any:
        direct, by_y = oracle.upper_grads(state.x, state.y)
        h_i = direct - oracle.cross(state.x, state.y, self.inverse(oracle, state.x, state.y, by_y))
        return state._replace(x=oracle.prox(state.x - self.step_size * h_i, self.step_size))

    def inverse(self, oracle: BilevelOracle, x: Vector, y: Vector, by_y: Vector) -> Vector:
        """(∂²_yy g_i)⁻¹ ∂_y f_i by this client alone, each product on a sample of its own."""
        powers = [by_y]
        for n in range(1, self.terms):
            powers.append(powers[-1] - self.neumann_step * oracle.fresh(n).hvp(x, y, powers[-1]))
        if self.series == "sum":
            return self.neumann_step * sum(powers[1:], start=by_y)
        number, p = drawn(oracle.key, self.terms), by_y
        for n, power in enumerate(powers):
            p = where(number == n, power, p)
        return self.terms * self.neumann_step * p


def drawn(key: Any, terms: int) -> Any:
    """N' ~ U{0, …, N − 1}."""
    return bits(key, ()) % terms
