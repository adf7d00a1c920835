"""Runs of one method per family, saved by the library as it was before the folders moved, which must still resume.

The files in `tests/simulate/baseline/` are those checkpoints, one zip per family, written by this script in a checkout
of commit c7b6674: `JAX_ENABLE_X64=1 python tests/support/baseline_runs.py FOLDER`.
"""

import contextlib
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

import fedstrata as fs

ROUNDS = 8


def clients(seed: int = 0) -> fs.Federation:
    rng, shards = np.random.default_rng(seed), []
    for rows in (6, 9, 7, 8):
        x = rng.normal(size=(rows, 3))
        group = (x[:, 1] > 0).astype(np.int32)
        shards.append({"x": x, "y": np.arange(rows, dtype=np.int32) % 2, "group": group})
    return fs.Federation.from_clients(shards)


def returns() -> fs.Federation:
    rng = np.random.default_rng(1)
    return fs.Federation.from_clients([{"r": rng.normal(0.1, 1, (rows, 3))} for rows in (8, 6, 9, 7)])


def runs() -> dict[str, tuple[Any, Any, Any, dict[str, Any]]]:
    """By family: problem, algorithm, federation and options of `fs.run`. All functions in them are the library's."""
    zeros = {"weight": np.zeros((1, 3), np.float64), "bias": np.zeros(1, np.float64)}
    classify = fs.losses.Classification(fs.models.Linear(3), l2=0.01)
    fair = fs.Fair(classify, group="group", groups=2)
    two = fs.Federation({"train": clients()["train"], "valid": clients(2)["train"]})
    ranking = fs.Pairwise(fs.models.Linear(3), fs.pair_losses.SquaredHinge())
    portfolio = fs.risk_averse(risk_aversion=0.5, eps=0.5, floor=0.1)
    scaffold = fs.SCAFFOLD if hasattr(fs, "SCAFFOLD") else fs.Scaffold  # its name then
    sparse = fs.Regularized(classify, fs.prox.ElasticNet(1e-2, 1e-2))
    quarter = np.full(3, 0.25, np.float64)
    return {
        "average": (fs.Average(classify), scaffold(0.1, 3), clients(), {"cohort": 3}),
        "regularized": (sparse, fs.FedNMap(0.1, 3, gamma=0.5), clients(), {}),
        "nested": (portfolio, fs.FedDRSCGD(0.02, 0.5, 3), returns(), {"params": quarter, "cohort": 3}),
        "bilevel": (fair.learn_weights(start=zeros), fs.FedBiOAcc(0.1, 0.15, 3, 0.1, 0.1, delta=1.0), two, {}),
        "fair": (fair, fs.FedMinMax(0.1, 2e-4), clients(), {"cohort": 3}),
        "pairwise": (ranking, fs.FedX2(0.02, 3, momentum=0.5, history=2), clients().by_label(), {"cohort": 3}),
    }


OPTIONS = {"rounds": ROUNDS, "evaluate_every": 2, "batch_size": 2, "seeds": [1, 2], "execution": "vmap"}


class Stopped(Exception):
    """Ends a run after its checkpoint, as a kill would."""


def stop(round: int, row: Any) -> None:
    if round > 4:
        raise Stopped


def write(folder: Path) -> None:
    for family, (problem, algorithm, federation, options) in runs().items():
        checkpoint = folder / family
        options = {**OPTIONS, **options, "checkpoint": checkpoint, "checkpoint_every": 0.0}
        with contextlib.suppress(Stopped):
            fs.run(problem, algorithm, federation, callbacks=[stop], **options)
        for old in sorted(checkpoint.glob("round-*"))[:-1]:
            shutil.rmtree(old)
        shutil.make_archive(str(checkpoint), "zip", checkpoint)
        print(family, [p.name for p in checkpoint.glob("*")], (folder / f"{family}.zip").stat().st_size)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
