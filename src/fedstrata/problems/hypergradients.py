r"""Estimators of the hypergradient, $\partial_x f - \partial^2_{xy} g \, (\partial^2_{yy} g)^{-1} \partial_y f$.

They differ in how they compute $v \approx (\partial^2_{yy} g)^{-1} \partial_y f$. All are evaluated at the current y,
which is not y(x) yet: that error belongs to the method, not to the estimator.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import cho_solve
from jax.scipy.sparse.linalg import cg

from fedstrata.core.hyperparameters import check_values, flag, real, reals, whole
from fedstrata.core.vector import Vector, power_of_two
from fedstrata.problems.bilevel import Bilevel, BilevelOracle
from fedstrata.solvers.newton import DENSE


class Hypergradient(eqx.Module):
    """An estimator: from a client's oracle, x, y and the v of the step before to the hypergradient and the new v."""

    def __check_init__(self) -> None:
        check_values(self)
        for name in reals(self):
            if callable(getattr(self, name)):
                raise TypeError(f"{type(self).__name__}: {name} must be a number; estimators take no schedules")

    @abstractmethod
    def inverse(self, oracle: BilevelOracle, x: Vector, y: Vector, v: Vector, by_y: Vector) -> Vector:
        """v ≈ (∂²_yy g)⁻¹ ∂_y f.

        Args:
            oracle: of one step of one client.
            x: the upper variable.
            y: the lower variable.
            v: of the step before.
            by_y: ∂_y f(x, y).
        """

    def __call__(self, oracle: BilevelOracle, x: Vector, y: Vector, v: Vector) -> tuple[Vector, Vector]:
        """The hypergradient and the new v.

        Args:
            oracle: of one step of one client.
            x: the upper variable.
            y: the lower variable.
            v: of the step before.
        """
        direct, by_y = oracle.upper_grads(x, y)
        v = self.inverse(oracle, x, y, v, by_y)
        return direct - oracle.cross(x, y, v), v

    @property
    def remembers(self) -> bool:
        """Whether the old v matters."""
        return False

    @property
    def hessian_batches(self) -> int:
        """Independent batches of the lower split that one estimate draws for Hessians."""
        return 1

    def check(self, problem: Bilevel) -> None:
        """Refuse a problem for which this estimator does not converge.

        Args:
            problem: with its curvature, where `bind` has measured it.
        """

    def _check_step(self, name: str, step: float, problem: Bilevel) -> None:
        if problem.curvature is None:
            return
        largest = float(problem.curvature[1])
        if step * largest >= 2:
            raise ValueError(
                f"{name}: step={step:g} must be below 2/L = {2 / largest:.3g}, where L = {largest:.3g} is the largest "
                "eigenvalue of ∂²_yy g at the start values; above it the iteration grows without bound (1/L is a good "
                "choice, and mini-batches have larger eigenvalues than all data)"
            )


class Exact(Hypergradient):
    """Eq. (3) of li2022: v solves the linear system on this sample, by a Cholesky factor or, above 512 unknowns, by CG.

    Bias: none with all data. On mini-batches the inverse of a mean is not the mean of inverses: the estimate then
    belongs to the problem of the batch, with an error of the order of 1 / batch size.

    >>> Exact().hessian_batches
    1
    """

    def inverse(self, oracle: BilevelOracle, x: Vector, y: Vector, v: Vector, by_y: Vector) -> Vector:
        b, unflatten = ravel_pytree(by_y)
        product = lambda u: ravel_pytree(oracle.hvp(x, y, unflatten(u)))[0]
        if b.size > DENSE:
            return unflatten(_solve(product, b, jnp.zeros_like(b), tol=1e-10 if b.dtype == jnp.float64 else 1e-6))
        factor = jnp.linalg.cholesky(jax.vmap(product)(jnp.eye(b.size, dtype=b.dtype)))
        return unflatten(cho_solve((factor, True), b))


class Neumann(Hypergradient):
    r"""Eq. (4) of li2022, a Neumann series.

    $$ v = \eta_N \sum_{q=-1}^{Q-1} \prod_{j=Q-q}^{Q} (I - \eta_N \partial^2_{yy} g(B_j)) \, \partial_y f $$

    Bias: with independent batches its mean is the truncated series, off by at most
    $(1 - \eta_N\mu)^{Q+1} |\partial_y f| / \mu$. A method that uses it converges to where the biased direction is zero.

    Args:
        step: η_N, below 2/L.
        terms: Q, the Hessian products, each on a fresh batch; $B_Q$ acts first.

    >>> Neumann(step=0.1, terms=20).hessian_batches
    20
    """

    step: float = real(above=0)
    terms: int = whole(at_least=0)

    def inverse(self, oracle: BilevelOracle, x: Vector, y: Vector, v: Vector, by_y: Vector) -> Vector:
        def term(count: Any, pair: tuple[Vector, Vector]) -> tuple[Vector, Vector]:
            r, total = pair
            r = r - self.step * oracle.fresh(self.terms - count).hvp(x, y, r)  # batches Q, Q − 1 … 1
            return r, total + r

        return self.step * jax.lax.fori_loop(0, self.terms, term, (by_y, by_y))[1]

    @property
    def hessian_batches(self) -> int:
        return self.terms

    def check(self, problem: Bilevel) -> None:
        self._check_step("Neumann", self.step, problem)


class ConjugateGradients(Hypergradient):
    r"""Some conjugate gradient steps for v on this sample.

    Bias: the error falls like $2 ((\sqrt\kappa - 1)/(\sqrt\kappa + 1))^{steps}$, to zero after as many steps as y has
    numbers; on mini-batches it has that of `Exact` too.

    Args:
        steps: the number of steps, one Hessian product each.
        warm: start from the v of the step before, otherwise from zero.

    >>> ConjugateGradients(10, warm=True).remembers
    True
    """

    steps: int = whole(at_least=1)
    warm: bool = flag(False)

    @property
    def remembers(self) -> bool:
        return self.warm

    def inverse(self, oracle: BilevelOracle, x: Vector, y: Vector, v: Vector, by_y: Vector) -> Vector:
        start = v if self.warm else by_y.zeros()
        return _solve(lambda u: oracle.hvp(x, y, u), by_y, start, tol=0.0, maxiter=self.steps)


class Tracking(Hypergradient):
    r"""One gradient step for v in every step: $v \gets v - \rho \, (\partial^2_{yy} g \, v - \partial_y f)$.

    Bias: v lags behind. With x and y at rest its error falls by $1 - \rho\mu$ per step, to zero; while they move it is
    proportional to their movement. It takes one Hessian product, and is unbiased on mini-batches in the limit.

    Args:
        step: ρ, below 2/L.

    >>> Tracking(0.1).remembers
    True
    """

    step: float = real(above=0)

    @property
    def remembers(self) -> bool:
        return True

    def inverse(self, oracle: BilevelOracle, x: Vector, y: Vector, v: Vector, by_y: Vector) -> Vector:
        return v - self.step * (oracle.hvp(x, y, v) - by_y)

    def check(self, problem: Bilevel) -> None:
        self._check_step("Tracking", self.step, problem)


def _solve(product: Callable[[Any], Any], b: Any, start: Any, **options: Any) -> Any:
    """Conjugate gradients of jax, which square b; scaled by a power of two, so that they do not stop at a tiny b."""
    unit = power_of_two(Vector(b).norm())
    scaled, first = (Vector(a) / unit for a in (b, start))
    return (Vector(cg(product, scaled.tree, x0=first.tree, **options)[0]) * unit).tree
