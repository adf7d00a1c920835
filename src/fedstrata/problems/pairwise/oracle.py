"""A pairwise problem as one client sees it: its examples, and scores of other clients from the pools."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, PyTree

from fedstrata.base.clock import stream_key
from fedstrata.base.permutation import key_words, permute
from fedstrata.core.memory import PerExample, Pool
from fedstrata.core.vector import Vector
from fedstrata.data.sampling import Whole, WithReplacement, sampler
from fedstrata.problems.base import Oracle
from fedstrata.problems.pairwise.partners import Draws, Partners, Side, drawn, pairs, whole

CHUNK = 2**20  # pairs of an exact mean over a pool in memory at a time


class Scores(NamedTuple):
    """Scores of the sampled examples; zeros for a client without examples of a kind.

    Args:
        first: h(x; z) of the examples of the first set.
        second: of the second set.
        pull: from slopes by both to the slope by x, without another run of the model.
    """

    first: Array
    second: Array
    pull: Callable[[tuple[Array, Array]], tuple[Vector]]


class PairwiseOracle(Oracle):
    """Scores and gradients of pairs with one example in this client's sample: the "active" one."""

    def scores(self, x: Vector) -> Scores:
        """h(x; z) of the sampled examples of both sets.

        Args:
            x: the parameters.
        """
        (first, second), pull = jax.vjp(self._scores, x)
        return Scores(first, second, pull)

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

    def partners(self, first: Pool, second: Pool, draws: Draws = "shuffled", shared: bool = True) -> Partners:
        """Partners of this step's examples from the received pools: as many as a step has rows.

        With batch_size="all" they are the whole pools.

        Args:
            first: pooled scores of the first set.
            second: pooled scores of the second set.
            draws: "shuffled" uses every score once before any twice; "replacement" draws independently.
            shared: all active examples have the same partners.
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
        return Partners(*sides, own=self.omegas)

    def own_partners(self, scores: Scores, u: Array | None) -> Partners:
        """This step's examples as partners of each other: pairs inside one client, fresh scores, no ω.

        Args:
            scores: of this step.
            u: estimates of the mean losses of its first examples; None for f(u) = u.
        """
        sides = []
        for stream, rows in (("first", scores.first), ("second", scores.second)):
            mask = self.samples[stream].mask
            mask = jnp.ones(rows.shape[0], bool) if mask is None else mask
            weight = mask.astype(self._dtype) / jnp.maximum(jnp.sum(mask), 1).astype(self._dtype)
            sides.append(Side({"score": rows, "u": u} if stream == "first" else {"score": rows}, weight))
        return Partners(*sides, own=(1.0, 1.0))

    @property
    def omegas(self) -> tuple[Array, Array]:
        """ω_1 and ω_2: the weights of this client's means over the first and the second set."""
        first, second = (self.problem.omega(side, self._dtype)[self.client] for side in (0, 1))
        return first, second

    def inner(self, first: Array, partners: Partners) -> Array:
        """The mean loss of each of these scores of the first set against its partners: an estimate of u.

        Args:
            first: scores of the first set.
            partners: of which the second side is used.
        """
        loss = lambda score, row: self.problem.pair_loss(score, row["score"])
        losses, weight = pairs(loss, first, partners.second), partners.second.weight
        return jax.vmap(self.problem.inner_mean, in_axes=(0, None if partners.second.shared else 0))(losses, weight)

    def blend(self, u: Array, fresh: Array, gamma: ArrayLike, partners: Partners) -> Array:
        """(1 − γ) u + γ fresh; u itself where no partner of the second set was found.

        Args:
            u: old estimates of mean losses.
            fresh: new ones, of `inner`.
            gamma: γ.
            partners: from which the new ones were computed.
        """
        found = self.problem.blend(u, fresh, gamma)
        return jnp.where(jnp.any(partners.second.weight > 0), found, u)

    def first_gradient(self, scores: Scores, partners: Partners, u: Array | None = None) -> Array:
        r"""$\omega_1 f'(u(z)) \, \omega_{2j} \, \partial_1 \ell(h(x; z), h_\xi)$ of the active first examples.

        This is the factor of ∇h(x; z) in $G_1$, a mean over partners and examples; `pull` multiplies by ∇h.

        Args:
            scores: h(x; z) and h(x; z'), of this oracle.
            partners: of which ξ is used.
            u: estimates of the active examples' mean losses; None for f(u) = u.
        """
        term = lambda z, row: self.problem.term(z[1], z[0], row["score"])
        mean = lambda first: self._mean("first", pairs(term, (first, u), partners.second), partners.second)
        return jax.grad(lambda first: partners.own[0] * mean(first))(scores.first)

    def second_gradient(self, scores: Scores, partners: Partners) -> Array:
        r"""$\omega_{1j'} f'(u_\zeta) \, \omega_2 \, \partial_2 \ell(h_\zeta, h(x; z'))$ of the active second examples.

        This is the factor of ∇h(x; z') in $G_2$, a mean over partners and examples; `pull` multiplies by ∇h.

        Args:
            scores: h(x; z) and h(x; z'), of this oracle.
            partners: of which ζ is used, with its u.
        """
        term = lambda z, row: self.problem.term(row.get("u"), row["score"], z)
        mean = lambda second: self._mean("second", pairs(term, second, partners.first), partners.first)
        return jax.grad(lambda second: partners.own[1] * mean(second))(scores.second)

    def pull(self, x: Vector, scores: Scores, g_1: Array, g_2: Array) -> Vector:
        """g_1 ∇h(x; z) + g_2 ∇h(x; z'), with the slope of the l2 penalty.

        One backward pass of the model serves both sets.

        Args:
            x: the parameters.
            scores: `oracle.scores(x)`.
            g_1: of `first_gradient`.
            g_2: of `second_gradient`.
        """
        return self.problem.penalised(x, scores.pull((g_1, g_2))[0])

    def grad(self, x: Vector, partners: Partners, u: Array | None = None, scores: Scores | None = None) -> Vector:
        """G_1 + G_2: this step's examples against their partners, each half a mean over both.

        Args:
            x: the parameters.
            partners: of the active examples, with their u.
            u: estimates of the active examples' mean losses; None for f(u) = u.
            scores: `oracle.scores(x)`, where they are computed already.
        """
        scores = self.scores(x) if scores is None else scores
        return self.pull(x, scores, self.first_gradient(scores, partners, u), self.second_gradient(scores, partners))

    def send(self, pool: Pool, side: int, steps: int, rows: PyTree) -> Pool:
        """The client's part of a pool with this step's rows written into it; all steps of a round fill it.

        A pool with fewer rows than the steps have keeps a random sample of them, another in every round.

        Args:
            pool: the client's part.
            side: 0 for the first set, 1 for the second.
            steps: local steps in a round.
            rows: this step's scores, with u in the first set.
        """
        batch = self.problem.steps_rows[side]
        at = self.clock.local_step * batch
        if pool.capacity == steps * batch:
            return pool.write(at, rows)
        words = key_words(stream_key(self.round_key, 0, len(self.problem.streams) + 3 + side))
        chosen = permute(words, jnp.arange(pool.capacity, dtype=jnp.int32), steps * batch)
        return pool.keep(chosen, at, rows)

    # The first pool and the first u.

    def first_scores(self, x: Vector, steps: int) -> tuple[Array, Array]:
        """Scores of as many examples of both sets as some steps draw, to fill the first pool.

        Args:
            x: the parameters.
            steps: the number of steps.
        """
        if self._sees_all:
            once = self.fresh(0).scores(x)
            return jnp.concatenate([once.first] * steps), jnp.concatenate([once.second] * steps)
        sizes = [steps * rows for rows in self.problem.steps_rows]
        found = [self.fresh(0, WithReplacement(size)).scores(x) for size in dict.fromkeys(sizes)]
        return found[0].first, found[-1].second

    def pooled(self, pool: Pool) -> Side:
        """All rows of a pool of the second set.

        Args:
            pool: the pool.
        """
        return whole(pool, self.problem.row_weight(1, pool, self._dtype))

    def own_side(self, x: Vector, steps: int) -> Side:
        """As many of the client's examples of the second set as some steps draw.

        Args:
            x: the parameters.
            steps: the number of steps.
        """
        drawn = self.fresh(0, None if self._sees_all else WithReplacement(steps * self.problem.steps_rows[1]))
        return drawn.own_partners(drawn.scores(x), None).second

    def mean_losses(self, first: Array, side: Side) -> Array:
        """The mean loss of each of these scores of the first set against rows of the second, computed in pieces.

        Args:
            first: scores of the first set.
            side: rows of the second set.
        """
        of_one = lambda score: self.inner(score[None], Partners(side, side, (1.0, 1.0)))[0]
        found = jax.lax.map(of_one, first, batch_size=max(1, CHUNK // max(1, side.weight.shape[0])))
        # Without a partner u is 1, which weighs every pair alike.
        none = jnp.zeros_like(found) if self.problem.in_logs else jnp.ones_like(found)
        return jnp.where(jnp.any(side.weight > 0), found, none)

    def remember(self, x: Vector, memory: PerExample, side: Side) -> PerExample:
        """u of all of the client's examples of the first set, from rows of the second.

        Args:
            x: the parameters.
            memory: the table of u.
            side: rows of the second set.
        """
        every = self.fresh(1, sampler("all"))
        return memory.set(every.sample("first").position, self.mean_losses(every.scores(x).first, side))

    # The min-max form of the square loss, for CODASCA.

    def minmax(self, v: Vector, alpha: Vector) -> Array:
        r"""$p(1-p) \big( \omega_1 E_+[(h-a)^2 - 2(1+\alpha)h] + \omega_2 E_-[(h-b)^2 + 2(1+\alpha)h] - \alpha^2 \big)$.

        The mean over clients, maximised over α and minimised over a and b, is p(1−p) times the mean of
        $(1 - h(z) + h(z'))^2 - 1$ over all pairs.

        Args:
            v: the tree (x, a, b).
            alpha: α.
        """
        x, a, b = v.tree
        problem, alpha_ = self.problem, alpha.tree
        scores = self.scores(Vector(x))
        first = self.samples["first"].mean(jnp.square(scores.first - a) - 2 * (1 + alpha_) * scores.first)
        second = self.samples["second"].mean(jnp.square(scores.second - b) + 2 * (1 + alpha_) * scores.second)
        omega_1, omega_2 = self.omegas
        p = problem.positive_share.astype(first.dtype)
        penalty = problem.penalty(Vector(x)).astype(first.dtype)
        return p * (1 - p) * (omega_1 * first + omega_2 * second - jnp.square(alpha_) + penalty)

    def minmax_grads(self, v: Vector, alpha: Vector) -> tuple[Vector, Vector]:
        """The gradients of `minmax` in (x, a, b) and in α.

        Args:
            v: the tree (x, a, b).
            alpha: α.
        """
        return jax.grad(self.minmax, argnums=(0, 1))(v, alpha)

    @property
    def _dtype(self) -> Any:
        return self.problem.blank("first").dtype

    @property
    def _sees_all(self) -> bool:
        return isinstance(self.sampler, Whole) or getattr(self.sampler, "whole", False)

    def _mean(self, stream: str, terms: Array, side: Side) -> Array:
        """Over partners with their weights, then over the active examples."""
        weight = side.weight[None] if side.shared else side.weight
        return self.samples[stream].mean(jnp.sum(terms * weight.astype(terms.dtype), axis=1))


def _alike(one: PyTree, other: PyTree) -> bool:
    """Whether rows of both fit into one batch."""
    kind = lambda tree: jax.tree.map(lambda a: (a.shape[1:], a.dtype), tree)
    return jax.tree.structure(one) == jax.tree.structure(other) and kind(one) == kind(other)
