"""The CIFAR-10 set-up of the pfl-research paper, on images of that shape: FedAvg with a small convolutional network.

1000 users × 50 images, 50 users per round, batches of 10, one epoch (5 local steps), evaluation on 10,000 images every
10 rounds. The network is that of pfl's benchmark without its dropout: two valid 3 × 3 convolutions with 32 and 64
channels, ReLU after each, 2 × 2 max pooling, a hidden layer of 128, 10 outputs: 1.6 million parameters.
Runs on the default device of JAX and PyTorch. `--here --only by_fedstrata,by_torch` creates no environments.
Target on a GPU: ≥ 20 × an eager PyTorch loop.
"""

import argparse

import numpy as np

import environments
import harness

OURS = "FedStrata"
# Title: script, environment, what differs in its job.
CONTENDERS = {
    OURS: ("by_fedstrata", None, {"sampling": "epochs"}),
    "FedStrata, recording the training objective too": ("by_fedstrata", None, {"sampling": "epochs", "records": 1}),
    "PyTorch eager": ("by_torch", "torch", {}),
    "pfl": ("by_pfl", "pfl", {}),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="rounds per call")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--test", type=int, default=10_000, help="images for evaluation")
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--step-size", type=float, default=0.02)
    parser.add_argument("--execution", default="auto", help="how FedStrata runs clients: vmap, map, auto or a number")
    parser.add_argument("--only", default="", help="comma-separated words; only scripts whose name contains one")
    parser.add_argument("--here", action="store_true", help="use this interpreter for all contenders")
    parser.add_argument("--draft", action="store_true", help="print only")
    given = parser.parse_args()
    execution = int(given.execution) if given.execution.isdigit() else given.execution
    job = {
        "model": "cnn",
        "clients": given.users,
        "examples": 50,
        "cohort": given.cohort,
        "batch": 10,
        "steps": 5,
        "test": given.test,
        "evaluate_every": given.evaluate_every,
        "step_size": given.step_size,
        "execution": execution,
    }
    wanted = {title: (script, env, {**job, **more}) for title, (script, env, more) in CONTENDERS.items()}
    children, lacking = environments.begin(wanted, given.here, given.only.split(",") if given.only else ())
    before = {title: child.call("evaluate")["loss"] for title, child in children.items()}
    for child in children.values():
        child.call("run", rounds=given.evaluate_every)
    took = {title: [] for title in children}
    for _ in range(given.repeats):
        for title, child in children.items():
            took[title].append(child.call("run", rounds=given.rounds))
    after = {title: child.call("evaluate") for title, child in children.items()}
    for child in children.values():
        child.close()
    seconds = {title: np.array(times) / given.rounds for title, times in took.items()}
    rows = []
    for title, times in seconds.items():
        middle, low, high = harness.ratio(seconds[OURS], times)
        faster = f"{middle:.2f} [{low:.2f}, {high:.2f}]"
        found = after[title]
        end = f"{before[title]:.3f} → {found['loss']:.3f}, {found['accuracy']:.1%}"
        rows.append([title, harness.spread(times), f"{1500 * np.median(times):.4g}", faster, end])
    rows += [[title, "not available, see below", "", "", ""] for title in lacking]
    head = ["program", "ms per round: median [quartiles]", "seconds for 1500 rounds, extrapolated"]
    head += ["speed-up of FedStrata", "test loss and accuracy"]
    done = given.evaluate_every + given.rounds * given.repeats
    note = (
        f"FedAvg, {given.users} users × 50 images of 32 × 32 × 3, {given.cohort} users per round, batch 10, one epoch "
        f"(5 local steps), step size {given.step_size}; two valid 3 × 3 convolutions (32 and 64 channels), 2 × 2 max "
        f"pooling, 128 hidden units; evaluation on {given.test:,} images every {given.evaluate_every} rounds, included "
        "in the time. Synthetic images: noise around ten patterns. "
        f"Rounds per call: {given.rounds}. Calls of each program, in turn: {given.repeats}. "
        f"Losses before and after all {done} rounds. The first FedStrata row evaluates on the same images as the other "
        "programs, between segments of the run. The second is plain `fs.run`, which also records the objective on all "
        "training data."
    )
    body = f"{note}\n\n{harness.table(head, rows)}\n\n{environments.notes(children, lacking)}"
    if given.draft:
        print(body)
        return
    plot = harness.bars(seconds, "cifar_setup")
    harness.page(__file__, "The CIFAR-10 set-up of pfl", f"{body}\n\n{plot}")


if __name__ == "__main__":
    main()
