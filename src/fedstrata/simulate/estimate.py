"""`fs.estimate`: memory, traffic and time of a run, estimated beforehand."""

import dataclasses
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from fedstrata.core.algorithm import Algorithm
from fedstrata.data.federation import Federation
from fedstrata.engine.participation import Everyone
from fedstrata.problems.base import Problem
from fedstrata.simulate.autotune import choose, choose_execution
from fedstrata.simulate.driver import SNAPSHOT_BYTES
from fedstrata.simulate.executable import Executable
from fedstrata.simulate.options import RunOptions, takes_run_options
from fedstrata.simulate.run import prepare

if TYPE_CHECKING:
    from rich.table import Table


class Estimate(NamedTuple):
    """The estimated cost of a run. Bytes are totals over clients, rounds and runs; seconds are extrapolated."""

    rounds: int
    runs: int  # seeds × swept settings
    cohort: int
    clients: int
    data_bytes: int
    state_bytes: int
    memory_bytes: int  # data, state (twice unless large: a segment keeps its start), and scratch memory
    up_bytes: int
    down_bytes: int
    compile_seconds: float
    seconds: float
    execution: str | int
    why: str

    def rich(self) -> "Table":
        from rich.table import Table

        from fedstrata.report.format import human_bytes, human_seconds

        table = Table(show_header=False, box=None)
        table.add_row("runs", f"{self.runs} × {self.rounds} rounds, {self.cohort} of {self.clients} clients each")
        parts = f"data {human_bytes(self.data_bytes)}, state {human_bytes(self.state_bytes)}"
        table.add_row("memory", f"{human_bytes(self.memory_bytes)} ({parts})")
        table.add_row("traffic", f"{human_bytes(self.up_bytes)} up, {human_bytes(self.down_bytes)} down")
        table.add_row(
            "time", f"{human_seconds(self.seconds)} after {human_seconds(self.compile_seconds)} of compilation"
        )
        table.add_row("clients run by", f"{self.execution} ({self.why})")
        return table


@takes_run_options
def estimate(problem: Problem, algorithm: Algorithm, federation: Federation, **options: Any) -> Estimate:
    """Compile a run, time a few rounds and one evaluation, and extrapolate.

    Args:
        problem: what to minimise.
        algorithm: how.
        federation: on whose data.
        **options: those of `fs.run`.
    """
    wanted = RunOptions.of("fs.estimate", options)
    executable = prepare(problem, algorithm, federation, dataclasses.replace(wanted, execution="vmap"))
    execution, why = choose(executable) if wanted.execution == "auto" else (wanted.execution, "as asked")
    executable = choose_execution(executable, execution)
    began = time.perf_counter()
    carry = executable.begin()[0]
    jax.block_until_ready(executable.advance(carry, 0, 0)[2])
    compiled = time.perf_counter() - began
    per_round, per_evaluation = _times(executable, carry)
    context, runs, rounds = executable.context, executable.runs.count, wanted.rounds
    took = rounds * context.cohort_size * runs
    late = not isinstance(context.participation, Everyone)
    data, state = _size((context.data, executable.inputs.full)), _size(carry)
    return Estimate(
        rounds=rounds,
        runs=runs,
        cohort=context.cohort_size,
        clients=context.clients,
        data_bytes=data,
        state_bytes=state,
        memory_bytes=data + (1 if state > SNAPSHOT_BYTES else 2) * state + executable.scratch_bytes(carry),
        up_bytes=took * executable.ledger.up,
        down_bytes=took * executable.ledger.total("down", late),
        compile_seconds=compiled,
        seconds=per_round * rounds + per_evaluation * -(-rounds // executable.every),
        execution=execution,
        why=why,
    )


def _times(executable: Executable, carry: Any) -> tuple[float, float]:
    """Seconds per round without evaluation, and seconds of one evaluation."""
    rare, often = (executable._replace(every=every, rounds=2**30) for every in (2**30, 1))

    def clock(executable: Executable) -> float:
        jax.block_until_ready(executable.advance(carry, 0, 1)[2])
        took = []
        for _ in range(3):
            began = time.perf_counter()
            jax.block_until_ready(executable.advance(carry, 1, 3)[2])
            took.append((time.perf_counter() - began) / 2)
        return float(np.median(took))

    quiet, full = clock(rare), clock(often)
    return quiet, max(full - quiet, 0.0)


def _size(tree: Any) -> int:
    """Bytes of the arrays in a tree, each counted once."""
    leaves = {id(a): a for a in jax.tree.leaves(tree) if hasattr(a, "nbytes")}
    return sum(int(a.nbytes) for a in leaves.values())
