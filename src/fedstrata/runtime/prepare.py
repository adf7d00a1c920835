"""From what a user gives to what the program takes: data on the device, weights, and every check that needs no run."""

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedstrata.algorithm import Algorithm, oracle_needed, oracle_of
from fedstrata.data import check
from fedstrata.data.federation import Federation, Split
from fedstrata.data.sampling import Balanced, Epochs, Sampler, Whole
from fedstrata.errors import unknown
from fedstrata.problems.base import Problem, Rows
from fedstrata.problems.stored import Stored
from fedstrata.runtime.checks import check_federation
from fedstrata.runtime.host import Host, HostSplit
from fedstrata.runtime.layout import FlatSplit
from fedstrata.runtime.mesh import Spread, by_device, in_blocks, per_client
from fedstrata.runtime.result import SetupWarning
from fedstrata.runtime.world import World
from fedstrata.transport.cohort import Selection, selection
from fedstrata.transport.ledger import exchanges
from fedstrata.transport.privacy import Privacy
from fedstrata.vector import Vector

Weights = Literal["uniform", "size"]


def sizes_of(federation: Federation, weights: Weights, split: str) -> np.ndarray:
    """Numbers in proportion to which clients weigh: the rows of this split, or one each."""
    counts = np.asarray(federation[split].counts)
    return counts if weights == "size" else np.ones(counts.shape, np.int64)


def rows_of(split: Split, dtype: Any, sizes: np.ndarray, stored: Any = None) -> Rows:
    """A whole split, each example with its share of the objective: p_i / n_i, over the clients that have any.

    sizes: numbers in proportion to p_i. In a pooled split, which nobody owns, every example counts the same.
    stored: the examples as they lie on a mesh, where each row is among them, and on how many devices; or `Stored`,
    if they stay on the host.
    """
    check.numbered(split.size, "this split")
    counts = np.asarray(split.counts)
    if not counts.any():
        raise ValueError("this split has no examples, so nothing can be evaluated on it")
    sizes = np.where(counts > 0, counts if split.pooled else sizes, 0)
    share = sizes / (sizes.sum() * np.maximum(counts, 1))
    owners = np.asarray(split.owners)
    weight, owner = jnp.asarray(share[owners], dtype), jnp.asarray(owners, jnp.int32)
    if isinstance(stored, tuple):
        examples, order, devices = stored
        return Rows(examples, weight, owner, split.clients, order=jnp.asarray(order), blocks=devices)
    examples = Stored(split.examples) if stored is Stored else jax.tree.map(jnp.asarray, split.examples)
    start, most = jnp.asarray(np.asarray(split.offsets)[:-1], jnp.int32), int(counts.max())
    return Rows(examples, weight, owner, split.clients, start=start, capacity=most)


def full_data(
    federation: Federation, weights: Weights = "uniform", dtype: Any = None, problem: Problem | None = None
) -> dict[str, Rows]:
    """Every split whole, for `problem.objective(x, full)` and the other exact evaluations.

    With weights="size" a client weighs by its rows in each split. A problem that draws from several splits weighs a
    client by its rows in one of them, for all of these splits: give the problem, and they weigh as in `fs.run`.

    >>> fed = Federation.from_clients([{"x": np.zeros(3)}, {"x": np.ones(1)}])
    >>> [round(6 * float(w), 5) for w in full_data(fed)["train"].weight]  # each client counts one half
    [1.0, 1.0, 1.0, 3.0]
    """
    check_federation(federation)
    dtype = jnp.zeros(()).dtype if dtype is None else dtype
    return {n: rows_of(s, dtype, weighing(problem, federation, weights, n)) for n, s in federation.splits.items()}


def weighing(problem: Problem | None, federation: Federation, weights: Weights, name: str) -> np.ndarray:
    """How clients weigh in a split: as in the merge, if the problem draws from it; else by their rows there."""
    if problem is None or weights == "uniform" or problem.weighs_clients or name not in problem.streams.values():
        return sizes_of(federation, weights, name)
    return sizes_of(federation, weights, problem.size_split)


def flat_split(split: Split) -> FlatSplit:
    start, counts = np.asarray(split.offsets)[:-1], np.asarray(split.counts)
    examples = jax.tree.map(jnp.asarray, split.examples)
    return FlatSplit(examples, jnp.asarray(start, jnp.int32), jnp.asarray(counts, jnp.int32), int(counts.max()))


def check_sizes(federation: Federation) -> None:
    """Every split must be one whose rows can be numbered."""
    for name, split in federation.splits.items():
        check.numbered(split.size, f"split {name!r}")


def check_parameters(x: Vector) -> None:
    """Parameters must be real arrays, and finite."""
    leaves = jax.tree_util.tree_flatten_with_path(x.tree)[0]
    if not leaves:
        raise ValueError("params has no arrays; give the start values of the model")
    for path, leaf in leaves:
        name = "params" + jax.tree_util.keystr(path)
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
            kind = getattr(leaf, "dtype", type(leaf).__name__)
            raise TypeError(f"{name} has dtype {kind}; parameters must be floating-point arrays (say, .astype(float))")
        if not bool(jnp.all(jnp.isfinite(leaf))):
            raise ValueError(f"{name} is not finite at the start")


def check_solves(algorithm: Algorithm, problem: Problem) -> None:
    """The algorithm's oracle must be one that the problem has, and its messages must be possible."""
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"algorithm={algorithm!r} is not an Algorithm; create one, e.g. fs.FedAvg(step_size=0.1)")
    if not isinstance(problem, Problem):
        raise TypeError(f"problem={problem!r} is not a Problem; create one, e.g. fs.Average(loss)")
    phases = algorithm.phases(problem)
    if not algorithm.centralised and not any(exchange.sends for exchange in exchanges(algorithm, phases)):
        warnings.warn(
            f"{type(algorithm).__name__} sends nothing up, so its server learns nothing from the clients; place what "
            "they should send as Averaged, Reported, Gathered or Pooled",
            SetupWarning,
            stacklevel=4,
        )
    for phase in phases:
        needed = oracle_needed(phase.step)
        if isinstance(needed, type) and not issubclass(problem.Oracle, needed):
            able = ", ".join(solvers(problem)) or "none of the library's algorithms"
            raise TypeError(
                f"{type(algorithm).__name__} does not solve {type(problem).__name__} problems: it asks for a "
                f"{needed.__name__}, and they have a {problem.Oracle.__name__}; these do: {able}"
            )


def solvers(problem: Problem) -> list[str]:
    """The library's algorithms whose steps ask for an oracle that this problem has."""
    from fedstrata.algorithms import known

    asks = {name: oracle_of(cls) for name, cls in known().items()}
    return [name for name, needed in asks.items() if isinstance(needed, type) and issubclass(problem.Oracle, needed)]


def world_of(
    problem: Problem,
    algorithm: Algorithm,
    federation: Federation,
    rule: Sampler,
    cohort: Any,
    weights: Weights,
    monitor: Problem | None,
    evaluate: Sequence[str] | None,
    dtype: Any,
    mesh: Mesh | None = None,
    stream: bool = False,
    privacy: Privacy | None = None,
) -> World:
    """Data on the device, over a mesh of them, or left on the host, and the rules of a run, checked."""
    if privacy is not None:
        check_private(privacy, algorithm, problem)
    check_weights(weights, problem)
    needed = sorted({*problem.streams.values()})
    for name in [*needed, *(evaluate or ())]:
        if name not in federation.splits:
            raise unknown(f"split (this federation is asked for {name!r}); split", name, federation.splits)
    check_counts(problem, federation, rule)
    also = set() if monitor is None else {*monitor.streams.values()}
    wanted = [n for n in federation.splits if n in {*needed, *also, "train"} or evaluate is None or n in evaluate]
    chosen: Selection = selection(cohort)
    sizes = sizes_of(federation, weights, problem.size_split) if weights == "size" else None
    total = None if sizes is None else float(sizes.sum())
    if mesh is not None and not algorithm.centralised:
        chosen.check(federation.clients)
        spread = Spread(mesh, federation.clients)
        flat, full = _over_devices(problem, federation, spread, wanted, weights, dtype)
        counts = per_client(sizes, spread) if sizes is not None else None
        size = federation.clients
        return World(problem, monitor, rule, chosen, flat, full, counts, size, spread, privacy=privacy, total=total)
    if stream:
        chosen.check(federation.clients)
        host = Host({n: HostSplit(federation[n], chosen.size(federation.clients)) for n in needed})
        flat = {n: FlatSplit(None, None, None, split.capacity) for n, split in host.splits.items()}
        rows = lambda n: rows_of(federation[n], dtype, weighing(problem, federation, weights, n), Stored)
        full = {n: rows(n) for n in wanted if federation[n].size}
        counts = None if sizes is None else jnp.asarray(sizes, jnp.int32)
        size = federation.clients
        return World(problem, monitor, rule, chosen, flat, full, counts, size, host=host, privacy=privacy, total=total)
    # One copy on the device serves training and evaluation.
    placed = {
        n: Split(jax.tree.map(jnp.asarray, s.examples), s.offsets, s.pooled) for n, s in federation.splits.items()
    }
    rows = lambda n: rows_of(placed[n], dtype, weighing(problem, federation, weights, n))
    full = {n: rows(n) for n in wanted if federation[n].size}
    flat = {n: flat_split(placed[n]) for n in needed}
    counts = None if sizes is None else jnp.asarray(sizes, jnp.int32)
    if algorithm.centralised:
        by = "size" if getattr(problem, "weighting", None) == "examples" else weights
        rule, flat = _pool(rule, flat, {n: weighing(problem, federation, by, n) for n in needed})
        return World(problem, monitor, rule, selection(None), flat, full, None, 1)
    chosen.check(federation.clients)
    size = federation.clients
    return World(problem, monitor, rule, chosen, flat, full, counts, size, privacy=privacy, total=total)


def check_weights(weights: Any, problem: Problem) -> None:
    if weights not in ("uniform", "size"):
        raise unknown("weights", str(weights), ["uniform", "size"])
    if weights == "size" and problem.weighs_clients:
        raise ValueError(
            f'weights="size": a {type(problem).__name__} problem weighs its clients itself; leave weights="uniform", '
            'and say weighting="examples" or "clients" in the problem'
        )


def check_private(privacy: Any, algorithm: Algorithm, problem: Problem) -> None:
    if not isinstance(privacy, Privacy):
        raise TypeError(f"privacy={privacy!r} is not a Privacy; create one, e.g. fs.Privacy(clip=1.0, noise=1.0)")
    privacy.check(algorithm, problem)


def check_counts(problem: Problem, federation: Federation, rule: Sampler) -> None:
    """Every client must have what its steps draw."""
    clients = max(split.clients for split in federation.splits.values())
    for name in sorted({*problem.streams.values()}):
        if federation[name].clients != clients:
            raise ValueError(
                f"split {name!r} is pooled: it belongs to no client, so no client can draw from it in training; give "
                f"each client its rows, with federation.with_split({name!r}, examples, clients=...), or hold some of "
                f"the clients' own rows out with federation.hold_out({name!r})"
            )
        counts = np.asarray(federation[name].counts)
        if problem.may_lack and counts.max() > 0:
            counts = np.where(counts > 0, counts, np.iinfo(np.int32).max)  # who has nothing is asked for nothing
        if counts.min() < 1:
            empty = federation.names[int(counts.argmin())]
            raise ValueError(
                f"{empty} has no examples in split {name!r}; drop it with federation.select, or give it data"
            )
        streams = [stream for stream, split in problem.streams.items() if split == name]
        rule.check(counts, federation.names.__getitem__, streams)


def streams(stream: bool | None, algorithm: Algorithm, federation: Federation, mesh: Mesh | None) -> bool:
    """Whether the federation stays on the host: as asked, or because its data would fill the device by half."""
    if stream not in (None, True, False):
        raise ValueError(f"stream={stream!r} must be True, False, or None to stream what does not fit")
    able = not algorithm.centralised and mesh is None
    if stream and algorithm.centralised:
        raise ValueError(
            f"stream=True: {type(algorithm).__name__} is centralised and draws from all data, so it needs them on the "
            "device; leave stream out"
        )
    if stream and mesh is not None:
        raise ValueError("stream=True with a mesh: a mesh shares data out over its devices; choose one of the two")
    held = sum(leaf.nbytes for split in federation.splits.values() for leaf in jax.tree.leaves(split.examples))
    return bool(stream) if stream is not None else able and held > 0.5 * device_memory()


def device_memory() -> float:
    """Bytes of the memory that arrays lie in."""
    found = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in found:
        return found["bytes_limit"]
    known = hasattr(os, "sysconf") and {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= os.sysconf_names.keys()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if known else float("inf")


def _over_devices(
    problem: Problem, federation: Federation, spread: Spread, wanted: Sequence[str], weights: Weights, dtype: Any
) -> tuple[dict[str, FlatSplit], dict[str, Rows]]:
    """Data for training and for evaluation over a mesh: one copy, every client's rows on its own device."""
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
    """One client that holds everything, sampled so that the objective stays the same. sizes: weights of the clients."""
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
