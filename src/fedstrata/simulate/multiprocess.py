"""One program over several processes: how they connect and agree, and which of them writes output.

Every process runs the same Python and owns some of the devices. All of them must compute the same things in the same
order: a computation on arrays that lie over several processes needs every process, and aborts or hangs if one process
computes what the others do not. So the first process takes every decision that depends on a clock, and it alone writes
files and prints. All processes read checkpoints, from a folder that all must see.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator

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
        address = os.environ[COORDINATOR]
        bind = address if address.startswith("127.0.0.1:") else None  # nobody outside this machine may connect to it
        jax.distributed.initialize(address, count, number, coordinator_bind_address=bind)
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


def lead(work: Callable[[], None], failed: Exception) -> None:
    """Let the first process do this work while the others wait; where it fails, it fails in all of them.

    Args:
        work: what only the first process does; it must not compute on arrays that lie over several processes.
        failed: what the others raise where the work fails.
    """
    error = None
    if leads():
        try:
            work()
        except Exception as caught:
            error = caught
    if agreed(float(error is not None)):
        raise error or failed


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


@contextlib.contextmanager
def local_coordinator() -> Iterator[str]:
    """An address on this machine for the first process to listen at, which no other program is given meanwhile.

    The port stays bound, so the system gives it to nobody else before the first process listens there. Both sides set
    SO_REUSEPORT, which lets that process bind it too.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"
