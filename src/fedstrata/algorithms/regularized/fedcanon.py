"""FedCanon, reconstructed from its abstract: tracking at the clients, one prox at the server."""

from fedstrata.algorithms.regularized.zhang2024 import Zhang2024
from fedstrata.problems.base import CompositeOracle


class FedCanon(Zhang2024):
    r"""Corrected local gradient steps without any prox, then one proximal step at the server: a reconstruction.

    $$ z_i \gets z_i - \eta_a \big( \nabla f_i(z_i; \xi_i) + c_i \big) \quad (Q \text{ times from } x), \qquad
       y_i = \frac{x - z_i}{\eta_a Q} $$
    $$ x \gets \mathrm{prox}_{\hat\eta\varphi}(x - \hat\eta \bar y), \qquad c_i \gets c_i + \bar y - y_i, \qquad
       \hat\eta = \eta_a \eta_s Q $$

    Args:
        step_size: η_a, the step of the clients; constant within a round (schedule it `fs.per_round`).
        local_steps: Q, the steps of a client in a round; every client takes all of them.
        server_step_size: η_s, the step of the server.

    - *Converges to* a point near the optimum of f + φ.
    - *Does not* reach it with constant steps: the limit is off by O(η_a Q). At the optimum the gradient is not zero
      (the regulariser balances it), so clients without a prox walk away from it while they work.
    - This is a reconstruction from the paper's abstract (control variables, one prox at the server, none at the
      clients), not its listing, which was not available; treat its results with caution.
    - It is Zhang2024 without the local prox, and step for step SCAFFOLD with a server prox at half of its message.
      Partial participation as in Zhang2024.

    >>> FedCanon(step_size=0.1, local_steps=10).server_step_size
    1.0

    Reference: zhou2025 (reconstructed).
    """

    def prox_steps(self) -> dict[str, float]:
        name = "step_size * local_steps * server_step_size"
        return {name: self.step_size * self.local_steps * self.server_step_size}

    def local_step(self, oracle: CompositeOracle, start: Zhang2024.State, state: Zhang2024.State) -> Zhang2024.State:
        return state._replace(x=state.x - self.step_size * (oracle.grad(state.x) + start.h - start.h_i))
