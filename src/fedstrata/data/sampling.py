"""Which examples a step looks at. A sampler answers with positions inside one client's shard."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from fedstrata.clock import Clock, stream_key
from fedstrata.data.permutation import below, key_words, permute
from fedstrata.errors import unknown
from fedstrata.random import bits, fold_in

Index = tuple[Int[Array, " b"], Array | None]  # positions, and which of them count (None: all)


class Draw(NamedTuple):
    """Everything that one draw may depend on."""

    key: PRNGKeyArray  # folded from (seed, round, client)
    lasting_key: PRNGKeyArray  # folded from (seed, client): the same in every round
    clock: Clock
    client: Array
    name: str  # of the stream
    number: int


class Sampler(eqx.Module):
    ahead: ClassVar[bool] = True  # all steps of a round are drawn at once, before the first

    @abstractmethod
    def draw(self, at: Draw, count: Array, capacity: int) -> Index:
        """Positions in [0, count); `capacity` is the largest count of any client."""

    @abstractmethod
    def rows(self, capacity: int) -> int:
        """How many examples one draw holds."""

    def seen(self, local_step: Array, count: Array) -> Array | None:
        """How many of them count in this step, where that differs between clients."""
        return None

    @property
    def may_idle(self) -> bool:
        """Whether a client may be done before the others; its remaining steps then change nothing."""
        return False

    def check(self, counts: np.ndarray, name: Any, streams: Sequence[str] | None = None) -> None:
        """Refuse shards that this sampler cannot serve to these streams (None: all), before anything runs."""

    def check_length(self, rounds: int, steps: int, capacity: int) -> None:
        """Refuse a run that is longer than this sampler can serve; capacity: the most rows of a client."""
        if rounds * steps >= 2**31:
            raise ValueError(
                f"rounds={rounds} × {steps} local steps: local steps are numbered in 32 bits, and a run has fewer than "
                "2**31; run fewer rounds, and go on from their solution (params=)"
            )


def _positive(who: str, **values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{who}: {name}={value!r} must be a whole number >= 1")


class WithReplacement(Sampler):
    """Independent uniform draws: the sampling that the papers' theory assumes."""

    batch_size: int

    def __check_init__(self) -> None:
        _positive("WithReplacement", batch_size=self.batch_size)

    def draw(self, at: Draw, count: Array, capacity: int) -> Index:
        key = stream_key(at.key, at.clock.local_step, at.number)
        return below(bits(key, (self.batch_size,)), count), None

    def rows(self, capacity: int) -> int:
        return self.batch_size


class Epochs(Sampler):
    """Reshuffled epochs: every example once before any comes twice.

    per_round=None: the epoch goes on over the rounds. per_round=E: every round is E epochs of its own shuffling, and
    steps beyond E epochs of a client's data are idle for it, so that clients of different sizes do "E local epochs".
    The batches of `local_begin` and `local_end` come from separate epochs, which advance by one batch a round.
    """

    batch_size: int
    per_round: int | None = None

    def __check_init__(self) -> None:
        _positive("Epochs", batch_size=self.batch_size)
        if self.per_round is not None:
            _positive("Epochs", per_round=self.per_round)

    def draw(self, at: Draw, count: Array, capacity: int) -> Index:
        whole_round, count = self.per_round is not None, jnp.maximum(count, 1)
        step, own = (at.clock.local_step, 0) if whole_round else (at.clock.step, at.clock.round)
        # `local_begin` and `local_end`, whose local steps are negative, shuffle apart, and draw once a round.
        step = jnp.where(at.clock.local_step < 0, own, step)
        whole = step // count if self._long(capacity) else 0  # step × batch size may pass 32 bits: count by shards
        position = (step - whole * count) * self.batch_size + jnp.arange(self.batch_size, dtype=jnp.int32)
        epoch = whole * self.batch_size + position // count
        key = at.key if whole_round else at.lasting_key
        base = stream_key(key, jnp.minimum(at.clock.local_step, 0), at.number)
        words = key_words(jax.vmap(lambda epoch: fold_in(base, epoch))(epoch))
        index = permute(words, position % count, count)
        return index, (epoch < self.per_round if self.per_round is not None else None)

    def _long(self, capacity: int) -> bool:
        """Whether positions within `capacity` steps fit 32 bits, so that a run may be as long as it likes."""
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
        """The local steps that `per_round` epochs take on the largest client."""
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
                    "2**31, and positions are numbered in 32 bits; take fewer epochs a round, and more rounds"
                )
            return  # a batch may then be larger than a shard: what lies beyond the last epoch does not count
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
    """Given positions: `indices[stream]` has shape (rounds, steps, clients, batch). Tests and audits drive with it.

    `local_begin` reads the last row of the steps and `local_end` the one before: append both where a method samples
    there.
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
        """Refuse a table that ends before the run does."""
        super().check_length(rounds, steps, capacity)
        for stream, table in self.indices.items():
            have = np.shape(table)[:2]
            if have[0] < rounds or have[1] < steps:
                raise ValueError(
                    f"Replay: indices[{stream!r}] have {have[0]} rounds × {have[1]} steps, {rounds} × {steps} are run"
                )


def sampler(batch_size: "int | Literal['all'] | Sampler", sampling: str = "replacement") -> Sampler:
    """The sampler that `batch_size` and `sampling` ("replacement" or "epochs") name."""
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

    What a centralised method needs to minimise the same objective as the federated ones; `whole` takes all examples
    with those weights instead. start, count: the clients' rows in the pooled data.
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
