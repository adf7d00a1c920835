"""A pairwise problem as one client sees it: its own examples, and scores of others that came with the pools."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedstrata.clock import stream_key
from fedstrata.data.permutation import key_words, permute
from fedstrata.data.sampling import Whole, WithReplacement, sampler
from fedstrata.memory import PerExample, Pool
from fedstrata.problems.base import Oracle
from fedstrata.problems.partners import Draws, Lazy, Side, drawn, pairs, whole
from fedstrata.vector import Vector

CHUNK = 2**20  # pairs of an exact mean over a pool that are held at a time


class Scores(NamedTuple):
    """Scores of the examples of one draw; of those of a client that has none of a kind, zeros."""

    first: Array
    second: Array
    back: Any = None  # from slopes in both to one in x, where x is known: the model need not run again for it


class PairwiseOracle(Oracle):
    """Scores and gradients of pairs, one of whose examples is this client's and in the sample ("active")."""

    def scores(self, x: Vector) -> Scores:
        """h(x; z) of the sampled examples of both sets."""
        (first, second), back = jax.vjp(self._scores, x)
        return Scores(first, second, back)

    def _scores(self, x: Vector) -> tuple[Array, Array]:
        """A model sees both sets as one batch."""
        problem, out = self.problem, []
        parts = [self.samples[stream].examples for stream in problem.streams]
        rows = [jax.tree.leaves(part)[0].shape[0] for part in parts]
        score = jax.vmap(lambda example: problem.score_of(x.tree, example))
        if _alike(*parts):
            both = score(jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts))
            found = [both[: rows[0]], both[rows[0] :]]
        else:
            found = [score(part) for part in parts]
        found[1] = jax.vmap(problem.second_row)(found[1], parts[1])
        for stream, values in zip(problem.streams, found, strict=True):
            here = self.shard[problem.streams[stream]].count > 0
            out.append(values if problem.complete else jnp.where(here, values, 0))
        return out[0], out[1]

    def partners(self, first: Pool, second: Pool, draws: Draws = "shuffled", shared: bool = True) -> Lazy:
        """Partners of this step's examples, out of the pools that were received: as many as a step has rows.

        With batch_size="all" they are the whole pools. shared: all active examples have the same partners.
        """
        problem, sides = self.problem, []
        for side, pool in enumerate((first, second)):
            weight = problem.row_weight(side, pool, self._dtype)
            if problem.whole:
                sides.append(whole(pool, weight))
                continue
            many = problem.steps_rows[side]
            shape = (many,) if shared else (problem.steps_rows[1 - side], many)
            number = len(problem.streams) + 1 + side
            sides.append(drawn(pool, weight, shape, draws, self.round_key, self.clock, number))
        return Lazy(*sides, own=self.omegas)

    def own_partners(self, scores: Scores, u: Array | None) -> Lazy:
        """This step's own examples as partners of each other: pairs inside one client only, nothing old, no ω."""
        sides = []
        for stream, rows in zip(("first", "second"), scores[:2], strict=True):
            mask = self.samples[stream].mask
            mask = jnp.ones(rows.shape[0], bool) if mask is None else mask
            weight = mask.astype(self._dtype) / jnp.maximum(jnp.sum(mask), 1).astype(self._dtype)
            sides.append(Side({"score": rows, "u": u} if stream == "first" else {"score": rows}, weight))
        return Lazy(*sides, own=(1.0, 1.0))

    @property
    def omegas(self) -> tuple[Array, Array]:
        """By how much this client's means over the first and over the second set count."""
        first, second = (self.problem.omega(side, self._dtype)[self.client] for side in (0, 1))
        return first, second

    def inner(self, first: Array, lazy: Lazy) -> Array:
        """For each of these scores of the first set the mean loss against its partners, an estimate of u."""
        losses, weight = self._losses(first, lazy), lazy.second.weight
        return jax.vmap(self.problem.inner_mean, in_axes=(0, None if weight.ndim == 1 else 0))(losses, weight)

    def blend(self, u: Array, fresh: Array, gamma: Any, lazy: Lazy) -> Array:
        """(1 − γ) u + γ fresh; u itself where nothing of the second set was to be had."""
        found = self.problem.blend(u, fresh, gamma)
        return jnp.where(jnp.any(lazy.second.weight > 0), found, u)

    def grad(self, x: Vector, lazy: Lazy, u: Array | None = None, scores: Scores | None = None) -> Vector:
        """G_1 + G_2: this step's examples against their partners, each half a mean over both.

        u: estimates for the active examples of the first set; partners bring their own. scores: those at x of this
        oracle, where they are known already.
        """
        problem, (omega_1, omega_2), zeta, xi = self.problem, lazy.own, lazy.first, lazy.second

        def value(first: Array, second: Array) -> Array:
            active = first if u is None else (first, u)
            ahead = lambda z, row: problem.term(None if u is None else z[1], z if u is None else z[0], row["score"])
            behind = lambda z, row: problem.term(row.get("u"), row["score"], z)
            one = pairs(ahead, active, xi.rows, xi.weight.ndim == 1)
            two = pairs(behind, second, zeta.rows, zeta.weight.ndim == 1)
            wide = lambda weight: weight[None] if weight.ndim == 1 else weight
            add = lambda terms, weight: jnp.sum(terms * wide(weight).astype(terms.dtype), axis=1)
            of_first = self.samples["first"].mean(add(one, xi.weight))
            of_second = self.samples["second"].mean(add(two, zeta.weight))
            return omega_1 * of_first + omega_2 * of_second

        first, second, back = self.scores(x) if scores is None else scores
        return problem.penalised(x, back(jax.grad(value, argnums=(0, 1))(first, second))[0])

    def send(self, pool: Pool, side: int, steps: int, rows: Any) -> Pool:
        """This step's rows written into the client's own part of a pool, which all steps of a round fill.

        Where it holds fewer rows than the steps have, it keeps a sample of them that is drawn anew in every round.
        """
        batch = self.problem.steps_rows[side]
        at = self.clock.local_step * batch
        if pool.capacity == steps * batch:
            return pool.write(at, rows)
        words = key_words(stream_key(self.round_key, 0, len(self.problem.streams) + 3 + side))
        chosen = permute(words, jnp.arange(pool.capacity, dtype=jnp.int32), steps * batch)
        return pool.keep(chosen, at, rows)

    # The first pool and the first u.

    def first_scores(self, x: Vector, steps: int) -> Scores:
        """Scores of as many examples of both sets as this many steps draw, for a pool to begin with."""
        if self._sees_all:
            once = self.fresh(0).scores(x)
            return Scores(*(jnp.concatenate([s] * steps) for s in once[:2]))
        sizes = [steps * rows for rows in self.problem.steps_rows]
        found = [self.fresh(0, WithReplacement(size)).scores(x) for size in dict.fromkeys(sizes)]
        return Scores(found[0].first, found[-1].second)

    def pooled(self, pool: Pool) -> Side:
        """All of a pool of the second set."""
        return whole(pool, self.problem.row_weight(1, pool, self._dtype))

    def own_side(self, x: Vector, steps: int) -> Side:
        """As many of the client's own examples of the second set as this many steps draw."""
        lazy = self.fresh(0, None if self._sees_all else WithReplacement(steps * self.problem.steps_rows[1]))
        return lazy.own_partners(lazy.scores(x), None).second

    def mean_losses(self, first: Array, side: Side) -> Array:
        """For each of these scores of the first set the mean loss against these rows of the second, in pieces."""
        of_one = lambda score: self.inner(score[None], Lazy(side, side, (1.0, 1.0)))[0]
        found = jax.lax.map(of_one, first, batch_size=max(1, CHUNK // max(1, side.weight.shape[0])))
        # Without anything to compare with, u is 1, which weighs every pair alike.
        none = jnp.zeros_like(found) if self.problem.in_logs else jnp.ones_like(found)
        return jnp.where(jnp.any(side.weight > 0), found, none)

    def remember(self, x: Vector, memory: PerExample, side: Side) -> PerExample:
        """u of all of the client's examples of the first set, from these rows of the second."""
        every = self.fresh(1, sampler("all"))
        return memory.set(every.sample("first").position, self.mean_losses(every.scores(x).first, side))

    # The min-max form of the square loss, for CODASCA.

    def minmax(self, v: Vector, alpha: Vector) -> Array:
        r"""$p(1-p) \big( \omega_1 E_+[(h-a)^2 - 2(1+\alpha)h] + \omega_2 E_-[(h-b)^2 + 2(1+\alpha)h] - \alpha^2 \big)$.

        v: the tree (x, a, b). The mean over clients, maximised over α and minimised over a and b, is p(1−p) times the
        mean of $(1 - h(z) + h(z'))^2 - 1$ over all pairs.
        """
        x, a, b = v.tree
        problem, alpha_ = self.problem, alpha.tree
        scores = self.scores(Vector(x))
        first = self.samples["first"].mean(jnp.square(scores.first - a) - 2 * (1 + alpha_) * scores.first)
        second = self.samples["second"].mean(jnp.square(scores.second - b) + 2 * (1 + alpha_) * scores.second)
        own = self.omegas
        p = problem.positive_share.astype(first.dtype)
        penalty = problem.penalty(Vector(x)).astype(first.dtype)
        return p * (1 - p) * (own[0] * first + own[1] * second - jnp.square(alpha_) + penalty)

    def minmax_grads(self, v: Vector, alpha: Vector) -> tuple[Vector, Vector]:
        """Its gradients in (x, a, b) and in α."""
        return jax.grad(self.minmax, argnums=(0, 1))(v, alpha)

    @property
    def _dtype(self) -> Any:
        return self.problem.blank("first").dtype

    @property
    def _sees_all(self) -> bool:
        return isinstance(self.sampler, Whole) or getattr(self.sampler, "whole", False)

    def _losses(self, first: Array, lazy: Lazy) -> Array:
        loss = lambda a, row: self.problem.pair_loss(a, row["score"])
        return pairs(loss, first, lazy.second.rows, lazy.second.weight.ndim == 1)


def _alike(one: Any, other: Any) -> bool:
    """Whether rows of both can lie in one batch."""
    kind = lambda tree: jax.tree.map(lambda a: (a.shape[1:], a.dtype), tree)
    return jax.tree.structure(one) == jax.tree.structure(other) and kind(one) == kind(other)
