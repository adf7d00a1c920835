"""What a large population costs: a cohort of 100 out of 1,000 and out of 1,000,000 clients, with local state.

Target: at most 1.2 × the time per round. Scaffold keeps a control variate per client; FedAvg keeps nothing.
"""

import jax
import numpy as np

import fedstrata as fs
import harness
from fedstrata.runtime.run import prepare

COHORT, EXAMPLES, FEATURES, ROUNDS = 100, 4, 32, 50


def federation(clients):
    rng = np.random.default_rng(0)
    x = rng.random((clients * EXAMPLES, FEATURES), dtype=np.float32)
    y = rng.integers(0, 10, clients * EXAMPLES).astype(np.int32)
    return fs.Federation.from_offsets({"x": x, "y": y}, np.arange(clients + 1) * EXAMPLES)


def program(problem, algorithm, data):
    options = {"rounds": 10**6, "evaluate_every": 10**6, "batch_size": 4, "cohort": COHORT, "execution": "vmap"}
    job = prepare(problem, algorithm, data, **options)
    carry = job.begin()[0]
    held = lambda tree: sum(a.nbytes for a in jax.tree.leaves(tree) if hasattr(a, "nbytes"))
    sizes = held(job.world.flat), held(carry)
    box = [carry]

    def advance():
        box[0] = job.advance(box[0], 0, ROUNDS, in_place=True)[0]
        return box[0].shared

    return advance, *sizes


def main():
    problem = fs.Average(fs.losses.Classification(fs.models.Linear(FEATURES, 10)))
    data = {clients: federation(clients) for clients in (1_000, 1_000_000)}
    rows = []
    for algorithm in (fs.FedAvg(0.1, 10), fs.Scaffold(0.1, 10)):
        built = {clients: program(problem, algorithm, d) for clients, d in data.items()}
        took = harness.interleaved({str(c): b[0] for c, b in built.items()}, repeats=7)
        middle, low, high = harness.ratio(took["1000"], took["1000000"])
        for clients, (_, data_bytes, state_bytes) in built.items():
            times = harness.spread(took[str(clients)] / ROUNDS)
            more = f"{middle:.2f} [{low:.2f}, {high:.2f}]" if clients > 1000 else "1"
            sizes = [f"{data_bytes / 1e6:.0f} MB", f"{state_bytes / 1e6:.0f} MB"]
            rows.append([type(algorithm).__name__, f"{clients:,}", times, more, *sizes])
    head = ["algorithm", "clients", "ms per round: median [quartiles]", "times 1,000 clients", "data", "state"]
    note = (
        f"Cohorts of {COHORT} drawn uniformly, 10 local steps, linear model 32 × 10, 4 examples a client, {ROUNDS} "
        "rounds a call. Target: ≤ 1.2. *State* is kept between rounds: Scaffold keeps a control variate per client."
    )
    harness.page(__file__, "Growth", note + "\n\n" + harness.table(head, rows))


if __name__ == "__main__":
    main()
