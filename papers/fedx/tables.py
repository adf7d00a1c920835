"""The paper's tables and ours side by side, as files, and the claims about them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedstrata.base.files import replacing
from fedstrata.experiments.reproduction import Claim, Desk, Verdict
from fedstrata.experiments.reproduction.statistics import interval

from . import methods
from .comparison import Found, Size
from .printed import PRINTED
from .tasks import PAPER, TASKS

COMPETITIVE = 0.01  # the largest loss that counts as competitive
NAMES = {"kl": "Table 1", "psm": "Table 2", "ap": "Average precision"}
TITLES = {
    "kl": "partial AUC on test data (McClish), KL-OPAUC",
    "psm": "AUC on test data, 20 % of the training labels flipped, pairwise sigmoid",
    "ap": "average precision on test data (the paper has no such table)",
}
MEASURES = {"pauc_0.3": "FPR ≤ 0.3", "pauc_0.5": "FPR ≤ 0.5", "auc": "AUC", "ap": "AP"}
Results = Mapping[str, Mapping[str, Found]]  # task -> method -> result


def hero(table: str) -> str:
    """The paper's method in a table."""
    return "FedX1" if table == "psm" else "FedX2"


def write(desk: Desk, table: str, results: Results, empty: Mapping[str, str], sizes: Mapping[str, Size]) -> Path:
    """Methods on every task: the paper's mean, ours with its deviation, and the difference to the paper's method.

    empty: tasks of the paper without numbers here, and the reason. sizes: of every task, listed below the table.
    """
    columns = [c for c in MEASURES if any(c in f.values for found in results.values() for f in found.values())]
    head = ["data", "method", "step", "λ", "batch", "settings tried"]
    for column in columns or ["pauc_0.3"]:
        head += [f"{MEASURES[column]}: paper", "ours", f"less {hero(table)}'s (95 %)"]
    lines = [f"# {NAMES[table]}: {TITLES[table]}", ""]
    lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for task in dict.fromkeys([*(PAPER if table != "ap" else ()), *results]):
        if task not in results:
            paper = [f"{_paper(table, c, task, hero(table))} ({hero(table)})" for c in columns or ["pauc_0.3"]]
            cells = [TASKS[task].title, empty.get(task, "data absent"), "", "", "", ""]
            lines.append(f"| {' | '.join([*cells, *(cell for p in paper for cell in (p, '', ''))])} |")
            continue
        for name, found in results[task].items():
            lines.append(f"| {' | '.join(_row(table, task, name, found, results[task], columns))} |")
    lines += ["", *_notes(results, sizes)]
    path = desk.folder / f"table_{table}.md"
    with replacing(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n")
    return path


def _row(
    table: str, task: str, name: str, found: Found, others: Mapping[str, Found], columns: Sequence[str]
) -> list[str]:
    method, setting = methods.TABLES[table][name], found.setting
    step = f"{setting.step:.3g}{' (edge)' * found.edge}"
    lam = f"{setting.lam:g}" if table == "kl" and not method.loss else ""
    batch = str(method.batch) if method.algorithm == "FedAvg" else f"{setting.batch} + {setting.batch}"
    cells = [TASKS[task].title, f"{name} (ours)" if method.ours else name, step, lam, batch, str(found.tried)]
    for column in columns:
        gap = "" if name == hero(table) or hero(table) not in others else difference(others, name, column, table)
        cells += [_paper(table, column, task, name), spread(found.values[column]), gap]
    return cells


def _paper(table: str, column: str, task: str, name: str) -> str:
    value = PRINTED[table].get(column, {}).get(task, {}).get(name)
    return "" if value is None else f"{value:.4f}"


def spread(values: np.ndarray) -> str:
    return f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else f"{np.mean(values):.4f}"


def gap(found: Mapping[str, Found], name: str, other: str, column: str) -> tuple[float, float, float]:
    """The mean difference to another method over seeds, paired, and its 95 % interval."""
    return interval(found[name].values[column] - found[other].values[column])


def difference(found: Mapping[str, Found], name: str, column: str, table: str) -> str:
    return words(gap(found, name, hero(table), column))


def words(found: tuple[float, float, float]) -> str:
    return "{:+.4f} ({:+.4f} to {:+.4f})".format(*found).replace("-", "−")


def _notes(results: Results, sizes: Mapping[str, Size]) -> list[str]:
    lines = []
    for task in results:
        size, about = sizes[task], TASKS[task]
        what = f"{size.rounds} rounds of {size.local_steps} steps ({size.rounds * size.local_steps:,}; paper 20,000)"
        lines.append(
            f"{about.title}: {what}, {size.seeds} seeds, {about.clients} clients, {about.model}; {about.here}."
        )
    comparable = "Values are not comparable with the paper's: fewer data and steps, or other data; only orders are."
    return [*lines, comparable]


# Claims.


def claims(figure: int, table: str, results: Results, empty: Mapping[str, str]) -> list[Claim]:
    """The paper's claims about a table, and the order of methods in its CIFAR-10 row."""
    ours, best = hero(table), NAMES[table]
    if not results:
        text = "; ".join(f"{TASKS[t].title}: {why}" for t, why in empty.items())
        return [Claim(figure, f"{best}: {ours} is better than all local methods", text, "not tested")]
    local = ("Local SGD", "Local Pair", "CODASCA")
    texts = {
        "kl": f"{ours} is better than all local methods (Local SGD, Local Pair and CODASCA)",
        "psm": f"{ours} is more robust to label noise than Local SGD, Local Pair and CODASCA",
        "ap": f"(no numbers in the paper) {ours} is better than Local SGD and Local Pair",
    }
    found = [_better(figure, texts[table], results, ours, local)]
    if table == "kl":
        text = "using data pairs from all machines is helpful: FedX2 is better than Local Pair"
        found.append(_better(figure, text, results, ours, ("Local Pair",)))
    found.append(_competitive(figure, results, ours))
    if "cifar10" in results and table != "ap":
        found.append(_order(figure, table, results["cifar10"]))
    found.append(
        _better(figure, f"(ours, not the paper's) TrackedX is better than {ours}", results, "TrackedX", (ours,))
    )
    return found


def _better(figure: int, text: str, results: Results, ours: str, others: Sequence[str]) -> Claim:
    """One method above others on every task, by paired intervals."""
    parts, wins = [], []
    for task, found in results.items():
        told = []
        for other in others:
            if ours not in found or other not in found:
                continue
            for column in found[ours].values:
                if column == "pauc_0.5":
                    continue  # the table has it; settings were chosen by the first column
                one = gap(found, ours, other, column)
                wins.append(one[1] > 0)
                told.append(f"{other} {words(one)}")
        if told:
            parts.append(f"{TASKS[task].title}: {', '.join(told)}")
    return Claim(figure, text, f"{ours} less others, paired by seed (95 %): {'; '.join(parts)}", judged(wins))


def _competitive(figure: int, results: Results, ours: str) -> Claim:
    parts, wins = [], []
    for task, found in results.items():
        if ours in found and "Centralized" in found:
            column = next(iter(found[ours].values))
            one = gap(found, ours, "Centralized", column)
            wins.append(one[1] > -COMPETITIVE)
            parts.append(f"{TASKS[task].title} {words(one)}")
    text = f"{ours} has competitive performance with the Centralized method (here: not {COMPETITIVE} less)"
    return Claim(figure, text, f"{ours} less Centralized, paired by seed (95 %): {'; '.join(parts)}", judged(wins))


def _order(figure: int, table: str, found: Mapping[str, Found]) -> Claim:
    """Of the pairs of methods whose published values differ by more than their deviations, how many have our order."""
    same, total, orders = 0, 0, []
    for column, printed in PRINTED[table].items():
        row = {name: value for name, value in printed["cifar10"].items() if name in found}
        means = {name: float(np.mean(found[name].values[column])) for name in row}
        pairs = [(a, b) for a in row for b in row if row[a] > row[b]]
        same, total = same + sum(means[a] > means[b] for a, b in pairs), total + len(pairs)
        orders.append(f"{MEASURES[column]}: paper {_ranked(row)}, ours {_ranked(means)}")
    verdict: Verdict = "holds" if same == total else "holds in part" if 2 * same > total else "does not hold"
    text = "the order of methods on CIFAR-10 (values are not comparable: fewer pictures and steps)"
    return Claim(figure, text, f"{same} of {total} pairs have the paper's order; {'; '.join(orders)}", verdict)


def _ranked(values: Mapping[str, float]) -> str:
    return " > ".join(sorted(values, key=lambda name: -values[name]))


def judged(wins: Sequence[bool]) -> Verdict:
    if not wins:
        return "not tested"
    return "holds" if all(wins) else "holds in part" if any(wins) else "does not hold"
