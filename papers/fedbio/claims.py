"""The claims of li2022 about its experiments, and whether they held here."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedstrata.data.sources import missing
from fedstrata.experiments.reproduction import Claim, Verdict

from . import methods
from .comparison import MEASURES, Found, Task, against, paired
from .floor import RATE, by_chance
from .printed import TABLE_1
from .table import difference
from .tasks import DATA, divided

THEIRS = ("FedBiO", "FedBiOAcc")
COMPARABLE = 0.01  # the largest loss of accuracy that counts as comparable
WAY = 0.9  # a curve counts as converged after this share of its descent


def judged(wins: Sequence[bool]) -> Verdict:
    return "holds" if all(wins) else "holds in part" if any(wins) else "does not hold"


def claims_about_table(figure: int, found: Mapping[Task, dict[str, Found]]) -> list[Claim]:
    return [
        _best(figure, found),
        _fairer(figure, found),
        _local(figure, found),
        _minmax(figure, found),
        _cheaper(figure, found),
        _level(figure, found),
        _tracked(figure, found),
    ]


def _best(figure: int, found: Mapping[Task, dict[str, Found]]) -> Claim:
    """The best by the mean alone, as the paper marks it; our methods are left out."""
    wins: dict[str, int] = dict.fromkeys(methods.PAPER, 0)
    for methods_found in found.values():
        for column in MEASURES:
            sign = -1 if column == "test/accuracy" else 1
            means = {name: sign * methods_found[name].values[column].mean() for name in methods.PAPER}
            wins[min(means, key=lambda name: means[name] if np.isfinite(means[name]) else np.inf)] += 1
    total, own = sum(wins.values()), sum(wins[name] for name in THEIRS)
    text = ", ".join(f"{name} {count}" for name, count in wins.items())
    claim = "either FedBiO or FedBiOAcc gets the best result for most cases (Table 1)"
    verdict: Verdict = "holds" if 2 * own > total else "does not hold"
    return Claim(figure, claim, f"best means among the paper's six, of {total} cells: {text}", verdict)


def _fairer(figure: int, found: Mapping[Task, dict[str, Found]]) -> Claim:
    words, wins = [], []
    for task, methods_found in found.items():
        for name in THEIRS:
            gap, accuracy = (against(methods_found, name, column) for column in ("test/eq_opp", "test/accuracy"))
            wins.append(gap[2] < 0 and accuracy[1] > -COMPARABLE)
            words.append(f"{task.title}, {name}: EqOpp {difference(*gap)}, accuracy {difference(*accuracy)}")
    claim = "fairer than FedAvg at comparable accuracy (Table 1; comparable is ours: not 0.01 less)"
    return Claim(figure, claim, f"less FedAvg's (95 %): {'; '.join(words)}", judged(wins))


def _local(figure: int, found: Mapping[Task, dict[str, Found]]) -> Claim:
    """The change from I.I.D. to non-I.I.D. of the test gap, beyond that of FedAvg."""
    claim = "FedReg and FCFL, which use local statistics, tend to perform worse in the non-I.I.D. case"
    words, wins = [], []
    for data in dict.fromkeys(task.data for task in found):
        pair = {task.iid: f for task, f in found.items() if task.data == data}
        if len(pair) < 2:
            continue
        for name in ("FedReg", "FCFL"):
            rise = paired(*(pair[iid][name].values["test/eq_opp"] for iid in (False, True)))
            wins.append(rise[1] > 0)
            words.append(f"{data}, {name} {difference(*rise)}")
    if not wins:
        return Claim(figure, claim, "needs both divisions of one data set", "not tested")
    return Claim(figure, claim, f"test EqOpp, non-I.I.D. less I.I.D. (95 %): {'; '.join(words)}", judged(wins))


def _minmax(figure: int, found: Mapping[Task, dict[str, Found]]) -> Claim:
    gaps = {task: against(f, "FedMinMax", "test/eq_opp") for task, f in found.items()}
    text = "; ".join(f"{task.title} {difference(*gap)}" for task, gap in gaps.items())
    claim = "FedMinMax is a strong baseline and can get good performance in both settings"
    return Claim(
        figure, claim, f"test EqOpp less FedAvg's (95 %): {text}", judged([gap[2] < 0 for gap in gaps.values()])
    )


def _cheaper(figure: int, found: Mapping[Task, dict[str, Found]]) -> Claim:
    """Bytes of all clients over the whole run, stage two included."""
    words, wins = [], []
    for task, f in found.items():
        sent = {name: float(np.nanmean(f[name].values["bytes_up"])) / 1e6 for name in (*THEIRS, "FedMinMax")}
        wins += [sent[name] < sent["FedMinMax"] for name in THEIRS]
        words.append(f"{task.title}: {', '.join(f'{name} {value:.3g}' for name, value in sent.items())}")
    claim = "the algorithms communicate every I iterations, FedMinMax at every one"
    return Claim(figure, claim, f"MB sent up, stage two included: {'; '.join(words)}", judged(wins))


def _level(figure: int, found: Mapping[Task, dict[str, Found]]) -> Claim:
    """Whether the published gaps can be those of the published definition."""
    words, wins = [], []
    for task, f in found.items():
        if (task.data, task.iid) not in TABLE_1:
            continue
        printed = TABLE_1[task.data, task.iid]["FedAvg"].test[0]
        values = f["FedAvg"].values
        ours, zero, pairs = (values[c] for c in ("test/eq_opp", "test/eq_opp_zero", "test/mean_gap_zero"))
        wins.append(bool(np.min(ours) <= printed <= np.max(ours)))
        extra = f"label 0: {zero.mean():.3f}, mean over pairs of it {pairs.mean():.3f}{_floor(task)}"
        words.append(f"{task.title} {ours.mean():.3f} ({ours.min():.3f} to {ours.max():.3f}; {extra}), paper {printed}")
    text = f"FedAvg's mean (smallest to largest of all runs): {'; '.join(words)}"
    claim = "the published level of EqOpp, defined as the largest difference of group rates"
    return Claim(figure, claim, text, judged(wins))


def _floor(task: Task) -> str:
    """The gap of a perfectly fair model by sampling alone, with the groups of the test split."""
    if missing(task.data):
        return ""
    about = DATA[task.data]
    part = divided(task.data, task.iid, 0, about.validation)["test"].examples
    return f"; equal true rates of {RATE} would show {by_chance(part, 1, RATE, about.groups):.3f}"


def _tracked(figure: int, found: Mapping[Task, dict[str, Found]]) -> Claim:
    words, wins = [], []
    for task, f in found.items():
        gap, accuracy = (against(f, "TrackedBiO", c, "FedBiO") for c in ("test/eq_opp", "test/accuracy"))
        wins.append(gap[2] < 0)
        words.append(f"{task.title}: EqOpp {difference(*gap)}, accuracy {difference(*accuracy)}")
    claim = "(ours, not the paper's) TrackedBiO's weights give fairer models than FedBiO's"
    return Claim(figure, claim, f"less FedBiO's (95 %): {'; '.join(words)}", judged(wins))


def claims_about_curves(
    figure: int,
    seen: Mapping[Task, Mapping[str, Any]],
    alike: Mapping[Task, np.ndarray],
    exact: Mapping[Task, Mapping[str, np.ndarray]],
) -> list[Claim]:
    """seen: rounds and outer losses (runs, records) of every method. alike: FedBiOAcc's with the steps of FedBiO.

    exact: the exact outer loss at the end of every run, and that of "equal weights".
    """
    words, wins = [], []
    for task, lines in seen.items():
        means = {name: lines[name][1][:, 1:].mean(axis=1) for name in THEIRS}
        gap, end = paired(means["FedBiOAcc"], means["FedBiO"]), paired(*(exact[task][n] for n in reversed(THEIRS)))
        same = paired(alike[task][:, 1:].mean(axis=1), means["FedBiO"])
        wins.append(gap[2] < 0)
        reach = {name: f"{rounds_to(*lines[name]).mean():.0f}" for name in THEIRS}
        words.append(
            f"{task.title}: mean over rounds {_fine(gap)}, with equal steps {_fine(same)}, exact at the end "
            f"{_fine(end)}, rounds to {WAY:.0%} of the way {reach['FedBiOAcc']} and {reach['FedBiO']}"
        )
    faster = Claim(
        figure,
        "FedBiOAcc converges much faster than FedBiO for both I.I.D. and non-I.I.D. cases",
        f"outer loss, FedBiOAcc less FedBiO (95 %): {'; '.join(words)}",
        judged(wins),
    )
    return [faster, _slower(figure, seen), _useful(figure, exact), _drift(figure, exact)]


def _slower(figure: int, seen: Mapping[Task, Mapping[str, Any]]) -> Claim:
    claim = "data heterogeneity slows down the convergence"
    by_kind = {task.iid: lines for task, lines in seen.items()}
    if len(by_kind) < 2:
        return Claim(figure, claim, "only one division of these data was run at this scale", "not tested")
    words, wins = [], []
    for name in THEIRS:
        more = paired(*(rounds_to(*by_kind[iid][name]) for iid in (False, True)))
        wins.append(more[1] > 0)
        words.append(f"{name} {more[0]:+.0f} ({more[1]:+.0f} to {more[2]:+.0f})".replace("-", "−"))
    text = f"rounds to {WAY:.0%} of the way down, non-I.I.D. less I.I.D. (95 %): {', '.join(words)}"
    return Claim(figure, claim, text, judged(wins))


def _useful(figure: int, exact: Mapping[Task, Mapping[str, np.ndarray]]) -> Claim:
    words, wins = [], []
    for task, ends in exact.items():
        for name in THEIRS:
            gain = paired(ends[name], ends["equal weights"])
            wins.append(gain[2] < 0)
            words.append(f"{task.title}, {name} {_fine(gain)}")
    claim = "group weights are found with which the model performs well over the validation set (Section 1)"
    text = f"exact outer loss at the end, less that of equal weights (95 %): {'; '.join(words)}"
    return Claim(figure, claim, text, judged(wins))


def _drift(figure: int, exact: Mapping[Task, Mapping[str, np.ndarray]]) -> Claim:
    gaps = {task: paired(ends["TrackedBiO"], ends["FedBiO"]) for task, ends in exact.items()}
    text = "; ".join(f"{task.title} {_fine(gap)}" for task, gap in gaps.items())
    claim = "(ours, not the paper's) TrackedBiO ends at a lower exact outer loss than FedBiO"
    verdict = judged([gap[2] < 0 for gap in gaps.values()])
    return Claim(figure, claim, f"exact outer loss, TrackedBiO less FedBiO (95 %): {text}", verdict)


def rounds_to(rounds: np.ndarray, values: np.ndarray) -> np.ndarray:
    """For every run, the first recorded round after this share of the descent from its start to its lowest value."""
    first, low = values[:, :1], values.min(axis=1, keepdims=True)
    return rounds[(values <= first - WAY * (first - low)).argmax(axis=1)].astype(float)


def _fine(gap: tuple[float, float, float]) -> str:
    return "{:+.2g} ({:+.2g} to {:+.2g})".format(*gap).replace("-", "−")
