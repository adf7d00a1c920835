"""Mutations of messages: of their bytes, and of the JSON in their headers. The same seed gives the same mutations."""

import json
import math
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

MAGICS = (b"FSL1", b"FSM1")
SIZES = {"float64": 8, "float32": 4, "int64": 8, "int32": 4, "int8": 1, "bool": 1, "uint64": 8, "bfloat16": 2}
MARK = "\x01here\x01"  # stands for raw JSON until the header is text
FLOOD = 1 / 500  # the share of mutations with long texts, which take most of the time

# Raw JSON that takes the place of a value of a header.
ODD = (
    *("0", "-1", "1", "true", "null", "1.5", "-0", "1e999", "NaN", "-Infinity", "[]", "{}", '""', "[[]]", '{"a":[1]}'),
    *("2147483647", "2147483648", "-2147483649", "4294967301", "1000000000000000000", "9" * 19, "9" * 20),
    *("-" + "9" * 20, "9" * 400, "9" * 4_000, "9" * 20_000, "1." + "3" * 4_000),
    *("[" * 40 + "]" * 40, "[" * 3_000, '{"a":' * 3_000),
    *("[0,1000000000000000000]", "[1000000000000000000,0]", "[" + "2," * 31 + "2]", "[" + "1," * 63 + "1]"),
    *("[65536,65536,65536,65536]", "[4611686018427387904,2]", '{"a":1,"a":2}', '["x","int8",[3]]', "[0,0,0,0,0]"),
    *(r'"\ud800"', r'"\udc00\ud800"', r'"\ud83d\ude00"', r'"\u0000"', r'"\u202e"', r'"a\nb"', '"\x1b[2K"'),
    *('"caf\u00e9"', '"' + "x" * 201 + '"', '"' + "x" * 513 + '"', '"' + "\u6771" * 300 + '"'),
    *('"float64"', '"float32"', '"bfloat16"', '"bool"', '"object"', '"x.tree"', "[3,1]", "[0]", "[4]"),
)  # fmt: skip


def _listed(item: str, times: int) -> str:
    return "[" + ",".join([item] * times) + "]"


# Raw JSON that tries to take much time or memory. The first ones are within the limits of a header.
# As many arrays as a message may have, with shapes as long as fit, and a text of digits that could be a number.
MANY = "[" + "".join(f'["{i}","int8",[0,1,1,1,1,1,1]],' for i in range(4_990)) + f'["{"1" * 20}","int8",[0]]]'
FLOODS = (
    _listed("1", 99_000),
    _listed("[]", 99_000),
    _listed('""', 99_000),
    _listed('"' + "x" * 8 + '"', 90_000),
    _listed("9" * 19, 50_000),
    _listed("1,1,1,1,1,1,1,1", 12_000),
    "[" + ",".join(f'["{i}","int8",[0]]' for i in range(4_990)) + "]",
    "[" + ",".join(f'["{i}","int8",[0,1,1,1,1,1]]' for i in range(4_990)) + "]",
    "[" + ",".join(f'["{i}","int8",[{",".join(["1"] * 32)}]]' for i in range(2_900)) + "]",
    "{" + ",".join(f'"{i}":[]' for i in range(99_000)) + "}",
    "{" + ",".join(f'"{i}":[1]' for i in range(60_000)) + "}",
    "{" + ",".join(f'"{i}":[1,2,3,4]' for i in range(19_900)) + "}",
    "{" + ",".join(f'"{i}":[{",".join(["1"] * 100)}]' for i in range(990)) + "}",
    '"' + "x" * 1_000_000 + '"',
    '"' + r"\\" * 500_000 + '"',
    '"' + r"\ud83d\ude00" * 80_000 + '"',
    '"' + r"\ud83d" * 160_000 + '"',
    '"' + "\U0001f600" * 250_000 + '"',
    _listed("{}", 99_000),
    _listed('{"":{}}', 99_000),
    "9" * 1_000_000,
    "1." + "9" * 1_000_000,
    '["' + "1" * 20 + '","' + r"\"" * 500_000,  # a text without an end, in which digits could be a number
    "[" + "1" * 20 + ',"' + r"\"" * 500_000,
    "[" * 1_000_000,
    '{"":' * 250_000,
    " " * 1_000_000,
    _listed("9" * 4_000, 250),
    _listed("9" * 4_000, 950),
    "[" + ",".join(f'["{i}","int8",[0]]' for i in range(200_000)) + "]",
    _listed("[[],[],[]]", 90_000),
)


class Parts(NamedTuple):
    """A message: its headers, from the outer to the inner, and what follows them. A plain JSON text has no magic."""

    headers: list[tuple[bytes, Any]]
    rest: bytes

    @classmethod
    def of(cls, data: bytes) -> "Parts":
        """The parts of a valid message."""
        headers = []
        while data[:4] in MAGICS:
            length = struct.unpack_from("<I", data, 4)[0]
            headers.append((data[:4], json.loads(data[8 : 8 + length])))
            data = data[8 + length :]
        return cls(headers, data) if headers else cls([(b"", json.loads(data))], b"")


def joined(headers: Sequence[tuple[bytes, bytes]], rest: bytes) -> bytes:
    """Headers as texts, and what follows, as one message."""
    return b"".join(m + struct.pack("<I", len(t)) + t if m else t for m, t in headers) + rest


def flipped(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(out) if draw.random() < 0.5 else min(len(out), 300))  # mostly in the headers
        out[at] ^= 1 << draw.randrange(8)
    return bytes(out)


def cut(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return data[: draw.randrange(len(data))] if draw.random() < 0.5 else data[draw.randrange(len(data)) :]


def doubled(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """A slice occurs again, somewhere."""
    a, b = sorted((draw.randrange(len(data)), draw.randrange(len(data))))
    at = draw.randrange(len(data))
    return data[:at] + data[a:b] * draw.choice((1, 2, 5)) + data[at:]


def removed(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    a, b = sorted((draw.randrange(len(data)), draw.randrange(len(data))))
    return data[:a] + data[b:]


def spliced(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """The beginning of one message and the end of another."""
    other = draw.choice(others)
    return data[: draw.randrange(len(data))] + other[draw.randrange(len(other)) :]


def inserted(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    at = draw.randrange(len(data))
    piece = draw.choice((draw.randbytes(draw.randrange(1, 40)), draw.choice(ODD).encode(), *MAGICS))
    return data[:at] + piece + data[at + draw.choice((0, len(piece))) :]


def wrong_length(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """A length field with another value."""
    at = draw.choice([data.find(magic) + 4 for magic in MAGICS if magic in data] or [0])
    old = int.from_bytes(data[at : at + 4], "little")
    new = draw.choice((0, 1, old - 1, old + 1, len(data), 2**20, 2**20 + 1, 2**31, 2**32 - 1, draw.getrandbits(32)))
    return data[:at] + struct.pack("<I", new % 2**32) + data[at + 4 :]


def restructured(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Values of a header replaced, removed, repeated or exchanged for others; lengths mostly agree."""
    parts = Parts.of(data)
    flood = draw.random() < 8 * FLOOD  # one in eight mutations comes here
    where = draw.randrange(len(parts.headers))
    texts = []
    for number, (magic, header) in enumerate(parts.headers):
        raw: list[str] = []
        if number == where:
            for _ in range(1 if flood else draw.choice((1, 1, 2, 3))):
                header = _changed(draw, header, raw, FLOODS if flood else ODD)
        text = json.dumps(header)
        for piece in raw:
            text = text.replace(json.dumps(MARK), piece, 1)
        texts.append((magic, text.encode("utf-8", "surrogatepass")))
    rest = parts.rest
    if draw.random() < 0.5:
        rest = _fitting(texts[-1][1], rest)
    elif draw.random() < 0.2:
        rest = draw.choice((b"", rest + b"\0" * draw.randrange(64), bytes(10_000)))
    return joined(texts, rest)


def _fitting(header: bytes, rest: bytes) -> bytes:
    """As many bytes as a header announces, if they are few: then other shapes and types pass the check of lengths."""
    if len(header) > 10_000:  # a flood would work here, too
        return rest
    try:
        rows = [(SIZES[kind], shape) for _, kind, shape in json.loads(header)]
    except (ValueError, TypeError, KeyError, RecursionError):
        return rest
    if not all(isinstance(shape, list) and all(isinstance(k, int) for k in shape) for _, shape in rows):
        return rest
    total = sum(size * math.prod(shape) for size, shape in rows)
    return (rest + bytes(total))[:total] if 0 < total <= 2**16 else rest


def _changed(draw: random.Random, header: Any, raw: list[str], pieces: Sequence[str]) -> Any:
    """A header with one change at a random place; raw JSON is noted, and marked in the header."""
    places = list(_places(header))
    if not places or draw.random() < 0.1:
        raw.append(draw.choice(pieces))
        return MARK
    holder, key = draw.choice(places)
    kind = draw.random() if pieces is ODD else 0
    if kind < 0.6:
        raw.append(draw.choice(pieces))
        holder[key] = MARK
    elif kind < 0.7:
        del holder[key]
    elif kind < 0.8:
        other, at = draw.choice(places)
        holder[key] = json.loads(json.dumps(other[at])) if key in _keys(holder) else None
    elif isinstance(holder, list):
        holder[key:key] = [holder[key]] * draw.choice((1, 2, 40, 300))
    else:
        holder[draw.choice(("", "run", "pools", "x" * 600, "\ud800", "\n"))] = holder[key]
    # Marks are replaced in the order of the text, so one that was lost or moved leaves its piece for another.
    return header


def _keys(holder: Any) -> Any:
    return range(len(holder)) if isinstance(holder, list) else holder


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every value inside a header, as its holder and its key."""
    for key in list(_keys(value)) if isinstance(value, list | dict) else ():
        yield value, key
        yield from _places(value[key])


def noise(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return draw.choice((b"", *MAGICS)) + draw.randbytes(draw.randrange(80))


BYTES: tuple[Callable[..., bytes], ...] = (flipped, cut, doubled, removed, spliced, inserted, wrong_length)
MUTATORS = (*BYTES, restructured)


def mutated(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """One message from a valid one, by one to three mutations.

    Args:
        draw: the source of randomness.
        data: a valid message.
        others: valid messages to take parts from.
    """
    first = draw.choice(MUTATORS)
    if draw.random() < 0.01:
        return noise(draw, data, others)
    out = first(draw, data, others)
    while out and draw.random() < 0.2:
        out = draw.choice(BYTES)(draw, out, others)
    return out
