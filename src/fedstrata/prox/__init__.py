r"""Regularisers φ with their proximal operators: `prox(z, γ)` is the minimiser of φ(x) + |x − z|²/(2γ).

A regulariser has four members. `value(x)` is φ(x). `prox(z, step)` takes one implicit step on φ. `rho` measures how far
φ is from convex (0: convex; `step` must stay below 1/ρ). `distance(x, g)` measures how far x is from stationary when g
is the gradient of the smooth part. All take arrays, trees of arrays and `Vector`s, and can be compiled, mapped and
differentiated. Regularisers can be scaled (`2 * L1(0.1)`), restricted to leaves (`.on("weight")`, `.on(kernels)`) and
added where they act on different leaves; a `SquaredL2` may be added to anything. An example:

>>> import jax.numpy as jnp
>>> phi = L1(1.0).on("weight") + SquaredL2(0.5).on("bias")
>>> z = {"weight": jnp.array([2.5, -0.5]), "bias": jnp.array([3.0])}
>>> {name: leaf.tolist() for name, leaf in phi.prox(z, step=0.5).items()}
{'bias': [2.0], 'weight': [2.0, 0.0]}
"""

from fedstrata.prox.base import Regularizer as Regularizer
from fedstrata.prox.folded import MCP as MCP
from fedstrata.prox.folded import SCAD as SCAD
from fedstrata.prox.groups import GroupLasso as GroupLasso
from fedstrata.prox.measures import hoyer as hoyer
from fedstrata.prox.measures import zeros as zeros
from fedstrata.prox.sets import Box as Box
from fedstrata.prox.sets import ConstraintSet as ConstraintSet
from fedstrata.prox.sets import L1Ball as L1Ball
from fedstrata.prox.sets import L2Ball as L2Ball
from fedstrata.prox.sets import LInfBall as LInfBall
from fedstrata.prox.sets import NonNegative as NonNegative
from fedstrata.prox.sets import Simplex as Simplex
from fedstrata.prox.sparse import L0 as L0
from fedstrata.prox.sparse import L1 as L1
from fedstrata.prox.sparse import ElasticNet as ElasticNet
from fedstrata.prox.sparse import SquaredL2 as SquaredL2
from fedstrata.prox.sparse import Zero as Zero
from fedstrata.prox.spectral import NuclearNorm as NuclearNorm
from fedstrata.prox.spectral import Rank as Rank
from fedstrata.prox.trees import kernels as kernels
from fedstrata.prox.variation import TotalVariation as TotalVariation
