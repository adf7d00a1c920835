"""The whole suite runs in float64, without implicit dtype or rank promotion."""

import atexit
import contextlib
import ctypes
import gc
import itertools
import os
import shutil
import tempfile
from importlib.metadata import version

# Test programs are tiny and many: compiling them fast matters more than running them fast. XLA refuses flags that it
# does not know, so the last three are for versions that have them. The third compiles a program in one thread: the
# workers already use all cores.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=4"  # for meshes; everything else runs on the first
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    + (" --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else "")
    + (" --xla_cpu_opt_preset=FAST_COMPILE" if version("jaxlib") == "0.10.2" else "")
    + (" --xla_cpu_parallel_codegen_split_count=1" if version("jaxlib").startswith("0.10.") else "")
)

import jax
import pytest

# Tests build the same programs again and again from new functions. What is compiled is found again in a folder of the
# worker's own (two writers of one could meet half a file), which the first process makes and removes.
if "FEDSTRATA_TEST_CACHE" not in os.environ:
    os.environ["FEDSTRATA_TEST_CACHE"] = tempfile.mkdtemp(prefix="fedstrata-tests-")
    atexit.register(shutil.rmtree, os.environ["FEDSTRATA_TEST_CACHE"], ignore_errors=True)
_CACHE = os.path.join(os.environ["FEDSTRATA_TEST_CACHE"], os.environ.get("PYTEST_XDIST_WORKER", "main"))
jax.config.update("jax_compilation_cache_dir", _CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Traced programs are many small objects that live long. With its default threshold the garbage collector walks through
# all of them again and again, which takes 5 to 10 % of the suite's time.
gc.set_threshold(100_000, 20, 50)


_MEMORY = 1.5e9  # bytes of a worker above which it forgets its programs between two files


@pytest.fixture(autouse=True, scope="module")
def bounded_memory():
    """Forget compiled programs between files: a later file shares few of them, and workers would grow without bound."""
    yield
    forget_programs()


@pytest.fixture(scope="session")
def forget():
    """For files with many programs: a function that forgets them where they have become many."""
    return forget_programs


def forget_programs() -> None:
    try:
        with open("/proc/self/statm") as pages:
            resident = int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return
    if resident > _MEMORY:
        jax.clear_caches()
        gc.collect()
        with contextlib.suppress(AttributeError, OSError):  # not glibc, which keeps what was freed
            ctypes.CDLL(None).malloc_trim(0)


_MAPS = 45_000  # every compiled program holds a few memory maps, and Linux allows a process 65,530 of them
_TESTS = itertools.count(1)


@pytest.fixture(autouse=True)
def few_memory_maps():
    """Forget compiled programs before a worker has so many that the system refuses it memory, and it crashes."""
    yield
    if next(_TESTS) % 16:  # counting reads a long file, and sixteen tests add far fewer than are left
        return
    try:
        with open("/proc/self/maps") as maps:
            many = sum(1 for _ in maps) > _MAPS
    except OSError:  # not Linux
        return
    if many:
        jax.clear_caches()
