"""FedMinMax: group weights that rise where the loss is high, so that the worst group decides."""

from typing import ClassVar, NamedTuple

from fedstrata.core.algorithm import Algorithm, Cohort, Phase
from fedstrata.core.hyperparameters import flag, real
from fedstrata.core.placement import Averaged, Broadcast, Reported, Server
from fedstrata.core.vector import Vector
from fedstrata.problems.fair import Fair, FairOracle
from fedstrata.prox import Simplex

SMALLEST = 1e-12  # a group's share is at least one over the number of examples, or zero


class FedMinMax(Algorithm):
    r"""Gradient descent on the model and projected ascent on group weights μ: the worst group's loss is minimised.

    $$ w_a = \mu_a / \rho_a, \qquad
       \theta_k = \theta - \eta \nabla \Big( \frac{1}{n_k} \sum_j w_{a_j} \ell(\theta; \xi_j) \Big), \qquad
       r_a = \sum_k \frac{n_{a,k}}{n_a} r_{a,k}(\theta) $$
    $$ \theta \gets \sum_k \frac{n_k}{n} \theta_k, \qquad \mu \gets \mathrm{Proj}_\Delta (\mu + \eta_\mu r), \qquad
       \rho_a = n_a / n, \quad \mu = \rho \text{ at first} $$

    Args:
        step_size: η, the step on the model.
        weight_step_size: η_μ, the step on the group weights.
        average_iterates: whether the solution is the mean of all θ so far, as the paper's output is, or the last θ.
        whole_risks: whether r is taken over all the client's examples (not counted as seen) or the gradient's sample.

    - *Converges to* $\min_\theta \max_a r_a(\theta)$ (plus the l2 term) for convex losses as steps fall to zero, in the
      mean of the iterates.
    - *Does not* settle in its last iterate when η_μ is large, or the loss not strongly convex: it circles round the
      saddle point.
    - With one group it is FedSGD. Every step is a round.
    - Run it with `weights="size"`, which is the rule above. With uniform weights it solves the same problem for data in
      which every client counts the same. The risks of a sample are unbiased too.
    - Beside the model a client reveals to the server, once, its group counts (group_shares, as fractions of its
      examples), and in every round its loss in each group (risks). All clients learn w, and with it how the groups
      fare.
    - ρ is that of all clients, who send their counts before round 0, also under partial participation.
    - Written from memory of the paper and third parties' code. li2022, which compares with it, does not state which
      iterate it reports.

    >>> FedMinMax(step_size=0.1).weight_step_size
    0.1

    Reference: papadaki2021, Algorithm 1 (from memory).
    """

    oracle: ClassVar[type] = FairOracle

    step_size: float = real(above=0)
    weight_step_size: float = real(0.1, above=0)
    average_iterates: bool = flag(False)
    whole_risks: bool = flag(True)
    local_steps: ClassVar[int] = 1
    merge_at_init: ClassVar[bool] = True

    class State(NamedTuple):
        x: Averaged[Vector]  # θ
        w: Broadcast[Vector]  # μ/ρ
        risks: Reported[Vector]  # (n_{a,k}/n_k) r_{a,k}: their mean by size, divided by ρ, is r
        group_shares: Reported[Vector]  # n_{a,k}/n_k, sent once, at the start; the server keeps their mean ρ
        mu: Server[Vector]
        mean: Server[Vector]  # of the iterates

    def check(self, problem: Fair) -> None:
        if problem.weights is not None:
            raise ValueError("FedMinMax learns the weights of groups, so give it a Fair problem with weights=None")

    def init_server(self, problem: Fair, x0: Vector) -> State:
        zero, one = (problem.per_group(value, x0) for value in (0.0, 1.0))
        return self.State(x=x0, w=one, risks=zero, group_shares=zero, mu=zero, mean=x0)

    def init_client(self, oracle: FairOracle, view: State) -> State:
        _, counts = oracle.fresh(0, "all").group_sums(view.x)
        return view._replace(group_shares=counts / counts.sum())

    def server_start(self, problem: Fair, merged: State, cohort: Cohort) -> State:
        rho = merged.group_shares
        return merged._replace(mu=rho, w=over(rho, rho))

    def phases(self, problem: Fair) -> list[Phase]:
        return [Phase(self.local_step, sends=("x", "risks"), server_step=self.server_step)]

    def local_step(self, oracle: FairOracle, start: State, state: State) -> State:
        sums, counts = (oracle.fresh(0, "all") if self.whole_risks else oracle).group_sums(state.x)
        x = state.x - self.step_size * oracle.weighted_grad(state.x, state.w)
        return state._replace(x=x, risks=sums / counts.sum())

    def server_step(self, problem: Fair, start: State, merged: State, cohort: Cohort) -> State:
        rho = start.group_shares
        mu = Simplex().prox(start.mu + self.weight_step_size * over(merged.risks, rho), 1.0)
        rounds = 1 + cohort.clock.round.astype(start.x.scalar_dtype)
        mean = start.mean + (merged.x - start.mean) / rounds
        return merged._replace(mu=mu, w=over(mu, rho), mean=mean)

    def solution(self, problem: Fair, state: State) -> Vector:
        return state.mean if self.average_iterates else state.x


def over(value: Vector, rho: Vector) -> Vector:
    """value/ρ, and 0 for a group without examples."""
    return rho.sign() * value / rho.maximum(SMALLEST)
