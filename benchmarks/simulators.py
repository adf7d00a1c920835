"""FedAvg in several simulators: an MLP 784-32-10, 100 clients, 10 local steps with batches of 64.

Every contender starts from the same parameters and trains on the same data, all clients in every round. The script
checks that each does the same number of steps on as many examples, and that all losses fall equally far. Start-up and
compilation are not timed, and memory is not measured. Targets for the rounds per second of FedStrata:
≥ 0.97 × hand-written JAX, ≥ 2 × fedjax, ≥ 3 × pfl, ≥ 4 × PyTorch eager, ≥ 15 × Flower's simulation.
"""

import argparse

import numpy as np

import environments
import harness

JOB = {"model": "mlp", "clients": 100, "examples": 640, "batch": 64, "steps": 10, "step_size": 0.1}
DRAWN, SHUFFLED = "FedStrata, drawn with replacement", "FedStrata, shuffled epochs"
# Title: script, environment, changes to the job, the FedStrata row that samples alike, target.
CONTENDERS = {
    DRAWN: ("by_fedstrata", None, {"sampling": "replacement"}, DRAWN, None),
    SHUFFLED: ("by_fedstrata", None, {"sampling": "epochs"}, SHUFFLED, None),
    "hand-written JAX, vmap": ("by_jax", None, {"chunk": 0}, DRAWN, 0.97),
    "hand-written JAX, chunks of 10": ("by_jax", None, {"chunk": 10}, DRAWN, 0.97),
    "torch.func": ("by_torch_func", "torch", {}, SHUFFLED, None),
    "fedjax": ("by_fedjax", "fedjax", {}, SHUFFLED, 2),
    "pfl": ("by_pfl", "pfl", {}, SHUFFLED, 3),
    "PyTorch eager": ("by_torch", "torch", {}, SHUFFLED, 4),
    "PyTorch eager, a process on each core": ("by_torch_processes", "torch", {}, SHUFFLED, None),
    "Flower simulation": ("by_flwr", "flwr", {}, SHUFFLED, 15),
}
ALIKE = 0.005  # largest difference of losses after the same number of rounds, relative to their fall


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="rounds per call")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--clients", type=int, default=JOB["clients"])
    parser.add_argument("--only", default="", help="comma-separated words; only scripts whose name contains one")
    parser.add_argument("--here", action="store_true", help="use this interpreter for all contenders")
    parser.add_argument("--draft", action="store_true", help="print only")
    given = parser.parse_args()
    job = {**JOB, "clients": given.clients}
    wanted = {title: (script, env, {**job, **more}) for title, (script, env, more, *_) in CONTENDERS.items()}
    children, lacking = environments.begin(wanted, given.here, given.only.split(",") if given.only else ())
    began = {title: child.call("report")["loss"] for title, child in children.items()}
    after, took = {}, {title: [] for title in children}
    for title, child in children.items():
        child.call("run", rounds=given.rounds)
        after[title] = child.call("report")
    for _ in range(given.repeats):
        for title, child in children.items():
            took[title].append(child.call("run", rounds=given.rounds))
    for child in children.values():
        child.close()
    seconds = {title: np.array(times) / given.rounds for title, times in took.items()}
    rows = [
        [
            title,
            harness.spread(seconds[title]),
            f"{np.median(1 / seconds[title]):.3g}",
            *_verdict(seconds[CONTENDERS[title][3]], seconds[title], CONTENDERS[title][4]),
            f"{after[title]['loss']:.4f}",
        ]
        for title in children
    ]
    rows += [[title, "not available, see below", *[""] * 5] for title in lacking]
    problems = _differences(began, after, job, given.rounds)
    head = ["program", "ms per round: median [quartiles]", "rounds/s", "speed-up of FedStrata"]
    head += ["target", "", f"loss after {given.rounds} rounds"]
    note = (
        f"FedAvg, MLP 784-32-10, {job['clients']} clients × {job['examples']} examples, all in every round, "
        f"{job['steps']} local steps, batch {job['batch']}, {given.rounds} rounds per call, {given.repeats} calls of "
        "each in turn. All programs have the same data and start values. An epoch is exactly the steps of a round. "
        "Hand-written JAX draws with replacement and is compared with the FedStrata row that does so. The others pass "
        "once through shuffled data (pfl: through the rows in their order) and are compared with the FedStrata row "
        'that shuffles. FedStrata runs with `execution="auto"`. PyTorch uses one thread or one per core, whichever is '
        "faster. "
        f"The loss at the start was {next(iter(began.values())):.4f}. Flower has done one round more."
    )
    body = f"{note}\n\n{harness.table(head, rows)}\n\n{problems}\n\n{environments.notes(children, lacking)}"
    if given.draft:
        print(body)
        return
    plot = harness.bars(seconds, "simulators")
    harness.page(__file__, "Simulators side by side", f"{body}\n\n{plot}")


def _verdict(ours, theirs, target):
    middle, low, high = harness.ratio(ours, theirs)
    words = ["", ""] if target is None else [f"≥ {target}", "met" if middle >= target else "**missed**"]
    return [f"{middle:.2f} [{low:.2f}, {high:.2f}]", *words]


def _differences(began, after, job, rounds):
    """A sentence for the page: all did the same work, or which did not."""
    steps = job["clients"] * job["steps"] * rounds
    partner = {title: after[CONTENDERS[title][3]]["loss"] for title in after}
    fall = began[SHUFFLED] - after[SHUFFLED]["loss"]
    others = {title: found for title, found in after.items() if title != "Flower simulation"}
    wrong = [title for title, loss in began.items() if abs(loss - began[SHUFFLED]) > 1e-4]
    wrong += [title for title, found in others.items() if tuple(found["work"]) != (steps, steps * job["batch"])]
    wrong += [title for title, found in others.items() if abs(found["loss"] - partner[title]) > ALIKE * fall]
    wrong += [title for title, found in after.items() if found["loss"] > began[title] - fall / 2]
    if wrong:
        return f"**These did not do the same work: {', '.join(dict.fromkeys(wrong))}.**"
    return (
        f"Checked: all programs start from the same loss; each did {steps:,} steps on {steps * job['batch']:,} "
        f"examples in its first call (Flower: {rounds + 1}/{rounds} of that); all losses fall; after the same number "
        f"of rounds, losses of programs that sample alike differ by less than {ALIKE:.1%} of the fall."
    )


if __name__ == "__main__":
    main()
