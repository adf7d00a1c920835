"""CIFAR-10 of Tables 1 and 2 with a ResNet-18, one method at a time, for a machine with a GPU.

    python -m papers.fedx.cifar --method FedX2 --out out/reproduce

runs the missing parts of one method: its tuning, then its seeds, each in a separate file of
`out/reproduce/fedx/full/runs`. Methods can thus run on several machines, and their files be copied together.
`fedstrata reproduce fedx --scale full --figure 3` then only writes the table.
"""

import argparse
from typing import Any

from fedstrata.experiments.reproduction import Desk

from .comparison import Case, Found, Size, compared, tries
from .methods import METRIC, TABLES, Setting

# The paper: 625 rounds of 32 steps, 3 seeds. The step falls after each quarter of a run of any length. Settings are
# chosen on runs a sixth as long. A centralised method's batch stays 32: others cost up to sixteen times as much.
SIZE = Size(
    rounds=48,
    tuning_rounds=8,
    seeds=3,
    tuning_seeds=1,
    evaluations=8,
    steps=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
    lams=(),
    batches=(),
    together=1,
    model=(("half", True), ("width", 32), ("squashed", False)),
)


def case(table: str = "kl", **changed: Any) -> Case:
    """Table 1 ("kl") or Table 2 ("psm") on CIFAR-10; `changed` are fields of `Size`."""
    return Case(table, "cifar10", SIZE._replace(**changed))


def run(desk: Desk, method: str, table: str = "kl", **changed: Any) -> Found:
    """Tune one method, then run it on all seeds. Finished runs are not repeated."""
    return compared(desk, case(table, **changed), [method])[method]


def trial(desk: Desk, method: str, step: float = 0.1, lam: float = 1.0, table: str = "kl", **changed: Any) -> Any:
    """The history of one short run, which shows the time of a round and whether it learns."""
    return tries(desk, case(table, **changed), method, Setting(step, lam))[0]


def main() -> None:
    from fedstrata.base.compilation import configure

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", default="kl", choices=("kl", "psm"), help="kl: Table 1, psm: Table 2")
    parser.add_argument("--method", action="append", help="as in the table; may be repeated (default: all)")
    parser.add_argument("--rounds", type=int, default=SIZE.rounds)
    parser.add_argument("--tuning-rounds", type=int, default=SIZE.tuning_rounds)
    parser.add_argument("--seeds", type=int, default=SIZE.seeds)
    parser.add_argument("--width", type=int, default=32, help="channels of the network's first stage")
    parser.add_argument("--trial", type=float, metavar="STEP", help="one short run with this step")
    parser.add_argument("--out", default="out/reproduce")
    given = parser.parse_args()
    configure(cache=True)
    desk = Desk(f"{given.out}/fedx/full", "full")
    changed: dict[str, Any] = {"rounds": given.rounds, "tuning_rounds": given.tuning_rounds, "seeds": given.seeds}
    changed["model"] = (("half", True), ("width", given.width), ("squashed", False))
    for method in given.method or TABLES[given.table]:
        if given.trial:
            history = trial(desk, method, given.trial, table=given.table, **changed)
            names = ("seconds", "objective", f"valid/{METRIC[given.table]}")
            print(method, {name: history[name].round(4).tolist() for name in names}, flush=True)
            continue
        found = run(desk, method, given.table, **changed)
        means = {name: f"{v.mean():.4f} ± {v.std():.4f}" for name, v in found.values.items()}
        print(method, found.setting, means, flush=True)


if __name__ == "__main__":
    main()
