"""The whole suite runs in float64, without implicit dtype or rank promotion."""

import os

# Test programs are tiny and many: compiling them fast matters more than running them fast.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

import jax

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
