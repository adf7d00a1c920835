"""Several processes that run one program: how they find each other, agree, and who speaks for all.

Every process runs the same Python and owns some of the devices; what it decides by its own clock, the others would not
know. So a decision is the first process's, and only that one writes files and talks.
"""

import os
import sys

import jax
import numpy as np

COORDINATOR, COUNT, NUMBER = "FEDSTRATA_COORDINATOR", "FEDSTRATA_PROCESSES", "FEDSTRATA_PROCESS"


def join() -> None:
    """Join the processes that the three variables above name, or those of a cluster that jax knows, such as Slurm.

    To be called before anything else is asked of jax.
    """
    _libraries_print_aside()
    if COORDINATOR in os.environ:
        count, number = int(os.environ[COUNT]), int(os.environ[NUMBER])
        jax.distributed.initialize(os.environ[COORDINATOR], count, number)
    else:
        _join_cluster()


def _join_cluster() -> None:
    try:
        jax.distributed.initialize()
    except ValueError as error:
        raise ValueError(
            "no other processes were found; start them with `fedstrata launch`, with a cluster's own launcher, or give "
            f"each {COORDINATOR} (host:port of the first), {COUNT} (how many) and {NUMBER} (which one, from 0) "
            f"({str(error).splitlines()[0]})"
        ) from error


def _libraries_print_aside() -> None:
    """What compiled libraries print as they connect goes to standard error: standard output may be somebody's JSON."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace")
    os.dup2(2, 1)


def leads() -> bool:
    """Whether this process writes and talks for all; true where there is only one."""
    return jax.process_index() == 0


def agreed(value: float) -> float:
    """The first process's value, in all of them."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return float(np.asarray(multihost_utils.broadcast_one_to_all(np.float64(value))))


def together(name: str) -> None:
    """Wait until every process has come here: what the first one wrote is there for the others to read."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)
