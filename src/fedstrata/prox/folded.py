"""Folded concave penalties: like the lasso near zero, without its bias on large entries."""

import jax.numpy as jnp
from jaxtyping import Array

from fedstrata.prox.base import Regularizer, number
from fedstrata.prox.sparse import folded_distance, soft
from fedstrata.prox.trees import squared


class MCP(Regularizer):
    r"""The minimax concave penalty: the lasso's slope λ at zero, none from $|x| = \theta\lambda$ on.

    $$ \varphi(x) = \sum_i \begin{cases} \lambda |x_i| - x_i^2 / (2\theta) & |x_i| \le \theta\lambda \\
                                         \theta\lambda^2 / 2 & \text{otherwise} \end{cases}
       \qquad
       \mathrm{prox}(z_i) = \begin{cases} \mathrm{sign}(z_i) \, (|z_i| - \gamma\lambda)_+ / (1 - \gamma/\theta)
                                                 & |z_i| \le \theta\lambda \\ z_i & \text{otherwise} \end{cases} $$

    Weakly convex with $\rho = 1/\theta$; the prox needs $\gamma < \theta$.

    Args:
        weight: λ, above 0.
        theta: θ, above 0; larger values are nearer to the lasso.

    >>> MCP(1.0, theta=2.0).prox(jnp.array([0.5, 1.5, 3.0]), step=1.0).tolist()
    [0.0, 1.0, 3.0]

    Reference: zhang2010.
    """

    weight: float = number(above=0)
    theta: float = number(above=0)

    @property
    def rho(self) -> float:
        return 1 / self.theta

    def _value(self, x: Array) -> Array:
        # Beyond the bend |x| counts as θλ, which makes both cases one formula.
        size = jnp.minimum(jnp.abs(x), self.theta * self.weight)
        return self.weight * jnp.sum(size) - squared(size) / (2 * self.theta)

    def _prox(self, z: Array, step: Array) -> Array:
        near = soft(z, step * self.weight) / (1 - step * self.rho)
        return jnp.where(jnp.abs(z) <= self.theta * self.weight, near, z)

    def _distance(self, x: Array, g: Array) -> Array:
        return folded_distance(x, g, jnp.maximum(self.weight - jnp.abs(x) / self.theta, 0), self.weight)


class SCAD(Regularizer):
    r"""The smoothly clipped absolute deviation, defined by its slope.

    $$ \varphi'(|x|) = \lambda \text{ for } |x| \le \lambda, \qquad
       \frac{(a\lambda - |x|)_+}{a - 1} \text{ beyond} $$
    $$ \mathrm{prox}(z_i) = \begin{cases}
         \mathrm{sign}(z_i) \, (|z_i| - \gamma\lambda)_+ & |z_i| \le (1 + \gamma)\lambda \\
         \dfrac{(a - 1) z_i - \mathrm{sign}(z_i) \gamma a \lambda}{a - 1 - \gamma}
                                                         & (1 + \gamma)\lambda < |z_i| \le a\lambda \\
         z_i & \text{otherwise} \end{cases} $$

    Weakly convex with $\rho = 1/(a - 1)$; the prox needs $\gamma < a - 1$.

    Args:
        weight: λ, above 0.
        a: the slope is zero from |x| = aλ on; above 2.

    >>> SCAD(1.0, a=3.0).prox(jnp.array([0.5, 1.5, 2.5, 4.0]), step=1.0).tolist()
    [0.0, 0.5, 2.0, 4.0]

    Reference: fan2001.
    """

    weight: float = number(above=0)
    a: float = number(3.7, above=2)

    @property
    def rho(self) -> float:
        return 1 / (self.a - 1)

    def _value(self, x: Array) -> Array:
        size = jnp.abs(x)
        lasso = jnp.minimum(size, self.weight)
        bend = jnp.clip(size, self.weight, self.a * self.weight)
        # The area under the falling part of the slope, a trapezium from λ to |x|.
        falling = (bend - self.weight) * ((2 * self.a - 1) * self.weight - bend) * (self.rho / 2)
        return self.weight * jnp.sum(lasso) + jnp.sum(falling)

    def _prox(self, z: Array, step: Array) -> Array:
        near = soft(z, step * self.weight)
        middle = (z - jnp.sign(z) * (step * self.a * self.weight * self.rho)) / (1 - step * self.rho)
        far = jnp.where(jnp.abs(z) <= self.a * self.weight, middle, z)
        return jnp.where(jnp.abs(z) <= (1 + step) * self.weight, near, far)

    def _distance(self, x: Array, g: Array) -> Array:
        slope = jnp.clip((self.a * self.weight - jnp.abs(x)) * self.rho, 0, self.weight)
        return folded_distance(x, g, slope, self.weight)
