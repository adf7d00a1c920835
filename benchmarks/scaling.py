"""Weak scaling: the same number of clients on each device or process.

On a CPU the devices share its cores, and one device already uses all of them. With 2 cores nothing can get faster: the
benchmark measures the cost of spreading. Perfect weak scaling of work that fills the machine is time ∝ devices.
"""

import argparse
import os
import subprocess
import sys

import numpy as np

import harness
from fedstrata.simulate.multiprocess import local_coordinator

PER_DEVICE, ROUNDS = 40, 5


def child(repeats):
    """One process of a run: prints the seconds of every repeat."""
    import jax

    import fedstrata as fs
    from fedstrata.simulate import multiprocess as processes
    from harness import prepare

    if processes.COORDINATOR in os.environ:
        processes.join()
    clients = PER_DEVICE * len(jax.devices())
    rng = np.random.default_rng(0)
    x = rng.random((clients * 64, 784), dtype=np.float32)
    y = rng.integers(0, 10, len(x)).astype(np.int32)
    data = fs.Federation.from_offsets({"x": x, "y": y}, np.arange(clients + 1) * 64)
    problem = fs.Average(fs.losses.Classification(fs.models.MLP((784, 32, 10))))
    options = {"rounds": 10**6, "evaluate_every": 10**6, "batch_size": 32, "stationarity": False, "execution": "vmap"}
    job = prepare(problem, fs.SCAFFOLD(0.1, 10), data, mesh="all", **options)
    box = [job.begin()[0]]

    def advance():
        box[0] = job.advance(box[0], 0, ROUNDS, in_place=True)[0]
        return box[0].shared

    took = harness.interleaved({"it": advance}, repeats)["it"]
    if jax.process_index() == 0:
        print(" ".join(str(t) for t in took), file=sys.stderr)


def measured(devices, processes, repeats):
    shared = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, __file__, "--child", "--repeats", str(repeats)]
    with local_coordinator() as address:
        if processes > 1:
            shared |= {"FEDSTRATA_COORDINATOR": address, "FEDSTRATA_PROCESSES": str(processes)}
        started = [
            subprocess.Popen(command, env={**shared, "FEDSTRATA_PROCESS": str(n)}, stderr=subprocess.PIPE, text=True)
            for n in range(processes)
        ]
        said = [process.communicate()[1] for process in started]
    return np.array([float(word) for word in said[0].strip().splitlines()[-1].split()]) / ROUNDS


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.repeats)
        return
    cases = {"one device": (1, 1), "2 devices": (2, 1), "4 devices": (4, 1), "2 processes of one device": (1, 2)}
    took = {title: [] for title in cases}
    for _ in range(3):  # processes come and go, so whole measurements are interleaved
        for title, case in cases.items():
            took[title].append(measured(*case, given.repeats))
    rows, one = [], np.concatenate(took["one device"])
    for title, (devices, processes) in cases.items():
        times = np.concatenate(took[title])
        share = np.median(times) / (devices * processes * np.median(one))
        rows.append([title, devices * processes * PER_DEVICE, harness.spread(times), f"{share:.2f}"])
    head = ["where", "clients", "ms per round: median [quartiles]", "time per client, one device = 1"]
    note = (
        f"SCAFFOLD, MLP 784-32-10, {PER_DEVICE} clients per device, 10 local steps, batch 32. One device uses all "
        f"{os.cpu_count()} cores, so time grows with the number of clients however they are spread. 1.00 in the last "
        "column means that spreading costs nothing."
    )
    harness.page(__file__, "Weak scaling", note + "\n\n" + harness.table(head, rows))


if __name__ == "__main__":
    main()
