"""FedNest: one lower problem for all clients; the inverse of its mean Hessian takes one exchange per factor."""

from typing import Any, Literal, NamedTuple

from fedstrata.algorithms.bilevel.base import BilevelMethod
from fedstrata.base.random import bits
from fedstrata.core.algorithm import Cohort, Phase
from fedstrata.core.hyperparameters import choice, is_number, real, whole
from fedstrata.core.placement import Averaged, Server
from fedstrata.core.vector import Vector, where
from fedstrata.problems.bilevel import Bilevel, BilevelOracle
from fedstrata.problems.hypergradients import Neumann


class NeumannMethod(BilevelMethod):
    """What FedNest and LFedNest share: one lower problem for all clients, and a Neumann series."""

    step_size: float = real(above=0)
    lower_step_size: float = real(above=0)
    neumann_step: float = real(above=0)
    local_steps: int = whole(1, at_least=1)
    inner_rounds: int = whole(1, at_least=1)
    terms: int = whole(5, at_least=1)
    series: Literal["random", "sum"] = choice("random", "sum")

    solves = "global"

    def check(self, problem: Bilevel) -> None:
        super().check(problem)
        if is_number(self.neumann_step):
            Neumann(self.neumann_step, self.terms - 1).check(problem)


class FedNest(NeumannMethod):
    r"""Corrected local steps in y and in x; between them a Neumann series whose products are averaged one by one.

    A round is FedInn T times, with $q = \sum_i p_i \partial_y g_i(x, y)$; then FedIHGP, from
    $p = N \eta \sum_i p_i \partial_y f_i$, with $N' \sim U\{0, \dots, N-1\}$ exchanges; then FedOut, with
    $h = \sum_i p_i (\partial_x f_i - \partial^2_{xy} g_i \, p)$. $p_i$ are weights of clients, p is a vector:

    $$ y_i \gets y_i - \beta \big( \partial_y g_i(x, y_i; \xi) - \partial_y g_i(x, y; \xi) + q \big)
       \quad (\tau \text{ times from } y), \qquad y \gets \sum_i p_i y_i $$
    $$ p \gets \sum_i p_i (I - \eta \, \partial^2_{yy} g_i) \, p $$
    $$ x_i \gets x_i - \alpha \big( h - \partial_x f_i(x, y; \xi) + \partial_x f_i(x_i, y; \xi) \big)
       \quad (\tau \text{ times from } x), \qquad x \gets \sum_i p_i x_i $$

    A round has 2T + N' + 3 exchanges (with "sum" N' = N − 1); the ledger always counts N − 1 of them for N', the most
    that may come. One cohort works for the whole round, where the paper draws one per exchange. Every exchange draws
    fresh samples. With a regulariser every step in x is a proximal one; the paper has none. The rules are from memory
    of the paper; its text was not available.

    Args:
        step_size: α, the step of x.
        lower_step_size: β, the step of y.
        neumann_step: η, the paper's 1/L of the mean lower objective; below 2/L.
        local_steps: τ, the steps of a client in FedInn and in FedOut.
        inner_rounds: T, how often FedInn runs in a round.
        terms: N, the terms of the series.
        series: "random" as above; "sum", the truncated sum $p = \eta \sum_{n<N} (I - \eta H)^n \partial_y f$ with H the
            mean Hessian, which is the mean of "random".

    - *Converges to* the point where the truncated hypergradient vanishes, with "sum" and all data, for any stable T, τ,
      α and β, however different the clients are. Its distance from a stationary point depends on N alone: the error of
      p falls like $(1 - \eta\mu)^N$.
    - *Does not* settle with "random" and a constant α: p has that error on average only, and is another term of the
      sum in every round, all data or not.
    - Products are averaged before the next one, so the mean Hessian is inverted. The public code keeps a factor for
      every client, which inverts something else, and uses α for η.

    >>> FedNest(step_size=0.1, lower_step_size=0.2, neumann_step=0.5, local_steps=5).series
    'random'

    Reference: tarzanagh2022, from memory, and its public code.
    """

    class State(NamedTuple):
        x: Averaged[Vector]
        y: Averaged[Vector]
        q: Averaged[Vector]  # ∂_y g where FedInn begins
        p: Averaged[Vector]  # ≈ (∂²_yy g)⁻¹ ∂_y f
        h: Averaged[Vector]  # the hypergradient where FedOut begins
        first: Server[Vector]  # η ∂_y f, which "sum" adds after every product

    def init_server(self, problem: Bilevel, x0: Vector) -> State:
        y = problem.lower_start()
        zero = y.zeros()
        return self.State(x=x0, y=y, q=zero, p=zero, h=x0.zeros(), first=zero)

    def phases(self, problem: Bilevel) -> list[Phase]:
        inner = [exchange for t in range(self.inner_rounds) for exchange in self.fed_inn(t)]
        return [*inner, *self.fed_ihgp(), *self.fed_out()]

    def fed_inn(self, t: int) -> list[Phase]:
        """FedInn: the mean lower gradient q, then τ corrected steps in y.

        Args:
            t: which of the T it is, from 0; x comes down in the first.
        """
        heard, look = ("x", "y") if t == 0 else ("y",), ("lower",)
        return [
            Phase(self.inner_gradient, receives=heard, sends=("q",), streams=look, fresh=True),
            Phase(self.inner_step, self.local_steps, receives=("q",), sends=("y",), streams=look, fresh=True),
        ]

    def fed_ihgp(self) -> list[Phase]:
        """FedIHGP: the start of p, then N' products, each averaged before the next."""
        start = Phase(
            self.series_start, receives=("y",), sends=("p",), server_step=self.scale, streams=("upper",), fresh=True
        )
        product = Phase(
            self.series_step,
            receives=("p",),
            sends=("p",),
            server_step=self.add,
            repeat=self.terms - 1,
            when=self.continues if self.series == "random" else None,
            streams=("hessian",),
            fresh=True,
        )
        return [start, product] if self.terms > 1 else [start]

    def fed_out(self) -> list[Phase]:
        """FedOut: the mean hypergradient h, then τ corrected steps in x."""
        look = ("upper", "cross")
        return [
            Phase(self.outer_gradient, receives=("p",), sends=("h",), streams=look, fresh=True),
            Phase(self.outer_step, self.local_steps, receives=("h",), sends=("x",), streams=("upper",), fresh=True),
        ]

    def inner_gradient(self, oracle: BilevelOracle, start: State, state: State) -> State:
        return state._replace(q=oracle.lower_grad(state.x, state.y))

    def inner_step(self, oracle: BilevelOracle, start: State, state: State) -> State:
        q_i = oracle.lower_grad(start.x, state.y) - oracle.lower_grad(start.x, start.y) + start.q
        return state._replace(y=state.y - self.lower_step_size * q_i)

    def series_start(self, oracle: BilevelOracle, start: State, state: State) -> State:
        return state._replace(p=oracle.upper_grads(state.x, state.y)[1])

    def scale(self, problem: Bilevel, start: State, merged: State, cohort: Cohort) -> State:
        first = self.neumann_step * merged.p
        return merged._replace(p=self.terms * first if self.series == "random" else first, first=first)

    def continues(self, state: State, cohort: Cohort, repetition: Any) -> Any:
        """Whether this product is one of the N'.

        Args:
            state: of the server.
            cohort: of this round, whose key draws N'.
            repetition: the number of the product, from 0.
        """
        return repetition < drawn(cohort, self.terms).astype(repetition.dtype)

    def series_step(self, oracle: BilevelOracle, start: State, state: State) -> State:
        return state._replace(p=state.p - self.neumann_step * oracle.hvp(state.x, state.y, state.p))

    def add(self, problem: Bilevel, start: State, merged: State, cohort: Cohort) -> State:
        return merged if self.series == "random" else merged._replace(p=merged.p + start.first)

    def outer_gradient(self, oracle: BilevelOracle, start: State, state: State) -> State:
        direct, _ = oracle.upper_grads(state.x, state.y)
        return state._replace(h=direct - oracle.cross(state.x, state.y, state.p))

    def outer_step(self, oracle: BilevelOracle, start: State, state: State) -> State:
        (here, _), (there, _) = oracle.upper_grads(state.x, state.y), oracle.upper_grads(start.x, state.y)
        return state._replace(x=oracle.prox(state.x - self.step_size * (start.h - there + here), self.step_size))


class LFedNest(NeumannMethod):
    r"""FedNest with everything at the client: plain local steps in y, and in x along the local hypergradient.

    $$ y_i \gets y_i - \beta \, \partial_y g_i(x, y_i; \xi) \quad (\tau \text{ times}), \qquad
       y \gets \sum_i p_i y_i \qquad (T \text{ rounds}) $$
    $$ x_i \gets x_i - \alpha \Big( \partial_x f_i - \eta \, \partial^2_{xy} g_i
       \sum_{n<N} (I - \eta \, \partial^2_{yy} g_i)^n \, \partial_y f_i \Big)(x_i, y) \quad (\tau \text{ times}), \qquad
       x \gets \sum_i p_i x_i $$

    A round has T + 1 exchanges. The hypergradient is computed in each of the τ steps, as in the public code.

    Args:
        step_size: α, the step of x.
        lower_step_size: β, the step of y.
        neumann_step: η; it must suit every client's Hessian, some of which may be larger than the mean's.
        local_steps: τ, the steps of a client in each exchange.
        inner_rounds: T, the exchanges of y in a round.
        terms: N, the terms of the series.
        series: "sum" as above; "random" replaces the sum by $N (I - \eta \, \partial^2_{yy} g_i)^{N'}$, with another
            $N'$ in every step of every client.

    - *Converges to* a stationary point when clients are alike.
    - *Does not* when they differ, however small the steps and however long the series. Each client multiplies the
      inverse of its Hessian with its ∂_y f, while the hypergradient of one common lower problem has the inverse of the
      mean of the one and the mean of the other.
    - *Does not* for τ > 1 either: both variables then drift, in proportion to their steps.

    >>> LFedNest(step_size=0.1, lower_step_size=0.2, neumann_step=0.5, local_steps=5, series="sum").terms
    5

    Reference: tarzanagh2022, as its public code has it.
    """

    variant_of = FedNest

    class State(NamedTuple):
        x: Averaged[Vector]
        y: Averaged[Vector]

    def init_server(self, problem: Bilevel, x0: Vector) -> State:
        return self.State(x=x0, y=problem.lower_start())

    def phases(self, problem: Bilevel) -> list[Phase]:
        first = Phase(
            self.inner_step, self.local_steps, receives=("x", "y"), sends=("y",), streams=("lower",), fresh=True
        )
        again = [first._replace(receives=("y",), repeat=self.inner_rounds - 1)] if self.inner_rounds > 1 else []
        looks = ("upper", "cross", *["hessian"] * (self.terms - 1))
        outer = Phase(self.outer_step, self.local_steps, sends=("x",), receives=("y",), streams=looks, fresh=True)
        return [first, *again, outer]

    def inner_step(self, oracle: BilevelOracle, start: State, state: State) -> State:
        return state._replace(y=state.y - self.lower_step_size * oracle.lower_grad(state.x, state.y))

    def outer_step(self, oracle: BilevelOracle, start: State, state: State) -> State:
        direct, by_y = oracle.upper_grads(state.x, state.y)
        h_i = direct - oracle.cross(state.x, state.y, self.inverse(oracle, state.x, state.y, by_y))
        return state._replace(x=oracle.prox(state.x - self.step_size * h_i, self.step_size))

    def inverse(self, oracle: BilevelOracle, x: Vector, y: Vector, by_y: Vector) -> Vector:
        """(∂²_yy g_i)⁻¹ ∂_y f_i by this client alone, each product on a separate sample.

        Args:
            oracle: of this step.
            x: the upper variable.
            y: the lower variable.
            by_y: ∂_y f_i.
        """
        powers = [by_y]
        for n in range(1, self.terms):
            powers.append(powers[-1] - self.neumann_step * oracle.fresh(n).hvp(x, y, powers[-1]))
        if self.series == "sum":
            return self.neumann_step * sum(powers[1:], start=by_y)
        number, p = drawn(oracle, self.terms), by_y
        for n, power in enumerate(powers):
            p = where(number == n, power, p)
        return self.terms * self.neumann_step * p


def drawn(source: Cohort | BilevelOracle, terms: int) -> Any:
    """N' ~ U{0, …, N − 1}.

    Args:
        source: whose key draws it.
        terms: N.
    """
    return bits(source.key, ()) % terms
