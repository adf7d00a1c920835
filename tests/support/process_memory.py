"""The memory of this process on Linux: what is resident, the peak of that, and a limit on what is reserved."""

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterator

M_MMAP_THRESHOLD = -3  # in glibc's malloc.h
PAGE = os.sysconf("SC_PAGE_SIZE")


def reset_peak() -> None:
    """The peak begins again at what is resident now."""
    with open("/proc/self/clear_refs", "wb", buffering=0) as file:
        file.write(b"5")


def peak() -> int:
    """The most bytes that were resident at once since `reset_peak`."""
    with open("/proc/self/status", "rb", buffering=0) as file:
        return 1024 * int(file.read().partition(b"VmHWM:")[2].split(maxsplit=1)[0])


def reserved_and_resident() -> tuple[int, int]:
    """The bytes of the address space that are reserved, and those that are resident."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        pages = file.read().split()
    return int(pages[0]) * PAGE, int(pages[1]) * PAGE


def release() -> None:
    """Give back what is free but resident: it would hide what is allocated next."""
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 2**17)  # larger blocks go back at once; by default, glibc raises this number
        libc.malloc_trim(0)


@contextlib.contextmanager
def reserving_at_most(count: int) -> Iterator[None]:
    """Here, only so many more bytes can be reserved; beyond that there is a MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (reserved_and_resident()[0] + count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def can_be_measured() -> bool:
    """Whether this machine has these files, and lets the process reset its peak."""
    try:
        reset_peak()
        return peak() > 0
    except (OSError, ValueError, IndexError):
        return False
