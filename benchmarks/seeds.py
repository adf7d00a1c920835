"""What ten seeds in one program cost, against one seed and against ten programs one after another (d = 100)."""

import numpy as np

import fedstrata as fs
import harness
from fedstrata.runtime.run import prepare

CLIENTS, EXAMPLES, DIMENSION, ROUNDS = 20, 200, 100, 200


def program(problem, data, seeds, sweep=None):
    options = {"rounds": 10**6, "evaluate_every": 10**6, "batch_size": 16, "params": np.zeros(DIMENSION, np.float32)}
    job = prepare(problem, fs.FedAvg(0.01, 10), data, seeds=seeds, sweep=sweep, execution="vmap", **options)
    carry = job.begin()[0]
    return lambda: job.advance(carry, 0, ROUNDS)[0]


def main():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(CLIENTS * EXAMPLES, DIMENSION)).astype(np.float32)
    y = (x @ rng.normal(size=DIMENSION)).astype(np.float32)
    data = fs.Federation.from_offsets({"x": x, "y": y}, np.arange(CLIENTS + 1) * EXAMPLES)
    problem = fs.Average(lambda w, e: 0.5 * (w @ e["x"] - e["y"]) ** 2)
    contenders = {
        "one seed": program(problem, data, 1),
        "ten seeds": program(problem, data, 10),
        "ten seeds × four step sizes": program(problem, data, 10, {"step_size": [0.003, 0.01, 0.03, 0.1]}),
    }
    took = harness.interleaved(contenders, repeats=9)
    rows = []
    for name, times in took.items():
        middle, low, high = harness.ratio(took["one seed"], times)
        rows.append([name, harness.spread(times), f"{middle:.2f} [{low:.2f}, {high:.2f}]"])
    head = ["program", f"ms for {ROUNDS} rounds: median [quartiles]", "times one seed"]
    note = "Least squares, d = 100, 20 clients, 10 local steps, batch 16. Target: ten seeds ≤ 5 × one seed on 2 cores."
    harness.page(__file__, "Seeds and sweeps in one program", note + "\n\n" + harness.table(head, rows))


if __name__ == "__main__":
    main()
