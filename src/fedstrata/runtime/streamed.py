"""A job whose federation stays on the host: round by round its cohort travels, while the round before is computed.

The rounds are those of every other job, on a world that has one cohort. What a round needs is known long before: who
takes part is drawn from the seed. So data and local fields of the next cohort are fetched by another thread. They may
miss what the round under way changes; the program takes those rows from that round's result, which is on the device.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fedstrata.runtime import simulate
from fedstrata.runtime import start as starting
from fedstrata.runtime import streamed_start as starts
from fedstrata.runtime.evaluate import measure, record_of
from fedstrata.runtime.host import HostLocal, HostSplit
from fedstrata.runtime.job import Job
from fedstrata.runtime.layout import Flat
from fedstrata.runtime.runs import over_runs
from fedstrata.runtime.world import Carry
from fedstrata.vector import Vector

BEGIN = 1024  # clients whose own fields are begun at a time
ROUNDS = 64  # rounds whose cohorts are drawn together


class Feed(NamedTuple):
    """What one round needs from the host, on the device; every array has a leading axis of seeds, or of runs."""

    ids: np.ndarray  # (runs, slots), −1 where a slot is empty
    flat: Flat
    rows: dict[str, Any]  # Local fields of the cohort of each run
    again: Array  # where a client was in the cohort before, or −1


class Streamed(Job):
    """A job that is advanced round by round. Its carry's `local` is on the host, and changed in place."""

    @property
    def splits(self) -> dict[str, HostSplit]:
        return self.world.host.splits

    @property
    def keeps_starts(self) -> bool:
        return False

    def begin(self) -> tuple[Carry, dict[str, Array], Any]:
        if self.rest.merge_at_init:
            start = self._begin_merged()
        else:
            start = starts.begin_apart(self._parts(), self._flat(self._cohorts(0, 1)[:, 0]))
        carry, found = _measure(self._parts(), starts.first_carry(self._parts(), start.shared), jnp.array(0, jnp.int32))
        carry = carry._replace(first=found["objective"], local=self._begin_local(start))
        return carry, found, start.own

    def _everyone(self) -> Iterator[tuple[np.ndarray, Flat]]:
        """All clients, some at a time: their ids, −1 beyond the last, and their data."""
        size = min(BEGIN, self.world.clients)
        room = {name: split.room(size) for name, split in self.splits.items()}
        for first in range(0, self.world.clients, size):
            ids = np.arange(first, first + size)
            ids = np.where(ids < self.world.clients, ids, -1)
            yield ids, {name: split.of(ids, room[name]) for name, split in self.splits.items()}

    def _begin_merged(self) -> starting.Start:
        """The start where those of all clients are merged: means are summed up, and rows laid side by side."""
        parts = self._parts()
        sent = [starts.sent(parts, flat, jnp.asarray(ids, jnp.int32)) for ids, flat in self._everyone()]
        means = jax.tree.map(lambda *sums: sum(sums[1:], start=sums[0]), *[s[0] for s in sent])
        merged = starts.merge_starts(parts, self._side_by_side([s[1] for s in sent]), means)
        if not starting.starts_twice(self.rest):
            return starts.narrowed(parts, merged, None, None)
        known = starts.received(parts, merged)
        rows = [starts.pooled(parts, flat, jnp.asarray(ids, jnp.int32), known) for ids, flat in self._everyone()]
        return starts.narrowed(parts, merged, self._side_by_side(rows), known)

    def _side_by_side(self, rows: list[Any]) -> Any:
        return jax.tree.map(lambda *some: jnp.concatenate(some, axis=1)[:, : self.world.clients], *rows)

    def _begin_local(self, start: starting.Start) -> dict[str, Any]:
        """The Local fields of all clients, some at a time."""
        template, differ = starts.template(self._parts()), starting.starts_differ(self.rest)
        local = HostLocal.filled(template, self.runs, self.world.clients, self.splits)
        for ids, flat in self._everyone() if template and differ else ():
            rows = starts.local_rows(self._parts(), flat, jnp.asarray(ids, jnp.int32), start.merged)
            local.write(np.broadcast_to(ids, (self.runs, ids.size)), rows)
        return local.fields

    def advance(
        self, carry: Carry, first: int, last: int, own: Any = None, in_place: bool = False
    ) -> tuple[Carry, dict, Array, Array]:
        if not in_place:
            carry = carry._replace(local=jax.tree.map(np.copy, carry.local))
        local, carry = HostLocal(carry.local, self.splits), carry._replace(local={})
        due, stop = {*self.due(first, last)}, max(last, min(first + 1, self.rounds))
        left: list[tuple] = []  # what a round changed, until it is put back
        before, total, records = None, jnp.zeros((2, self.runs), jnp.int32), []
        under_way: list[Array] = []
        for round, feed in self._feeds(local, first, stop, left):
            if len(under_way) == 2:  # no more, or what they were fed would fill the device
                under_way.pop(0).block_until_ready()
            given = (jnp.asarray(round, jnp.int32), carry, feed.rows, feed.rows if before is None else before)
            beside = own if round < starting.first_rounds(own or {}) else None
            done, rows, *more = _round(self._parts(), feed.flat, *given, feed.again, beside)
            if first == last:  # compiled, and that was all
                jax.block_until_ready(done)
                break
            carry, before, total = done, rows, total + jnp.stack(more)
            left.append((feed.ids, rows))
            under_way.append(carry.status)
            if round + 1 in due:
                carry, found = _measure(self._parts(), carry, jnp.asarray(round + 1, jnp.int32))
                records.append({**found, "samples": total[0], "took": total[1], "status": carry.status})
        for ids, rows in left:
            local.write(ids, rows)
        blank = {"status": jnp.zeros((self.runs, 0), jnp.int32)}
        found = jax.tree.map(lambda *rows: jnp.stack(rows, axis=1), *records) if records else blank
        return carry._replace(local=local.fields), found, total[0], total[1]

    def _feeds(self, local: HostLocal, first: int, last: int, left: list[tuple]) -> Iterator[tuple[int, Feed]]:
        """Round by round what it needs, the next being fetched meanwhile."""
        cohorts = self._cohorts(first, last)

        def fetch(number: int, written: Any) -> Feed:
            if written is not None:
                local.write(*written)
            ids = cohorts[:, number]
            again = seats(ids, cohorts[:, number - 1]) if number else np.full(ids.shape, -1, np.int32)
            of_runs = self._of_runs(ids)
            return Feed(of_runs, *jax.device_put((self._flat(ids), local.read(of_runs), again)))

        with ThreadPoolExecutor(1) as pool:
            coming: Any = pool.submit(fetch, 0, None)
            for number, round in enumerate(range(first, last)):
                feed, before = coming.result(), left.pop() if left else None
                # This round runs while the next is fetched; what the one before it left is put back first.
                if number + 1 < last - first:
                    coming = pool.submit(fetch, number + 1, before)
                elif before is not None:
                    coming = pool.submit(local.write, *before)
                yield round, feed
            coming.result()

    def _cohorts(self, first: int, last: int) -> np.ndarray:
        """Who takes part: (seeds, rounds, slots), −1 for an empty slot."""
        length = max(last - first, 1)
        whole = -(-length // ROUNDS) * ROUNDS  # of few lengths, each of which is a program
        return np.asarray(_cohorts(self._parts(), first + jnp.arange(whole, dtype=jnp.int32)))[:, :length]

    def _of_runs(self, ids: np.ndarray) -> np.ndarray:
        return np.tile(ids, (self.runs // self.seeds, 1))

    def _flat(self, ids: np.ndarray) -> Flat:
        """The data of the cohort of each seed."""
        each = [{name: split.of(own) for name, split in self.splits.items()} for own in ids]
        join = lambda first, *rest: np.stack([first, *rest]) if rest else first[None]
        return jax.tree.map(join, each[0], *each[1:])

    def _parts(self) -> tuple:
        return self.world, self.plan, self.values, self.rest, self.x0, self.keys, self.seeds

    def shapes(self) -> Carry:
        carry = jax.eval_shape(lambda: starts.first_carry(self._parts(), starts.blank(self._parts())))
        return carry._replace(local=HostLocal.shapes(starts.template(self._parts()), self.world.clients, self.splits))

    def scratch_bytes(self, carry: Carry) -> int:
        analysis = self._compiled(carry).memory_analysis()
        return int(analysis.temp_size_in_bytes) if analysis is not None else 0

    def programs(self, carry: Carry) -> list[str]:
        program: Any = _measure
        given = (carry._replace(local={}), jnp.array(1, jnp.int32))
        return [self._compiled(carry).as_text(), program.lower(self._parts(), *given).compile().compiled.as_text()]

    def _compiled(self, carry: Carry) -> Any:
        ids = self._cohorts(0, 1)[:, 0]
        local, nobody = HostLocal(carry.local, self.splits).read(self._of_runs(ids)), jnp.full(ids.shape, -1, jnp.int32)
        given = (self._flat(ids), jnp.array(0, jnp.int32), carry._replace(local={}), local, local, nobody, None)
        program: Any = _round
        return program.lower(self._parts(), *given).compile().compiled

    def spread(self, carry: Carry) -> Carry:
        rest, local = carry._replace(local={}), jax.tree.map(np.array, carry.local)  # copies, to be written to
        return jax.tree.map(jnp.asarray, rest)._replace(local=local)


def seats(ids: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Where each client was in the cohort before, −1 where it was not; both (seeds, slots).

    >>> seats(np.array([[7, 2, -1]]), np.array([[-1, 5, 7]])).tolist()
    [[2, -1, -1]]
    """
    out = np.full(ids.shape, -1, np.int32)
    for row, now, then in zip(out, ids, before, strict=True):
        here, there = np.flatnonzero(now >= 0), np.flatnonzero(then >= 0)
        _, a, b = np.intersect1d(now[here], then[there], assume_unique=True, return_indices=True)
        row[here[a]] = there[b]
    return out


@eqx.filter_jit
def _cohorts(parts: tuple, rounds: Array) -> Array:
    world, _, values, rest, x0, keys, seeds = parts
    one = jax.tree.map(lambda a: a[0], values)  # who takes part does not depend on settings

    def of_seed(x: Vector, key: Array) -> Array:
        at = lambda round: simulate.cohort_at(world, eqx.combine(one, rest), key, round, x.scalar_dtype)
        cohorts = jax.vmap(at)(rounds)
        return jnp.where(cohorts.present, cohorts.ids, -1)

    return jax.vmap(of_seed)(*jax.tree.map(lambda a: a[:seeds], (x0, keys)))


@eqx.filter_jit
def _round(
    parts: tuple, flat: Flat, round: Array, carry: Carry, rows: Any, before: Any, again: Array, own: Any
) -> tuple[Carry, Any, Array, Array]:
    """One round on what was fetched; `before` are the rows that the round before left."""
    world, plan, values, rest, x0, keys, seeds = parts

    def one(
        v: Any, flat: Flat, x: Vector, key: Array, again: Array, carry: Carry, rows: Any, before: Any, own: Any
    ) -> Any:
        here, algorithm = starts.with_data(world, flat), eqx.combine(v, rest)
        newer = lambda a: (again >= 0).reshape((-1,) + (1,) * (a.ndim - 1))
        rows = jax.tree.map(lambda a, b: jnp.where(newer(a), b[jnp.maximum(again, 0)], a), rows, before)
        cohort = simulate.cohort_at(here, algorithm, key, round, x.scalar_dtype)
        return simulate.one_cohort(here, algorithm, plan, x, key, carry, cohort, rows, own)

    return over_runs(one, seeds, values, (flat, x0, keys, again), (carry, rows, before, own))


@eqx.filter_jit
def _measure(parts: tuple, carry: Carry, round: Array) -> tuple[Carry, dict[str, Array]]:
    world, plan, values, rest, *_, seeds = parts

    def one(v: Any, carry: Carry) -> Any:
        return record_of(plan, carry, partial(measure, world, eqx.combine(v, rest), plan), round)

    return over_runs(one, seeds, values, (), (carry,))
