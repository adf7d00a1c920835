"""Sums of what sites send that hide every single site's part: the interface of a secure-aggregation backend.

A site multiplies its (clipped) arrays by its weight and passes them to `conceal`; only the result leaves the site. The
server passes the concealed arrays of all sites to `reveal`, which returns their sum: the mean. Rows (`Pooled` and
`Gathered` fields) are not summed. They are refused unless accepted, and then leave the site unprotected.
"""

import hashlib
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fedstrata.core.algorithm import Cohort
from fedstrata.core.placement import field_of
from fedstrata.deploy.agreement import Agreement
from fedstrata.deploy.messages import Message, Stage
from fedstrata.engine.codec import encode
from fedstrata.engine.privacy import check_rows, means

Arrays = Mapping[str, np.ndarray]


class SecureSumError(RuntimeError):
    """A sum cannot be computed, or not without revealing a single site's part."""


class SecureSum(Protocol):
    """One object at every site, and one at the server. Concealed arrays have 64-bit unsigned integers."""

    accept: tuple[str, ...]  # Pooled and Gathered fields whose rows may leave unprotected
    bits: int  # after the point of the sums: a site's part is wrong by at most half of the last one

    def conceal(self, stage: Stage, call: bytes, peers: Sequence[int], arrays: Arrays) -> dict[str, np.ndarray]:
        """What leaves this site instead of its arrays: the same names and shapes, in uint64.

        Args:
            stage: of the exchange.
            call: a digest of the run, the stage and the arrays that the server sent; the same at all sites.
            peers: the numbers of the sites whose parts are summed.
            arrays: this site's part, weighted.
        """
        ...

    def reveal(self, stage: Stage, peers: Sequence[int], parts: Mapping[int, Arrays]) -> dict[str, np.ndarray]:
        """The sum of all parts, in float64.

        Args:
            stage: of the exchange.
            peers: the numbers of the sites whose parts are summed.
            parts: by site number, what left the site.

        Raises:
            SecureSumError: parts of peers are missing and cannot be replaced.
        """
        ...


class MaskedSum:
    """A REFERENCE, for tests and as an example for a real backend: pairwise masks that cancel in the sum.

    A value is a fixed-point number with `bits` fractional bits, modulo 2⁶⁴. Every two sites share a secret. It gives a
    fresh mask for every array of every exchange (SHAKE-256); one of the two adds it and the other subtracts it.

    It is not hardened. There is no key agreement: the caller of `dealt` creates all secrets and must be trusted to
    forget them. There is no recovery: an exchange fails if a site drops out. Nothing detects a server that sends
    different calls to different sites. An object refuses to use a mask for two different messages, but it remembers
    masks only as long as its process runs.
    """

    def __init__(
        self, number: int = -1, shared: Mapping[int, bytes] | None = None, bits: int = 40, accept: Sequence[str] = ()
    ):
        """One site's object, or the server's.

        Args:
            number: of the site; −1: the server.
            shared: by number of the other sites, the secret shared with them; the server has none.
            bits: fractional bits of the fixed-point numbers, 0 to 60.
            accept: Pooled and Gathered fields whose rows may leave unprotected.
        """
        if not 0 <= bits <= 60:
            raise ValueError(f"MaskedSum: bits={bits} must be between 0 and 60")
        self.number, self.shared, self.bits, self.accept = number, dict(shared or {}), bits, tuple(accept)
        self.used: dict[bytes, bytes] = {}

    @classmethod
    def dealt(cls, sites: int, bits: int = 40, accept: Sequence[str] = ()) -> tuple["MaskedSum", list["MaskedSum"]]:
        """The server's object and those of all sites, with secrets from the operating system.

        Args:
            sites: how many.
            bits: as in the constructor.
            accept: as in the constructor.
        """
        pairs = {(i, j): secrets.token_bytes(32) for i in range(sites) for j in range(i)}
        shared = lambda i: {j: pairs[max(i, j), min(i, j)] for j in range(sites) if j != i}
        return cls(bits=bits, accept=accept), [cls(i, shared(i), bits, accept) for i in range(sites)]

    def conceal(self, stage: Stage, call: bytes, peers: Sequence[int], arrays: Arrays) -> dict[str, np.ndarray]:
        """The arrays as fixed-point numbers plus this site's masks; arguments as in `SecureSum`."""
        strangers = [p for p in peers if p != self.number and p not in self.shared]
        if strangers or self.number not in peers:
            raise SecureSumError(f"site {self.number} has no secret with {strangers}, or is not one of {list(peers)}")
        _check_peers(stage, peers)
        plain = {name: self._fixed(name, array, len(peers)) for name, array in arrays.items()}
        message = hashlib.sha256(encode(plain)).digest()
        if self.used.setdefault(call, message) != message:
            raise SecureSumError(
                f"site {self.number} was called twice for stage {tuple(stage)}, with the same arrays, and has "
                "different results: the same masks would reveal their difference; start a new run"
            )
        return {name: self._masked(call, name, array, peers) for name, array in plain.items()}

    def reveal(self, stage: Stage, peers: Sequence[int], parts: Mapping[int, Arrays]) -> dict[str, np.ndarray]:
        """The sum, in which all masks cancel; arguments as in `SecureSum`."""
        _check_peers(stage, peers)
        if missing := sorted({*peers} - {*parts}):
            raise SecureSumError(
                f"round {stage.round}, exchange {stage.exchange}: the parts of sites {missing} are missing, and the "
                "sum of the others cannot be unmasked; the run's state has not changed: repeat the round when they are "
                "back"
            )
        first = parts[peers[0]]
        total = {n: np.sum(np.stack([parts[p][n] for p in peers]), axis=0, dtype=np.uint64) for n in first}
        return {
            n: np.asarray(t, np.uint64).view(np.int64).astype(np.float64) / 2.0**self.bits for n, t in total.items()
        }

    def _fixed(self, name: str, array: np.ndarray, peers: int) -> np.ndarray:
        scaled = np.asarray(array, np.float64) * 2.0**self.bits
        largest = 2.0**63 / peers  # the sum of all sites must fit
        if not np.all(np.abs(scaled) < largest):  # NaNs fail this, too
            raise SecureSumError(
                f"site {self.number}: {name} has a weighted value that is not finite or not below {largest} × "
                f"2^-{self.bits} in size; use fewer bits, or clip (fs.Privacy)"
            )
        return np.rint(scaled).astype(np.int64).view(np.uint64)

    def _masked(self, call: bytes, name: str, plain: np.ndarray, peers: Sequence[int]) -> np.ndarray:
        out = plain.reshape(-1).copy()
        for peer in peers:
            if peer != self.number:
                stream = hashlib.shake_256(self.shared[peer] + call + name.encode()).digest(8 * out.size)
                mask = np.frombuffer(stream, "<u8").astype(np.uint64)
                out = out + mask if peer < self.number else out - mask
        return out.reshape(plain.shape)


def _check_peers(stage: Stage, peers: Sequence[int]) -> None:
    """Refuse a sum of fewer than two sites, which would be the value of one."""
    if len(set(peers)) < 2:
        raise SecureSumError(
            f"round {stage.round}, exchange {stage.exchange}: this sum has {len(set(peers))} sites, and "
            "at least 2 are needed, because it would reveal the value of a single site; use a larger cohort"
        )


def digest(call: Message) -> bytes:
    """A hash of what all sites of an exchange receive alike: run, stage, arrays, and the writers of pooled rows."""
    return hashlib.sha256(call._replace(site="", after=None).encode()).digest()


def split(state: type, arrays: Arrays) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Named arrays that are averaged, and the others.

    Args:
        state: the class of the algorithm's state.
        arrays: what a site sends.
    """
    field = lambda name: field_of(name.partition("[")[0])
    summed = {name: array for name, array in arrays.items() if means(state, (field(name),))}
    return summed, {name: array for name, array in arrays.items() if name not in summed}


def with_dtype(template: Any, dtype: Any) -> Any:
    """A state with the shapes of the template, and this dtype for what is summed: uint64 in a concealed reply."""
    word = lambda a: jax.ShapeDtypeStruct(a.shape, np.dtype(dtype))
    state = type(template)
    return template._replace(**{f: jax.tree.map(word, getattr(template, f)) for f in means(state, state._fields)})


def check_secure(agreement: Agreement, secure: SecureSum | None) -> None:
    """Refuse a secure sum if it does not hide rows that were not accepted, or does not fit the noise of the run."""
    if secure is None:
        return
    context = agreement.started()
    check_rows(context.algorithm, context.problem, secure.accept, "a secure sum does not hide", "its `accept`")
    if (privacy := context.privacy) is None:
        return
    if privacy.where == "sites":
        raise ValueError(
            'Privacy(where="sites") cannot be combined with a secure sum yet: every site would add noise for itself '
            'alone; leave one of the two out, or use where="server"'
        )
    state = context.state
    merges = [(exchange.sends, context.cohort_size) for exchange in context.exchanges]
    if context.algorithm.merge_at_init:
        merges.append((means(state, state._fields), context.clients))
    for sends, clients in merges:
        if grid := context.grid(sends, clients):
            step = privacy.clip / clients / grid.bound  # with equal weights, which make it smallest
            if too_coarse(secure.bits, step):
                raise ValueError(
                    f"a secure sum with {secure.bits} bits is coarser than the grid of the noise, {step:.3g}, so that "
                    f"the clip would not hold; use at least {math.ceil(1 - math.log2(step))} bits"
                )


def too_coarse(bits: int, step: float) -> bool:
    """Whether a sum with so many bits after the point is not fine enough for noise on a grid of this step."""
    return 2.0**-bits > step / 2


def weights_at(agreement: Agreement, round: int) -> dict[int, float]:
    """The weight of every site of a round, by its number; before round 0, of all sites."""
    bare = agreement.unnamed()._replace(context=agreement.context.with_data({}))  # all sites share one program
    cohort = _everyone(bare) if round < 0 else _cohort(bare, jnp.asarray(round, jnp.int32))
    slots = zip(np.asarray(cohort.ids), np.asarray(cohort.present), np.asarray(cohort.weights), strict=True)
    return {int(i): float(w) for i, here, w in slots if here}


@eqx.filter_jit
def _cohort(agreement: Agreement, round: Array) -> Cohort:
    return agreement.context.cohort(agreement.key, round)


@eqx.filter_jit
def _everyone(agreement: Agreement) -> Cohort:
    return agreement.context.everyone(agreement.key)
