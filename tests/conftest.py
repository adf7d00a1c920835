"""The whole suite runs in float64, without implicit dtype or rank promotion."""

import os

# Test programs are tiny and many: compiling them fast matters more than running them fast.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

_MAPS = 30_000  # every compiled program holds a few memory maps, and Linux allows a process 65,530 of them


@pytest.fixture(autouse=True)
def few_memory_maps():
    """Forget compiled programs before a worker has so many that the system refuses it memory, and it crashes."""
    yield
    try:
        with open("/proc/self/maps") as maps:
            many = sum(1 for _ in maps) > _MAPS
    except OSError:  # not Linux
        return
    if many:
        jax.clear_caches()
