"""One of several processes that run one program; `tests/simulate/test_multiprocess.py` starts them."""

import contextlib
import os
import sys
from pathlib import Path

OPTIONS = {"rounds": 4, "evaluate_every": 1, "batch_size": 3, "execution": "vmap", "cohort": 3}


class Killed(Exception):
    pass


def kill(round, row):
    if round == 3:
        raise Killed


def numbers(result) -> list:
    import jax
    import numpy as np

    ends = jax.tree.leaves((result.solutions, result.local, result.state))
    return [result.history["objective"], *(np.asarray(a) for a in ends)]


def main(folder: Path, name: str) -> None:
    """A run that is killed after two rounds, and resumes."""
    import jax
    import numpy as np
    from cases import CASES, START, task_of

    import fedstrata as fs

    task, algorithm = task_of(CASES[name].algorithm), CASES[name].algorithm
    kept = {"checkpoint": folder / name, "checkpoint_every": 0.0, "mesh": "all", "params": START}
    with contextlib.suppress(Killed):
        fs.run(task.problem, algorithm, task.federation, **OPTIONS, **kept, callbacks=[kill])
    result = fs.run(task.problem, algorithm, task.federation, **OPTIONS, **kept, resume=True)
    np.savez(folder / f"{name}_{jax.process_index()}.npz", *numbers(result))


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    import jax

    from fedstrata.simulate import multiprocess

    multiprocess.join()
    assert jax.process_count() == 2
    jax.config.update("jax_enable_x64", True)
    for name in sys.argv[2:]:
        main(Path(sys.argv[1]), name)
