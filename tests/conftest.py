"""The whole suite runs in float64, without implicit dtype or rank promotion."""

import os
from importlib.metadata import version

# Test programs are tiny and many: compiling them fast matters more than running them fast. XLA refuses flags that it
# does not know, so the last one, which halves compile times, is for versions that have it.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true" + (
    " --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""
)

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
