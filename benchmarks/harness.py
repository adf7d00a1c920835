"""Timing and pages of benchmarks: interleaved contenders, medians with quartiles, one Markdown page each."""

import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedstrata.simulate import run
from fedstrata.simulate.executable import Executable
from fedstrata.simulate.options import RunOptions

# JAX takes most of a GPU's memory when it starts. Programs of a benchmark share the GPU, so preallocation is off. Every
# benchmark imports this module, and child processes inherit the setting.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

PAGES = Path(__file__).parents[1] / "docs" / "benchmarks"
IMAGES = PAGES.parent / "images"


def prepare(problem: Any, algorithm: Any, federation: Any, **options: Any) -> Executable:
    """The executable of `fs.run` with these options."""
    return run.prepare(problem, algorithm, federation, RunOptions(**options))


def seconds(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - began


def interleaved(contenders: Mapping[str, Callable[[], Any]], repeats: int = 7) -> dict[str, np.ndarray]:
    """Seconds of each contender, taken in turn `repeats` times. The first call of each is not counted."""
    for function in contenders.values():
        seconds(function)
    took: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, function in contenders.items():
            took[name].append(seconds(function))
    return {name: np.array(values) for name, values in took.items()}


def ratio(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float, float]:
    """Median and quartiles of theirs / ours, paired within each repeat: the speed-up of ours."""
    low, middle, high = np.quantile(theirs / ours, [0.25, 0.5, 0.75])
    return float(middle), float(low), float(high)


def spread(values: np.ndarray, unit: float = 1e3) -> str:
    low, middle, high = np.quantile(values * unit, [0.25, 0.5, 0.75])
    return f"{middle:.3g} [{low:.3g}, {high:.3g}]"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    line = lambda cells: "| " + " | ".join(str(c) for c in cells) + " |"
    return "\n".join([line(head), line(["---"] * len(head)), *map(line, rows)])


def bars(seconds: Mapping[str, np.ndarray], name: str) -> str:
    """A bar chart of rounds per second, FedStrata in blue, as Markdown."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return ""

    titles = sorted(seconds, key=lambda title: float(np.median(seconds[title])), reverse=True)
    rates = np.array([np.quantile(1 / seconds[title], [0.25, 0.5, 0.75]) for title in titles])
    figure, axes = plt.subplots(figsize=(7, 0.4 * len(titles) + 1.2), layout="constrained")
    colours = ["#0072B2" if title.startswith("FedStrata") else "#999999" for title in titles]
    spans = np.stack([rates[:, 1] - rates[:, 0], rates[:, 2] - rates[:, 1]])
    drawn = axes.barh(titles, rates[:, 1], xerr=spans, color=colours, error_kw={"linewidth": 1})
    axes.bar_label(drawn, [f"{rate:.3g}" for rate in rates[:, 1]], padding=6)
    axes.set(xlabel="rounds per second (median and quartiles)", xlim=(0, 1.15 * rates.max()))
    axes.spines[["top", "right"]].set_visible(False)
    name = f"bench_{name}{_suffix()}.png"
    figure.savefig(IMAGES / name, dpi=150)
    return f"![Rounds per second](../images/{name})"


def page(script: str, title: str, body: str) -> None:
    """Print the result and write it as a page, with the command, the versions and the machine."""
    names = {n: __import__(n).__version__ for n in ("jax", "equinox", "optax", "numpy")}
    versions = ", ".join(f"{n} {v}" for n, v in names.items())
    kind = "cpu" if jax.default_backend() == "cpu" else jax.devices()[0].device_kind
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, {kind}"
    command = " ".join(["python", f"benchmarks/{Path(script).name}", *sys.argv[1:]])
    text = f"# {title}{_suffix(' on a GPU')}\n\n{body.strip()}\n\nFrom `{command}` ({machine}; {versions}).\n"
    print(text)
    PAGES.mkdir(parents=True, exist_ok=True)
    (PAGES / f"{Path(script).stem}{_suffix()}.md").write_text(text)


def _suffix(word: str = "_gpu") -> str:
    """`word` on a GPU, so that its pages have other names; empty on a CPU."""
    return "" if jax.default_backend() == "cpu" else word
