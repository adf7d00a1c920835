"""Checks before compilation, for simulation and deployment. Each message names the argument and the remedy."""

import dataclasses
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.base.errors import SetupWarning, unknown
from fedstrata.core.algorithm import Algorithm
from fedstrata.core.placement import PlacedState, select
from fedstrata.core.vector import Vector
from fedstrata.data.federation import Federation
from fedstrata.data.sampling import Sampler
from fedstrata.data.validation import numbered
from fedstrata.engine.context import RoundContext
from fedstrata.engine.exchange import Exchange, exchanges
from fedstrata.engine.privacy import Privacy
from fedstrata.problems.base import Problem


def check_solves(algorithm: Algorithm, problem: Problem) -> tuple[Exchange, ...]:
    """The exchanges of the algorithm on this problem. The problem must have the algorithm's oracle."""
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"algorithm={algorithm!r} is not an Algorithm; create one, e.g. fs.FedAvg(step_size=0.1)")
    if not isinstance(problem, Problem):
        raise TypeError(f"problem={problem!r} is not a Problem; create one, e.g. fs.Average(loss)")
    found = exchanges(algorithm, problem)
    if not algorithm.centralised and not any(exchange.sends for exchange in found):
        warnings.warn(
            f"{type(algorithm).__name__} sends nothing up, so its server learns nothing from the clients; place what "
            "they should send as Averaged, Reported, Gathered or Pooled",
            SetupWarning,
            stacklevel=4,
        )
    needed = algorithm.oracle
    if needed is not None and not issubclass(problem.Oracle, needed):
        able = ", ".join(solvers(problem)) or "none of the library's algorithms"
        raise TypeError(
            f"{type(algorithm).__name__} does not solve {type(problem).__name__} problems: it needs a "
            f"{needed.__name__}, and they have a {problem.Oracle.__name__}; these do: {able}"
        )
    return found


def solvers(problem: Problem) -> list[str]:
    """The known algorithms whose oracle this problem has."""
    from fedstrata.algorithms import known

    asks = {name: cls.oracle for name, cls in known().items()}
    return [name for name, needed in asks.items() if needed is not None and issubclass(problem.Oracle, needed)]


def check_sizes(federation: Federation) -> None:
    """The number of rows of every split must fit into its index type."""
    for name, split in federation.splits.items():
        numbered(split.size, f"split {name!r}")


def check_parameters(x: Vector) -> None:
    """Parameters must be real arrays, and finite."""
    leaves = jax.tree_util.tree_flatten_with_path(x.tree)[0]
    if not leaves:
        raise ValueError("params has no arrays; give the start values of the model")
    for path, leaf in leaves:
        name = "params" + jax.tree_util.keystr(path)
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
            kind = getattr(leaf, "dtype", type(leaf).__name__)
            raise TypeError(f"{name} has dtype {kind}; parameters must be floating-point arrays (say, .astype(float))")
        if not bool(jnp.all(jnp.isfinite(leaf))):
            raise ValueError(f"{name} is not finite at the start")


def check_weights(weights: str, problem: Problem) -> None:
    """`weights` must be "uniform" or "size", and "size" needs a problem that does not weigh its clients itself."""
    if weights not in ("uniform", "size"):
        raise unknown("weights", str(weights), ["uniform", "size"])
    if weights == "size" and problem.weighs_clients:
        raise ValueError(
            f'weights="size": a {type(problem).__name__} problem weighs its clients itself; leave weights="uniform", '
            'and give weighting="examples" or "clients" to the problem'
        )


def check_private(privacy: Privacy | None, algorithm: Algorithm, problem: Problem) -> None:
    """`privacy` must be a `Privacy` that can cover what this algorithm sends."""
    if privacy is None:
        return
    if not isinstance(privacy, Privacy):
        raise TypeError(f"privacy={privacy!r} is not a Privacy; create one, e.g. fs.Privacy(clip=1.0, noise=1.0)")
    privacy.check(algorithm, problem)


def check_grid(context: RoundContext, template: PlacedState) -> None:
    """The integers of a private run must be able to hold what its clients send; `template` may have shapes only."""
    if context.privacy is None:
        return
    size = context.privacy.clip * max(1.0, 8 * context.privacy.noise)
    for dtype in {a.dtype for a in jax.tree.leaves(template) if jnp.issubdtype(a.dtype, jnp.floating)}:
        most = float(jnp.finfo(dtype).max)
        if size > (math.sqrt(most) if most > 1e30 else most):  # squares are needed, in half precision of wider numbers
            raise ValueError(
                f"Privacy: with clip={context.privacy.clip:g} and noise={context.privacy.noise:g} values of about "
                f"{size:.1e} occur, with which {dtype} cannot compute; use less, or scale the parameters"
            )
    started = dataclasses.replace(context, template=template)
    for exchange in context.exchanges:
        started.grid(exchange.sends)
    if context.algorithm.merge_at_init:
        started.grid(select(context.state, lambda p: p.up), context.clients)


def check_counts(problem: Problem, federation: Federation, rule: Sampler, others: bool = False) -> None:
    """Every client must have rows in the splits that its steps draw from.

    Args:
        problem: what is minimised; it may let clients lack a split, but not all of them.
        federation: the data.
        rule: draws the batches.
        others: whether clients will come that are not known yet.
    """
    clients = max(split.clients for split in federation.splits.values())
    for name in sorted({*problem.streams.values()}):
        if federation[name].clients != clients:
            raise ValueError(
                f"split {name!r} is pooled: it belongs to no client, so no client can draw from it in training; give "
                f"each client its rows, with federation.with_split({name!r}, examples, clients=...), or hold some of "
                f"the clients' own rows out with federation.hold_out({name!r})"
            )
        counts = np.asarray(federation[name].counts)
        if problem.may_lack and (counts.max() > 0 or others):
            counts = np.where(counts > 0, counts, np.iinfo(np.int32).max)  # clients without rows draw none
        if counts.min() < 1:
            empty = federation.names[int(counts.argmin())]
            raise ValueError(
                f"{empty} has no examples in split {name!r}; drop it with federation.select, or give it data"
            )
        streams = [stream for stream, split in problem.streams.items() if split == name]
        rule.check(counts, federation.names.__getitem__, streams)
