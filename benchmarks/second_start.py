"""What the persistent compilation cache saves: the same command twice, in fresh processes."""

import json
import os
import subprocess
import sys
import tempfile
import time

import numpy as np

import harness

RUN = [
    "-m",
    "fedstrata.cli",
    "run",
    "digits",
    "--algorithm",
    "Scaffold",
    "--rounds",
    "20",
    "--quiet",
    "--force",
    "--json",
]


def start(cache, out):
    """Seconds of the whole command, and the seconds it says it compiled."""
    environment = {**os.environ, "FEDSTRATA_CACHE": cache}
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *RUN, "--out", out], env=environment, check=True, capture_output=True, text=True
    )
    method = json.loads(done.stdout)["methods"]["Scaffold"]
    return time.perf_counter() - began, float(method["compile_seconds"])


def main():
    first, second = [], []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as out:
            first.append(start(cache, out))
            second.append(start(cache, out))
    whole = [np.array([t for t, _ in times]) for times in (first, second)]
    compiled = [np.array([c for _, c in times]) for times in (first, second)]
    rows = [
        ["whole command", harness.spread(whole[0], 1), harness.spread(whole[1], 1)],
        ["start-up and compilation", harness.spread(compiled[0], 1), harness.spread(compiled[1], 1)],
    ]
    head = ["seconds: median [quartiles]", "first start (empty cache)", "second start"]
    note = "`fedstrata run digits --algorithm Scaffold --rounds 20`, thrice each; what is left is tracing and loading."
    harness.page(__file__, "Second start", note + "\n\n" + harness.table(head, rows))


if __name__ == "__main__":
    main()
