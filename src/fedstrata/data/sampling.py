"""Samplers: the positions in a client's shard of the examples of one step."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from fedstrata.base.clock import Clock, stream_key
from fedstrata.base.errors import unknown
from fedstrata.base.permutation import below, key_words, permute
from fedstrata.base.random import bits, fold_in

Index = tuple[Int[Array, " b"], Array | None]  # positions, and which of them count (None: all)


class Draw(NamedTuple):
    """The arguments of one draw.

    Args:
        key: folded from (seed, round, client).
        lasting_key: folded from (seed, client): the same in every round.
        clock: the round and step.
        client: the number of the client.
        name: the stream.
        number: the number of the stream.
    """

    key: PRNGKeyArray
    lasting_key: PRNGKeyArray
    clock: Clock
    client: Array
    name: str
    number: int


class Sampler(eqx.Module):
    """A rule that draws the examples of each step; subclasses define `draw` and `rows`."""

    ahead: ClassVar[bool] = True  # all steps of a round are drawn at once, before the first

    @abstractmethod
    def draw(self, at: Draw, count: Array, capacity: int) -> Index:
        """Positions in [0, count), and which of them count.

        Args:
            at: the keys and the clock.
            count: the rows of the client.
            capacity: the largest count of any client.
        """

    @abstractmethod
    def rows(self, capacity: int) -> int:
        """The number of examples of one draw."""

    def seen(self, local_step: Array, count: Array) -> Array | None:
        """The number of examples that count in this step; None where it is `rows` for all clients."""
        return None

    @property
    def may_idle(self) -> bool:
        """Whether a client may finish before the others; its remaining steps then change nothing."""
        return False

    def check(self, counts: np.ndarray, name: Any, streams: Sequence[str] | None = None) -> None:
        """Raise if this sampler cannot draw from a client's shard.

        Args:
            counts: the rows of each client.
            name: the name of a client, by number.
            streams: the streams that are drawn; None: all.
        """

    def check_length(self, rounds: int, steps: int, capacity: int) -> None:
        """Raise for a run that is too long for this sampler.

        Args:
            rounds: of the run.
            steps: local steps per round.
            capacity: the most rows of a client.
        """
        if rounds * steps >= 2**31:
            raise ValueError(
                f"rounds={rounds} × {steps} local steps: local steps are numbered in 32 bits, and a run has fewer than "
                "2**31; run fewer rounds, and continue from their solution (params=)"
            )


def _positive(who: str, **values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{who}: {name}={value!r} must be a whole number >= 1")


class WithReplacement(Sampler):
    """Independent uniform draws, as the theory of most papers assumes.

    Args:
        batch_size: the examples of one draw.
    """

    batch_size: int

    def __check_init__(self) -> None:
        _positive("WithReplacement", batch_size=self.batch_size)

    def draw(self, at: Draw, count: Array, capacity: int) -> Index:
        key = stream_key(at.key, at.clock.local_step, at.number)
        return below(bits(key, (self.batch_size,)), count), None

    def rows(self, capacity: int) -> int:
        return self.batch_size


class Epochs(Sampler):
    """Reshuffled epochs: every example is drawn once before any is drawn twice.

    The batches of `local_begin` and `local_end` come from separate epochs, which advance by one batch per round.

    Args:
        batch_size: the examples of one draw.
        per_round: None: epochs continue over the rounds. E: every round is E newly shuffled epochs; a client is idle in
            steps beyond E epochs of its data, so that clients of different sizes all do E local epochs.
    """

    batch_size: int
    per_round: int | None = None

    def __check_init__(self) -> None:
        _positive("Epochs", batch_size=self.batch_size)
        if self.per_round is not None:
            _positive("Epochs", per_round=self.per_round)

    def draw(self, at: Draw, count: Array, capacity: int) -> Index:
        whole_round, count = self.per_round is not None, jnp.maximum(count, 1)
        step, visit = (at.clock.local_step, 0) if whole_round else (at.clock.step, at.clock.round)
        # `local_begin` and `local_end`, whose local steps are negative, have separate epochs and draw once per round.
        step = jnp.where(at.clock.local_step < 0, visit, step)
        whole = step // count if self._long(capacity) else 0  # step × batch size may pass 32 bits: count by shards
        position = (step - whole * count) * self.batch_size + jnp.arange(self.batch_size, dtype=jnp.int32)
        epoch = whole * self.batch_size + position // count
        key = at.key if whole_round else at.lasting_key
        base = stream_key(key, jnp.minimum(at.clock.local_step, 0), at.number)
        words = key_words(jax.vmap(lambda epoch: fold_in(base, epoch))(epoch))
        index = permute(words, position % count, count)
        return index, (epoch < self.per_round if self.per_round is not None else None)

    def _long(self, capacity: int) -> bool:
        """Whether positions within `capacity` steps fit 32 bits, so that the length of a run is not limited."""
        return capacity * self.batch_size < 2**31

    def rows(self, capacity: int) -> int:
        return self.batch_size

    def seen(self, local_step: Array, count: Array) -> Array | None:
        if self.per_round is None:
            return None
        rows = self.per_round * count
        done = jnp.minimum(local_step, rows // self.batch_size + 1) * self.batch_size  # of later steps it could wrap
        return jnp.clip(rows - done, 0, self.batch_size)

    @property
    def may_idle(self) -> bool:
        return self.per_round is not None

    def steps(self, counts: np.ndarray) -> int:
        """The local steps of `per_round` epochs on the largest client.

        Args:
            counts: the rows of each client.
        """
        return int(np.ceil((self.per_round or 1) * counts.max() / self.batch_size))

    def check_length(self, rounds: int, steps: int, capacity: int) -> None:
        super().check_length(rounds, steps, capacity)
        in_a_row = steps if self.per_round is not None else rounds * steps
        if not self._long(capacity) and in_a_row * self.batch_size >= 2**31:
            raise ValueError(
                f"Epochs: {in_a_row:,} steps × batch_size={self.batch_size} on a client of {capacity:,} examples pass "
                '2**31, and positions are numbered in 32 bits; take a smaller batch_size, or sampling="replacement"'
            )

    def check(self, counts: np.ndarray, name: Any, streams: Sequence[str] | None = None) -> None:
        if self.per_round is not None:
            large = np.flatnonzero((counts < 2**31 - 1) & (self.per_round * counts + self.batch_size >= 2**31))
            if large.size:
                raise ValueError(
                    f"Epochs: per_round={self.per_round} × the {counts[large[0]]:,} examples of {name(large[0])} pass "
                    "2**31, and positions are numbered in 32 bits; take fewer epochs per round, and more rounds"
                )
            return  # a batch may then be larger than a shard: examples beyond the last epoch do not count
        small = np.flatnonzero(counts < self.batch_size)
        if small.size:
            raise ValueError(
                f"batch_size={self.batch_size} without replacement is larger than the shard of {name(small[0])} "
                f"({counts[small[0]]} examples; {small.size} such clients): choose batch_size <= {counts.min()}, "
                'sampling="replacement", or batch_size="all"'
            )


class Whole(Sampler):
    """The whole shard, in order: every algorithm becomes deterministic."""

    ahead: ClassVar[bool] = False

    def draw(self, at: Draw, count: Array, capacity: int) -> Index:
        index = jnp.arange(capacity, dtype=jnp.int32)
        return index, index < count

    def rows(self, capacity: int) -> int:
        return capacity

    def seen(self, local_step: Array, count: Array) -> Array | None:
        return count


class Replay(Sampler):
    """Given positions, for tests and audits.

    `local_begin` reads the last row of the steps and `local_end` the one before: append both where a method samples
    there.

    Args:
        indices: for each stream an array of positions, of shape (rounds, steps, clients, batch).
    """

    ahead: ClassVar[bool] = False
    indices: Mapping[str, Array]

    def draw(self, at: Draw, count: Array, capacity: int) -> Index:
        if at.name not in self.indices:
            raise unknown("stream in Replay", at.name, self.indices)
        table = jnp.asarray(self.indices[at.name], jnp.int32)
        return table[at.clock.round, at.clock.local_step, at.client], None

    def rows(self, capacity: int) -> int:
        return int(next(iter(self.indices.values())).shape[-1])

    def check(self, counts: np.ndarray, name: Any, streams: Sequence[str] | None = None) -> None:
        for stream, table in self.indices.items():
            if streams is not None and stream not in streams:
                continue
            if np.ndim(table) != 4 or np.shape(table)[2] != len(counts):
                wanted = f"(rounds, steps, {len(counts)} clients, batch)"
                raise ValueError(f"Replay: indices[{stream!r}] has shape {np.shape(table)}, expected {wanted}")
            bad = np.flatnonzero((np.max(table, axis=(0, 1, 3)) >= counts) | (np.min(table, axis=(0, 1, 3)) < 0))
            if bad.size:
                client = int(bad[0])
                raise ValueError(f"Replay: indices[{stream!r}] leave the {counts[client]} examples of {name(client)}")

    def check_length(self, rounds: int, steps: int, capacity: int) -> None:
        """Raise for a table that is shorter than the run."""
        super().check_length(rounds, steps, capacity)
        for stream, table in self.indices.items():
            have = np.shape(table)[:2]
            if have[0] < rounds or have[1] < steps:
                raise ValueError(
                    f"Replay: indices[{stream!r}] have {have[0]} rounds × {have[1]} steps, {rounds} × {steps} are run"
                )


def sampler(batch_size: "int | Literal['all'] | Sampler", sampling: str = "replacement") -> Sampler:
    """The sampler of a batch size.

    Args:
        batch_size: the examples of one draw, "all", or a sampler.
        sampling: "replacement" or "epochs".
    """
    if isinstance(batch_size, Sampler):
        return batch_size
    kinds = {"replacement": WithReplacement, "epochs": Epochs}
    if sampling not in kinds:
        raise unknown("sampling", sampling, kinds)
    if batch_size == "all":
        return Whole()
    if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
        raise ValueError(f'batch_size={batch_size!r} must be a whole number >= 1, "all", or a Sampler')
    return kinds[sampling](int(batch_size))


class Balanced(Sampler):
    """Draws from the pooled data of all clients: a client by its weight, then one of its examples.

    With it a centralised method minimises the same objective as the federated ones.

    Args:
        batch_size: the examples of one draw.
        start: the first row of each client in the pooled data.
        count: the rows of each client.
        by_size: whether clients weigh by their rows; else all weigh the same.
        whole: whether to take all examples with these weights instead of drawing.
    """

    batch_size: int
    start: Array
    count: Array
    by_size: bool = eqx.field(static=True)
    whole: bool = eqx.field(static=True)

    def draw(self, at: Draw, count: Array, capacity: int) -> Index:
        clients = self.count.shape[0]
        if self.whole:
            share = capacity / clients / self.count.astype(float)
            owner = jnp.repeat(jnp.arange(clients), self.count, total_repeat_length=capacity)
            return jnp.arange(capacity, dtype=jnp.int32), None if self.by_size else share[owner]
        key = stream_key(at.key, at.clock.local_step, at.number)
        which, row = bits(key, (2, self.batch_size))
        if self.by_size:
            return below(row, count), None
        client = below(which, clients)
        return self.start[client] + below(row, self.count[client]), None

    def rows(self, capacity: int) -> int:
        return capacity if self.whole else self.batch_size
