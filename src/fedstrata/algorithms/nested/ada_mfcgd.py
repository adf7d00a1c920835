"""AdaMFCGD: MFCGD in an adaptive diagonal metric; and the same with corrected client drift."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from fedstrata.algorithm import Cohort, real
from fedstrata.algorithms.nested.mfcgd import MFCGD, TrackedMFCGD
from fedstrata.errors import unknown
from fedstrata.placement import Averaged, Broadcast, Local, Reported, Server
from fedstrata.problems.nested import Jacobian
from fedstrata.prox import Zero
from fedstrata.vector import Vector


class DiagonalRule:
    """How a diagonal A_t follows from the mean estimates w̄; a rule of one's own is a frozen dataclass with these."""

    def start(self, x0: Vector) -> Any:
        """a_0"""
        raise NotImplementedError(f"{type(self).__name__} must define start(x0)")

    def update(self, a: Any, w: Vector, theta: Any) -> Any:
        """a_t from the last a, w̄_t and ϑ_t."""
        raise NotImplementedError(f"{type(self).__name__} must define update(a, w, theta)")

    def diagonal(self, a: Any, rho: Any) -> Any:
        """The diagonal of A_t, as a Vector, or as a number for a multiple of I."""
        raise NotImplementedError(f"{type(self).__name__} must define diagonal(a, rho)")


@dataclass(frozen=True)
class Coordinate(DiagonalRule):
    """Line 6: a ← ϑ a + (1 − ϑ) w̄², A = √a + ρ."""

    def start(self, x0: Vector) -> Vector:
        return x0.zeros()

    def update(self, a: Vector, w: Vector, theta: Any) -> Vector:
        return theta * a + (1 - theta) * w**2

    def diagonal(self, a: Vector, rho: Any) -> Vector:
        return a.sqrt() + rho


@dataclass(frozen=True)
class Norm(DiagonalRule):
    """Equation (6): a ← ϑ a + (1 − ϑ) |w̄|, A = (a + ρ) I."""

    def start(self, x0: Vector) -> Any:
        return 0.0

    def update(self, a: Any, w: Vector, theta: Any) -> Any:
        return theta * a + (1 - theta) * w.norm()

    def diagonal(self, a: Any, rho: Any) -> Any:
        return a + rho


RULES: dict[str, DiagonalRule] = {"coordinate": Coordinate(), "norm": Norm()}


def rule_of(given: str | DiagonalRule) -> DiagonalRule:
    return RULES[given] if isinstance(given, str) else given


class AdaMFCGD(MFCGD):
    r"""MFCGD with an adaptive diagonal metric A, which the server makes from the mean estimates.

    $$ a \gets \vartheta a + (1-\vartheta) \bar w^2, \quad A = \mathrm{diag}(\sqrt a + \rho) \qquad \text{or} \qquad
       a \gets \vartheta a + (1-\vartheta) |\bar w|, \quad A = (a + \rho) I $$
    $$ x_i \gets x_i - \gamma\eta \, A^{-1} w_i \quad (q - 1 \text{ times}), \qquad
       x \gets \bar x - \gamma\eta \, A^{-1} \bar w $$

    step_size, local_steps, momenta, radii and init_batch_size: as in `MFCGD`. rule: "coordinate", "norm", or a
    `DiagonalRule`. rho: ρ; at a stationary point A = ρ, so step_size / rho is the step that has to be stable there.
    theta: ϑ (None: α, the value momentum, as the paper allows).

    Converges as `MFCGD` does: A changes the metric and does not remove drift. a starts from zero and changes only where
    clients average. A of the first local steps is the rule applied to the mean of the first w_i of all clients, for
    which there is one averaging before the first round; the next one continues from that a (for q = 1, where the first
    step averages the same w_i, from zero). Not for regularised problems: the step would be a prox in the metric A.

    >>> AdaMFCGD(step_size=0.1, local_steps=5, rule="norm", rho=0.5).theta
    0.9

    Reference: huang2022, Algorithm 1 and equation (6).
    """

    rule: str | DiagonalRule = "coordinate"
    rho: float = real(0.1, above=0)
    theta: float | None = real(0.9, above=0, at_most=1)

    merge_at_init = True

    class State(NamedTuple):  # pyright: ignore[reportIncompatibleVariableOverride]
        x: Averaged[Vector]
        w: Reported[Vector]
        a: Server[Any]
        A: Broadcast[Any]
        old: Local[Vector]
        h: Local[Vector]
        u: Local[Jacobian]
        v: Local[Vector]

    def check(self, problem: Any) -> None:
        name = type(self).__name__
        if not isinstance(self.rule, DiagonalRule) and self.rule not in RULES:
            raise unknown(f"rule of {name} (or a DiagonalRule)", str(self.rule), RULES)
        if not isinstance(problem.regularizer, Zero):
            raise ValueError(
                f"{name} cannot take {problem.regularizer!r}: with an adaptive A every step would be a prox in the "
                "metric A, which has no closed form; use MFCGD or TrackedMFCGD"
            )
        super().check(problem)

    def metric(self, a: Any, w: Vector, theta: Any) -> tuple[Any, Any]:
        """The next a, and A from it."""
        a = rule_of(self.rule).update(a, w, theta)
        return a, rule_of(self.rule).diagonal(a, self.rho)

    def start_values(self, problem: Any, x0: Vector) -> dict[str, Any]:
        a = rule_of(self.rule).start(x0)
        return {**super().start_values(problem, x0), "a": a, "A": rule_of(self.rule).diagonal(a, self.rho)}

    def server_start(self, problem: Any, merged: Any, cohort: Cohort) -> Any:
        theta = self.value_momentum if self.theta is None else self.theta
        a, A = self.metric(merged.a, merged.w, theta)
        return merged._replace(a=merged.a if self.local_steps == 1 else a, A=A)  # q = 1: t = 1 averages w̄_1 again

    def direction(self, start: Any, w: Vector) -> Vector:
        return super().direction(start, w) / start.A

    def server_step(self, problem: Any, start: Any, merged: Any, cohort: Cohort) -> Any:
        a, A = self.metric(start.a, merged.w, self.value_momentum if self.theta is None else self.theta)
        return merged._replace(x=merged.x - self.step_size * merged.w / A, a=a, A=A)


class TrackedAdaMFCGD(TrackedMFCGD, AdaMFCGD):
    r"""AdaMFCGD with the correction of `TrackedMFCGD` inside the metric.

    $$ x_i \gets x_i - \gamma\eta \, A^{-1} (w_i + c_i), \qquad c_i = \bar w - w_i \text{ at the last averaging} $$

    Hyper-parameters: as in `AdaMFCGD`.

    Converges where `TrackedMFCGD` does, in the metric A. Ours, not the paper's.

    >>> TrackedAdaMFCGD(step_size=0.1, local_steps=5, rho=0.5).rule
    'coordinate'

    Reference: huang2022, whose recursions it corrects; the method is this library's.
    """

    class State(NamedTuple):  # pyright: ignore[reportIncompatibleVariableOverride]
        x: Averaged[Vector]
        w: Reported[Vector]
        mean: Broadcast[Vector]
        a: Server[Any]
        A: Broadcast[Any]
        w_i: Local[Vector]
        old: Local[Vector]
        h: Local[Vector]
        u: Local[Jacobian]
        v: Local[Vector]
