"""Resuming: which settings a checkpoint and the run that resumes it must have in common."""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from fedstrata.core.algorithm import Algorithm
from fedstrata.core.fingerprint import describe, differences
from fedstrata.core.hyperparameters import hyperparameters
from fedstrata.data.federation import Federation
from fedstrata.engine.checkpoint import CheckpointError, Checkpoints
from fedstrata.problems.base import Problem
from fedstrata.simulate.driver import Driver, carry_paths
from fedstrata.simulate.executable import Executable
from fedstrata.simulate.options import RunOptions, defaults
from fedstrata.simulate.records import Records

# Options that do not change a trajectory, or that the settings contain in another form.
SKIPPED = ("rounds", "params", "execution", "evaluate_every", "mesh", "stream")


def settings_of(
    executable: Executable, problem: Problem, algorithm: Algorithm, federation: Federation, options: RunOptions
) -> dict[str, Any]:
    """All settings that determine a trajectory, as plain JSON. `rounds` is not among them: a run may be extended."""
    words = partial(describe, by_name=True)
    values = {f"{type(algorithm).__name__}.{k}": words(v) for k, v in hyperparameters(algorithm).items()}
    settings = {
        "algorithm": type(algorithm).__name__,
        **values,
        "problem": words(problem),
        "data": federation.fingerprint()[:16],
        "start": describe([np.asarray(leaf) for leaf in jax.tree.leaves(executable.runs.x0)]),
        **{name: words(value) for name, value in options.given().items() if name not in SKIPPED},
        "axes": executable.axes,
        "every": executable.every,
        "execution": executable.context.execution,
        "threads": executable.threads,
        "jax": jax.__version__,
        "device": jax.default_backend(),
    }
    return json.loads(json.dumps(settings))


def restore(executable: Executable, store: Checkpoints, settings: Mapping[str, Any]) -> Driver | None:
    """The run at its newest good checkpoint, or None if there is none."""
    saved = store.load()
    if saved is None:
        return None
    unsaid = {name: describe(value) for name, value in defaults().items() if name not in SKIPPED}
    changed = differences({**unsaid, **saved.config}, settings)
    if changed:
        raise CheckpointError(
            f"the run in {store.folder} cannot be resumed with other settings:\n  " + "\n  ".join(changed) + "\n"
            "resume it as it was, or start a new run in another folder"
        )
    shapes = executable.shapes()
    _check_paths(saved.paths, carry_paths(shapes))
    carry = executable.spread(_rebuild(shapes, "carry/", saved.arrays))
    records, seconds = Records.from_arrays(saved.arrays), float(saved.arrays["elapsed"])
    return Driver(executable, carry, records, saved.round, executable.first_round_starts(saved.round), seconds)


def _check_paths(saved: list[str] | None, now: list[str]) -> None:
    """The fields of the state must have the same names in the same order; old checkpoints store no names."""
    if saved is None or saved == now:
        return
    gone, new = [p for p in saved if p not in now], [p for p in now if p not in saved]
    what = f"it has {gone or 'no other'}, this run {new or 'no other'}" if gone or new else "their order has changed"
    raise CheckpointError(
        f"this checkpoint has other state fields than this run: {what}; was the algorithm's code changed? Resume it "
        "with the code that saved it, or start a new run in another folder"
    )


def _rebuild(like: Any, prefix: str, arrays: Mapping[str, np.ndarray]) -> Any:
    leaves, structure = jax.tree.flatten(like)
    paths = carry_paths(like)
    found = [arrays.get(f"{prefix}{i:05d}") for i in range(len(leaves))]
    for path, a, b in zip(paths, found, leaves, strict=True):
        if a is None or a.shape != b.shape or a.dtype != b.dtype:
            has = "nothing" if a is None else f"{a.dtype}{list(a.shape)}"
            raise CheckpointError(
                f"this checkpoint has {has} for {path}, and this run {b.dtype}{list(b.shape)}; was the algorithm's "
                "code changed? Resume it with the code that saved it, or start a new run in another folder"
            )
    return jax.tree.unflatten(structure, found)
