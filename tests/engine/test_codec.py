"""Messages: every array comes back as it was, and bytes that are no message never become arrays."""

import json
import pickle
import struct
import time
from typing import NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays, from_dtype

from fedstrata.core.memory import Pool
from fedstrata.core.vector import Vector
from fedstrata.engine.codec import DTYPES, decode, encode, from_named_arrays, message, named_arrays, payload_bytes

few = settings(max_examples=40, deadline=None)
plain = st.sampled_from([d for n, d in DTYPES.items() if n != "bfloat16"])
shapes = st.just(()) | array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)
anything = plain.flatmap(lambda d: arrays(d, shapes, elements=from_dtype(d)))
brain = arrays(np.uint16, shapes).map(lambda a: a.view(ml_dtypes.bfloat16))  # every bit pattern, NaN included


def identical(ours, theirs):
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert ours.tobytes() == theirs.tobytes()  # bits, so that NaN and −0 count


@few
@given(st.dictionaries(st.text(max_size=8), anything | brain, max_size=4))
def test_round_trip(named):
    back = decode(encode(named))
    assert list(back) == list(named)
    for name, array in named.items():
        identical(back[name], array)
    assert payload_bytes(encode(named)) == sum(a.nbytes for a in named.values())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_travels_from_any_memory_layout(dtype):
    grid = np.arange(24).reshape(4, 6).astype(dtype)
    swapped = grid if dtype.itemsize == 1 or dtype == DTYPES["bfloat16"] else grid.astype(dtype.newbyteorder(">"))
    for array in (grid, grid.T, grid[::2, ::-1], np.asfortranarray(grid), swapped, grid[0, 0], grid[:0]):
        array = np.asarray(array)
        back = decode(encode({"x": array}))["x"]
        assert back.dtype == dtype
        np.testing.assert_array_equal(back, array)


def test_the_layout_of_a_message_is_as_documented():
    """Built by hand: four letters, the header's length, JSON, little-endian numbers."""
    header = json.dumps([["x", "int16", [2]], ["y", "float32", []]], separators=(",", ":")).encode()
    by_hand = b"FSM1" + struct.pack("<I", len(header)) + header + struct.pack("<2h", 1, -2) + struct.pack("<f", 0.5)
    assert encode({"x": np.array([1, -2], np.int16), "y": np.array(0.5, np.float32)}) == by_hand


class Pair(NamedTuple):
    x: Vector
    y: Vector


def test_a_tree_by_its_paths_and_back():
    tree = Pair(Vector({"w": jnp.ones((2, 3)), "b": jnp.zeros(())}), Vector([jnp.arange(3, dtype=jnp.int32)]))
    named = named_arrays(tree)
    assert set(named) == {".x.tree['w']", ".x.tree['b']", ".y.tree[0]"}
    back = from_named_arrays(tree, decode(encode(named)))
    assert type(back) is Pair
    np.testing.assert_array_equal(back.x.tree["w"], np.ones((2, 3)))
    np.testing.assert_array_equal(back.y.tree[0], np.arange(3))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.pop("['a']"), r"missing \[\"\['a'\]\"\], unexpected \[\]"),
        (lambda m: m.update(z=np.ones(1)), r"missing \[\], unexpected \['z'\]"),
        (lambda m: m.update({"['a']": np.ones(3)}), r"\['a'\] is float64\(3,\), expected float64\(2,\)"),
        (lambda m: m.update({"['a']": np.ones(2, np.float32)}), r"\['a'\] is float32\(2,\), expected float64\(2,\)"),
    ],
)
def test_a_message_that_does_not_fit_the_state_is_refused(change, words):
    like = {"a": np.ones(2), "b": np.ones(())}
    named = dict(named_arrays(like))
    change(named)
    with pytest.raises(ValueError, match=words):
        from_named_arrays(like, named)


def test_of_a_pool_only_the_rows_travel():
    pool = Pool.empty({"s": jnp.zeros(()), "z": jnp.zeros(2)}, capacity=5).write(
        0, {"s": jnp.ones(1), "z": jnp.ones((1, 2))}
    )
    sent = message({"x": Vector(jnp.ones(3, jnp.float32)), "pool": pool})
    assert payload_bytes(sent) == 3 * 4 + 5 * 8 + 5 * 2 * 8
    assert set(decode(sent)) == {"x.tree", "pool['s']", "pool['z']"}


GOOD = encode({"x": np.arange(3.0), "y": np.ones(2, np.int8)})


def forged(header, payload=b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return b"FSM1" + struct.pack("<I", len(text)) + text + payload


def test_every_truncation_and_any_addition_is_refused():
    for length in range(len(GOOD)):
        with pytest.raises(ValueError, match="message: "):
            decode(GOOD[:length])
    with pytest.raises(ValueError, match="announces"):
        decode(GOOD + b"\0")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (b"", "wrong first bytes"),
        (b"FSM2" + GOOD[4:], "wrong first bytes"),
        (pickle.dumps({"x": np.ones(3)}), "wrong first bytes"),
        (forged(b"{"), "unreadable header"),
        (forged(b"\xff\xfe\x00"), "unreadable header"),
        (forged(b"[" * 100_000), "unreadable header"),
        (forged({"x": 1}), "unreadable header"),
        (forged(5), "unreadable header"),
        (forged([["x", "int8"]]), "unreadable header"),
        (forged([["x", "complex64", [1]]], b"\0" * 8), "unreadable header.*complex64"),
        (forged([["x", "object", [1]]], b"\0" * 8), "unreadable header.*object"),
        (forged([["x", ["int8"], [1]]], b"\0"), "unreadable header"),
        (forged([["x", "int8", [1.5]]], b"\0"), "unreadable header"),
        (forged([["x", "int8", "1"]], b"\0"), "unreadable header"),
        (forged(b'[["x","int8",[Infinity]]]'), "unreadable header"),
        (forged(b'[["x","int8",[' + b"9" * 5000 + b"]]]"), "unreadable header"),
        (forged([["x", "int8", [-1]]]), "negative shape"),
        (forged([["x", "int8", [-1, -1]]], b"\0"), "negative shape"),
        (forged([["x", "int8", [1]], ["x", "int8", [1]]], b"\0\0"), "repeated name"),
        (forged([["x", "float64", [10**30]]]), "31 digits"),
        (forged([["x", "float64", [10**18]]]), "x announces more than 2,147,483,648 bytes"),
        (forged([["x", "float64", [2**40, 2**40]]]), "announces"),
        (forged([["x", "float64", [2**61]]]), "announces"),  # 2⁶¹ × 8 = 0 in 64 bits
        (forged([["x", "float64", [0, 10**18]]]), "announces"),  # no bytes at all, so the lengths agree
        (forged([["x", "float64", [10**18, 10**18, 0]]]), "announces"),
        (forged([["x", "int8", [1] * 33]], b"\0"), "at most 32 dimensions"),
        (forged([["x" * 513, "int8", [1]]], b"\0"), "name of at most 512 characters"),
        (forged([[5, "int8", [1]]], b"\0"), "name of at most 512 characters"),
        (forged([["x", "int8", [True]]], b"\0"), "not whole numbers"),
        (forged([["\ud800", "int8", [1]]], b"\0"), "not valid Unicode"),
        (forged([{"x": "int8"}]), "more than 0 objects"),
        (forged([["x\n" * 50, "none", [1]]]), r"\(x\\nx.{40,80}… has a dtype none\)$"),
        (forged([["x", "int8\x1b[2K", [1]]]), r"dtype int8\\x1b\[2K\)$"),
        (b"FSM1\xff\xff\xff\xff[]", "4,294,967,295 bytes announced"),
    ],
    ids=lambda v: v[:20] if isinstance(v, str) else repr(v[8:40]),
)
def test_malformed_messages_are_refused(bad, words):
    with pytest.raises(ValueError, match=words):
        decode(bad)


# Without limits the first took 36 s and the second 1.6 s. The others are within the length of a header.
FLOODS = {
    "digits": b'[["x","int8",[' + b",".join([b"9" * 4000] * 950) + b"]]]",
    "arrays": b"[" + b",".join(b'["%d","int8",[0]]' % i for i in range(200_000)) + b"]",
    "digits in a short header": b'[["x","int8",[' + b",".join([b"9" * 4000] * 260) + b"]]]",
    "arrays in a short header": b"[" + b",".join(b'["%d","int8",[0]]' % i for i in range(30_000)) + b"]",
    "products": b"[" + b",".join(b'["%d","int8",[9999999999,9999999999,0]]' % i for i in range(9_999)) + b"]",
    "no arrays": b"[" + b",".join([b"[[],[],[]]"] * 30_000) + b"]",
    "a dtype of lists": b'[["x",[' + b",".join([b"[]"] * 99_000) + b"],[1]]]",
}


@pytest.mark.parametrize("what", FLOODS)
def test_a_flood_is_refused_before_any_work(what):
    taken, bad = [], forged(FLOODS[what])
    for _ in range(3):
        start = time.process_time()
        with pytest.raises(ValueError, match=r"^message: .{0,200}$"):
            decode(bad)
        taken.append(time.process_time() - start)
    assert min(taken) < 0.05


def test_the_largest_messages_within_the_limits_travel():
    many = {f"{i:0>40}": np.zeros((), np.int8) for i in range(5_000)}
    assert list(decode(encode(many))) == list(many)
    odd = {"é" * 512: np.zeros((1,) * 32), "empty": np.zeros((0, 2**20, 2**8))}
    assert {n: a.shape for n, a in decode(encode(odd)).items()} == {n: a.shape for n, a in odd.items()}


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({str(i): np.zeros(()) for i in range(5_001)}, "5,001 arrays, and at most 5,000 are allowed"),
        ({"x" * 513: np.zeros(())}, "name of at most 512 characters"),
        ({"x": np.zeros((1,) * 33)}, "at most 32 dimensions"),
        ({"x": np.broadcast_to(np.zeros(()), (2**28,))}, "bytes, and at most 2,147,483,648 are allowed"),
        ({"x": np.broadcast_to(np.zeros(()), (2**40,))}, "x announces more than 2,147,483,648 bytes"),
        ({"x": np.zeros((0, 2**40))}, "x announces more than 2,147,483,648 bytes"),
        ({f"{i:0>500}": np.zeros(()) for i in range(3_000)}, "header would be refused: 1,"),
        ({"\ud800": np.zeros(())}, "header would be refused: text that is not valid Unicode"),
    ],
    ids=["arrays", "name", "dimensions", "bytes", "more bytes", "no bytes", "header", "surrogate"],
)
def test_a_sender_finds_out_first(arrays, words):
    with pytest.raises(ValueError, match=words):
        encode(arrays)


def test_errors_of_names_from_a_peer_are_short():
    like, sent = {"a": np.ones(2)}, {f"{i}\n" * 100: np.ones(2) for i in range(1_000)}
    with pytest.raises(ValueError, match=r"^message: missing .*… and 995 more$") as error:
        from_named_arrays(like, sent)
    assert len(str(error.value)) < 500


@few
@given(st.binary(max_size=60), st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_noise_is_refused_or_decoded_but_never_anything_else(noise, at, flip):
    damaged = bytearray(GOOD)
    damaged[at] ^= flip
    for bad in (noise, b"FSM1" + noise, forged(noise), bytes(damaged)):
        try:
            out = decode(bad)
        except ValueError:
            continue
        assert all(a.dtype.name in DTYPES for a in out.values())


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


def test_nothing_is_ever_pickled_or_unpickled():
    with pytest.raises(TypeError, match="x has dtype object, not supported in messages; supported: float16"):
        encode({"x": np.array([Bomb()], dtype=object)})
    bomb = pickle.dumps(Bomb())
    for bad in (bomb, b"FSM1" + bomb, forged(bomb), forged([["x", "object", [1]]], bomb)):
        with pytest.raises(ValueError, match="message: "):
            decode(bad)
    kept = decode(forged([["x", "uint8", [len(bomb)]]], bomb))  # as numbers, it is only numbers
    assert kept["x"].tobytes() == bomb


@pytest.mark.parametrize("array", [np.array([1j]), np.array(["a"]), np.zeros(2, "M8[D]"), np.zeros(2, [("a", "f4")])])
def test_what_does_not_travel_is_named(array):
    with pytest.raises(TypeError, match=r"grad\.w has dtype .* not supported"):
        encode({"grad.w": array})
