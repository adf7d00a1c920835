"""Table 1 of the paper and ours side by side, as a file."""

from pathlib import Path

import numpy as np

from fedstrata.base.files import replacing
from fedstrata.experiments.reproduction import Desk

from .comparison import MEASURES, Found, Task, against
from .printed import TABLE_1

EXTRA = {"test/eq_opp_zero": "test gap, label 0", "test/mean_gap_zero": "mean over pairs, label 0"}


def table(task: Task, found: dict[str, Found], desk: Desk) -> Path:
    """Means ± standard deviations over runs, and paired differences to FedAvg with their 95 % intervals."""
    path = desk.folder / f"table_{task.name}.md"
    with replacing(path) as temporary:
        temporary.write_text("\n".join(rows(task, found)) + "\n")
    return path


def rows(task: Task, found: dict[str, Found]) -> list[str]:
    head = ["method", "step"]
    for text in MEASURES.values():
        head += [f"{text}: paper", "ours"]
    head += ["test accuracy less FedAvg's (95 %)", "test EqOpp less FedAvg's (95 %)", *EXTRA.values(), "MB up"]
    printed = TABLE_1.get((task.data, task.iid), {})
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, (step, edge, values) in found.items():
        cells = [name if name in printed or not printed else f"{name} (ours)", f"{step:g}{' (edge)' * edge}"]
        paper = printed.get(name)
        for number, column in enumerate(MEASURES):
            cells.append("" if paper is None else "{:.3f} ± {:.3f}".format(*paper[number]))
            cells.append(spread(values[column]))
        for column in ("test/accuracy", "test/eq_opp"):
            cells.append("" if name == "FedAvg" else difference(*against(found, name, column)))
        cells += [spread(values[column]) for column in EXTRA]
        cells.append(f"{np.nanmean(values['bytes_up']) / 1e6:.3g}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def spread(values: np.ndarray) -> str:
    lost = int(np.isnan(values).sum())
    return f"{lost} of {values.size} diverged" if lost else f"{values.mean():.3f} ± {values.std(ddof=1):.3f}"


def difference(mean: float, low: float, high: float) -> str:
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})".replace("-", "−") if np.isfinite(mean) else "not comparable"
