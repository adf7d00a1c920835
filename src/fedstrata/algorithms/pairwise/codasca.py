"""CODA+ and CODASCA: AUC by the min-max form of the square loss; no scores leave a client."""

from typing import Any, NamedTuple, TypeVar

from fedstrata.algorithms.pairwise.base import PairwiseMethod
from fedstrata.core.algorithm import Cohort
from fedstrata.core.hyperparameters import real, whole
from fedstrata.core.placement import Averaged, Broadcast, Local, Reported, Server
from fedstrata.core.vector import Scalar, Vector, where
from fedstrata.problems.pairwise.oracle import PairwiseOracle
from fedstrata.problems.pairwise.pair_losses import Square
from fedstrata.problems.pairwise.problem import Pairwise

S = TypeVar("S", "CODAPlus.State", "CODASCA.State")  # the state of either method


class MinMaxMethod(PairwiseMethod):
    """What CODA+ and CODASCA share: the min-max form, its stages and the server's step."""

    step_size: float = real(above=0)
    local_steps: int = whole(1, at_least=1)
    server_step_size: float = real(1.0, above=0)
    prox_weight: float | None = real(None, above=0)
    stage_rounds: int | None = whole(None, at_least=1)
    stage_decay: float = real(3.0, at_least=1)

    def check(self, problem: Pairwise) -> None:
        loss = problem.pair_loss
        if not (isinstance(loss, Square) and loss.margin == 1 and problem.linear):
            has = "an outer function" if isinstance(loss, Square) and loss.margin == 1 else f"pair_loss={loss!r}"
            raise ValueError(
                f"{type(self).__name__} solves the min-max form of the square loss with margin 1 and f(u) = u, and "
                f"this problem has {has}: give it a separate problem, fs.Pairwise(score, fs.pair_losses.Square()), and "
                "compare by metrics; or use FedX1 or FedX2, which take other losses"
            )

    def fields(self, problem: Pairwise, x0: Vector) -> dict[str, Any]:
        """The start values of the fields that both methods have: a = b = α = 0.

        Args:
            problem: the problem.
            x0: the start of x.
        """
        zero, none = problem.blank("first"), Vector(())
        v = Vector((x0.tree, zero, zero))
        near = self.prox_weight is not None
        average = v.zeros() if near and self.stage_rounds is not None else none
        return {"v": v, "alpha": Vector(zero), "ref": v if near else none, "average": average}

    def stage_step(self, oracle: PairwiseOracle, v: Vector) -> Scalar:
        """η of this stage.

        Args:
            oracle: of this step.
            v: for the dtype.
        """
        if self.stage_rounds is None:
            return self.step_size
        stage = oracle.clock.round // self.stage_rounds
        return self.step_size / self.stage_decay ** stage.astype(v.scalar_dtype)

    def proximal(self, g: Vector, v: Vector, ref: Vector) -> Vector:
        """g + (v − v_ref) / γ.

        Args:
            g: a direction of v.
            v: (x, a, b).
            ref: v_ref.
        """
        return g if self.prox_weight is None else g + (v - ref) / self.prox_weight

    def averaged(self, start: S, merged: S, cohort: Cohort) -> S:
        """The server's step in v and α, and at the end of a stage the new v_ref.

        Args:
            start: the state as the round began.
            merged: the state with the means over the clients.
            cohort: of this round, for its number.
        """
        v = start.v + self.server_step_size * (merged.v - start.v)
        alpha = start.alpha + self.server_step_size * (merged.alpha - start.alpha)
        merged = merged._replace(v=v, alpha=alpha)
        if self.prox_weight is None or self.stage_rounds is None:
            return merged
        count = cohort.clock.round % self.stage_rounds + 1  # rounds of this stage so far, this one included
        average = start.average + (v - start.average) / count.astype(v.scalar_dtype)
        return merged._replace(average=average, ref=where(count == self.stage_rounds, average, start.ref))

    def solution(self, problem: Pairwise, state: "CODAPlus.State | CODASCA.State") -> Vector:
        return Vector(state.v.tree[0])


class CODAPlus(MinMaxMethod):
    r"""CODA+: local descent in v = (x, a, b) and ascent in α on the min-max form of AUC, then averages.

    $$ F_i(v, \alpha) = p(1-p) \big( \omega_{1i} E_{S_1^i}[(h-a)^2 - 2(1+\alpha)h]
       + \omega_{2i} E_{S_2^i}[(h-b)^2 + 2(1+\alpha)h] - \alpha^2 \big) $$
    $$ v_i \gets v_i - \eta \big( \nabla_v F_i + (v_i - v_{ref}) / \gamma \big), \qquad
       \alpha_i \gets \alpha_i + \eta \nabla_\alpha F_i \quad (K \text{ times}), \qquad
       v \gets v + \eta_s \tfrac{1}{N} \sum_i (v_i - v) $$

    and α alike. $\min_{a,b} \max_\alpha$ of the mean of the $F_i$ is $p(1-p) (R(x) - 1)$, with R the mean of
    $(1 - h(z) + h(z'))^2$ over all pairs and p the share of the first set. It is a sum over examples, so no scores
    travel. A step draws from both sets, each weighted by ω. The paper draws from their mixture at the client. That has
    the same mean when clients have equally many examples, and a small batch may miss the rare set.

    Args:
        step_size: η.
        local_steps: K, the steps of a client in a round.
        server_step_size: η_s.
        prox_weight: γ of $\frac{1}{2\gamma} \|v - v_{ref}\|^2$; the larger, the weaker (None: no such term).
        stage_rounds: rounds in a stage (None: one stage). At its end $v_{ref}$, at first the start value, becomes the
            mean of the server's v over the stage.
        stage_decay: the divisor of η after each stage; 3 in the authors' code.

    - *Converges to* the minimum up to an error proportional to the step when clients differ: local models drift.
    - *Does not* leave the start value with a γ and no stages: the proximal term holds it there.
    - When p(1−p) is small, so is every gradient, that of α included, and η must be larger.
    - The authors' code differs: it clips the gradient of x, decays weights (here: `l2` of the problem), starts
      $v_{ref}$ at random numbers, and moves 1 + α by $2(1 + b - a) - 2(1 + \alpha)$ instead of the gradient, clamped
      to [0, 999]. In the paper (from memory) a stage starts at $v_{ref}$; here, as in the code, at the last v.

    >>> CODAPlus(step_size=0.1, local_steps=8, prox_weight=500.0, stage_rounds=100).stage_decay
    3.0

    Reference: yuan2021auc, Algorithm 1 (from memory), and the authors' public code for the stages.
    """

    class State(NamedTuple):
        v: Averaged[Vector]  # (x, a, b)
        alpha: Averaged[Vector]
        ref: Broadcast[Vector]  # v_ref; empty where there is no proximal term
        average: Server[Vector]  # of v over the stage so far; empty where there are no stages

    def init_server(self, problem: Pairwise, x0: Vector) -> State:
        return self.State(**self.fields(problem, x0))

    def local_step(self, oracle: PairwiseOracle, start: State, state: State) -> State:
        g, g_alpha = oracle.minmax_grads(state.v, state.alpha)
        step = self.stage_step(oracle, state.v)
        v = state.v - step * self.proximal(g, state.v, state.ref)
        return state._replace(v=v, alpha=state.alpha + step * g_alpha)

    def server_step(self, problem: Pairwise, start: State, merged: State, cohort: Cohort) -> State:
        return self.averaged(start, merged, cohort)


class CODASCA(MinMaxMethod):
    r"""CODA+ with control variates on v and on α, which remove the drift of clients that differ.

    $$ v_i \gets v_i - \eta \big( \nabla_v F_i - c_i + c + (v_i - v_{ref}) / \gamma \big), \qquad
       \alpha_i \gets \alpha_i + \eta \big( \nabla_\alpha F_i - c_i^\alpha + c^\alpha \big) \quad (K \text{ times}) $$
    $$ c_i^+ = \tfrac{1}{K} \sum_k \nabla_v F_i, \qquad c \gets c + \frac{1}{N} \sum_{i \in S} (c_i^+ - c_i) $$

    and $c^\alpha$ alike, with $F_i$, the server's step and the stages as in `CODAPlus`. The $c_i$ are means of raw
    gradients, without the proximal term: option II of SCAFFOLD, written so that steps may change within a round. It
    sends 2(d + 2) + 2 numbers, twice as many as CODA+; with a $v_{ref}$, d + 2 more come down.

    Args:
        step_size: η.
        local_steps: K, the steps of a client in a round.
        server_step_size: η_s.
        prox_weight: γ of $\frac{1}{2\gamma} \|v - v_{ref}\|^2$; the larger, the weaker (None: no such term).
        stage_rounds: rounds in a stage (None: one stage), as in `CODAPlus`.
        stage_decay: the divisor of η after each stage; 3 in the authors' code.

    - *Converges to* a minimum of the pairwise square loss with constant steps, however different the clients are (with
      full batches and scores that are linear in x exactly), when γ is None or with stages and `stage_decay` 1.
    - *Converges to* the proximal point of the start value with a γ and one stage.
    - *Does not* reach the minimum when η decays over stages of equal length, as in the authors' code: those steps have
      a finite sum. A large γ and long stages hide this; the paper (from memory) makes stages longer as η falls.
    - $c = \frac{1}{N} \sum_i c_i$ holds under partial participation too.
    - The authors' code differs as in `CODAPlus`; its first round has one step whose gradient is also divided by K.

    >>> CODASCA(step_size=0.1, local_steps=8).server_step_size
    1.0

    Reference: yuan2021auc, Algorithm 2 (from memory), and the authors' public code for c_i and the stages.
    """

    variant_of = CODAPlus

    class State(NamedTuple):
        v: Averaged[Vector]
        alpha: Averaged[Vector]
        ref: Broadcast[Vector]
        average: Server[Vector]
        c: Broadcast[Vector]  # the mean of the clients' c_i, for v and for α
        c_alpha: Broadcast[Vector]
        c_i: Local[Vector]
        c_i_alpha: Local[Vector]
        dc: Reported[Vector]  # in the round the mean gradient so far, at its end the change of c_i
        dc_alpha: Reported[Vector]

    def check(self, problem: Pairwise) -> None:
        super().check(problem)
        if problem.may_idle:
            raise ValueError(
                f"{type(self).__name__}: with Epochs(per_round=...) a client may finish before the others, and its "
                'c_i would be too small; use sampling="epochs" or "replacement"'
            )

    def init_server(self, problem: Pairwise, x0: Vector) -> State:
        given = self.fields(problem, x0)
        v, alpha = given["v"].zeros(), given["alpha"].zeros()
        return self.State(**given, c=v, c_i=v, dc=v, c_alpha=alpha, c_i_alpha=alpha, dc_alpha=alpha)

    def local_step(self, oracle: PairwiseOracle, start: State, state: State) -> State:
        g, g_alpha = oracle.minmax_grads(state.v, state.alpha)
        dc, dc_alpha = state.dc + g / self.local_steps, state.dc_alpha + g_alpha / self.local_steps
        step = self.stage_step(oracle, state.v)
        v = state.v - step * self.proximal(g - start.c_i + start.c, state.v, state.ref)
        alpha = state.alpha + step * (g_alpha - start.c_i_alpha + start.c_alpha)
        return state._replace(v=v, alpha=alpha, dc=dc, dc_alpha=dc_alpha)

    def local_end(self, oracle: PairwiseOracle, start: State, state: State) -> State:
        changes = {"dc": state.dc - start.c_i, "dc_alpha": state.dc_alpha - start.c_i_alpha}
        return state._replace(c_i=state.dc, c_i_alpha=state.dc_alpha, **changes)

    def server_step(self, problem: Pairwise, start: State, merged: State, cohort: Cohort) -> State:
        merged = self.averaged(start, merged, cohort)
        return merged._replace(
            c=start.c + cohort.share * merged.dc, c_alpha=start.c_alpha + cohort.share * merged.dc_alpha
        )
