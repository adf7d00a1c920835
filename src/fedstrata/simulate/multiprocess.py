"""One program over several processes: how they connect and agree, and which of them writes output.

Every process runs the same Python and owns some of the devices. A decision by one process's clock could differ from the
others'. So the first process decides, and it alone writes files and prints.
"""

import os
import sys

import jax
import numpy as np

COORDINATOR, COUNT, NUMBER = "FEDSTRATA_COORDINATOR", "FEDSTRATA_PROCESSES", "FEDSTRATA_PROCESS"


def join() -> None:
    """Join the processes of the three variables above, or of a cluster that JAX supports, such as Slurm.

    Call it before any other use of JAX.
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
            "no other processes were found; start them with `fedstrata launch`, with a cluster's launcher, or set for "
            f"each {COORDINATOR} (host:port of the first), {COUNT} (how many) and {NUMBER} (which one, from 0) "
            f"({str(error).splitlines()[0]})"
        ) from error


def _libraries_print_aside() -> None:
    """Send the output of compiled libraries to standard error: standard output may be JSON."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace")
    os.dup2(2, 1)


def leads() -> bool:
    """Whether this process writes and prints for all; true if there is only one."""
    return jax.process_index() == 0


def agreed(value: float) -> float:
    """The first process's value, in all processes."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return float(np.asarray(multihost_utils.broadcast_one_to_all(np.float64(value))))


def together(name: str) -> None:
    """Wait for all processes. After this, the others can read what the first one wrote."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)
