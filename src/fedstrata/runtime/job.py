"""A job: one algorithm on one federation, over swept values × seeds, ready to be advanced as one program."""

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from fedstrata.algorithm import Algorithm, as_arrays, reals, with_values
from fedstrata.clock import domain
from fedstrata.errors import unknown
from fedstrata.memory import Pool
from fedstrata.random import seed_key
from fedstrata.runtime import simulate
from fedstrata.runtime.checks import as_arrays_by_name, check_distinct, check_grid, is_start_function, started
from fedstrata.runtime.counting import counting_unit
from fedstrata.runtime.crew import spread_again, unspread
from fedstrata.runtime.mesh import everywhere
from fedstrata.runtime.runs import Groups, over_runs
from fedstrata.runtime.sight import show_server
from fedstrata.runtime.start import first_rounds, start_values
from fedstrata.runtime.world import Carry, Plan, Span, World
from fedstrata.transport.cohort import Everyone
from fedstrata.transport.ledger import Ledger, ledger
from fedstrata.transport.privacy import Spent, mechanisms
from fedstrata.vector import Vector

# Measured, see docs/benchmarks/tiny.md: up to which sizes a program is compiled for little work.
TINY_STATE = 8192  # parameters × clients of a round × runs of a thread
TINY_DRAWN = 8192  # examples drawn in a round × runs of a thread
TINY_DATA = 16384  # examples in all, which evaluations look at


class Job(NamedTuple):
    """`runs` simulations in one program; every array in `values`, `x0` and `keys` has a leading axis of runs."""

    world: World
    plan: Plan
    values: Any  # the array part of the algorithm: its real hyper-parameters
    rest: Any  # the static part
    x0: Vector
    keys: Array
    axes: dict[str, list]
    ledger: Ledger
    rounds: int
    every: int  # rounds between evaluations
    threads: int = 1  # equal groups of runs, side by side: small programs leave the other cores idle
    minimised: tuple[str, str] = ("", "")  # fingerprints of the problem and of the monitor, for the history

    @property
    def runs(self) -> int:
        return self.keys.shape[0]

    @property
    def seeds(self) -> int:
        """Runs that differ in nothing but their seed; every swept setting has them."""
        return len(self.axes["seed"])

    def over(self, mesh: Mesh) -> "Job":
        """The job with everything that is not spread over the mesh on every device of it."""
        world, values, x0, keys = everywhere((self.world, self.values, self.x0, self.keys), mesh)
        return self._replace(world=world, values=values, x0=x0, keys=keys)

    def begin(self) -> tuple[Carry, dict[str, Array], Any]:
        return _begin(self.world, self.plan, self.values, self.rest, self.x0, self.keys, self.seeds)

    def advance(
        self, carry: Carry, first: int, last: int, own: Any = None, in_place: bool = False
    ) -> tuple[Carry, dict, Array, Array]:
        """Rounds first … last−1 of every run; first = last compiles and runs nothing.

        in_place: the given carry is used up, which saves copying the local state of all clients.
        """
        program = _advance[self.tiny, in_place]
        if self.threads == 1 or in_place:
            return program(self._fixed(first, last, own), carry)
        groups = Groups(self.runs // self.seeds, self.seeds, self.threads)
        parts = groups.cut((self.values, self.x0, self.keys, carry, own))

        def step(part: tuple) -> Any:
            values, x0, keys, carry, own = part
            group = self._replace(values=values, x0=x0, keys=keys)
            return jax.block_until_ready(program(group._fixed(first, last, own, groups.seeds_each), carry))

        if first == last:  # one thread compiles, the others find it done
            done = [step(part) for part in parts]
        else:
            with ThreadPoolExecutor(self.threads) as pool:
                done = list(pool.map(step, parts))
        return groups.join(done)

    def _fixed(self, first: int, last: int, own: Any = None, seeds: int | None = None) -> tuple:
        span = Span(*(jnp.asarray(v, jnp.int32) for v in (first, last, self.every, self.rounds)))
        return self.world, self.plan, self.values, self.rest, self.x0, self.keys, seeds or self.seeds, span, own

    @property
    def tiny(self) -> bool:
        """Whether a step of all clients is so little that starting its kernels is most of its cost, on a CPU."""
        if jax.default_backend() != "cpu" or self.world.spread is not None:
            return False
        state = sum(int(a.size) for a in jax.tree.leaves(self.x0)) * self.world.selection.size(self.world.clients)
        drawn = self.rows_a_round() * self.runs
        data = sum(len(jax.tree.leaves(split.examples)[0]) for split in self.world.flat.values())
        most = max(state / TINY_STATE, drawn / TINY_DRAWN) / self.threads
        return most <= 1 and data <= TINY_DATA

    def rows_a_round(self) -> int:
        """The most examples that the cohort of one run draws in a round."""
        world = self.world
        steps = sum(p.steps * p.repeat for p in self.rest.phases(world.problem))
        rows = sum(world.sampler.rows(world.flat[s].capacity) for s in world.problem.streams.values())
        return rows * steps * world.selection.size(world.clients)

    @property
    def counting_unit(self) -> int:
        """What a count of examples is a multiple of."""
        return counting_unit(self.world, self.rest)

    def spent(self, rounds: int) -> Spent | None:
        """What so many rounds cost the client that took part in the most of them, in any run."""
        privacy = self.world.privacy
        if privacy is None:
            return None
        once, each = mechanisms(self.rest, self.world.problem)
        return Spent(privacy.noise, privacy.delta, once + each * self.most_often(rounds))

    def most_often(self, rounds: int) -> int:
        """The most rounds that one client took part in."""
        world = self.world
        if isinstance(world.selection, Everyone) or not rounds:
            return rounds
        algorithm, dtype = self._first(), jax.tree.map(lambda a: a[0], self.x0).scalar_dtype
        at = jax.jit(lambda key, round: simulate.cohort_at(world, algorithm, key, round, dtype))
        took = lambda key, r: (c := at(key, jnp.asarray(r, jnp.int32))).ids[c.present]
        each = [np.concatenate([np.asarray(took(key, r)) for r in range(rounds)]) for key in self.keys[: self.seeds]]
        return max(int(np.unique(ids, return_counts=True)[1].max(initial=0)) for ids in each)

    def due(self, first: int, last: int) -> list[int]:
        """The rounds after which rounds first … last−1 evaluate."""
        return [r for r in range(first + 1, last + 1) if r % self.every == 0 or r == self.rounds]

    def scratch_bytes(self, carry: Carry) -> int:
        """Memory that the compiled program needs beside its arguments and results."""
        program: Any = _advance[self.tiny, False]
        analysis = program.lower(self._fixed(0, 0), carry).compile().compiled.memory_analysis()
        return int(analysis.temp_size_in_bytes) if analysis is not None else 0

    def programs(self, carry: Carry) -> list[str]:
        """What is compiled to be run round by round, as XLA's text."""
        program: Any = _advance[self.tiny, False]
        return [program.lower(self._fixed(0, 0), carry).compile().compiled.as_text()]

    def state_bytes(self) -> int:
        """Bytes of the state that all runs keep between rounds."""
        leaves = jax.tree.leaves(self.shapes())
        return sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in leaves)

    def gathered(self, carry: Carry) -> Carry:
        """The carry as one device would keep it: what a checkpoint and a result hold, whatever ran it."""
        return _gathered(self.world, carry) if self.world.spread and jax.tree.leaves(carry.local) else carry

    def spread(self, carry: Carry) -> Carry:
        """A gathered carry, as it lies on this job's devices."""
        if self.world.spread is None:
            return jax.tree.map(jnp.asarray, carry)
        carry = everywhere(carry, self.world.spread.mesh)
        return _spread(self.world, carry) if jax.tree.leaves(carry.local) else carry

    def solutions(self, carry: Carry) -> Vector:
        return _solutions(self.world, self.values, self.rest, carry._replace(local={}), self.seeds)

    def starts_beside(self, round: int) -> Any:
        """What this round and the next ones start from beside the carry, usually nothing: for a run that resumes.

        Only the first pools outlast a round.
        """
        if not round:
            return self.begin()[2]
        if not self.rest.merge_at_init or isinstance(self.world.selection, Everyone):
            return None
        x0 = jax.tree.map(lambda a: a[0], self.x0)
        template = jax.eval_shape(lambda x: start_values(self._first(), self.world.problem, x), x0)
        beside = {field: value for field, value in template._asdict().items() if isinstance(value, Pool)}
        return self.begin()[2] if round < first_rounds(beside) else None

    def _first(self) -> Any:
        """The algorithm of the first run."""
        return eqx.combine(jax.tree.map(lambda a: a[0], self.values), self.rest)

    @property
    def keeps_starts(self) -> bool:
        """Whether a carry stays as it was when the job is advanced from it."""
        return True

    def shapes(self) -> Carry:
        """Shapes of the carry as a checkpoint has it."""
        return jax.eval_shape(lambda: self.gathered(self.begin()[0]))


@eqx.filter_jit
def _begin(world: World, plan: Plan, values: Any, rest: Any, x0: Vector, keys: Array, seeds: int) -> Any:
    def one(v: Any, x: Vector, k: Array) -> Any:
        carry, found, start = simulate.begin(world, eqx.combine(v, rest), plan, x, k)
        return carry, found, start.own

    return over_runs(one, seeds, values, (x0, keys))


def _advance_all(fixed: tuple, carry: Carry) -> Any:
    world, plan, values, rest, x0, keys, seeds, span, own = fixed
    one = lambda v, x, k, c, o: simulate.advance(world, eqx.combine(v, rest), plan, x, k, c, span, o)
    return over_runs(one, seeds, values, (x0, keys), (carry, own))


# What XLA does for large programs on a CPU costs tiny ones up to a third of their time: it shares kernels between
# threads, and takes sums in two kernels.
FOR_TINY = {"xla_disable_hlo_passes": "cpu-parallel-task-assigner,tree_reduction_rewriter"}
_jit: Any = eqx.filter_jit  # its types do not know of options for the compiler
_advance = {  # by (tiny, in place)
    (tiny, in_place): _jit(_advance_all, donate=donated, compiler_options=FOR_TINY if tiny else None)
    for tiny in (False, True)
    for in_place, donated in ((False, "none"), (True, "all-except-first"))
}


@eqx.filter_jit
def _solutions(world: World, values: Any, rest: Any, carry: Carry, seeds: int) -> Vector:
    one = lambda v, c: eqx.combine(v, rest).solution(world.problem, show_server(c.shared))
    return over_runs(one, seeds, values, (), (carry,))


@eqx.filter_jit
def _gathered(world: World, carry: Carry) -> Carry:
    spread: Any = world.spread
    return carry._replace(local=spread.whole(jax.vmap(lambda local: unspread(local, world.flat, spread))(carry.local)))


@eqx.filter_jit
def _spread(world: World, carry: Carry) -> Carry:
    spread: Any = world.spread
    return carry._replace(local=jax.vmap(lambda local: spread_again(local, world.flat, spread))(carry.local))


def seed_list(seeds: int | Sequence[int]) -> list[int]:
    """`seeds=10` means 0 … 9."""
    whole = lambda s: isinstance(s, int | np.integer) and not isinstance(s, bool)
    given: Any = () if isinstance(seeds, str) else seeds
    given = range(given) if whole(given) else [*given] if np.iterable(given) else []
    fits = all(whole(s) and 0 <= s < 2**64 for s in given)
    if not given or not fits or len(set(given)) != len(given):
        raise ValueError(f"seeds={seeds!r} must be a number >= 1, or different whole numbers from 0 to 2**64 - 1")
    return [int(s) for s in given]


def spread(
    algorithm: Algorithm, sweep: Mapping[str, Sequence[Any]], seeds: list[int], dtype: Any
) -> tuple[Any, Any, dict[str, list]]:
    """The algorithm's array part stacked over sweep × seeds, its static part, and the labelled axes."""
    known = reals(algorithm)
    for name, values in check_grid(sweep, "sweep").items():
        if name not in known:
            if hasattr(algorithm, name):
                raise ValueError(
                    f"{type(algorithm).__name__}: {name!r} cannot be swept in one program, because it changes the "
                    f"program; run once per value, or use fs.tune, which does (can be swept: {', '.join(known)})"
                )
            raise unknown(f"hyper-parameter of {type(algorithm).__name__}", name, known)
        check_distinct(name, values, dtype)
        with_values(algorithm, **{name: np.asarray(values, np.float64)})  # every value in range, before stacking
    names = list(sweep)
    combined = [with_values(algorithm, **dict(zip(names, v, strict=True))) for v in itertools.product(*sweep.values())]
    parts = [eqx.partition(as_arrays(a, dtype), eqx.is_array) for a in combined for _ in seeds]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[p[0] for p in parts])
    axes = {name: [float(v) for v in sweep[name]] for name in names} | {"seed": seeds}
    return stacked, parts[0][1], axes


def start_points(problem: Any, params: Any, seeds: list[int]) -> Vector:
    """x0 of every seed: given arrays, a function of a key, or the problem's own start."""
    keys = jnp.stack([seed_key(s) for s in seeds])
    if params is not None and not is_start_function(params):
        given = Vector(as_arrays_by_name(params))
        return jax.tree.map(lambda a: jnp.broadcast_to(a, (len(seeds), *a.shape)), given)
    make = problem.init if params is None else lambda key: as_arrays_by_name(started(params, key))
    points = [make(domain(key, "parameters")) for key in keys]
    return Vector(jax.tree.map(lambda *leaves: jnp.stack(leaves), *points))


def repeat_runs(x0: Vector, seeds: list[int], runs: int) -> tuple[Vector, Array]:
    """Start points and keys of all runs: the seeds again for every swept setting."""
    times = runs // len(seeds)
    keys = jnp.stack([seed_key(s) for s in seeds])
    return jax.tree.map(lambda a: jnp.concatenate([a] * times), x0), jnp.concatenate([keys] * times)


def ledger_of(world: World, algorithm: Algorithm, x0: Vector) -> Ledger:
    """What one client sends and receives a round; nothing for a centralised method."""
    if algorithm.centralised:
        return Ledger(())
    template = jax.eval_shape(lambda x: start_values(algorithm, world.problem, x), x0)
    return ledger(algorithm, world.problem, template, world.selection.size(world.clients), world.clients)
