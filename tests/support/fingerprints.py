"""Fingerprints of every algorithm's common case: its trajectory, ledger, checkpoint layout and message bytes.

They compare two checkouts on one machine, say before and after a refactoring; they are not golden numbers:

    python tests/support/fingerprints.py write /tmp/before       # in the one checkout
    python tests/support/fingerprints.py write /tmp/after        # in the other
    python tests/support/fingerprints.py compare /tmp/before /tmp/after

`write` takes the library and the cases of the checkout whose `src` and `tests` are on PYTHONPATH, or of its own.
`compare` names every algorithm whose fingerprint changed, with the largest difference of its numbers.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

# Algorithms that have another name in the newer checkout.
RENAMED = {"Scaffold": "SCAFFOLD", "ScaffoldServerProx": "SCAFFOLDServerProx"}

HERE = Path(__file__).resolve().parents[2]


def fingerprint(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Hashes of one algorithm's common case, and its numbers."""
    import jax
    from cases import CASES, START, task_of

    import fedstrata as fs

    algorithm = CASES[name].algorithm
    task = task_of(algorithm)
    plain = {"rounds": 6, "evaluate_every": 1, "params": START, "execution": "vmap"}
    runs = {
        "cohort": {"cohort": 3, "batch_size": 3, "seeds": [3, 5]},
        "everyone": {"batch_size": "all"},
        "epochs": {"batch_size": 2, "sampling": "epochs"},
    }
    arrays: dict[str, np.ndarray] = {}
    hashes: dict[str, Any] = {}
    for kind, options in runs.items():
        try:
            result = fs.run(task.problem, algorithm, task.federation, **plain, **options)
        except ValueError as error:  # a centralised method may refuse epochs over unequal clients
            hashes[f"{kind}: refused"] = type(error).__name__
            continue
        columns = {n: v for n, v in result.history.columns.items() if n != "seconds"}
        found = {"solutions": result.solutions, "state": result.state, "local": result.local, "history": columns}
        for part, tree in found.items():
            leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
            arrays |= {f"{kind}/{part}{jax.tree_util.keystr(path)}": np.asarray(leaf) for path, leaf in leaves}
        hashes[f"{kind}: ledger"] = [list(entry) for entry in result.ledger.entries]
        layout = _layout(task, algorithm, {**plain, **options})
        hashes[f"{kind}: checkpoint"] = [[list(leaf.shape), str(leaf.dtype)] for leaf in jax.tree.leaves(layout)]
    if not algorithm.centralised:
        hashes["messages"] = _messages(task, algorithm, START)
    return hashes, arrays


def _layout(task: Any, algorithm: Any, options: dict[str, Any]) -> Any:
    try:
        from fedstrata.simulate.options import RunOptions
        from fedstrata.simulate.run import prepare
    except ImportError:
        from fedstrata.runtime.run import prepare

        return prepare(task.problem, algorithm, task.federation, **options).shapes()
    return prepare(task.problem, algorithm, task.federation, RunOptions(**options)).shapes()


def _messages(task: Any, algorithm: Any, start: Any) -> str:
    """A hash of all bytes that pass between server and sites in three rounds."""
    try:
        from fedstrata.deploy.in_process import advance, in_process_run
    except ImportError:
        from fedstrata.runtime.rehearsal import advance
        from fedstrata.runtime.rehearsal import rehearsal as in_process_run

    whole = hashlib.sha256()
    server, _, _ = in_process_run(
        task.problem, algorithm, task.federation, run="run", seed=5, params=start, batch_size=3, cohort=3
    )
    link = server.caller.link

    def counted(calls: Any) -> Any:
        replies = link(calls)
        for letters in (calls, replies):
            for site in sorted(letters):
                whole.update(letters[site].encode())
        return replies

    server.caller.link = counted
    advance(server, 3)
    return whole.hexdigest()


def write(folder: Path, only: list[str]) -> None:
    import jax

    jax.config.update("jax_enable_x64", True)
    from cases import CASES

    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(only or CASES):
        hashes, arrays = fingerprint(name)
        hashes["numbers"] = {
            n: hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest() for n, a in arrays.items()
        }
        (folder / f"{name}.json").write_text(json.dumps(hashes, indent=1, default=str))
        np.savez(folder / f"{name}.npz", **arrays)
        print(name, flush=True)
        jax.clear_caches()


def compare(before: Path, after: Path) -> int:
    """Print what changed; returns the number of algorithms that did."""
    stems = {RENAMED.get(p.stem, p.stem) for folder in (before, after) for p in folder.glob("*.json")}
    old_names, names, changed = {new: old for old, new in RENAMED.items()}, sorted(stems), 0
    for name in names:
        old_path = before / f"{name}.json"
        if not old_path.exists():
            old_path = before / f"{old_names.get(name, name)}.json"
        paths = [old_path, after / f"{name}.json"]
        missing = [path for path in paths if not path.exists()]
        if missing:
            print(f"{name}: only on one side, {missing[0]} is missing")
            changed += 1
            continue
        old, new = (json.loads(path.read_text()) for path in paths)
        parts = [part for part in sorted({*old, *new}) if old.get(part) != new.get(part)]
        if parts:
            changed += 1
            print(f"{name}: {', '.join(parts)} changed; {_difference(paths)}")
    print(f"{len(names)} algorithms, {changed} changed")
    return changed


def _difference(paths: list[Path]) -> str:
    """The largest difference of two runs' numbers, relative to max(|before|, 1)."""
    old, new = (dict(np.load(path.with_suffix(".npz"))) for path in paths)
    if {n: a.shape for n, a in old.items()} != {n: a.shape for n, a in new.items()}:
        return f"other arrays: {sorted({*old} ^ {*new}) or 'shapes differ'}"
    largest = 0.0
    for name, a in old.items():
        if np.issubdtype(a.dtype, np.inexact):
            with np.errstate(invalid="ignore"):
                apart = np.where(np.isnan(a) & np.isnan(new[name]), 0, np.abs(a - new[name]) / np.maximum(np.abs(a), 1))
            largest = max(largest, float(apart.max(initial=0)))
        elif not np.array_equal(a, new[name]):
            return f"{name} differs"
    return f"numbers differ by at most {largest:.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    under = parser.add_subparsers(dest="command", required=True)
    writing = under.add_parser("write")
    writing.add_argument("folder", type=Path)
    writing.add_argument("names", nargs="*", help="only these algorithms")
    comparing = under.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "compare":
        return int(compare(options.before, options.after) > 0)
    # A script's own folder comes first, before another checkout's on PYTHONPATH: put it last.
    sys.path = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
    sys.path += [str(HERE / "src"), str(HERE / "tests"), str(HERE / "tests" / "support")]
    write(options.folder, options.names)
    return 0


if __name__ == "__main__":
    sys.exit(main())
