"""The shape and dtype of one example of a split."""

from typing import Any

import jax


def one_example(column: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one row of a column, as it will be on the device."""
    return jax.ShapeDtypeStruct(column.shape[1:], jax.dtypes.canonicalize_dtype(column.dtype))
