"""FCFL: the worst client's loss under a limit on all disparities, then the mean loss at no client's expense."""

from typing import Any, ClassVar, NamedTuple

from fedstrata.core.algorithm import Algorithm, Cohort
from fedstrata.core.hyperparameters import real, whole
from fedstrata.core.placement import Broadcast, Gathered, Server
from fedstrata.core.vector import Scalar, Vector, where
from fedstrata.problems.fair import Fair, FairOracle
from fedstrata.solvers.gathered import aligned, append, combine, filled, largest, soft_worst, stack


class FCFL(Algorithm):
    r"""Fair and consistent federated learning: from all clients' gradients a linear program chooses the direction.

    $$ g_f = \sum_i s_i(f; \delta_f) \nabla f_i, \qquad g_u = \sum_i s_i(u; \delta_u) \nabla u_i, \qquad
       s_i(v; \delta) = \frac{e^{v_i / \delta}}{\sum_j e^{v_j / \delta}}, \qquad x \gets x - \eta d $$
    $$ \text{stage one: } d = \alpha_1 g_f + \alpha_2 g_u, \qquad
       \max_\alpha \langle d, g_f \rangle \text{ if } \max_i u_i \le \epsilon, \qquad
       \text{else } \max_\alpha \langle d, g_u \rangle \text{ subject to } \langle d, g_f \rangle \ge 0 $$
    $$ \text{stage two: } d = \sum_i \alpha_i \nabla f_i + \alpha_0 g_u, \qquad
       \max_\alpha \Big\langle d, \sum_i p_i \nabla f_i \Big\rangle \text{ subject to }
       \langle d, \nabla f_i \rangle \ge 0 \text{ and } \langle d, g_u \rangle \ge 0 $$

    f_i is the loss of client i and u_i its disparity; α is in the simplex; in stage two g_u = 0 where max u_i <= ϵ.

    Args:
        step_size: η, the step of the server.
        eps: ϵ, the disparity that every client is allowed.
        stage_one: the rounds of stage one; all later ones belong to stage two.
        delta: δ_f and δ_u at the start.
        decay: what a δ is multiplied by when it falls.
        factor: in stage one, a δ falls once factor ‖g‖ <= δ for its own g.
        floor: a δ at or below this stays.
        sharpness: u_i is the gap in equal opportunity of σ(sharpness · logit).

    - *Converges to*, if steps are small, a point near the lowest worst loss under the limit (stage one), and from there
      to where no direction helps some clients and harms none (stage two).
    - *Does not* settle with a constant step: at the limit stage one alternates between its programs, so max u_i ends
      near ϵ, on either side.
    - *Does not* keep the limit with long steps (twice ϵ with η = 0.1 in a test): stage two forbids growth to first
      order only and never restores what was lost.
    - *Does not* help all clients alike: its program favours clients with long gradients and leaves others just as they
      are, even where the mean gradient would help all.
    - u_i is smoothed, so the gap of decisions may be larger. A client without positives in two groups has u_i = 0.
    - It sends all gradients one by one, which secure aggregation cannot hide: one a round, in the paper of all data
      (`batch_size="all"`).
    - The rules are those of the public code, which adds weight decay 1e-4 (here the loss's l2). Where the limit holds
      in stage two, that code may still step along g_u with the weight that its program gave to a zero; here that weight
      does nothing.
    - Cohorts are ours: the programs are then about the clients that are present.

    >>> FCFL(step_size=0.1, eps=0.05).stage_one
    800

    Reference: cui2021, two-stage optimisation, as in the authors' code.
    """

    oracle: ClassVar[type] = FairOracle

    step_size: float = real(above=0)
    eps: float = real(0.05, at_least=0)
    stage_one: int = whole(800, at_least=0)
    delta: float = real(0.5, above=0)
    decay: float = real(0.01, above=0, at_most=1)
    factor: float = real(0.1, above=0)
    floor: float = real(1e-4, above=0)
    sharpness: float = real(10.0, above=0)
    local_steps: ClassVar[int] = 1

    class State(NamedTuple):
        x: Broadcast[Vector]
        f: Gathered[Any]  # one number per client
        df: Gathered[Vector]
        u: Gathered[Any]  # the disparity
        du: Gathered[Vector]
        delta_f: Server[Scalar]
        delta_u: Server[Scalar]

    def init_server(self, problem: Fair, x0: Vector) -> State:
        zero = x0.zeros()
        return self.State(x=x0, f=0.0, df=zero, u=0.0, du=zero, delta_f=self.delta, delta_u=self.delta)

    def local_step(self, oracle: FairOracle, start: State, state: State) -> State:
        f, df = oracle.value_and_grad(state.x)
        u, du = oracle.disparity_value_and_grad(state.x, self.sharpness)
        kind = state.x.scalar_dtype
        return state._replace(f=f.astype(kind), df=df, u=u.astype(kind), du=du)

    def server_step(self, problem: Fair, start: State, merged: State, cohort: Cohort) -> State:
        present, df = cohort.present, filled(merged.df, cohort.present)
        g_f = combine(soft_worst(merged.f, start.delta_f, present), df)
        g_u = combine(soft_worst(merged.u, start.delta_u, present), filled(merged.du, present))
        kept = largest(merged.u, present) <= self.eps
        early = cohort.clock.round < self.stage_one
        d = where(early, self.worst_first(g_f, g_u, kept), self.nobody_worse(df, g_u, kept, cohort))
        delta_f, delta_u = (
            where(early & (self.floor < delta) & (self.factor * g.norm() <= delta), self.decay * delta, delta)
            for delta, g in ((start.delta_f, g_f), (start.delta_u, g_u))
        )
        return merged._replace(x=start.x - self.step_size * d, delta_f=delta_f, delta_u=delta_u)

    def worst_first(self, g_f: Vector, g_u: Vector, kept: Any) -> Vector:
        """The direction of stage one. A zero gradient is no constraint."""
        return aligned(stack(g_f, g_u), target=where(kept, g_f, g_u), keep=stack(where(kept, g_f.zeros(), g_f)))

    def nobody_worse(self, df: Vector, g_u: Vector, kept: Any, cohort: Cohort) -> Vector:
        """The direction of stage two."""
        rows = append(df, where(kept, g_u.zeros(), g_u))
        return aligned(rows, target=combine(cohort.weights, df), keep=rows)

    def solution(self, problem: Fair, state: State) -> Vector:
        return state.x
