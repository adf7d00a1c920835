"""An executable: one algorithm on one federation, over swept values × seeds, as compiled programs."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from fedstrata.core.memory import Pool
from fedstrata.core.vector import Vector
from fedstrata.engine.context import RoundContext
from fedstrata.engine.counting import counting_unit, rows_a_round
from fedstrata.engine.initialise import first_rounds
from fedstrata.engine.ledger import Ledger
from fedstrata.engine.mesh import everywhere
from fedstrata.engine.over_clients import spread_again, unspread
from fedstrata.engine.participation import Everyone
from fedstrata.engine.privacy import Spent, mechanisms
from fedstrata.engine.visibility import show_server
from fedstrata.simulate import program
from fedstrata.simulate.batching import Groups, Runs
from fedstrata.simulate.inputs import Inputs
from fedstrata.simulate.state import Carry, ProgramOptions, Segment

# Largest sizes of jobs that are compiled as tiny ones, as measured in docs/benchmarks/tiny.md.
TINY_STATE = 8192  # parameters × clients of a round × runs of a thread
TINY_DRAWN = 8192  # examples drawn in a round × runs of a thread
TINY_DATA = 16384  # examples in all, which evaluations read


class Executable(NamedTuple):
    """Runs that advance together, in one program."""

    runs: Runs
    axes: dict[str, list]
    ledger: Ledger
    rounds: int
    every: int  # rounds between evaluations
    threads: int = 1  # equal groups of runs, in parallel: small programs leave the other cores idle
    minimised: tuple[str, str] = ("", "")  # fingerprints of the problem and of the monitor, for the history

    @property
    def inputs(self) -> Inputs:
        return self.runs.inputs

    @property
    def context(self) -> RoundContext:
        """The context of all runs."""
        return self.runs.inputs.context

    @property
    def settings(self) -> int:
        """The number of swept settings. Each runs with every seed."""
        return self.runs.count // self.runs.seeds

    def with_context(self, **changed: Any) -> "Executable":
        """A copy with some fields of the context replaced."""
        inputs = dataclasses.replace(self.inputs, context=dataclasses.replace(self.context, **changed))
        return self._replace(runs=dataclasses.replace(self.runs, inputs=inputs))

    def with_options(self, options: ProgramOptions) -> "Executable":
        """A copy with some static settings replaced."""
        return self._replace(runs=dataclasses.replace(self.runs, options=options))

    def on_mesh(self, mesh: Mesh) -> "Executable":
        """A copy whose arrays are on every device of the mesh, except those spread over it."""
        return self._replace(runs=everywhere(self.runs, mesh))

    def begin(self) -> tuple[Carry, dict[str, Array], Any]:
        """The carry before round 0, its evaluation, and `first_round_starts`."""
        return _begin(self.runs)

    def advance(
        self, carry: Carry, first: int, last: int, first_round_starts: Any = None, in_place: bool = False
    ) -> tuple[Carry, dict, Array, Array]:
        """Run rounds first … last−1 of every run; first = last only compiles.

        in_place: the given carry is donated, which avoids a copy of the `Local` fields of all clients.
        """
        compiled, segment = _advance[self.tiny, in_place], self._segment(first, last)
        if self.threads == 1 or in_place:
            return compiled((self.runs, segment, first_round_starts), carry)
        groups = Groups(self.settings, self.runs.seeds, self.threads)
        cut = groups.cut((self.runs.values, self.runs.x0, self.runs.keys, carry, first_round_starts))

        def step(part: tuple) -> Any:
            values, x0, keys, carry, starts = part
            group = Runs(self.inputs, self.runs.options, values, x0, keys, groups.seeds_each)
            return jax.block_until_ready(compiled((group, segment, starts), carry))

        if first == last:  # one thread compiles, the others reuse its program
            done = [step(part) for part in cut]
        else:
            with ThreadPoolExecutor(self.threads) as pool:
                done = list(pool.map(step, cut))
        return groups.join(done)

    def _segment(self, first: int, last: int) -> Segment:
        return Segment(*(jnp.asarray(v, jnp.int32) for v in (first, last, self.every, self.rounds)))

    @property
    def tiny(self) -> bool:
        """Whether starting kernels is most of the cost of a step, on a CPU."""
        if jax.default_backend() != "cpu" or self.context.spread is not None:
            return False
        state = sum(int(a.size) for a in jax.tree.leaves(self.runs.x0)) * self.context.cohort_size
        drawn = self.rows_a_round() * self.runs.count
        data = sum(len(jax.tree.leaves(split.examples)[0]) for split in self.context.data.values())
        most = max(state / TINY_STATE, drawn / TINY_DRAWN) / self.threads
        return most <= 1 and data <= TINY_DATA

    def rows_a_round(self) -> int:
        """The most examples that the cohort of one run draws in a round."""
        return rows_a_round(self.context)

    @property
    def counting_unit(self) -> int:
        """The unit in which examples are counted."""
        return counting_unit(self.context)

    def spent(self, rounds: int) -> Spent | None:
        """The privacy cost of these rounds to the most frequent client of any run."""
        privacy = self.context.privacy
        if privacy is None:
            return None
        once, each = mechanisms(self.context.algorithm, self.context.exchanges)
        return Spent(privacy.noise, privacy.delta, once + each * self.most_often(rounds), privacy.accept)

    def most_often(self, rounds: int) -> int:
        """The largest number of rounds in which one client took part."""
        if isinstance(self.context.participation, Everyone) or not rounds:
            return rounds
        context = self.runs.first_context()
        at = jax.jit(lambda key, round: context.cohort(key, round))
        took = lambda key, r: (c := at(key, jnp.asarray(r, jnp.int32))).ids[c.present]
        keys = self.runs.keys[: self.runs.seeds]
        each = [np.concatenate([np.asarray(took(key, r)) for r in range(rounds)]) for key in keys]
        return max(int(np.unique(ids, return_counts=True)[1].max(initial=0)) for ids in each)

    def due(self, first: int, last: int) -> list[int]:
        """The rounds after which rounds first … last−1 evaluate."""
        return [r for r in range(first + 1, last + 1) if r % self.every == 0 or r == self.rounds]

    def scratch_bytes(self, carry: Carry) -> int:
        """Memory of the compiled program beyond its arguments and results."""
        analysis = self._compiled(carry).memory_analysis()
        return int(analysis.temp_size_in_bytes) if analysis is not None else 0

    def programs(self, carry: Carry) -> list[str]:
        """The compiled programs of the rounds, as XLA's text."""
        return [self._compiled(carry).as_text()]

    def _compiled(self, carry: Carry) -> Any:
        given = (self.runs, self._segment(0, 0), None)
        return _advance[self.tiny, False].lower(given, carry).compile().compiled

    def state_bytes(self) -> int:
        """Bytes of the state that all runs keep between rounds."""
        leaves = jax.tree.leaves(self.shapes())
        return sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in leaves)

    def gathered(self, carry: Carry) -> Carry:
        """The carry in the layout of one device, as in checkpoints and results."""
        return _gathered(self.context, carry) if self.context.spread and jax.tree.leaves(carry.local) else carry

    def spread(self, carry: Carry) -> Carry:
        """A gathered carry in the layout of this executable's devices."""
        if self.context.spread is None:
            return jax.tree.map(jnp.asarray, carry)
        carry = everywhere(carry, self.context.spread.mesh)
        return _spread(self.context, carry) if jax.tree.leaves(carry.local) else carry

    def solutions(self, carry: Carry) -> Vector:
        return _solutions(self.runs, carry._replace(local={}))

    def first_round_starts(self, round: int) -> Any:
        """`first_round_starts` for a run that resumes at this round, usually none.

        Only the first pools last longer than one round.
        """
        if not round:
            return self.begin()[2]
        if not self.context.algorithm.merge_at_init or isinstance(self.context.participation, Everyone):
            return None
        template = self.runs.template()
        beside = {field: value for field, value in template._asdict().items() if isinstance(value, Pool)}
        return self.begin()[2] if round < first_rounds(beside) else None

    @property
    def keeps_starts(self) -> bool:
        """Whether `advance` leaves the given carry unchanged."""
        return True

    def shapes(self) -> Carry:
        """Shapes of the carry as a checkpoint has it."""
        return jax.eval_shape(lambda: self.gathered(self.begin()[0]))


@eqx.filter_jit
def _begin(runs: Runs) -> Any:
    def one(context: RoundContext, key: Array) -> Any:
        carry, found, start = program.begin(runs.inputs, runs.options, context, key)
        return carry, found, start.first_round_starts

    return runs.each(one)


def _advance_all(given: tuple[Runs, Segment, Any], carry: Carry) -> Any:
    runs, segment, first_round_starts = given

    def one(context: RoundContext, key: Array, carry: Carry, starts: Any) -> Any:
        return program.advance(runs.inputs, runs.options, context, key, carry, segment, starts)

    return runs.each(one, by_run=(carry, first_round_starts))


# On a CPU XLA splits kernels between threads and sums into two kernels. This helps large programs and costs tiny ones
# up to a third of their time.
FOR_TINY = {"xla_disable_hlo_passes": "cpu-parallel-task-assigner,tree_reduction_rewriter"}
_jit: Any = eqx.filter_jit  # its type stubs lack compiler options
_advance = {  # by (tiny, in place)
    (tiny, in_place): _jit(_advance_all, donate=donated, compiler_options=FOR_TINY if tiny else None)
    for tiny in (False, True)
    for in_place, donated in ((False, "none"), (True, "all-except-first"))
}


@eqx.filter_jit
def _solutions(runs: Runs, carry: Carry) -> Vector:
    one = lambda context, key, carry: context.algorithm.solution(context.problem, show_server(carry.shared))
    return runs.each(one, by_run=(carry,))


@eqx.filter_jit
def _gathered(context: RoundContext, carry: Carry) -> Carry:
    spread: Any = context.spread
    plain = jax.vmap(lambda local: unspread(local, context.data, spread))(carry.local)
    return carry._replace(local=spread.whole(plain))


@eqx.filter_jit
def _spread(context: RoundContext, carry: Carry) -> Carry:
    spread: Any = context.spread
    return carry._replace(local=jax.vmap(lambda local: spread_again(local, context.data, spread))(carry.local))
