"""Clients over a device mesh: each device has the data and `Local` fields of its clients and computes them.

Client i is on device i // each, so a block of clients is a block of every array with a row per client. The rows of a
split are stored device by device, each block padded to the longest one. The server's state is on every device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from fedstrata.data import validation as check

AXIS = "clients"


@dataclass(frozen=True)
class Spread:
    """Clients over a mesh, in blocks of `each`. The last places may be empty."""

    mesh: Mesh
    clients: int

    @property
    def devices(self) -> int:
        return self.mesh.size

    @property
    def each(self) -> int:
        return -(-self.clients // self.devices)

    @property
    def slots(self) -> int:
        return self.devices * self.each

    @property
    def even(self) -> bool:
        """Whether no device has a place without a client."""
        return self.slots == self.clients

    def cut(self, tree: PyTree) -> PyTree:
        """These arrays with the first axis sharded over the devices."""
        return jax.lax.with_sharding_constraint(tree, NamedSharding(self.mesh, PartitionSpec(AXIS)))

    def whole(self, tree: PyTree) -> PyTree:
        """These arrays replicated on every device."""
        return jax.lax.with_sharding_constraint(tree, NamedSharding(self.mesh, PartitionSpec()))


def mesh_of(given: "int | str | Mesh | None") -> Mesh | None:
    """The mesh of the option `mesh`: "all" devices, a number of them, or a mesh of one axis; None for one device."""
    if given is None:
        return None
    if isinstance(given, Mesh):
        if len(given.shape) != 1:
            raise ValueError(f"mesh={given} has the axes {tuple(given.shape)}; clients are spread over one axis")
        return Mesh(given.devices.reshape(-1), (AXIS,))
    devices = jax.devices()
    if given == "all":
        return Mesh(np.asarray(devices), (AXIS,))
    if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < 1:
        raise ValueError(f'mesh={given!r} must be "all", a number of devices, or a jax.sharding.Mesh with one axis')
    if given > len(devices):
        raise ValueError(
            f"mesh={given}: there are {len(devices)} devices; on a CPU the flag --xla_force_host_platform_device_count "
            "in XLA_FLAGS creates more"
        )
    if jax.process_count() > 1 and given != len(devices):
        raise ValueError(f"mesh={given}: with several processes the mesh must have all {len(devices)} devices")
    return Mesh(np.asarray(devices[:given]), (AXIS,))


def on_devices(spread: Spread, function: Callable[[Any, Any], Any], same: PyTree, parts: PyTree) -> PyTree:
    """function(same, parts) on every device, with that device's block of every array in `parts` and of the result.

    `same` may contain modules and functions too. Its arrays are on every device.
    """
    arrays, rest = eqx.partition(same, eqx.is_array)
    body = lambda arrays, parts: function(eqx.combine(arrays, rest), parts)
    own = PartitionSpec(AXIS)
    there = jax.shard_map(
        body, mesh=spread.mesh, in_specs=(PartitionSpec(), own), out_specs=own, check_vma=False
    )  # no communication inside, so there is nothing to check
    return there(arrays, parts)


def everywhere(tree: PyTree, mesh: Mesh) -> PyTree:
    """The tree with every array on every device, except those that are on the mesh already."""
    to = NamedSharding(mesh, PartitionSpec())

    def put(leaf: PyTree) -> Any:
        if not eqx.is_array(leaf) or getattr(getattr(leaf, "sharding", None), "mesh", None) == mesh:
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(put(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, to, host.__getitem__)

    return jax.tree.map(put, tree)


def by_device(offsets: np.ndarray, spread: Spread, pooled: bool) -> np.ndarray:
    """Offsets of each device's rows: by its clients, or in equal parts for pooled rows."""
    if pooled:
        return np.linspace(0, offsets[-1], spread.devices + 1).astype(np.int64)
    return offsets[np.minimum(np.arange(spread.devices + 1) * spread.each, spread.clients)]


def in_blocks(examples: PyTree, bounds: np.ndarray, mesh: Mesh) -> tuple[PyTree, np.ndarray]:
    """The rows of each device, padded to the longest block with copies of a row, and the position of every row."""
    counts = np.diff(bounds)
    long, sharding = max(1, int(counts.max())), NamedSharding(mesh, PartitionSpec(AXIS))
    check.numbered(len(counts) * long, "a mesh on which every device has as many rows as the fullest")

    def put(leaf: PyTree) -> Any:
        leaf = np.asarray(leaf)
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)

        def block(index: Any) -> np.ndarray:
            device = (index[0].start or 0) // long
            own = leaf[bounds[device] : bounds[device + 1]]
            return np.concatenate([own, np.repeat(leaf[:1], long - len(own), axis=0)]).astype(dtype)

        return jax.make_array_from_callback((len(counts) * long, *leaf.shape[1:]), sharding, block)

    order = np.concatenate([device * long + np.arange(count) for device, count in enumerate(counts)])
    return jax.tree.map(put, examples), order.astype(np.int32)


def per_client(values: np.ndarray, spread: Spread) -> Any:
    """One whole number per client, zero at empty places."""
    filled = np.zeros((spread.slots,), np.int32)
    filled[: spread.clients] = values
    to = NamedSharding(spread.mesh, PartitionSpec(AXIS))
    return jax.make_array_from_callback(filled.shape, to, filled.__getitem__)
