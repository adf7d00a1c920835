"""CPU time of one phase at a site: Flower with a client app that does nothing, and a phase of FedAvg.

Both answer messages of the same size on loopback, at one site, one after the other. All CPU time at the site counts:
the SuperNode, the processes that are started for every message, and those that keep running. "Flower's program" runs
the FedAvg app in the process that Flower starts for a message. `fedstrata deploy site` replaces that program by one
that checks whether the app was approved, and forks from a process that has imported Flower.
"""

import os
import tempfile
import time
from pathlib import Path

import numpy as np

import harness
from fedstrata.deploy.flower.config import SiteConfig, environment
from fedstrata.deploy.flower.local_federation import LocalFederation

FIRST, LAST, REPEATS = 3, 13, 3  # exchanges between which time is measured
PROJECT = """
[project]
name = "{name}"
version = "1.0.0"
description = "a benchmark"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "benchmarks"
[tool.flwr.app.components]
serverapp = "{name}.server_app:app"
clientapp = "{name}.client_app:app"
[tool.flwr.app.config]
run = "first"
folder = "out"
"""
NOTHING = {
    "client_app": """
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
app = ClientApp()
@app.train("phase0")
def train(message, context):
    return Message(message.content, reply_to=message)
""",
    "server_app": """
import os, time
import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.1)
    folder = os.path.join(context.run_config["folder"], "first")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "reports.jsonl"), "w") as file:
        for _ in range({rounds}):
            content = RecordDict({{"x": ArrayRecord([np.zeros(100)])}})
            sent = grid.push_messages([Message(content, nodes[0], "train.phase0")])
            while not list(grid.pull_messages(sent)):
                time.sleep(0.1)
            print("done", file=file, flush=True)
""",
}
FEDAVG = {
    f"{side}_app": f"""
from fedstrata.deploy.flower.{side}_app import {side}_app
app = {side}_app("{{name}}.task:deployment")
"""
    for side in ("client", "server")
} | {
    "task": """
import numpy as np
import fedstrata as fs
from fedstrata.deploy.flower import Deployment
problem = fs.Average(lambda w, example: 0.5 * (w - example["x"]) @ (w - example["x"]))
load = lambda settings: fs.Federation.from_clients([{{"x": np.ones((20, 100), "float32")}}])
options = {{"params": np.zeros(100, "float32"), "batch_size": 4}}
deployment = Deployment(problem, fs.FedAvg(0.1), load, {rounds}, 1, options)
""",
}


class Stock(SiteConfig):
    """A site whose client app is started by Flower's program."""

    def environment(self) -> dict[str, str]:
        return environment(self.folder / self.state)


def cpu(flower: LocalFederation) -> float:
    """CPU seconds of the site's processes so far, including those that have ended."""
    whole = {flower.processes["site"].pid}
    parents = {int(p.name): _stat(p) for p in Path("/proc").glob("[0-9]*") if _stat(p)}
    while more := {pid for pid, fields in parents.items() if int(fields[1]) in whole} - whole:
        whole |= more
    lasting = [str(flower.home / "site").encode(), b"fedstrata.deploy.flower"]  # worker and fork server
    whole |= {pid for pid in parents if all(word in _command(pid) for word in lasting)}
    ticks = sum(sum(map(int, parents[pid][11:15])) for pid in whole if pid in parents)
    return ticks / os.sysconf("SC_CLK_TCK")


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _stat(entry: Path) -> list[str]:
    try:
        return (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def phase(files: dict[str, str], name: str, kind: type[SiteConfig]) -> float:
    """CPU seconds of one exchange."""
    with tempfile.TemporaryDirectory() as folder:
        app = Path(folder) / name
        (app / name).mkdir(parents=True)
        (app / "pyproject.toml").write_text(PROJECT.format(name=name))
        for file, text in {"__init__": "", **files}.items():
            (app / name / f"{file}.py").write_text(text.format(name=name, rounds=LAST + 2))
        flower = LocalFederation(app, Path(folder) / "home", {"site": {}}, secure=False)
        flower.sites["site"] = kind(*flower.sites["site"])
        with flower:
            process = flower.run(folder=folder)
            reports, at = Path(folder) / "first" / "reports.jsonl", {}
            while len(at) < 2:
                if process.poll() is not None:
                    raise RuntimeError(process.communicate()[0])
                done = len(reports.read_text().splitlines()) if reports.exists() else 0
                for mark in (FIRST, LAST):
                    if done >= mark and mark not in at:
                        at[mark] = cpu(flower), done
                time.sleep(0.02)
            process.communicate()
    (before, first), (after, last) = at[FIRST], at[LAST]
    return (after - before) / (last - first)


def main() -> None:
    kinds = {
        "Flower, an app that does nothing": (NOTHING, Stock),
        "FedAvg, in Flower's program": (FEDAVG, Stock),
        "FedAvg, as `fedstrata deploy site` runs it": (FEDAVG, SiteConfig),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for repeat in range(REPEATS):
        for number, (name, (files, kind)) in enumerate(kinds.items()):
            found[name].append(phase(files, f"app{repeat}x{number}", kind))
    base = np.array(found["Flower, an app that does nothing"])
    rows = [
        [name, harness.spread(1000 * np.array(times), 1), f"{np.median(1000 * (np.array(times) - base)):+.0f}"]
        for name, times in found.items()
    ]
    head = ["one phase at a site", "CPU, ms: median [quartiles]", "beyond the app that does nothing, ms"]
    note = f"{(__doc__ or '').strip()}\n\nExchanges {FIRST} to {LAST} of a run, {REPEATS} runs of each in turn."
    harness.page(__file__, "A phase at a site", note + "\n\n" + harness.table(head, rows))


if __name__ == "__main__":
    main()
