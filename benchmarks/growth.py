"""Time of a round and memory, against the number of clients, local steps and parameters.

Target: a cohort of 100 out of 1,000,000 clients ≤ 1.2 × one out of 1,000. SCAFFOLD keeps a control variate per client,
FedAvg keeps nothing. Streamed: data and `Local` fields stay on the host. Exponents are slopes of log-log fits.
"""

import argparse

import jax
import numpy as np

import fedstrata as fs
import harness
from harness import prepare

COHORT, EXAMPLES, FEATURES = 100, 4, 32
CLIENTS, STEPS, SIZES = (100, 1_000, 10_000, 100_000, 1_000_000), (1, 3, 10, 30, 100, 300), (10, 100, 1_000, 10_000)


def federation(clients, features=FEATURES):
    rng = np.random.default_rng(0)
    x = rng.random((clients * EXAMPLES, features), dtype=np.float32)
    y = rng.integers(0, 10, clients * EXAMPLES).astype(np.int32)
    return fs.Federation.from_offsets({"x": x, "y": y}, np.arange(clients + 1) * EXAMPLES)


def program(algorithm, data, rounds, stream=False):
    features = data["train"].examples["x"].shape[1]
    problem = fs.Average(fs.losses.Classification(fs.models.Linear(features, 10)))
    options = {"rounds": 10**6, "evaluate_every": 10**6, "batch_size": 4, "cohort": COHORT, "execution": "vmap"}
    job = prepare(problem, algorithm, data, stationarity=False, stream=stream, **options)
    box = [job.begin()[0]]
    once = {id(a): a.nbytes for a in jax.tree.leaves((job.inputs, box[0])) if isinstance(a, jax.Array)}
    size = sum(once.values())

    def advance():
        box[0] = job.advance(box[0], 0, rounds, in_place=True)[0]
        return box[0].shared

    return advance, size


def series(values, make, repeats):
    """Seconds of every value's program, interleaved, and the bytes it keeps on the device."""
    built = {value: make(value) for value in values}
    took = harness.interleaved({str(v): b[0] for v, b in built.items()}, repeats)
    return {v: took[str(v)] for v in values}, {v: b[1] for v, b in built.items()}


def exponent(points):
    """The slope of log y in log x."""
    x, y = np.log([*points]), np.log([float(np.median(p)) for p in points.values()])
    return float(np.polyfit(x, y, 1)[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--draft", action="store_true", help="print only")
    given = parser.parse_args()
    repeats, found = given.repeats, {}
    data = {clients: federation(clients) for clients in CLIENTS}
    for title, algorithm, rounds, stream in (
        ("FedAvg", fs.FedAvg(0.1, 10), 20, False),
        ("SCAFFOLD", fs.SCAFFOLD(0.1, 10), 20, False),
        ("SCAFFOLD, streamed", fs.SCAFFOLD(0.1, 10), 20, True),
    ):
        make = lambda n, a=algorithm, r=rounds, s=stream: program(a, data[n], r, s)
        times, sizes = series(CLIENTS, make, repeats)
        found["clients", title] = ({n: t / rounds for n, t in times.items()}, sizes)
    make = lambda steps: program(fs.SCAFFOLD(0.1, steps), data[1_000], 10)
    times, sizes = series(STEPS, make, repeats)
    found["local steps", "SCAFFOLD"] = ({n: t / 10 for n, t in times.items()}, sizes)
    make = lambda size: program(fs.SCAFFOLD(0.1, 10), federation(1_000, size), 2)
    times, sizes = series(SIZES, make, repeats)
    found["parameters", "SCAFFOLD"] = (
        {10 * (n + 1): t / 2 for n, t in times.items()},
        {10 * (n + 1): b for n, b in sizes.items()},
    )
    rows = []
    for (axis, title), (times, sizes) in found.items():
        for value, t in times.items():
            rows.append([title, f"{value:,} {axis}", harness.spread(t), f"{sizes[value] / 1e6:,.1f} MB"])
        slopes = [f"**time ∝ n^{exponent(times):.2f}**", f"**memory ∝ n^{exponent(sizes):.2f}**"]
        rows.append([f"**{title}**", f"**in {axis}**", *slopes])
    times = {title: found["clients", title][0] for title in ("FedAvg", "SCAFFOLD", "SCAFFOLD, streamed")}
    more = [f"{title} {harness.ratio(t[1_000], t[1_000_000])[0]:.2f}" for title, t in times.items()]
    head = ["algorithm", "with", "ms per round: median [quartiles]", "kept on the device"]
    note = (
        f"Cohorts of {COHORT}, {EXAMPLES} examples per client, batch 4; linear model 32 × 10 and 10 local steps unless "
        "stated otherwise. Memory is data and state between rounds. Time with a million clients over time with a "
        f"thousand, target ≤ 1.2: {', '.join(more)}."
    )
    body = note + "\n\n" + harness.table(head, rows)
    if given.draft:
        print(body)
        return
    harness.page(__file__, "Growth", f"{body}\n\n{plot(found)}")


def plot(found):
    import matplotlib.pyplot as plt

    axes_of = {name: i for i, name in enumerate(("clients", "local steps", "parameters"))}
    figure, axes = plt.subplots(2, 3, figsize=(10, 5.6), layout="constrained")
    for (axis, title), (times, sizes) in found.items():
        column = axes[:, axes_of[axis]]
        low, middle, high = np.quantile(np.array([*times.values()]), [0.25, 0.5, 0.75], axis=1) * 1e3
        label = f"{title}: time ∝ n^{exponent(times):.2f}"
        column[0].errorbar([*times], middle, [middle - low, high - middle], marker="o", capsize=2, label=label)
        label = f"{title}: memory ∝ n^{exponent(sizes):.2f}"
        column[1].plot([*sizes], np.array([*sizes.values()]) / 1e6, marker="o", label=label)
    for name, i in axes_of.items():
        for row, unit in enumerate(("ms per round", "MB on the device")):
            axes[row, i].set(xscale="log", yscale="log", xlabel=name, ylabel=unit if i == 0 else "")
            axes[row, i].margins(y=0.3)
            axes[row, i].legend(fontsize=7, frameon=False, loc="upper left")
            axes[row, i].spines[["top", "right"]].set_visible(False)
    figure.savefig(harness.IMAGES / "bench_growth.png", dpi=150)
    return "![Time and memory against clients, local steps and parameters](../images/bench_growth.png)"


if __name__ == "__main__":
    main()
