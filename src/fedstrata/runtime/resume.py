"""Going on where a run stopped: what a checkpoint must share with the run that resumes it."""

import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedstrata.algorithm import Algorithm, hyperparameters
from fedstrata.data.federation import Federation
from fedstrata.problems.base import Problem
from fedstrata.runtime.checkpoint import CheckpointError, Checkpoints, difference
from fedstrata.runtime.describe import describe
from fedstrata.runtime.job import Job
from fedstrata.runtime.progress import Run
from fedstrata.runtime.records import Records


def config_of(
    job: Job, problem: Problem, algorithm: Algorithm, federation: Federation, options: Mapping[str, Any]
) -> dict:
    """Everything that decides a trajectory, as plain JSON. (`rounds` is not in it: a run may be made longer.)"""
    values = {f"{type(algorithm).__name__}.{k}": describe(v) for k, v in hyperparameters(algorithm).items()}
    skip = ("params", "execution", "evaluate_every", "mesh", "stream")
    config = {
        "algorithm": type(algorithm).__name__,
        **values,
        "problem": describe(problem),
        "data": federation.fingerprint()[:16],
        "start": describe([np.asarray(leaf) for leaf in jax.tree.leaves(job.x0)]),
        **{k: describe(v) for k, v in options.items() if k not in skip},
        "axes": job.axes,
        "every": job.every,
        "execution": job.plan.execution,
        "threads": job.threads,
        "jax": jax.__version__,
        "device": jax.default_backend(),
    }
    return json.loads(json.dumps(config))


def restore(job: Job, store: Checkpoints, config: Mapping[str, Any]) -> Run | None:
    """The run as its newest good checkpoint left it, or None where there is none."""
    saved = store.load()
    if saved is None:
        return None
    changed = difference(saved.config, config)
    if changed:
        raise CheckpointError(
            f"the run in {store.folder} cannot be resumed with other settings:\n  " + "\n  ".join(changed) + "\n"
            "resume it as it was, or start a new run in another folder"
        )
    carry = job.spread(_rebuild(job.shapes(), "carry/", saved.arrays))
    records, seconds = Records.from_arrays(saved.arrays), float(saved.arrays["elapsed"])
    return Run(job, carry, records, saved.round, job.starts_beside(saved.round), seconds)


def _rebuild(like: Any, prefix: str, arrays: Mapping[str, np.ndarray]) -> Any:
    leaves, structure = jax.tree.flatten(like)
    found = [arrays[f"{prefix}{i:05d}"] for i in range(len(leaves))]
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(found, leaves, strict=True)):
        raise CheckpointError(
            "this checkpoint has arrays of other shapes than this run; was the algorithm's code changed?"
        )
    return jax.tree.unflatten(structure, found)
