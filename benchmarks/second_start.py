"""Time saved by the persistent compilation cache: the same command twice, in fresh processes."""

import os
import subprocess
import sys
import tempfile
import time

import numpy as np

import harness

COMMAND = ["run", "digits", "--algorithm", "SCAFFOLD", "--rounds", "20", "--quiet", "--force"]
# The same run from Python, with the command line's cache. Its result has the time of compilation.
CODE = """
import fedstrata as fs
from fedstrata.base.compilation import configure
from fedstrata.experiments import get
configure(cache=True)
setup = get("digits").build()
options = dict(rounds=20, batch_size=16, seeds=3, evaluate_every=1)
print(fs.run(setup.problem, fs.SCAFFOLD(0.3, 10), setup.federation, **options).compile_seconds)
"""


def command(cache: str, out: str) -> float:
    began = time.perf_counter()
    arguments = [sys.executable, "-m", "fedstrata.cli.main", *COMMAND, "--out", out]
    subprocess.run(arguments, env={**os.environ, "FEDSTRATA_CACHE": cache}, check=True, capture_output=True)
    return time.perf_counter() - began


def compilation(cache: str, _: str) -> float:
    environment = {**os.environ, "FEDSTRATA_CACHE": cache}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout)


def main() -> None:
    rows = []
    for name, measure in {"whole command": command, "start and compilation": compilation}.items():
        first, second = [], []
        for _ in range(5):
            with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as out:
                first.append(measure(cache, out))
                second.append(measure(cache, out))
        times = [np.array(first), np.array(second)]
        rows.append([name, *(harness.spread(t, 1) for t in times), f"{np.median(times[1] / times[0]):.2f}"])
    head = ["seconds: median [quartiles]", "first start (empty cache)", "second start", "ratio"]
    note = f"`fedstrata {' '.join(COMMAND[:6])}`, five times each. The second start still imports, traces and loads."
    harness.page(__file__, "Second start", note + "\n\n" + harness.table(head, rows))


if __name__ == "__main__":
    main()
