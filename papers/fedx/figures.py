"""Tables 1 and 2 as figures 3 and 4, average precision as figure 5, and Figures 1 and 2 at a size for a CPU."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.experiments.reproduction import Claim, Desk, Outcome
from fedstrata.experiments.reproduction.drawing import Line, Panel, draw
from fedstrata.experiments.reproduction.statistics import interval

from . import cifar, tables
from .comparison import Case, Found, Size, at_best, compared, runs, tuned
from .methods import BATCHES, TABLES
from .tables import judged, words
from .tasks import CPU, PAPER, TASKS, absent

if TYPE_CHECKING:
    from fedstrata.report.history import History

STEPS = (0.01, 0.1, 1.0, 10.0)  # a decade above the paper's: runs are much shorter, and scores are between 0 and 1
SIZES = {
    "small": Size(20, 20, seeds=10, tuning_seeds=2, evaluations=10, steps=STEPS, batches=(256,)),
    "full": Size(80, 40, seeds=10, tuning_seeds=2, evaluations=20, steps=STEPS, batches=BATCHES),
}
ABLATION = "ijcnn1"
INTERVALS = (1, 8, 32, 128)  # K
MACHINES = (1, 4, 16)  # N of 16, each with its own data
HISTORIES = (1, 2, 4)  # τ


class NotHere(Exception):
    """A run that is neither stored nor to be started on this machine."""


class Shelf(Desk):
    """A desk that only reads stored runs, for machines without a GPU."""

    def run(self, name: str, build: Any, data: Mapping[str, Any], algorithm: Any, **options: Any) -> "History":
        return super().run(name, _refused, data, algorithm, **options)


def _refused(**data: Any) -> Any:
    raise NotHere


def figure_3(desk: Desk) -> Outcome:
    """Table 1: partial AUC."""
    return _table(desk, 3, "kl")


def figure_4(desk: Desk) -> Outcome:
    """Table 2: AUC with flipped labels."""
    return _table(desk, 4, "psm")


def figure_5(desk: Desk) -> Outcome:
    """Average precision, for which the paper has losses and no numbers."""
    return _table(desk, 5, "ap")


def _table(desk: Desk, number: int, table: str) -> Outcome:
    results: dict[str, dict[str, Found]] = {}
    empty = {task: "data absent" for task in PAPER if absent(task)}
    sizes = {"cifar10": cifar.SIZE}
    if table != "ap" and "cifar10" not in empty:
        on_gpu = on_cifar(desk, table) if desk.scale == "full" else {}
        empty["cifar10"] = "not run: full scale, on a GPU"
        if on_gpu:
            results["cifar10"] = on_gpu
    for task in CPU:
        if absent(task):
            empty[task] = "data absent"
        elif desk.scale == "small" or table != "kl":
            sizes[task] = SIZES[desk.scale]
            results[task] = compared(desk, Case(table, task, sizes[task]))
    path = tables.write(desk, table, results, empty, sizes)
    return Outcome(tables.claims(number, table, results, empty), [path])


def on_cifar(desk: Desk, table: str) -> dict[str, Found]:
    """Methods on CIFAR-10; without a GPU, those whose runs are all stored."""
    import jax

    reads = jax.default_backend() == "cpu"
    place = Shelf(desk.folder, desk.scale, desk.quiet) if reads else desk
    found = {}
    for name in TABLES[table]:
        try:
            found[name] = cifar.run(place, name, table)
        except NotHere:
            continue
    desk.done |= place.done
    return found


def figure_1(desk: Desk) -> Outcome:
    """Partial AUC of FedX2 for several K and N."""
    if absent(ABLATION):
        return Outcome([Claim(1, "FedX2 tolerates skipped communications", "data absent", "not tested")], [])
    by_k = {f"K = {k}": _ablation(desk, local_steps=k) for k in INTERVALS}
    by_n = {f"N = {n}": _ablation(desk, clients=max(MACHINES), only=n) for n in MACHINES}
    panels = []
    for what, found in (("N = 8", by_k), ("K = 32", by_n)):
        for column in ("pauc_0.3", "pauc_0.5"):
            lines = {name: _line(histories, column, name) for name, histories in found.items()}
            title = f"{what}, {tables.MEASURES[column]}"
            panels.append(Panel(title, lines, across="iterations", up="test pAUC", log=False))
    path = draw(panels, f"FedX2 on {TASKS[ABLATION].title}", desk.folder / "figure_1.png", columns=2)
    ends = {name: np.concatenate([at_best(h, "pauc_0.3") for h in hs]) for name, hs in (by_k | by_n).items()}
    skipped = {name: interval(ends[name] - ends["K = 1"]) for name in by_k if name != "K = 1"}
    more = {name: interval(ends["N = 16"] - ends[name]) for name in by_n if name != "N = 16"}
    show = lambda found: ", ".join(f"{name} {words(value)}" for name, value in found.items())
    tolerant = judged([value[1] > -tables.COMPETITIVE for value in skipped.values()])
    return Outcome(
        [
            Claim(
                1,
                "FedX2 can tolerate a certain value of K for skipping communications without harming the performance",
                f"test pAUC (FPR ≤ 0.3) less that of K = 1, the same number of iterations (95 %): {show(skipped)}",
                tolerant,
            ),
            Claim(
                1,
                "using data from more sources can dramatically improve the performance",
                f"test pAUC (FPR ≤ 0.3) of N = 16 less that of fewer (95 %): {show(more)}",
                judged([value[1] > 0 for value in more.values()]),
            ),
        ],
        [path],
    )


def figure_2(desk: Desk) -> Outcome:
    """Partial AUC of FedX2 with scores of the last τ rounds as partners."""
    if absent(ABLATION):
        return Outcome([Claim(2, "larger buffers improve the performance", "data absent", "not tested")], [])
    panels, parts, wins = [], [], []
    for k in (8, 32):
        found = {f"τ = {tau}": _ablation(desk, local_steps=k, history=tau) for tau in HISTORIES}
        lines = {name: _line(histories, "pauc_0.3", f"K = {k}") for name, histories in found.items()}
        panels.append(Panel(f"N = 8, K = {k}", lines, across="iterations", up="test pAUC, FPR ≤ 0.3", log=False))
        ends = {name: np.concatenate([at_best(h, "pauc_0.3") for h in hs]) for name, hs in found.items()}
        for name in list(found)[1:]:
            one = interval(ends[name] - ends["τ = 1"])
            wins.append(one[1] > 0)
            parts.append(f"K = {k}, {name} {words(one)}")
    path = draw(panels, f"FedX2 with older scores, {TASKS[ABLATION].title}", desk.folder / "figure_2.png", columns=2)
    text = f"test pAUC (FPR ≤ 0.3) less that of τ = 1 (95 %): {', '.join(parts)}"
    return Outcome([Claim(2, "keeping some larger τ can improve the performance", text, judged(wins))], [path])


def _ablation(desk: Desk, local_steps: int = 32, **changed: Any) -> list["History"]:
    """FedX2 with the step, λ and number of iterations of Table 1."""
    size = SIZES[desk.scale]
    case = Case("kl", ABLATION, size)
    setting = tuned(desk, case, "FedX2")[0]
    rounds = size.rounds * size.local_steps // local_steps
    return runs(desk, case, "FedX2", setting, range(size.seeds), rounds, local_steps=local_steps, **changed)


def _line(histories: list["History"], column: str, name: str) -> Line:
    """Test values of all seeds against iterations."""
    k = int(name.split()[-1]) if name.startswith("K") else 32
    return Line(k * histories[0].mean("round"), np.concatenate([h[f"test/{column}"] for h in histories]))
