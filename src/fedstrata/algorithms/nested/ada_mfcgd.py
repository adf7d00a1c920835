"""AdaMFCGD: MFCGD in an adaptive diagonal metric; and the same with corrected client drift."""

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from fedstrata.algorithms.nested.mfcgd import MFCGD, Estimates, RecursiveMethod, TrackedMFCGD
from fedstrata.base.errors import unknown
from fedstrata.core.algorithm import Cohort
from fedstrata.core.hyperparameters import Range, declared, real
from fedstrata.core.placement import Averaged, Broadcast, Local, Reported, Server
from fedstrata.core.vector import Scalar, Vector
from fedstrata.problems.nested import Jacobian, Nested, NestedOracle
from fedstrata.prox import Zero

Diagonal = Vector | Scalar  # a number stands for a multiple of I
T = TypeVar("T", bound=Diagonal)


class DiagonalRule(Generic[T]):
    """How a diagonal A_t follows from the mean estimates w̄. A new rule is a frozen dataclass with these methods."""

    def start(self, x0: Vector) -> T:
        """a_0"""
        raise NotImplementedError(f"{type(self).__name__} must define start(x0)")

    def update(self, a: T, w: Vector, theta: Scalar) -> T:
        """a_t from the last a, w̄_t and ϑ_t."""
        raise NotImplementedError(f"{type(self).__name__} must define update(a, w, theta)")

    def diagonal(self, a: T, rho: Scalar) -> T:
        """The diagonal of A_t, as a Vector, or as a number for a multiple of I."""
        raise NotImplementedError(f"{type(self).__name__} must define diagonal(a, rho)")


@dataclass(frozen=True)
class Coordinate(DiagonalRule[Vector]):
    """Line 6: a ← ϑ a + (1 − ϑ) w̄², A = √a + ρ."""

    def start(self, x0: Vector) -> Vector:
        return x0.zeros()

    def update(self, a: Vector, w: Vector, theta: Scalar) -> Vector:
        return theta * a + (1 - theta) * w**2

    def diagonal(self, a: Vector, rho: Scalar) -> Vector:
        return a.sqrt() + rho


@dataclass(frozen=True)
class Norm(DiagonalRule[Scalar]):
    """Equation (6): a ← ϑ a + (1 − ϑ) |w̄|, A = (a + ρ) I."""

    def start(self, x0: Vector) -> Scalar:
        return 0.0

    def update(self, a: Scalar, w: Vector, theta: Scalar) -> Scalar:
        return theta * a + (1 - theta) * w.norm()

    def diagonal(self, a: Scalar, rho: Scalar) -> Scalar:
        return a + rho


RULES: dict[str, DiagonalRule[Any]] = {"coordinate": Coordinate(), "norm": Norm()}


class RuleOrName(NamedTuple):
    """The declaration of a hyper-parameter that is a `DiagonalRule` or the name of one."""

    names: tuple[str, ...] = tuple(RULES)

    def check(self, where: str, value: object) -> None:
        if not isinstance(value, DiagonalRule) and value not in self.names:
            raise unknown(f"value of {where} (or a DiagonalRule):", value, self.names)

    def __str__(self) -> str:
        return " or ".join([*map(repr, self.names), "a DiagonalRule"])


def rule_of(given: str | DiagonalRule) -> DiagonalRule[Any]:
    return RULES[given] if isinstance(given, str) else given


S = TypeVar("S", "AdaMFCGD.State", "TrackedAdaMFCGD.State")  # the state of either method


class AdaptiveMethod(RecursiveMethod):
    """What AdaMFCGD and TrackedAdaMFCGD share: the metric A, which the server makes from mean estimates."""

    rule: str | DiagonalRule = declared(RuleOrName(), "coordinate")
    rho: float = real(0.1, above=0)
    theta: float | None = declared(Range(above=0, at_most=1, optional=True), 0.9)

    merge_at_init = True

    def check(self, problem: Nested) -> None:
        if not isinstance(problem.regularizer, Zero):
            raise ValueError(
                f"{type(self).__name__} cannot take {problem.regularizer!r}: with an adaptive A every step would be a "
                "prox in the metric A, which has no closed form; use MFCGD or TrackedMFCGD"
            )
        super().check(problem)

    def metric(self, a: Diagonal, w: Vector) -> tuple[Diagonal, Diagonal]:
        """The next a, and A from it."""
        rule, theta = rule_of(self.rule), self.value_momentum if self.theta is None else self.theta
        a = rule.update(a, w, theta)
        return a, rule.diagonal(a, self.rho)

    def first_metric(self, x0: Vector) -> tuple[Diagonal, Diagonal]:
        """a_0, and A from it."""
        rule = rule_of(self.rule)
        a = rule.start(x0)
        return a, rule.diagonal(a, self.rho)

    def server_start(self, problem: Nested, merged: S, cohort: Cohort) -> S:
        a, A = self.metric(merged.a, merged.w)
        return merged._replace(a=merged.a if self.local_steps == 1 else a, A=A)  # q = 1: t = 1 averages w̄_1 again


class AdaMFCGD(AdaptiveMethod):
    r"""MFCGD with an adaptive diagonal metric A, which the server makes from the mean estimates.

    $$ a \gets \vartheta a + (1-\vartheta) \bar w^2, \quad A = \mathrm{diag}(\sqrt a + \rho) \qquad \text{or} \qquad
       a \gets \vartheta a + (1-\vartheta) |\bar w|, \quad A = (a + \rho) I $$
    $$ x_i \gets x_i - \gamma\eta \, A^{-1} w_i \quad (q - 1 \text{ times}), \qquad
       x \gets \bar x - \gamma\eta \, A^{-1} \bar w $$

    a starts from zero and changes only where clients average. A of the first local steps is the rule applied to the
    mean of the first w_i of all clients, for which there is one averaging before the first round. The next averaging
    continues from that a (for q = 1, where the first step averages the same w_i, from zero).

    Args:
        step_size: γη.
        local_steps: q.
        value_momentum: α, the weight of the new sample; 1 forgets the past.
        jacobian_momentum: β (None: as value_momentum).
        gradient_momentum: ϱ (None: as value_momentum).
        jacobian_radius: C_g, the radius of a ball in the Frobenius norm (None: no projection).
        gradient_radius: C_f, the radius of a ball (None: no projection).
        init_batch_size: examples for the first estimates (None: those of a step; the paper has q).
        rule: "coordinate", "norm", or a `DiagonalRule`.
        rho: ρ; at a stationary point A = ρ, so step_size / rho is the step that has to be stable there.
        theta: ϑ (None: α, the value momentum, as the paper allows).

    Converges to:
        - a stationary point where `MFCGD` does.

    Does not:
        - remove client drift: A changes the metric only; `TrackedAdaMFCGD` removes it.
        - solve regularised problems: the step would be a prox in the metric A.

    >>> AdaMFCGD(step_size=0.1, local_steps=5, rule="norm", rho=0.5).theta
    0.9

    Reference: huang2022, Algorithm 1 and equation (6).
    """

    variant_of = MFCGD

    class State(NamedTuple):
        x: Averaged[Vector]
        w: Reported[Vector]
        a: Server[Diagonal]
        A: Broadcast[Diagonal]
        old: Local[Vector]
        h: Local[Vector]
        u: Local[Jacobian]
        v: Local[Vector]

    def init_server(self, problem: Nested, x0: Vector) -> State:
        a, A = self.first_metric(x0)
        return self.State(**self.start_values(problem, x0), a=a, A=A)

    def local_step(self, oracle: NestedOracle, start: State, state: State) -> State:
        h, u, v = self.track(oracle, state.x, state.old, Estimates(state.h, state.u, state.v))
        w = u.pull(v)
        return state._replace(x=self.move(oracle, state.x, w / start.A), w=w, old=state.x, h=h, u=u, v=v)

    def server_step(self, problem: Nested, start: State, merged: State, cohort: Cohort) -> State:
        a, A = self.metric(start.a, merged.w)
        return merged._replace(x=merged.x - self.step_size * merged.w / A, a=a, A=A)


class TrackedAdaMFCGD(AdaptiveMethod):
    r"""AdaMFCGD with the correction of `TrackedMFCGD` inside the metric.

    $$ x_i \gets x_i - \gamma\eta \, A^{-1} (w_i + c_i), \qquad c_i = \bar w - w_i \text{ at the last averaging} $$

    This method is the library's: no paper has it.

    Args:
        step_size: γη.
        local_steps: q.
        value_momentum: α, the weight of the new sample; 1 forgets the past.
        jacobian_momentum: β (None: as value_momentum).
        gradient_momentum: ϱ (None: as value_momentum).
        jacobian_radius: C_g, the radius of a ball in the Frobenius norm (None: no projection).
        gradient_radius: C_f, the radius of a ball (None: no projection).
        init_batch_size: examples for the first estimates (None: those of a step; the paper has q).
        rule: "coordinate", "norm", or a `DiagonalRule`.
        rho: ρ; at a stationary point A = ρ, so step_size / rho is the step that has to be stable there.
        theta: ϑ (None: α, the value momentum, as the paper allows).

    Converges to:
        - a stationary point where `TrackedMFCGD` does, in the metric A.

    Does not:
        - solve regularised problems: the step would be a prox in the metric A.

    >>> TrackedAdaMFCGD(step_size=0.1, local_steps=5, rho=0.5).rule
    'coordinate'

    Reference: huang2022, whose recursions it corrects; the method is this library's.
    """

    variant_of = TrackedMFCGD

    class State(NamedTuple):
        x: Averaged[Vector]
        w: Reported[Vector]
        mean: Broadcast[Vector]
        a: Server[Diagonal]
        A: Broadcast[Diagonal]
        w_i: Local[Vector]
        old: Local[Vector]
        h: Local[Vector]
        u: Local[Jacobian]
        v: Local[Vector]

    def init_server(self, problem: Nested, x0: Vector) -> State:
        a, A = self.first_metric(x0)
        return self.State(**self.start_values(problem, x0), mean=x0.zeros(), a=a, A=A, w_i=x0.zeros())

    def local_step(self, oracle: NestedOracle, start: State, state: State) -> State:
        h, u, v = self.track(oracle, state.x, state.old, Estimates(state.h, state.u, state.v))
        w = u.pull(v)
        x = self.move(oracle, state.x, (w + start.mean - start.w_i) / start.A)
        return state._replace(x=x, w=w - start.w_i, w_i=w, old=state.x, h=h, u=u, v=v)

    def server_step(self, problem: Nested, start: State, merged: State, cohort: Cohort) -> State:
        w = start.mean + merged.w
        a, A = self.metric(start.a, w)
        x = merged.x - self.step_size * w / A
        return merged._replace(x=x, w=w, mean=start.mean + cohort.share * merged.w, a=a, A=A)
