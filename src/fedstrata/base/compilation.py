"""The cache of compiled programs, in the user's cache folder."""

import sys

import jax

from fedstrata.base.files import cache_folder


def configure(cache: bool) -> None:
    """Switch on the cache of compiled programs, small and quick ones included: a second start compiles nothing.

    Args:
        cache: whether to keep compiled programs; False changes nothing.
    """
    if not cache:
        return
    folder = cache_folder() / "jax"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"warning: compiled programs cannot be kept in {folder} ({error.strerror})", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
