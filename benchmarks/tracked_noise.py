"""Noise and the tracked methods: a root of an estimated variance, and hypergradients on small batches.

The `Tracked…` methods are this library's. The page shows their failures: how many runs of `TrackedSCGD` diverge on
√(variance + 0.01), and whether `TrackedBiO` gains or loses against `FedBiO` on batches.
"""

import argparse
import warnings

import numpy as np

import fedstrata as fs
import harness
from fedstrata.experiments.bilevel import build
from fedstrata.simulate.result import DivergenceWarning

STEPS = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0]
SCORED = 0.5  # the objective is averaged over this last part of a run


def markets(sites=8, days=500, assets=10):
    """Sites whose assets differ in mean and spread."""
    rng = np.random.default_rng(0)
    one = lambda: rng.normal(0.05, 0.3, assets) + rng.normal(size=(days, assets)) * rng.uniform(0.5, 1.5, assets)
    return fs.Federation.from_clients([{"r": one().astype("float32")} for _ in range(sites)])


def roots(rounds, seeds):
    """For each method, guard and batch size: the number of seeds that diverged, for each step size."""
    federation, start, out = markets(), np.full(10, 0.1, "float32"), []
    methods = {
        "TrackedSCGD": fs.TrackedSCGD(0.01, 0.1, 4),
        "TrackedSCGD, separate_samples=True": fs.TrackedSCGD(0.01, 0.1, 4, separate_samples=True),
        "FedDRSCGD": fs.FedDRSCGD(0.01, 0.1, 4),
        "SMVR": fs.SMVR(0.01, 0.1, 4),
    }
    for guard in ({"eps": 0.01}, {"floor": 0.01}):
        problem = fs.risk_averse(risk_aversion=1.0, regularizer=fs.prox.Simplex(), **guard)
        for batch in (1, 4, 32):
            for name, method in methods.items():
                options = {"params": start, "batch_size": batch, "seeds": seeds, "stationarity": False}
                result = fs.run(problem, method, federation, rounds=rounds, sweep={"step_size": STEPS}, **options)
                lost = np.sum(np.isin(result.endings, ["diverged", "exploded"]), axis=1)
                words = ", ".join(f"{key} = {value}" for key, value in guard.items())
                out.append([words, batch, name, *lost.tolist()])
    return out


def ends(problem, federation, method, batch, rounds, seeds, sweep):
    """The mean exact objective over the last part of each run: (steps, seeds); infinite where a run diverged."""
    options = {"batch_size": batch, "seeds": seeds, "sweep": {"step_size": sweep}, "stationarity": False}
    options["evaluate_every"] = rounds // 20
    history = fs.run(problem, method, federation, rounds=rounds, **options).history
    values = history["objective"][..., int(SCORED * len(history)) :].mean(axis=-1)
    return np.where(np.isfinite(values), values, np.inf)


def bilevel(rounds, instances):
    """For each batch size and method: the best step on seeds 0 to 4, and its excess over FedBiO on fresh seeds."""
    grid, fresh, out = [round(0.0002 * 2.5**k, 6) for k in range(9)], range(100, 105), []
    methods = {
        "FedBiO": fs.FedBiO(0.01, 0.2, 5),
        "TrackedBiO": fs.TrackedBiO(0.01, 0.2, 5),
        "TrackedBiO, momentum=0.1": fs.TrackedBiO(0.01, 0.2, 5, momentum=0.1),
    }
    problem = build().problem  # shared by all instances, which avoids recompilation
    for spread in (0.3, 1.0):
        for batch in (1, 4):
            found, steps = {name: [] for name in methods}, {name: [] for name in methods}
            for instance in range(instances):
                given = (problem, build(clients=8, noise=0.5, spread=spread, seed=instance).federation)
                for name, method in methods.items():
                    score = ends(*given, method, batch, rounds, 5, grid).mean(axis=1)
                    chosen = grid[int(np.argmin(score))]
                    steps[name].append(chosen)
                    found[name].append(ends(*given, method, batch, rounds, list(fresh), [chosen])[0])
            for name, values in found.items():
                excess = np.mean(np.array(values) - np.array(found["FedBiO"]), axis=1)  # one number per instance
                error = 2.262 * excess.std(ddof=1) / np.sqrt(len(excess)) if name != "FedBiO" else 0.0
                edge = sum(step in (grid[0], grid[-1]) for step in steps[name])
                interval = (
                    "–"
                    if name == "FedBiO"
                    else f"{excess.mean():+.4f} ({excess.mean() - error:+.4f} to {excess.mean() + error:+.4f})"
                )
                out.append([spread, batch, name, f"{np.mean(values):.4f}", interval, f"{edge} of {instances}"])
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    warnings.simplefilter("ignore", DivergenceWarning)  # divergence is what is counted
    lost = harness.table(
        ["guard", "batch", "method", *(f"step {s:g}" for s in STEPS)], roots(given.rounds, given.seeds)
    )
    head = [
        "spread of clients",
        "batch",
        "method",
        "objective",
        "above FedBiO (95 %)",
        "best step at an edge of the grid",
    ]
    gains = harness.table(head, bilevel(given.rounds, 10))
    body = (
        f"Batches drawn with replacement, all clients in every round, {given.rounds} rounds.\n\n"
        "**The root of a variance.** `fs.risk_averse` with a budget, 8 sites that differ, 10 assets, 500 days, 4 local "
        f"steps, momentum 0.1. Cells: how many of {given.seeds} seeds diverged, for seven step sizes. `eps` is added "
        f"to the estimated variance. `floor` is a lower bound on it under the root.\n\n{lost}\n\n"
        "**Hypergradients on batches.** The quadratic problem of `fedstrata run bilevel` with 8 clients, noise 0.5, 5 "
        "local steps and lower step 0.2. Each method's step is chosen from nine by the mean objective over the second "
        "half of a run (seeds 0 to 4). The method is then run with that step on seeds 100 to 104. Intervals are over "
        f"ten instances of the problem.\n\n{gains}"
    )
    harness.page(__file__, "Tracked methods under noise", body)


if __name__ == "__main__":
    main()
