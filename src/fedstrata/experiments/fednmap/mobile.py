"""Figure 6: sparsity and training loss of MobileNetV3-Small with an l1 norm."""

from functools import partial
from typing import TYPE_CHECKING, Any

from fedstrata.experiments.drawing import Line, Panel, draw
from fedstrata.experiments.fednmap.tasks import cifar10
from fedstrata.experiments.reproduction import Claim, Desk, Outcome, Verdict

if TYPE_CHECKING:
    from fedstrata.report.history import History

METHODS = ("FedNMap", "Zhang2024", "FedCanon")
GAMMA = 2.5
# small: the same code with a network a quarter as wide, fewer pictures and rounds, one seed.
SIZES: dict[str, dict[str, Any]] = {
    "small": {"rounds": 40, "batch_size": 8, "seeds": 1, "width": 0.25, "rows": 1000, "cells": ((20, 10),)},
    "full": {
        "rounds": 1200,
        "batch_size": 32,
        "seeds": 2,
        "width": 1.0,
        "rows": 0,
        "cells": ((20, 10), (20, 20), (50, 10)),
    },
}


def run(desk: Desk, name: str, clients: int, steps: int) -> "History":
    """One method in one cell of the figure."""
    from fedstrata.algorithms import FedCanon, FedNMap, Zhang2024

    kinds = {"FedNMap": partial(FedNMap, gamma=GAMMA), "Zhang2024": Zhang2024, "FedCanon": FedCanon}
    size = SIZES[desk.scale]
    data = {"clients": clients, "width": size["width"], "rows": size["rows"], "gamma": GAMMA}
    options = {k: size[k] for k in ("rounds", "batch_size", "seeds")} | {"evaluate_every": size["rounds"] // 20}
    options["stationarity"] = False  # the figure has none, and a full gradient is most of the evaluation
    return desk.run(f"mobile_{name}_n{clients}_Q{steps}", cifar10, data, kinds[name](1 / steps, steps), **options)


def figure_6(desk: Desk) -> Outcome:
    """Hoyer's sparsity and the training loss for (n, Q) = (20, 10), (20, 20), (50, 10)."""
    size = SIZES[desk.scale]
    sparsity, losses, wins, words = [], [], [], []
    for clients, steps in size["cells"]:
        found = {name: run(desk, name, clients, steps) for name in METHODS}
        cell = f"n = {clients}, Q = {steps}"
        lines = lambda column, found=found: {k: Line(h.mean("round"), h[column]) for k, h in found.items()}
        sparsity.append(Panel(cell, lines("hoyer"), up="Hoyer's sparsity", log=False))
        losses.append(Panel(cell, lines("loss"), up="training loss", log=False))
        ends = {k: (h.last("hoyer").mean(), h.last("loss").mean()) for k, h in found.items()}
        ours = ends["FedNMap"]
        wins += [won for k, (s, f) in ends.items() if k != "FedNMap" for won in (ours[0] > s, ours[1] < f)]
        words.append(f"{cell}: " + ", ".join(f"{k} {s:.3f} / {f:.3f}" for k, (s, f) in ends.items()))
    seeds = f"{size['seeds']} seed{'s' * (size['seeds'] > 1)}"
    title = f"MobileNetV3-Small (width {size['width']:g}), l1 norm, CIFAR-10 sorted by label, {seeds}"
    path = draw([*sparsity, *losses], title, desk.folder / "figure_6.png", columns=len(size["cells"]))
    verdict: Verdict = "holds" if all(wins) else "holds in part" if any(wins) else "does not hold"
    if desk.scale == "small":
        verdict = "not tested"  # it shows that the code runs; so few rounds teach the network nothing
    claim = "FedNMap consistently achieves higher sparsity and lower training loss than Zhang and FedCanon"
    return Outcome([Claim(6, claim, f"sparsity / training loss at the end; {'; '.join(words)}", verdict)], [path])
