"""Out of core: the federation stays on the host. Each cohort is copied while the round before is computed.

The rounds are those of every executable, with a context that has the data of one cohort. Cohorts follow from the seed,
so they are known in advance, and another thread fetches the data and `Local` fields of the next one. The fetched fields
lack the changes of the current round. For clients of both cohorts the program takes the rows of that round's result,
which is on the device.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fedstrata.core.vector import Vector
from fedstrata.engine import initialise
from fedstrata.engine.context import RoundContext
from fedstrata.engine.layout import Flat
from fedstrata.simulate import program
from fedstrata.simulate.batching import Runs
from fedstrata.simulate.evaluate import measure, record_of
from fedstrata.simulate.executable import Executable
from fedstrata.simulate.out_of_core import initialise as starts
from fedstrata.simulate.out_of_core.host import HostLocal, HostSplit
from fedstrata.simulate.state import Carry

BEGIN = 1024  # clients per batch when `Local` fields are initialised
ROUNDS = 64  # rounds whose cohorts are drawn together


class Feed(NamedTuple):
    """A round's data and fields from the host, on the device. Every array has a leading axis of seeds or runs."""

    data: Flat
    rows: dict[str, Any]  # Local fields of the cohort of each run
    again: Array  # a client's position in the previous cohort, or −1


class OutOfCoreExecutable(Executable):
    """An executable that advances round by round. Its carry's `local` is on the host and changes in place."""

    @property
    def splits(self) -> Mapping[str, HostSplit]:
        return {} if self.inputs.host is None else self.inputs.host.splits

    @property
    def keeps_starts(self) -> bool:
        return False

    def begin(self) -> tuple[Carry, dict[str, Array], Any]:
        if self.context.algorithm.merge_at_init:
            start = self._begin_merged()
        else:
            start = starts.start_apart(self.runs, self._flat(self._cohorts(0, 1)[:, 0]))
        carry, found = _measure(self.runs, starts.first_carry(self.runs, start.shared), jnp.array(0, jnp.int32))
        carry = carry._replace(first=found["objective"], local=self._begin_local(start))
        return carry, found, start.first_round_starts

    def _everyone(self) -> Iterator[tuple[np.ndarray, Flat]]:
        """All clients in batches: their ids (−1 beyond the last) and their data."""
        size = min(BEGIN, self.context.clients)
        room = {name: split.room(size) for name, split in self.splits.items()}
        for first in range(0, self.context.clients, size):
            ids = np.arange(first, first + size)
            ids = np.where(ids < self.context.clients, ids, -1)
            yield ids, {name: split.of(ids, room[name]) for name, split in self.splits.items()}

    def _begin_merged(self) -> initialise.Start:
        """The start if all clients' starts are merged: means are accumulated, rows concatenated."""
        sent = [starts.sent(self.runs, flat, jnp.asarray(ids, jnp.int32)) for ids, flat in self._everyone()]
        means = jax.tree.map(lambda *sums: sum(sums[1:], start=sums[0]), *[s[0] for s in sent])
        merged = starts.merge_starts(self.runs, self._side_by_side([s[1] for s in sent]), means)
        if not initialise.starts_twice(self.context.algorithm):
            return starts.narrowed(self.runs, merged, None, None)
        known = starts.received(self.runs, merged)
        rows = [starts.pooled(self.runs, flat, jnp.asarray(ids, jnp.int32), known) for ids, flat in self._everyone()]
        return starts.narrowed(self.runs, merged, self._side_by_side(rows), known)

    def _side_by_side(self, rows: list[Any]) -> Any:
        return jax.tree.map(lambda *some: jnp.concatenate(some, axis=1)[:, : self.context.clients], *rows)

    def _begin_local(self, start: initialise.Start) -> dict[str, Any]:
        """The `Local` fields of all clients, in batches."""
        template, differ = starts.template(self.runs), initialise.starts_differ(self.context.algorithm)
        local = HostLocal.filled(template, self.runs.count, self.context.clients, self.splits)
        for ids, flat in self._everyone() if template and differ else ():
            rows = starts.local_rows(self.runs, flat, jnp.asarray(ids, jnp.int32), start.merged)
            local.write(np.broadcast_to(ids, (self.runs.count, ids.size)), rows)
        return local.fields

    def advance(
        self, carry: Carry, first: int, last: int, first_round_starts: Any = None, in_place: bool = False
    ) -> tuple[Carry, dict, Array, Array]:
        if not in_place:
            carry = carry._replace(local=jax.tree.map(np.copy, carry.local))
        local, carry = HostLocal(carry.local, self.splits), carry._replace(local={})
        due, stop = {*self.due(first, last)}, max(last, min(first + 1, self.rounds))
        left: list[tuple] = []  # rows that a round changed, until they are written back
        before, total, records = None, jnp.zeros((2, self.runs.count), jnp.int32), []
        under_way: list[Array] = []
        for round, ids, feed in self._feeds(local, first, stop, left):
            if len(under_way) == 2:  # at most two, to limit the memory of their inputs
                under_way.pop(0).block_until_ready()
            now, left_rows = jnp.asarray(round, jnp.int32), feed.rows if before is None else before
            given = first_round_starts or {}
            beside = given if round < initialise.first_rounds(given) else {}
            done, rows, *more = _round(self.runs, feed, now, carry, left_rows, beside)
            if first == last:  # only compiled
                jax.block_until_ready(done)
                break
            carry, before, total = done, rows, total + jnp.stack(more)
            left.append((ids, rows))
            under_way.append(carry.status)
            if round + 1 in due:
                carry, found = _measure(self.runs, carry, jnp.asarray(round + 1, jnp.int32))
                records.append({**found, "samples": total[0], "took": total[1], "status": carry.status})
        for ids, rows in left:
            local.write(ids, rows)
        blank = {"status": jnp.zeros((self.runs.count, 0), jnp.int32)}
        found = jax.tree.map(lambda *rows: jnp.stack(rows, axis=1), *records) if records else blank
        return carry._replace(local=local.fields), found, total[0], total[1]

    def _feeds(
        self, local: HostLocal, first: int, last: int, left: list[tuple]
    ) -> Iterator[tuple[int, np.ndarray, Feed]]:
        """The inputs of each round, fetched one round ahead."""
        cohorts = self._cohorts(first, last)

        def fetch(number: int, written: Any) -> tuple[np.ndarray, Feed]:
            if written is not None:
                local.write(*written)
            ids = cohorts[:, number]
            again = seats(ids, cohorts[:, number - 1]) if number else np.full(ids.shape, -1, np.int32)
            of_runs = self._of_runs(ids)
            return of_runs, Feed(*jax.device_put((self._flat(ids), local.read(of_runs), again)))

        with ThreadPoolExecutor(1) as pool:
            coming: Any = pool.submit(fetch, 0, None)
            for number, round in enumerate(range(first, last)):
                (ids, feed), before = coming.result(), left.pop() if left else None
                # The next round is fetched while this one runs. The rows of the one before are written back first.
                if number + 1 < last - first:
                    coming = pool.submit(fetch, number + 1, before)
                elif before is not None:
                    coming = pool.submit(local.write, *before)
                yield round, ids, feed
            coming.result()

    def _cohorts(self, first: int, last: int) -> np.ndarray:
        """The cohorts: (seeds, rounds, slots), −1 for an empty slot."""
        length = max(last - first, 1)
        whole = -(-length // ROUNDS) * ROUNDS  # few different lengths, because each is a program
        return np.asarray(_cohorts(self.runs, first + jnp.arange(whole, dtype=jnp.int32)))[:, :length]

    def _of_runs(self, ids: np.ndarray) -> np.ndarray:
        return np.tile(ids, (self.settings, 1))

    def _flat(self, ids: np.ndarray) -> Flat:
        """The data of the cohort of each seed."""
        each = [{name: split.of(own) for name, split in self.splits.items()} for own in ids]
        join = lambda first, *rest: np.stack([first, *rest]) if rest else first[None]
        return jax.tree.map(join, each[0], *each[1:])

    def shapes(self) -> Carry:
        carry = jax.eval_shape(lambda: starts.first_carry(self.runs, starts.blank(self.runs)))
        return carry._replace(local=HostLocal.shapes(starts.template(self.runs), self.context.clients, self.splits))

    def programs(self, carry: Carry) -> list[str]:
        compiled: Any = _measure
        given = (carry._replace(local={}), jnp.array(1, jnp.int32))
        return [self._compiled(carry).as_text(), compiled.lower(self.runs, *given).compile().compiled.as_text()]

    def _compiled(self, carry: Carry) -> Any:
        ids = self._cohorts(0, 1)[:, 0]
        local, nobody = HostLocal(carry.local, self.splits).read(self._of_runs(ids)), jnp.full(ids.shape, -1, jnp.int32)
        feed, zero = Feed(self._flat(ids), local, nobody), jnp.array(0, jnp.int32)
        compiled: Any = _round
        return compiled.lower(self.runs, feed, zero, carry._replace(local={}), local, {}).compile().compiled

    def spread(self, carry: Carry) -> Carry:
        rest, local = carry._replace(local={}), jax.tree.map(np.array, carry.local)  # writable copies
        return jax.tree.map(jnp.asarray, rest)._replace(local=local)


def seats(ids: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Each client's position in the previous cohort, or −1; both are (seeds, slots).

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
def _cohorts(runs: Runs, rounds: Array) -> Array:
    """The cohorts by seed. They do not depend on settings."""
    values = jax.tree.map(lambda a: a[0], runs.values)

    def of_seed(x0: Vector, key: Array) -> Array:
        context = runs.context(values, x0)
        cohorts = jax.vmap(lambda round: context.cohort(key, round))(rounds)
        return jnp.where(cohorts.present, cohorts.ids, -1)

    return jax.vmap(of_seed)(*jax.tree.map(lambda a: a[: runs.seeds], (runs.x0, runs.keys)))


@eqx.filter_jit
def _round(
    runs: Runs, feed: Feed, round: Array, carry: Carry, before: Any, first_round_starts: Any
) -> tuple[Carry, Any, Array, Array]:
    """One round on fetched inputs; `before` are the rows of the previous round's result."""

    def one(context: RoundContext, key: Array, data: Flat, again: Array, *of_run: Any) -> Any:
        carry, rows, before, starts = of_run
        here = context.with_data(data)
        newer = lambda a: (again >= 0).reshape((-1,) + (1,) * (a.ndim - 1))
        rows = jax.tree.map(lambda a, b: jnp.where(newer(a), b[jnp.maximum(again, 0)], a), rows, before)
        return program.one_cohort(here, key, carry, here.cohort(key, round), rows, starts)

    return runs.each(one, (feed.data, feed.again), (carry, feed.rows, before, first_round_starts))


@eqx.filter_jit
def _measure(runs: Runs, carry: Carry, round: Array) -> tuple[Carry, dict[str, Array]]:
    def one(context: RoundContext, key: Array, carry: Carry) -> Any:
        return record_of(runs.options, carry, partial(measure, runs.inputs, runs.options, context), round)

    return runs.each(one, by_run=(carry,))
