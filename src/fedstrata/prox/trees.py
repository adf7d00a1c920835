"""The leaves of a tree by name, the choice among them, and sums over them."""

import fnmatch
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fedstrata.core.vector import Vector, power_of_two, widest

Leaves = dict[str, Any]
Selector = str | Callable[[str, Any], bool]


def named_leaves(tree: PyTree) -> tuple[Leaves, Callable[[Leaves], PyTree]]:
    """The leaves by name (the path joined with "/"), and the function that puts such leaves back into the tree.

    Args:
        tree: a tree of arrays or a `Vector`.

    >>> leaves, rebuild = named_leaves(Vector([{"weight": jnp.ones((2, 3)), "bias": jnp.ones(2)}]))
    >>> list(leaves)
    ['0/bias', '0/weight']
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    paths = [(path[1:], leaf) for path, leaf in paths] if isinstance(tree, Vector) else paths
    named = [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in paths]
    leaves = {name: leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf) for name, leaf in named}
    if len(leaves) < len(named):
        names = [name for name, _ in named]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"two leaves of this tree have the same name: {twice}; rename a key that contains '/'")
    return leaves, lambda new: jax.tree.unflatten(structure, [new[name] for name in leaves])


def kernels(name: str, leaf: Any) -> bool:
    """Select the leaves of two or more dimensions: `L1(0.1).on(kernels)` leaves biases and scales alone.

    Args:
        name: the name of the leaf.
        leaf: the leaf.
    """
    return leaf.ndim >= 2


def chosen(leaves: Leaves, selectors: tuple[Selector, ...], who: str) -> Leaves:
    """The leaves that at least one selector matches; raises if a selector matches none.

    Args:
        leaves: all leaves by name.
        selectors: names, patterns or functions.
        who: the regulariser, for the error.
    """
    hits = {s: [name for name, leaf in leaves.items() if _matches(s, name, leaf)] for s in selectors}
    for selector, names in hits.items():
        if not names:
            known = ", ".join(repr(name) for name in leaves) or "none"
            raise ValueError(
                f"{who}: {spelled(selector)} matches no leaf; the tree has the leaves {known}. "
                "A string is a whole name, a pattern such as '*/weight', or one part of a name."
            )
    wanted = {name for names in hits.values() for name in names}
    return {name: leaf for name, leaf in leaves.items() if name in wanted}


def spelled(selector: Selector) -> str:
    """A selector as text, for `repr` and errors."""
    return repr(selector) if isinstance(selector, str) else getattr(selector, "__name__", repr(selector))


def _matches(selector: Selector, name: str, leaf: Any) -> bool:
    if isinstance(selector, str):
        return selector == name or selector in name.split("/") or fnmatch.fnmatchcase(name, selector)
    return bool(selector(name, leaf))


def wide(x: Any) -> Array:
    """The array in float32 or wider: narrow parameters are rounded once, after the whole formula."""
    x = jnp.asarray(x)
    return x.astype(widest(x.dtype, jnp.float32))


def total(parts: list[Array]) -> Array:
    """The sum of scalars of possibly different dtypes, in the widest."""
    dtype = widest(jnp.float32, *[part.dtype for part in parts])
    return sum((part.astype(dtype) for part in parts), start=jnp.zeros((), dtype))


def squared(x: Array) -> Array:
    """|x|² over all entries, in float32 or wider."""
    return jnp.sum(wide(x) ** 2)


def root(x: Array) -> Array:
    """√x whose derivative at 0 is 0 instead of infinite."""
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), x)


def unit(x: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    """The power of two of the largest entry, over these axes (kept with length one) or all: see `power_of_two`."""
    return power_of_two(jnp.max(jnp.abs(x), axis=axis, keepdims=axis is not None, initial=0))
