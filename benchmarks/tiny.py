"""Tiny jobs on a CPU, compiled with and without the passes of XLA that are for large ones.

The same rounds with both programs, for jobs of growing size. `Executable.tiny` follows this table.
"""

import jax
import numpy as np

import fedstrata as fs
import harness
from fedstrata.simulate.executable import _advance
from harness import prepare

ROUNDS, EXAMPLES = 40, 200


def squares(algorithm, parameters, clients, batch, runs=1, every=10**6):
    """Least squares with 200 examples per client."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(clients * EXAMPLES, parameters)).astype(np.float32)
    data = fs.Federation.from_offsets({"x": x, "y": x[:, 0]}, np.arange(clients + 1) * EXAMPLES)
    problem = fs.Average(lambda w, e: 0.5 * (w @ e["x"] - e["y"]) ** 2)
    options = {"rounds": 10**6, "evaluate_every": every, "stationarity": False, "execution": "vmap"}
    start = np.zeros(parameters, np.float32)
    job = prepare(problem, algorithm, data, seeds=runs, batch_size=batch, params=start, **options)
    return job._replace(threads=1)


def jobs():
    """Title and executable of each row."""
    for parameters, clients, batch, runs in [
        (10, 8, 1, 1),
        (100, 8, 1, 1),
        (100, 20, 16, 1),
        (100, 20, 16, 4),
        (100, 20, 16, 10),
        (1000, 8, 1, 1),
        (1000, 20, 16, 1),
        (100, 200, 1, 1),
        (4000, 16, 16, 1),
        (20_000, 8, 1, 1),
    ]:
        title = f"FedAvg, {parameters:,} parameters, {clients} clients, batch {batch}, {runs} runs"
        yield title, squares(fs.FedAvg(1e-4, 10), parameters, clients, batch, runs)
    yield "SCAFFOLD, 100 parameters, 20 clients, batch 16, 1 runs", squares(fs.SCAFFOLD(1e-4, 10), 100, 20, 16)
    whole = squares(fs.FedAvg(1e-4, 1), 20, 80, "all", every=1)
    yield "FedAvg, 20 parameters, 80 clients, batch all, 1 step, evaluated every round", whole


def main():
    rows = []
    for title, job in jobs():
        carry, given = job.begin()[0], (job.runs, job._segment(0, ROUNDS), None)
        program = lambda tiny, given=given, carry=carry: lambda: _advance[tiny, False](given, carry)
        took = harness.interleaved({"default": program(False), "tiny": program(True)}, repeats=9)
        middle, low, high = harness.ratio(took["tiny"], took["default"])
        numbers = sum(a.size for a in jax.tree.leaves(job.runs.x0)) * job.context.cohort_size
        spreads = [harness.spread(times / ROUNDS, unit=1e6) for times in took.values()]
        chosen = "tiny" if job.tiny else "default"
        rows.append([title, f"{numbers:,}", *spreads, f"{middle:.2f} [{low:.2f}, {high:.2f}]", chosen])
    head = ["job", "parameters × clients × runs", "µs per round, default", "tiny"]
    head += ["default / tiny", "chosen by `Executable.tiny`"]
    note = (
        'Least squares, 200 examples per client, 10 local steps. The "tiny" program is compiled without two passes of '
        "XLA: the one that splits a kernel between threads, and the one that splits a sum into two kernels."
    )
    table = harness.table(head, rows)
    harness.page(__file__, "Tiny jobs on a CPU", f"{note}\n\n{table}")


if __name__ == "__main__":
    main()
