"""Differential privacy: every client's change is clipped, and noise hides it, at the merge or at each client.

One exchange is one Gaussian mechanism. The `Averaged` and `Reported` fields that a client sends, taken together, are a
*reference* plus a change. The change is clipped to a norm of at most `clip`, so that leaving it out moves the weighted
mean by at most clip × weight. Noise of standard deviation σ = noise × clip × (largest weight) hides that.

**What is released is integers.** The grid γ = σ / 2^s depends on public numbers alone. Client i adds the integers
q_i = rint(w_i change_i / γ) to an exact sum, and the merge itself ensures ‖q_i‖ ≤ B = 2^s / noise, whatever was sent:
it shortens the change so that neither rounding (√d / 2) nor errors of a computed norm can exceed the bound. The release
is K = Σ q_i + ⌊2^s G⌋, with G standard Gaussian; the mean, reference + γ (K + 1/2), is computed from it. The set of
values that can occur is therefore the same whoever is present, and no last bit of a float tells more.

**Why ⌊2^s G⌋.** For integers q, q + ⌊2^s G⌋ = ⌊q + 2^s G⌋: it is computed from the continuous Gaussian mechanism, and
has its guarantee, exactly accounted for, in any number of dimensions. For the discrete Gaussian only a bound by
concentrated divergences is proven there. `base/gaussian.py` samples it without an error of rounding, from bytes of the
operating system. Simulations, and tests that compare with them, draw it from the run's key instead.

**Where.** With where="server" the server adds the noise; it is trusted (it sees single replies, unless a secure sum
hides them). With where="sites" each client adds noise of standard deviation noise × clip to its own change, in the same
way, and the guarantee also holds against the server. The mean then has the variance Σ w_i² (noise × clip)².

**A secure sum** shows the merge only the mean. Its q = rint((mean − reference) / γ) moves by at most B if clients clip
to (B − 2 √d) γ / w_max = clip (1 − 2 √d / B): rounding two neighbours adds √d, and √d is left for the resolution of the
sum and for its rounding in 64 bits (half a step of the grid for each number). All clients clip to that, so that a run
is the same with and without one. Here the bound relies on all clients: the merge cannot shorten what it does not see,
and the sum has 64 bits, so that one client that sends too large a number moves the sum across their end, which tells
whether the others' is above a number of its choice. One client that lies costs every client its guarantee.

**The reference** of a field is the value that the server sent last in this round. Before that, and always for a
`Reported` field, it is the template (the start value of `init_server`). In a round of one exchange it is the round's
start. In a round of several, the last value is nearer than the first: the clipped change then excludes what other
clients did in earlier exchanges. A reference is valid for two reasons. It depends on a client's data only through means
that were noised before. And all clients of an exchange have the same one, so the mean is the reference plus the mean of
clipped changes. Messages do not grow. A client's starts (`init_client`), its copies of fields and its `Local` fields
are not references; their effect counts as change.

**The guarantee**: (ε, δ) for neighbours that differ in one client's changes, in all exchanges, being replaced by none,
against everyone who sees the server's messages and the result; with where="sites", against everyone. Participation,
clients' weights and the shapes of data count as public. Not covered: accepted rows, exact evaluations on clients' data
(the columns of a simulation's history), a user's choices based on them, and the time that computations take.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from fedstrata.base.accounting import epsilon
from fedstrata.base.errors import unknown
from fedstrata.base.random import fold_in
from fedstrata.core.algorithm import Algorithm
from fedstrata.core.clipping import clipped, flat, split
from fedstrata.core.grid import Grid, Noise
from fedstrata.core.placement import PlacedState, field_of, hide, part, placements, select, with_parts
from fedstrata.engine.exchange import Exchange, exchanges
from fedstrata.problems.base import Problem

Where = Literal["server", "sites"]


@dataclass(frozen=True)
class Privacy:
    """The largest change of one client in an exchange, and the noise that hides it.

    Args:
        clip: the largest Euclidean norm of a client's change, over all its `Averaged` and `Reported` fields together.
        noise: the noise multiplier; the mean's noise has standard deviation noise × clip × the largest weight.
        delta: the δ at which ε is reported.
        accept: `Pooled` and `Gathered` fields whose rows may leave a client unprotected.
        where: "server": it adds the noise, and must be trusted; "sites": every client adds noise of standard deviation
            noise × clip to its own change before it leaves.

    >>> Privacy(clip=1.0, noise=2.0).noise
    2.0
    """

    clip: float
    noise: float
    delta: float = 1e-5
    accept: tuple[str, ...] = ()
    where: Where = "server"

    def __post_init__(self) -> None:
        for name, value, low in (("clip", self.clip, "> 0"), ("noise", self.noise, ">= 0")):
            number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and low == "> 0"):
                raise ValueError(f"Privacy: {name}={value!r} must be a finite number {low}")
            object.__setattr__(self, name, float(value))
        if not 1e-30 <= self.clip <= 1e30:  # beyond, steps of the grid are no numbers of float32
            raise ValueError(f"Privacy: clip={self.clip!r} must be between 1e-30 and 1e30; scale the parameters")
        if self.noise > 1e12:  # beyond, ε is too small for its computation
            raise ValueError(f"Privacy: noise={self.noise!r} must be at most 1e12; use a smaller multiple of the clip")
        if not isinstance(self.delta, float) or not 0 < self.delta < 1:
            raise ValueError(f"Privacy: delta={self.delta!r} must be between 0 and 1; well below 1 / clients is usual")
        if isinstance(self.accept, str):
            raise ValueError(f"Privacy: accept={self.accept!r} must be names of fields: accept=({self.accept!r},)")
        object.__setattr__(self, "accept", tuple(self.accept))
        if self.where not in get_args(Where):
            raise unknown("place of the noise, Privacy(where=...):", self.where, get_args(Where))

    def check(self, algorithm: Algorithm, problem: Problem) -> None:
        """Refuse an algorithm that sends rows, not only means, unless their fields were accepted."""
        if algorithm.centralised:
            raise ValueError(
                f"privacy: {type(algorithm).__name__} is centralised: it has all data and merges nothing; choose a "
                "federated method, or leave privacy out"
            )
        check_rows(algorithm, problem, self.accept, "noise on means does not protect", "Privacy(accept=...)")

    def grid(self, template: PlacedState, paths: tuple[str, ...], clients: int) -> Grid | None:
        """The grid of an exchange in which these paths are sent; None if it releases no mean, or without noise.

        Args:
            template: a state with the shapes.
            paths: what is sent.
            clients: the most that are merged.
        """
        size = sum(int(a.size) for path in means(type(template), paths) for a in jax.tree.leaves(part(template, path)))
        if not self.noise or not size:
            return None
        return Grid.of(self.noise, clients if self.where == "server" else 1, size)

    def sent(
        self, state: PlacedState, reference: PlacedState, grid: Grid | None, sends: tuple[str, ...], noise: Any
    ) -> Any:
        """A client's state, with the fields that are averaged clipped around the reference, and noised at sites.

        Args:
            state: after its work.
            reference: the values around which changes are clipped.
            grid: of the exchange.
            sends: the paths that it sends.
            noise: of this client, if it adds noise itself.
        """
        new, old = (_averaged(source, sends) for source in (state, reference))
        if grid is None or self.where == "server":
            return with_parts(state, clipped(new, old, self.clip * (grid.kept if grid else 1)))
        if noise is None:
            raise ValueError('with Privacy(where="sites") every client needs noise of its own')
        change = flat(new) - flat(old)
        released = grid.integers(change, self.clip) + grid.noise(noise, change.dtype)
        return with_parts(state, grid.values(released, old, self.clip))

    def summed(self, sent: Mapping[str, Any], reference: PlacedState, grid: Grid, ratios: Array) -> dict[str, Any]:
        """The sum of all clients' integers, by path.

        Args:
            sent: the fields of all clients, stacked.
            reference: the values around which changes were clipped.
            grid: of the exchange.
            ratios: each client's weight over the largest, 0 if absent.
        """
        new = {path: sent[path] for path in means(type(reference), tuple(sent))}
        old = _averaged(reference, tuple(new))

        def one(new: Any, ratio: Array) -> Array:
            return grid.integers(flat(new) - flat(old), self.clip, ratio)

        each = jax.vmap(one)(new, ratios)
        there = (ratios > 0)[:, None]  # values of an empty slot must not matter
        return split(jnp.sum(jnp.where(there, each, 0), axis=0, dtype=jnp.int32), old)

    def noised(
        self, integers: Mapping[str, Any], reference: PlacedState, grid: Grid, largest: Array, noise: Noise
    ) -> dict[str, Any]:
        """The means, with noise, from the sum of the clients' integers.

        Args:
            integers: the sum, by path.
            reference: the values around which changes were clipped.
            grid: of the exchange.
            largest: weight.
            noise: of this exchange.
        """
        old = _averaged(reference, tuple(integers))
        total = jnp.concatenate([jnp.ravel(a) for a in jax.tree.leaves(dict(integers))])
        return grid.values(total + grid.noise(noise, flat(old).dtype), old, self.clip, largest)


def _averaged(source: PlacedState, paths: tuple[str, ...]) -> dict[str, Any]:
    """The fields, by path, that are averaged."""
    return {path: part(source, path) for path in means(type(source), paths)}


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


def noise_key(key: PRNGKeyArray, round: Array | int, phase: int, repetition: Array | int) -> PRNGKeyArray:
    """The key of one exchange's noise; before round 0 the round is −1."""
    return fold_in(fold_in(fold_in(key, round), phase), repetition)


def own_noise(noise: Noise | None, client: Array | int) -> Noise | None:
    """One client's noise, if clients add it: from the key of the exchange, or as it was given to this client."""
    if noise is None or not jnp.issubdtype(noise.dtype, jax.dtypes.prng_key):
        return noise
    return fold_in(noise, client)


class Spent(NamedTuple):
    """The privacy cost of one run to its most frequent client (an upper bound if phases have a `when`).

    Several runs on the same data, over seeds or swept values, cost the sum of their exchanges.
    """

    noise: float
    delta: float
    exchanges: int
    unprotected: tuple[str, ...] = ()  # fields that leave without noise, as `Privacy(accept=…)` says

    @property
    def epsilon(self) -> float:
        """ε of all that leaves; infinite if something leaves without noise."""
        return math.inf if self.unprotected else self.epsilon_of_means

    @property
    def epsilon_of_means(self) -> float:
        """ε of the means alone."""
        return epsilon(self.noise, self.exchanges, self.delta)

    def __str__(self) -> str:
        means = f"({self.epsilon_of_means:.3g}, {self.delta:g})-differential privacy after {self.exchanges} exchanges"
        fields = ", ".join(map(repr, self.unprotected))
        return f"no guarantee, because {fields} leave without noise; of the means alone: {means}" if fields else means


def mechanisms(algorithm: Algorithm, rounds: Sequence[Exchange]) -> tuple[int, int]:
    """The number of exchanges that release a mean: before round 0, and at most in a round."""
    state = type(algorithm).State
    once = bool(algorithm.merge_at_init and means(state, state._fields))
    return int(once), sum(exchange.repeat for exchange in rounds if means(state, exchange.sends))
