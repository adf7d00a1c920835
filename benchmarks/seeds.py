"""Many seeds and step sizes in one program against one run: least squares with d = 100, and an MLP.

Targets: ten seeds × four step sizes ≤ 16 × one run on 2 cores with d = 100, ≤ 2 × on a GPU with the MLP.
"""

import argparse

import jax
import numpy as np

import fedstrata as fs
import harness
from harness import prepare

STEPS = {"step_size": [0.003, 0.01, 0.03, 0.1]}


def squares():
    """Least squares, d = 100: 20 clients with 200 examples."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, 100)).astype(np.float32)
    y = (x @ rng.normal(size=100)).astype(np.float32)
    data = fs.Federation.from_offsets({"x": x, "y": y}, np.arange(21) * 200)
    problem = fs.Average(lambda w, e: 0.5 * (w @ e["x"] - e["y"]) ** 2)
    return problem, data, {"batch_size": 16, "params": np.zeros(100, np.float32)}


def mlp():
    """An MLP 784-32-10: 100 clients with 640 examples."""
    rng = np.random.default_rng(0)
    x = 2 * rng.random((64_000, 784), np.float32) - 1
    y = np.argmax(x @ rng.standard_normal((784, 10)).astype(np.float32), axis=-1).astype(np.int32)
    data = fs.Federation.from_offsets({"x": x, "y": y}, np.arange(101) * 640)
    return fs.Average(fs.losses.Classification(fs.models.MLP((784, 32, 10)))), data, {"batch_size": 64}


def program(problem, data, options, rounds, seeds, sweep=None):
    long = {"rounds": 10**6, "evaluate_every": 10**6, "stationarity": False, "execution": "vmap"}
    job = prepare(problem, fs.FedAvg(0.01, 10), data, seeds=seeds, sweep=sweep, **long, **options)
    carry = job.begin()[0]
    return lambda: job.advance(carry, 0, rounds)[0]


def measured(make, rounds, repeats):
    problem, data, options = make()
    runs = {"one run": (1, None), "ten seeds": (10, None), "ten seeds × four step sizes": (10, STEPS)}
    contenders = {title: program(problem, data, options, rounds, *what) for title, what in runs.items()}
    took = harness.interleaved(contenders, repeats)
    rows = []
    for name, times in took.items():
        middle, low, high = harness.ratio(took["one run"], times)
        rows.append([name, harness.spread(times / rounds), f"{middle:.2f} [{low:.2f}, {high:.2f}]"])
    return harness.table(["program", "ms per round: median [quartiles]", "times one run"], rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draft", action="store_true", help="print only")
    given, on_cpu = parser.parse_args(), jax.default_backend() == "cpu"
    body = (
        "FedAvg, 10 local steps. Targets: forty runs ≤ 16 × one on 2 cores with d = 100, ≤ 2 × on a GPU with the MLP.\n"
        f"\nLeast squares, d = 100, 20 clients, batch 16:\n\n{measured(squares, 200, 9)}\n"
        f"\nMLP 784-32-10, 100 clients, batch 64:\n\n{measured(mlp, 2 if on_cpu else 20, 5)}"
    )
    print(body) if given.draft else harness.page(__file__, "Seeds and sweeps in one program", body)


if __name__ == "__main__":
    main()
