"""Differential privacy at the merge: every client's change is clipped, and the mean is noised.

One exchange is one Gaussian mechanism. The `Averaged` and `Reported` fields that a client sends, taken together, are a
*reference* plus a change. The change is clipped to a norm of at most `clip`, so that leaving it out moves the weighted
mean by at most clip × weight. Noise of standard deviation noise × clip × (largest weight) hides that.

**The reference** of a field is the value that the server sent last in this round. Before that, and always for a
`Reported` field, it is the template (the start value of `init_server`). In a round of one exchange it is the round's
start. In a round of several, the last value is nearer than the first: the clipped change then excludes what other
clients did in earlier exchanges. A reference is valid for two reasons. It depends on a client's data only through means
that were noised before. And all clients of an exchange have the same one, so the mean is the reference plus the mean of
clipped changes. Messages do not grow. A client's starts (`init_client`), its copies of fields and its `Local` fields
are not references; their effect counts as change.

**The guarantee**: (ε, δ) for neighbours that differ in one client's changes, in all exchanges, being replaced by none,
against everyone who sees the server's messages and the result. The server itself is trusted (it sees single replies,
unless a secure sum hides them). Participation, clients' weights and the shapes of data count as public. Not covered:
accepted rows, exact evaluations on clients' data (the columns of a simulation's history), and a user's choices based on
them. Numbers are floats: the bound holds up to rounding, and the noise is not hardened against attacks on its last
bits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from fedstrata.base.errors import unknown
from fedstrata.base.random import fold_in
from fedstrata.core.algorithm import Algorithm
from fedstrata.core.placement import PlacedState, field_of, hide, part, placements, select, with_parts
from fedstrata.core.vector import widest
from fedstrata.engine.exchange import Exchange, exchanges
from fedstrata.problems.base import Problem


@dataclass(frozen=True)
class Privacy:
    """The largest change of one client in an exchange, and the noise that hides it.

    Args:
        clip: the largest Euclidean norm of a client's change, over all its `Averaged` and `Reported` fields together.
        noise: the noise multiplier; the mean's noise has standard deviation noise × clip × the largest weight.
        delta: the δ at which ε is reported.
        accept: `Pooled` and `Gathered` fields whose rows may leave a client unprotected.

    >>> Privacy(clip=1.0, noise=2.0).noise
    2.0
    """

    clip: float
    noise: float
    delta: float = 1e-5
    accept: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value, low in (("clip", self.clip, "> 0"), ("noise", self.noise, ">= 0")):
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and low == "> 0"):
                raise ValueError(f"Privacy: {name}={value!r} must be a finite number {low}")
        if not isinstance(self.delta, float) or not 0 < self.delta < 1:
            raise ValueError(f"Privacy: delta={self.delta!r} must be between 0 and 1; well below 1 / clients is usual")
        if isinstance(self.accept, str):
            raise ValueError(f"Privacy: accept={self.accept!r} must be names of fields: accept=({self.accept!r},)")
        object.__setattr__(self, "accept", tuple(self.accept))

    def check(self, algorithm: Algorithm, problem: Problem) -> None:
        """Refuse an algorithm that sends rows, not only means, unless their fields were accepted."""
        if algorithm.centralised:
            raise ValueError(
                f"privacy: {type(algorithm).__name__} is centralised: it has all data and merges nothing; choose a "
                "federated method, or leave privacy out"
            )
        check_rows(algorithm, problem, self.accept, "noise on means does not protect", "Privacy(accept=...)")

    def clipped(self, state: PlacedState, reference: PlacedState, sends: tuple[str, ...]) -> Any:
        """A client's state, with the fields that are averaged clipped around the reference."""
        paths = means(type(state), sends)
        of = lambda source: {path: part(source, path) for path in paths}
        return with_parts(state, clipped(of(state), of(reference), self.clip))

    def noised(self, merged: Mapping[str, Any], state: type, weights: Array, key: PRNGKeyArray) -> dict[str, Any]:
        """The merged fields with noise on the means; `weights` of absent clients are zero."""
        found = {path: merged[path] for path in means(state, tuple(merged))}
        return {**merged, **(noised(found, key, self.noise * self.clip * jnp.max(weights)) if self.noise else {})}


def check_rows(algorithm: Algorithm, problem: Problem, accept: tuple[str, ...], why: str, remedy: str) -> None:
    """Refuse rows of single clients, unless their fields were accepted by name."""
    rows = select(type(algorithm).State, lambda p: p.up and p.merge != "mean")
    for field in accept:
        if field not in rows:
            raise unknown(f"Pooled or Gathered field of {type(algorithm).__name__} to accept", field, rows)
    sent = {field_of(path) for exchange in exchanges(algorithm, problem) for path in exchange.sends}
    open_ = [f for f in rows if f not in accept and (f in sent or algorithm.merge_at_init)]
    if open_:
        kinds = ", ".join(f"{f!r} ({placements(type(algorithm).State)[f].name})" for f in open_)
        raise ValueError(
            f"{type(algorithm).__name__} sends rows of single clients, which {why}: {kinds}; choose a method without "
            f"them, or let them leave unprotected by naming them in {remedy}"
        )


def means(state: type, paths: tuple[str, ...]) -> tuple[str, ...]:
    """The paths whose fields are averaged."""
    places = placements(state)
    return tuple(path for path in paths if places[field_of(path)].up and places[field_of(path)].merge == "mean")


def first_reference(template: PlacedState) -> Any:
    """The references when a round begins."""
    fields = template._fields
    averaged = means(type(template), fields)
    return hide(template, {f: f"{f!r} has no reference" for f in fields if f not in averaged})


def next_reference(reference: PlacedState, received: Mapping[str, Any]) -> Any:
    """The references once the server has sent these fields."""
    state = type(reference)
    return with_parts(reference, {path: received[path] for path in means(state, tuple(received))})


def clipped(sent: Mapping[str, Any], reference: Mapping[str, Any], clip: float) -> dict[str, Any]:
    """reference + (sent − reference) × min(1, clip / ‖sent − reference‖), one norm over all arrays of all fields.

    A change that is not finite counts as none. Otherwise it would reveal more than clipped changes may.
    """
    new, structure = jax.tree.flatten(dict(sent))
    old = jax.tree.leaves(dict(reference))
    if not new:
        return dict(sent)
    wide = widest(jnp.float32, *[a.dtype for a in new])
    changes = [a.astype(wide) - b.astype(wide) for a, b in zip(new, old, strict=True)]
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(c), initial=0.0) for c in changes]))
    smallest = float(jnp.finfo(wide).tiny)
    # Squares of large numbers would overflow, and reciprocals of the largest ones are flushed to zero.
    unit = jnp.clip(jnp.where(jnp.isfinite(largest), largest, 1), smallest, 1 / smallest)
    scaled = jnp.sqrt(sum((jnp.sum((c / unit) ** 2) for c in changes), start=jnp.zeros((), wide)))
    norm = unit * scaled
    inside, finite = norm <= clip, jnp.isfinite(largest)
    factor = clip / jnp.where(inside, clip, norm)
    tiny = factor < smallest  # flushed to zero: then the change is scaled first

    def one_leaf(a: Array, b: Array, change: Array) -> Array:
        short = jnp.where(tiny, change / unit * (clip / jnp.where(tiny, scaled, 1)), factor * change)
        short = (b.astype(wide) + short).astype(a.dtype)
        return jnp.where(inside & finite, a, jnp.where(finite, short, b))

    return jax.tree.unflatten(structure, [one_leaf(*leaf) for leaf in zip(new, old, changes, strict=True)])


def noised(merged: Mapping[str, Any], key: PRNGKeyArray, std: Array | float) -> dict[str, Any]:
    """Gaussian noise of one standard deviation on every number, with a separate key for every array."""
    leaves, structure = jax.tree.flatten(dict(merged))
    out = []
    for number, leaf in enumerate(leaves):
        wide = widest(leaf.dtype, jnp.float32)
        noise = jnp.asarray(std).astype(wide) * jax.random.normal(fold_in(key, number), leaf.shape, wide)
        out.append((leaf.astype(wide) + noise).astype(leaf.dtype))
    return jax.tree.unflatten(structure, out)


def noise_key(key: PRNGKeyArray, round: Array | int, phase: int, repetition: Array | int) -> PRNGKeyArray:
    """The key of one exchange's noise; before round 0 the round is −1."""
    return fold_in(fold_in(fold_in(key, round), phase), repetition)


class Spent(NamedTuple):
    """The privacy cost of one run to its most frequent client (an upper bound if phases have a `when`).

    Several runs on the same data, over seeds or swept values, cost the sum of their exchanges.
    """

    noise: float
    delta: float
    exchanges: int

    @property
    def epsilon(self) -> float:
        return epsilon(self.noise, self.exchanges, self.delta)

    def __str__(self) -> str:
        return f"({self.epsilon:.3g}, {self.delta:g})-differential privacy after {self.exchanges} exchanges"


def mechanisms(algorithm: Algorithm, rounds: Sequence[Exchange]) -> tuple[int, int]:
    """The number of exchanges that release a mean: before round 0, and at most in a round."""
    state = type(algorithm).State
    once = bool(algorithm.merge_at_init and means(state, state._fields))
    return int(once), sum(exchange.repeat for exchange in rounds if means(state, exchange.sends))


def epsilon(noise: float, exchanges: int, delta: float) -> float:
    """ε at δ of `mechanisms` Gaussian mechanisms with this noise multiplier, by Rényi divergences (dp-accounting).

    No amplification by sampling is claimed: cohorts follow from a seed that is public to all participants.
    """
    try:
        import dp_accounting
        from dp_accounting import rdp
    except ImportError as error:
        raise ImportError(
            "privacy: ε is computed by dp-accounting, which is not installed: pip install 'fedstrata[privacy]'"
        ) from error
    if exchanges == 0 or noise == 0:
        return math.inf if exchanges else 0.0
    accountant = rdp.RdpAccountant().compose(dp_accounting.GaussianDpEvent(noise), exchanges)
    return float(accountant.get_epsilon(delta))
