"""Sums of what sites send that show no single site's part: where a secure-aggregation backend plugs in.

A site weighs its (clipped) mean-merged arrays and hands them to `conceal`; what comes back is all that leaves it. The
server hands the concealed arrays of all sites to `reveal` and gets their sum, which is the mean. Rows (`Pooled` and
`Gathered` fields) are no sums: they are refused unless accepted, and then leave as they are.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from fedstrata.placement import field_of
from fedstrata.transport.codec import encode
from fedstrata.transport.letters import Letter, Stage
from fedstrata.transport.privacy import means

Arrays = Mapping[str, np.ndarray]


class SecureSumError(RuntimeError):
    """A sum cannot be made, or not without showing a single site's part."""


class SecureSum(Protocol):
    """One object at every site, and one at the server. What is concealed are arrays of whole numbers in 64 bits."""

    accept: tuple[str, ...]  # Pooled and Gathered fields whose rows may leave as they are

    def conceal(self, stage: Stage, call: bytes, peers: Sequence[int], arrays: Arrays) -> dict[str, np.ndarray]:
        """What leaves this site instead of its arrays, with the same names and shapes, in uint64.

        call: a digest of what all sites of this exchange were told, and of which run and stage it is; the same at all
        of them. peers: the numbers of the sites whose parts are summed.
        """
        ...

    def reveal(self, stage: Stage, peers: Sequence[int], parts: Mapping[int, Arrays]) -> dict[str, np.ndarray]:
        """The sum of all parts in float64. A SecureSumError where parts of peers are missing and cannot be replaced."""
        ...


class MaskedSum:
    """A REFERENCE, for tests and as an example for a real backend: pairwise masks that cancel in the sum.

    A value is a fixed-point number of `bits` fractional bits, modulo 2⁶⁴. Every two sites share a secret, from which
    comes a fresh mask for every array of every exchange (SHAKE-256); one of them adds it and the other subtracts it.

    It is not hardened. Secrets are dealt by whoever calls `dealt`, which must be trusted to forget them: there is no
    key agreement. A site that drops out makes the exchange fail: there is no recovery. Nothing stops a server that
    lies about what it told other sites. An object refuses to use a mask for two different messages, but only as long
    as it lives.
    """

    def __init__(
        self, number: int = -1, shared: Mapping[int, bytes] | None = None, bits: int = 40, accept: Sequence[str] = ()
    ):
        """number, shared: which site this is, and its secret with each of the others; the server has neither."""
        if not 0 <= bits <= 60:
            raise ValueError(f"MaskedSum: bits={bits} must be between 0 and 60")
        self.number, self.shared, self.bits, self.accept = number, dict(shared or {}), bits, tuple(accept)
        self.used: dict[bytes, bytes] = {}

    @classmethod
    def dealt(cls, sites: int, bits: int = 40, accept: Sequence[str] = ()) -> tuple["MaskedSum", list["MaskedSum"]]:
        """The server's object, and every site's, with secrets from the operating system."""
        pairs = {(i, j): secrets.token_bytes(32) for i in range(sites) for j in range(i)}
        own = lambda i: {j: pairs[max(i, j), min(i, j)] for j in range(sites) if j != i}
        return cls(bits=bits, accept=accept), [cls(i, own(i), bits, accept) for i in range(sites)]

    def conceal(self, stage: Stage, call: bytes, peers: Sequence[int], arrays: Arrays) -> dict[str, np.ndarray]:
        strangers = [p for p in peers if p != self.number and p not in self.shared]
        if strangers or self.number not in peers:
            raise SecureSumError(f"site {self.number} has no secret with {strangers}, or is not one of {list(peers)}")
        plain = {name: self._fixed(name, array, len(peers)) for name, array in arrays.items()}
        message = hashlib.sha256(encode(plain)).digest()
        if self.used.setdefault(call, message) != message:
            raise SecureSumError(
                f"site {self.number} was asked for {tuple(stage)} twice, told the same, and has another answer: under "
                "the same masks the difference would show; start a new run"
            )
        return {name: self._masked(call, name, array, peers) for name, array in plain.items()}

    def reveal(self, stage: Stage, peers: Sequence[int], parts: Mapping[int, Arrays]) -> dict[str, np.ndarray]:
        if missing := sorted({*peers} - {*parts}):
            raise SecureSumError(
                f"round {stage.round}, exchange {stage.exchange}: the parts of sites {missing} are missing, and the "
                "sum of the others cannot be unmasked; the run stays as it was: repeat the round when they are back"
            )
        first = parts[peers[0]]
        total = {n: np.sum(np.stack([parts[p][n] for p in peers]), axis=0, dtype=np.uint64) for n in first}
        return {
            n: np.asarray(t, np.uint64).view(np.int64).astype(np.float64) / 2.0**self.bits for n, t in total.items()
        }

    def _fixed(self, name: str, array: np.ndarray, peers: int) -> np.ndarray:
        scaled = np.asarray(array, np.float64) * 2.0**self.bits
        largest = 2.0**63 / peers  # the sum of all must fit, too
        if not np.all(np.abs(scaled) < largest):  # nor do NaNs
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


def digest(call: Letter) -> bytes:
    """What all sites of an exchange were told alike: run, stage, arrays, and who wrote the rows of pools."""
    return hashlib.sha256(call._replace(site="", after=None).encode()).digest()


def split(state: type, arrays: Arrays) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Named arrays that are to be averaged, and the others."""
    field = lambda name: field_of(name.partition("[")[0])
    summed = {name: array for name, array in arrays.items() if means(state, (field(name),))}
    return summed, {name: array for name, array in arrays.items() if name not in summed}


def concealed_like(template: Any) -> Any:
    """A state with the shapes of what comes concealed from a site."""
    word = lambda a: jax.ShapeDtypeStruct(a.shape, np.dtype(np.uint64))
    state = type(template)
    return template._replace(**{f: jax.tree.map(word, getattr(template, f)) for f in means(state, state._fields)})
