"""The groups of the examples of a federation: counts and checks before a run."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fedstrata.base.errors import unknown
from fedstrata.core.vector import Vector
from fedstrata.data.examples import one_example

GroupOf = str | Callable[[PyTree], Any]  # a column of the examples, or a function of one example


class GroupWarning(UserWarning):
    """A client has no training example of some group."""


def codes(group: GroupOf, split: Any, where: str) -> np.ndarray:
    """The group of every row of a split; raises for a column that does not hold groups."""
    if not isinstance(group, str):
        columns = jax.tree.leaves(split.examples)
        if columns and all(np.ndim(a) and not any(np.asarray(a).strides) for a in columns):
            found = jax.eval_shape(jax.vmap(group), split.examples)  # placeholders take no memory, and have no values
            values = np.broadcast_to(np.zeros((), found.dtype), found.shape)
        else:
            values = np.asarray(jax.vmap(group)(jax.tree.map(jnp.asarray, split.examples)))
    elif not isinstance(split.examples, Mapping) or group not in split.examples:
        raise unknown(
            f"column of groups ({where})", group, split.examples if isinstance(split.examples, Mapping) else ()
        )
    else:
        values = np.asarray(split.examples[group])
    if values.ndim != 1 or values.dtype.kind not in "iub":
        raise ValueError(
            f"{where}: a group is one whole number per example, got {values.dtype} {values.shape}; number the groups "
            "from 0, e.g. with numpy.unique(column, return_inverse=True)"
        )
    if values.strides == (0,) and values.size:  # a placeholder for the rows of a site, which take no memory
        return np.broadcast_to(values[:1].astype(np.int64), values.shape)
    return values.astype(np.int64)


def count(group: GroupOf, given: int | None, federation: Any) -> int:
    """The number of groups (the given one, if any), after a check of every row of every split."""
    found = {name: codes(group, split, f"Fair, split {name!r}") for name, split in federation.splits.items()}
    total = given if given is not None else 1 + max(int(c.max()) for c in found.values() if c.size)
    for name, every in found.items():
        numbers = every[:1] if every.strides == (0,) else every  # a placeholder's rows are all alike
        wrong = np.flatnonzero((numbers < 0) | (numbers >= total))
        if wrong.size:
            split = federation[name]
            client = int(np.searchsorted(split.offsets, wrong[0], side="right")) - 1
            owner = "the pooled data" if split.pooled else federation.names[client]
            raise ValueError(
                f"Fair, split {name!r}: {owner} has group {numbers[wrong[0]]}, but groups run from 0 to {total - 1}"
            )
    return total


def sizes(group: GroupOf, total: int, federation: Any, labels: bool = False) -> dict[str, np.ndarray]:
    """By split, the number of rows of every group.

    Args:
        group: the column of the groups, or a function of one example.
        total: how many groups there are.
        federation: the data.
        labels: whether to count the positive rows of a group and its others separately.
    """
    found = {name: codes(group, split, f"Fair, split {name!r}") for name, split in federation.splits.items()}
    if labels:
        yes = {name: np.reshape(split.examples["y"], -1) == 1 for name, split in federation.splits.items()}
        found = {name: 2 * every + yes[name] for name, every in found.items()}
    return {name: np.bincount(every, minlength=total * (1 + labels)) for name, every in found.items()}


def check_decisions(model: Callable[..., Any], x: Vector, federation: Any) -> None:
    """Raise for a model whose output is not one number, which has no yes/no decision."""
    for name, split in federation.splits.items():
        if not isinstance(split.examples, Mapping) or not {"x", "y"} <= split.examples.keys():
            raise ValueError(f"Fair, split {name!r}: examples must be a dictionary with 'x' and 'y'")
        out = jax.eval_shape(model, x.tree, jax.tree.map(one_example, split.examples["x"]))
        if out.size != 1:
            raise ValueError(
                f"Fair: the model gives outputs of shape {out.shape}, and fairness measures compare yes/no decisions; "
                "give it one output (labels 0 and 1)"
            )


def warn_of_missing(group: GroupOf, total: int, federation: Any) -> None:
    """Warn of clients without a training example of a group."""
    train = federation["train"]
    present = np.zeros((federation.clients, total), bool)
    present[np.asarray(train.owners), codes(group, train, "Fair")] = True
    missing = np.argwhere(~present)
    if not missing.size:
        return
    client, number = missing[0]
    nobody = np.flatnonzero(~present.any(axis=0)).tolist()
    gone = f"; no client has any of groups {nobody}" if nobody else ""
    warnings.warn(
        f"Fair: {federation.names[int(client)]} has no training example of group {number} ({len(missing)} such pairs "
        f"of client and group{gone}); it contributes nothing for that group",
        GroupWarning,
        stacklevel=3,
    )
