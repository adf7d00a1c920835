"""The memory of this machine."""

import os


def machine_memory() -> float:
    """Its bytes; infinite if it does not tell."""
    known = hasattr(os, "sysconf") and {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= os.sysconf_names.keys()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if known else float("inf")
