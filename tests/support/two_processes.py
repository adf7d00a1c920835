"""One of several processes that run one program; `tests/simulate/test_multiprocess.py` starts them."""

import contextlib
import os
import sys
from pathlib import Path

from fedstrata.engine.checkpoint import CheckpointError, Checkpoints

OPTIONS = {"rounds": 4, "evaluate_every": 1, "batch_size": 3, "execution": "vmap", "cohort": 3}


class Killed(Exception):
    pass


def kill(round, row):
    if round == 3:
        raise Killed


def refuse(*_):
    raise CheckpointError("the disk is full")


def numbers(result) -> list:
    import jax
    import numpy as np

    ends = jax.tree.leaves((result.solutions, result.local, result.state))
    return [result.history["objective"], *(np.asarray(a) for a in ends)]


def main(folder: Path, name: str) -> None:
    """A run that is killed after two rounds, and resumes; then one whose checkpoints cannot be written."""
    import jax
    import numpy as np
    import pytest
    from cases import CASES, START, task_of

    import fedstrata as fs

    task, algorithm = task_of(CASES[name].algorithm), CASES[name].algorithm
    kept = {"checkpoint": folder / name, "checkpoint_every": 0.0, "mesh": "all", "params": START}
    with contextlib.suppress(Killed):
        fs.run(task.problem, algorithm, task.federation, **OPTIONS, **kept, callbacks=[kill])
    result = fs.run(task.problem, algorithm, task.federation, **OPTIONS, **kept, resume=True)
    np.savez(folder / f"{name}_{jax.process_index()}.npz", *numbers(result))
    Checkpoints.save = refuse
    said = "the disk is full" if jax.process_index() == 0 else "the first process could not write"
    kept["checkpoint"] = folder / f"{name}_full"
    with pytest.raises(CheckpointError, match=said) as stopped:
        fs.run(task.problem, algorithm, task.federation, **OPTIONS, **kept)
    assert stopped.value.result.rounds == 1


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    import jax

    from fedstrata.simulate import multiprocess

    multiprocess.join()
    assert jax.process_count() == 2
    jax.config.update("jax_enable_x64", True)
    for name in sys.argv[2:]:
        main(Path(sys.argv[1]), name)
