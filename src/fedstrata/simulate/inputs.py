"""The inputs of a program, from the arguments of `fs.run`: data on a device, a mesh or the host, and weights."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedstrata.base.errors import unknown
from fedstrata.base.memory import machine_memory
from fedstrata.core.algorithm import Algorithm
from fedstrata.data.federation import Federation
from fedstrata.data.sampling import Balanced, Epochs, Sampler, Whole
from fedstrata.data.split import Split
from fedstrata.engine.checks import check_counts, check_private, check_weights
from fedstrata.engine.context import RoundContext
from fedstrata.engine.exchange import Exchange
from fedstrata.engine.layout import FlatSplit
from fedstrata.engine.mesh import Spread, by_device, in_blocks, per_client
from fedstrata.engine.participation import Selection, selection
from fedstrata.problems.base import Problem
from fedstrata.problems.rows import Rows
from fedstrata.problems.stored import Stored
from fedstrata.problems.weighting import Weights, rows_of, sizes_of, weighing
from fedstrata.simulate.options import RunOptions
from fedstrata.simulate.out_of_core.host import Host, HostSplit


class Inputs(eqx.Module):
    """Everything that the runs of a program read and never change."""

    context: RoundContext
    full: dict[str, Rows]  # the splits to evaluate on; "train" is the objective
    monitor: Problem | None  # another problem to evaluate on
    host: Host | None = eqx.field(static=True, default=None)  # data that stay there; the context then has one cohort's

    @property
    def out_of_core(self) -> bool:
        return self.host is not None

    def with_algorithm(self, algorithm: Algorithm) -> "Inputs":
        return dataclasses.replace(self, context=dataclasses.replace(self.context, algorithm=algorithm))


def inputs_of(
    problem: Problem,
    algorithm: Algorithm,
    federation: Federation,
    options: RunOptions,
    *,
    exchanges: tuple[Exchange, ...],
    rule: Sampler,
    dtype: Any,
    mesh: Mesh | None,
    host: bool,
) -> Inputs:
    """Data on a device, on a mesh or on the host, and the checked rules of a run."""
    weights, evaluate = options.weights, options.evaluate
    check_private(options.privacy, algorithm, problem)
    check_weights(weights, problem)
    needed = sorted({*problem.streams.values()})
    for name in [*needed, *(evaluate or ())]:
        if name not in federation.splits:
            raise unknown("split of this federation:", name, federation.splits)
    check_counts(problem, federation, rule)
    also = set() if options.monitor is None else {*options.monitor.streams.values()}
    wanted = [n for n in federation.splits if n in {*needed, *also, "train"} or evaluate is None or n in evaluate]
    chosen: Selection = selection(options.cohort)
    if not algorithm.centralised:
        chosen.check(federation.clients)
    sizes = sizes_of(federation, weights, problem.size_split) if weights == "size" else None
    context = RoundContext(
        problem=problem,
        algorithm=algorithm,
        sampler=rule,
        participation=chosen,
        data={},
        counts=None if sizes is None else jnp.asarray(sizes, jnp.int32),
        total=None if sizes is None else float(sizes.sum()),
        exchanges=exchanges,
        clients=federation.clients,
        privacy=options.privacy,
        dtype=dtype,
    )
    weigh = lambda name: weighing(problem, federation, weights, name)
    if mesh is not None and not algorithm.centralised:
        spread = Spread(mesh, federation.clients)
        data, full = _over_devices(problem, federation, spread, wanted, weights, dtype)
        counts = per_client(sizes, spread) if sizes is not None else None
        return Inputs(dataclasses.replace(context, data=data, counts=counts, spread=spread), full, options.monitor)
    if host:
        held = Host({n: HostSplit(federation[n], chosen.size(federation.clients)) for n in needed})
        data = {n: FlatSplit(None, None, None, split.capacity) for n, split in held.splits.items()}
        full = {n: rows_of(federation[n], dtype, weigh(n), Stored) for n in wanted if federation[n].size}
        context = dataclasses.replace(context, data=data, in_cohort_order=True)
        return Inputs(context, full, options.monitor, held)
    # One copy on the device serves training and evaluation.
    placed = {
        n: Split(jax.tree.map(jnp.asarray, s.examples), s.offsets, s.pooled) for n, s in federation.splits.items()
    }
    full = {n: rows_of(placed[n], dtype, weigh(n)) for n in wanted if federation[n].size}
    data = {n: flat_split(placed[n]) for n in needed}
    if algorithm.centralised:
        by = "size" if getattr(problem, "weighting", None) == "examples" else weights
        rule, data = _pool(rule, data, {n: weighing(problem, federation, by, n) for n in needed})
        alone = {"sampler": rule, "participation": selection(None), "counts": None, "total": None, "clients": 1}
        return Inputs(dataclasses.replace(context, data=data, **alone), full, options.monitor)
    return Inputs(dataclasses.replace(context, data=data), full, options.monitor)


def flat_split(split: Split) -> FlatSplit:
    """A split on the device: its rows, and the start and the count of each client."""
    start, counts = np.asarray(split.offsets)[:-1], np.asarray(split.counts)
    examples = jax.tree.map(jnp.asarray, split.examples)
    return FlatSplit(examples, jnp.asarray(start, jnp.int32), jnp.asarray(counts, jnp.int32), int(counts.max()))


def out_of_core(stream: bool | None, algorithm: Algorithm, federation: Federation, mesh: Mesh | None) -> bool:
    """Whether the federation stays on the host: as requested, or because its data would fill half of the device."""
    if stream not in (None, True, False):
        raise ValueError(f"stream={stream!r} must be True, False, or None to stream what does not fit")
    able = not algorithm.centralised and mesh is None
    if stream and algorithm.centralised:
        raise ValueError(
            f"stream=True: {type(algorithm).__name__} is centralised and draws from all data, so it needs them on the "
            "device; omit stream"
        )
    if stream and mesh is not None:
        raise ValueError("stream=True with a mesh: a mesh spreads data over its devices; choose one of the two")
    held = sum(leaf.nbytes for split in federation.splits.values() for leaf in jax.tree.leaves(split.examples))
    return bool(stream) if stream is not None else able and held > 0.5 * device_memory()


def device_memory() -> float:
    """Bytes of the default device's memory."""
    found = jax.local_devices()[0].memory_stats() or {}
    return found.get("bytes_limit", machine_memory())


def _over_devices(
    problem: Problem, federation: Federation, spread: Spread, wanted: Sequence[str], weights: Weights, dtype: Any
) -> tuple[dict[str, FlatSplit], dict[str, Rows]]:
    """Data for training and evaluation over a mesh: one copy, every client's rows on its device."""
    flat: dict[str, FlatSplit] = {}
    full: dict[str, Rows] = {}
    needed = sorted({*problem.streams.values()})
    for name in dict.fromkeys([*needed, *wanted]):
        split = federation[name]
        if not split.size:
            continue
        offsets, counts = np.asarray(split.offsets), np.asarray(split.counts)
        bounds = by_device(offsets, spread, split.pooled)
        examples, order = in_blocks(split.examples, bounds, spread.mesh)
        if name in wanted:
            sizes = weighing(problem, federation, weights, name)
            full[name] = rows_of(split, dtype, sizes, (examples, order, spread.devices))
        if name in needed:
            start = per_client(offsets[:-1] - np.repeat(bounds[:-1], spread.each)[: spread.clients], spread)
            count, most = per_client(counts, spread), int(counts.max())
            flat[name] = FlatSplit(examples, start, count, most, jnp.asarray(order))
    return flat, full


def _pool(
    rule: Sampler, flat: dict[str, FlatSplit], sizes: Mapping[str, np.ndarray]
) -> tuple[Sampler, dict[str, FlatSplit]]:
    """One client with all data, sampled so that the objective stays the same. sizes: weights of the clients."""
    first = next(iter(flat.values()))
    counts = {name: np.asarray(split.count, np.int64) for name, split in flat.items()}
    alike = all(np.array_equal(sizes[n] * count[0], sizes[n][0] * count) for n, count in counts.items())
    if not alike and len(flat) > 1:
        raise ValueError(
            "a centralised method that draws from several splits needs every example to count alike: "
            'weights="size", or weighting="examples" in the problem'
        )
    if not alike and isinstance(rule, Epochs):
        raise ValueError(
            'centralised epochs over clients of different sizes need weights="size", or sampling="replacement"'
        )
    if not isinstance(rule, Epochs):
        whole = isinstance(rule, Whole)
        rule = Balanced(0 if whole else rule.rows(first.capacity), first.start, first.count, alike, whole)
    size = lambda f: jax.tree.leaves(f.examples)[0].shape[0]
    zero = jnp.zeros((1,), jnp.int32)
    return rule, {n: FlatSplit(f.examples, zero, jnp.full((1,), size(f), jnp.int32), size(f)) for n, f in flat.items()}
